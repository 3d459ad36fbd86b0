"""Rules of the source that import-linter and ruff cannot express (`make lint`, pyproject.toml).

The core names no architecture, only upstream/ imports private names of other projects, and every
library that the package imports has a contract that says which files may import it.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE, PLUGINS = "hf_moe_ep", "model_patches"
FILES = sorted(path for top in (PACKAGE, PLUGINS) for path in (ROOT / top).rglob("*.py"))
# The libraries that have a contract, and torch, which every file but two may import.
CONTRACTS = re.findall(r"protected_modules = \[(.*)\]", (ROOT / "pyproject.toml").read_text())
LIBRARIES = {"torch", *re.findall(r"\w+", " ".join(CONTRACTS))}
ARCHITECTURES = ("qwen", "deepseek", "mixtral", "llama", "gpt_oss", "gptoss", "olmoe")
# TRL takes the aux loss of every architecture from this module.
ALLOWED = ("upstream", "transformers.models.mixtral.modeling_mixtral")


def problems_of_imports(folder: str, tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=aliases):
                names = [alias.name for alias in aliases]
            case ast.ImportFrom(module=str(module), level=0, names=aliases):
                names = [f"{module}.{alias.name}" for alias in aliases]
            case _:
                continue
        for name in names:
            parts = name.split(".")
            if parts[0] in (PACKAGE, "__future__"):
                continue
            if parts[0] not in LIBRARIES | sys.stdlib_module_names:
                yield f"line {node.lineno}: {parts[0]} has no contract in pyproject.toml"
            if folder != "upstream" and any(part.startswith("_") for part in parts):
                yield f"line {node.lineno}: {name} is private; only upstream/ may import it"


def names_of_architectures(folder: str, tree: ast.Module) -> Iterator[str]:
    """Find them in identifiers and strings; a docstring may say where a number was measured."""
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        match node:
            case (
                ast.Name(id=text)
                | ast.Attribute(attr=text)
                | ast.arg(arg=text)
                | ast.keyword(arg=str(text))
                | ast.alias(name=text)
                | ast.FunctionDef(name=text)
                | ast.ClassDef(name=text)
                | ast.Constant(value=str(text))
            ) if id(node) not in docstrings and (folder, text) != ALLOWED:
                if any(name in text.lower() for name in ARCHITECTURES):
                    yield f"line {node.lineno}: the core names an architecture: {text!r}"


def problems(path: Path, text: str) -> list[str]:
    folder, tree = path.relative_to(ROOT).parts[1], ast.parse(text)
    found = list(problems_of_imports(folder, tree))
    if path.relative_to(ROOT).parts[0] != PLUGINS:
        found += names_of_architectures(folder, tree)
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_obeys_the_rules(path: Path) -> None:
    assert problems(path, path.read_text(encoding="utf-8")) == []


BAD = {
    "import einops": "einops has no contract",
    "from torch.distributed.fsdp._fully_shard import x": "_fully_shard.x is private",
    "from torch import _C": "torch._C is private",
    "if name == 'Qwen3MoeExperts':\n    pass": "'Qwen3MoeExperts'",
    "x = f'{y} of mixtral'": "' of mixtral'",
    "def is_qwen3():\n    pass": "'is_qwen3'",
}


@pytest.mark.parametrize("text", BAD)
def test_a_wrong_file_is_refused(text: str) -> None:
    (problem,) = problems(ROOT / PACKAGE / "moe" / "layer.py", text)
    assert BAD[text] in problem


def test_what_upstream_may_do() -> None:
    text = '"""Measured on Qwen3."""\nfrom torch.distributed import _functional_collectives'
    assert problems(ROOT / PACKAGE / "upstream" / "names.py", text) == []
    assert problems(ROOT / PACKAGE / "moe" / "layer.py", text) != []
