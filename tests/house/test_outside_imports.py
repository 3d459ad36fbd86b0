"""Every name that notebooks, examples and benchmarks import from the package exists.

Other tests run these files, but those tests are slow.
"""

import ast
import importlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
SCRIPTS = sorted(path for top in ("examples", "benchmarks") for path in (ROOT / top).rglob("*.py"))


def _read_code(path: Path) -> str:
    if path.suffix == ".py":
        return path.read_text()
    cells = json.loads(path.read_text())["cells"]
    lines = [line for cell in cells if cell["cell_type"] == "code" for line in cell["source"]]
    # Lines of IPython, such as "%matplotlib inline", are not Python.
    python = (line for line in lines if not line.lstrip().startswith(("%", "!")))
    return "\n".join(line.rstrip("\n") for line in python)


def _find_missing(code: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(code)):
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("hf_moe_ep"):
            continue
        module = importlib.import_module(str(node.module))
        for alias in node.names:
            if not hasattr(module, alias.name):
                try:
                    importlib.import_module(f"{node.module}.{alias.name}")
                except ModuleNotFoundError:
                    yield f"line {node.lineno}: {node.module} has no {alias.name}"


@pytest.mark.parametrize("path", NOTEBOOKS + SCRIPTS, ids=lambda p: p.name)
def test_imported_names_exist(path: Path) -> None:
    assert not list(_find_missing(_read_code(path)))


def test_a_name_that_does_not_exist_is_found() -> None:
    assert list(
        _find_missing("from hf_moe_ep import patch, nothing\nfrom hf_moe_ep.cli import main")
    )
