"""The index of upstream/ names every file of the folder, and each file what it leans on."""

import ast
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "hf_moe_ep" / "upstream"
FILES = sorted(path for path in FOLDER.glob("*.py") if path.stem != "__init__")


def _docstring(path: Path) -> str:
    return ast.get_docstring(ast.parse(path.read_text())) or ""


def test_the_index_is_the_folder() -> None:
    lines = _docstring(FOLDER / "__init__.py").splitlines()
    listed = sorted(line.split()[0] for line in lines if line.startswith("    "))
    assert listed == [path.stem for path in FILES]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_names_what_it_leans_on(path: Path) -> None:
    """A path below a package; `wrap` is told its targets by the table of wraps."""
    if path.stem != "wrap":
        assert ".py" in _docstring(path) or "/" in _docstring(path)
