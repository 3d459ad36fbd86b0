"""The files that conftest.py runs first exist. A renamed file would silently run last."""

from conftest import LONGEST_FIRST, TESTS


def test_the_files_that_run_first_exist() -> None:
    assert [name for name in LONGEST_FIRST if not (TESTS / name).exists()] == []
