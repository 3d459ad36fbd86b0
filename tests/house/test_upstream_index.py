"""The index of `hf_moe_ep/upstream/` is in the docstring of its `__init__.py`."""

import ast
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "hf_moe_ep" / "upstream"


def test_the_index_names_every_file_of_the_folder() -> None:
    docstring = ast.get_docstring(ast.parse((FOLDER / "__init__.py").read_text())) or ""
    listed = sorted(line.split()[0] for line in docstring.splitlines() if line.startswith("    "))
    assert listed == sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "__init__")
