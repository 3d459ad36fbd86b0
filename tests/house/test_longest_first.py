"""The files that conftest.py puts first exist; one that was renamed would come last unseen."""

from conftest import LONGEST_FIRST, TESTS


def test_the_files_that_go_first_exist() -> None:
    assert [name for name in LONGEST_FIRST if not (TESTS / name).exists()] == []
