"""Every folder of Transformers with experts outside of its experts interface has a file of ours.

A file in `model_patches` describes the MoE blocks of such a model, or says why it is refused, and
ARCHITECTURES.md then has a row with a star. The folders are found in the code of Transformers, so a
folder that a newer version adds fails this test (`make test-newest`).
"""

import ast
import re
from pathlib import Path

import pytest
import transformers
from support.architectures.table import PAGE, ROOT
from support.architectures.types import OUTSIDE
from support.needs import SINCE_5_24

from hf_moe_ep.architectures import read_differences

# Code that names experts, and has none: a number of experts that is always 1, and a second decoder.
WITHOUT_EXPERTS = {"bamba", "pi0"}
# The experts of these types are in the folder of another type.
ELSEWHERE = {"vitpose": "vitpose_backbone"}
# In older versions, other models are outside of the interface.
since_5_24 = pytest.mark.skipif(not SINCE_5_24, reason="needs the models of transformers 5.24")


def _names_in(source: str) -> set[str]:
    """Return the names in Python code. Comments, docstrings and imports have none."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.Attribute):
            names.add(node.attr)
    return names


def _find_folders_outside(models: Path) -> set[str]:
    """Return the folders whose models have experts, and do not use the experts interface."""
    folders = set()
    for path in models.glob("*/modeling_*.py"):
        source = path.read_text()
        if "@use_experts_implementation" in source or "expert" not in source.lower():
            continue
        if any(re.search("expert", name, re.IGNORECASE) for name in _names_in(source)):
            folders.add(path.parent.name)
    return folders - WITHOUT_EXPERTS


def _list_types_with_a_file() -> set[str]:
    """Return the types whose file in `model_patches` describes MoE blocks or refuses the type."""
    types = [path.stem for path in (ROOT / "model_patches").glob("*.py")]
    changes = {name: read_differences(name) for name in types}
    return {name for name, x in changes.items() if x.refused or "block" in x.fields}


@since_5_24
def test_every_folder_with_experts_outside_of_the_interface_has_a_file() -> None:
    found = _find_folders_outside(Path(transformers.__file__).parent / "models")
    listed = _list_types_with_a_file()
    folders = {ELSEWHERE.get(name, name.removesuffix("_text")) for name in listed}
    assert found == folders, "describe their MoE blocks in model_patches, or say why not"


@since_5_24
def test_every_file_has_a_row_with_a_star() -> None:
    starred = set(re.findall(r"^\| `([\w-]+)` \*", PAGE.read_text(), re.MULTILINE))
    listed = _list_types_with_a_file()
    assert {name.replace("-", "_") for name in starred} == listed - {*ELSEWHERE.values()}
    assert starred == {*OUTSIDE}


def test_a_new_folder_is_found(tmp_path: Path) -> None:
    """Comments do not count, nor do models that use the interface."""
    router = "class NewRouter:\n    def forward(self, x):\n        return self.experts(x)\n"
    sources = {
        "new": router,
        "interface": f"@use_experts_implementation\n{router}",
        "dense": '"""No experts."""\nclass Dense:  # no expert\n    pass\n',
    }
    for name, source in sources.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / f"modeling_{name}.py").write_text(source)
    assert _find_folders_outside(tmp_path) == {"new"}
