"""tests/README.md says what the docstrings of the tests say, and every test module has one."""

import pytest
from support import claims_table
from support.longest_first import LONGEST_FIRST


def test_the_table_of_claims_is_up_to_date() -> None:
    written = (claims_table.TESTS / "README.md").read_text()
    assert written == claims_table.table(), f"out of date: run `{claims_table.COMMAND}`"


def test_a_module_without_a_docstring_is_named(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(claims_table, "TESTS", tmp_path)
    (tmp_path / "test_silent.py").write_text("def test_it(): pass\n")
    with pytest.raises(ValueError, match=r"tests/test_silent\.py has no docstring"):
        claims_table.table()


@pytest.mark.parametrize(
    ("docstring", "sentence"),
    [
        ("Gradients of N ranks are stock's.", "Gradients of N ranks are stock's"),
        ("One.\n\nAnother paragraph.", "One"),
        ("`patch` in one\nprocess. And more.", "`patch` in one process"),
        ("Needs 1.5 s, see mesh.py for it. Yes.", "Needs 1.5 s, see mesh.py for it"),
    ],
)
def test_first_sentences(docstring: str, sentence: str) -> None:
    assert claims_table.first_sentence(docstring) == sentence


def test_rows_are_tests_and_checks_with_a_docstring(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(claims_table, "TESTS", tmp_path)
    file = tmp_path / "test_two.py"
    file.write_text(
        '"""Both | sides."""\n'
        'def check(rank, world):\n    """Norms agree. Always."""\n'
        'def folder(rank, world, folder):\n    """Files agree."""\n'
        'def case(layout, rank, world):\n    """PEFT layouts agree."""\n'
        'def _helper(rank, world):\n    """No claim."""\n'
        'def test_x():\n    """X is y."""\n'
        "def test_silent(): pass\n"
    )
    claims = [claim for claim, _ in claims_table.rows_of_file(file)]
    assert claims == [
        "Both | sides",
        "... check. Norms agree",
        "... folder. Files agree",
        "... case. PEFT layouts agree",
        "... x. X is y",
    ]


def test_the_files_that_go_first_exist() -> None:
    missing = [name for name in LONGEST_FIRST if not (claims_table.TESTS / name).exists()]
    assert not missing, f"renamed? see tests/support/longest_first.py: {missing}"
