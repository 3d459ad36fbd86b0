"""Rules for imports that import-linter and ruff cannot express (`make lint`, pyproject.toml).

The core names no architecture. Only upstream/ imports private names of other projects. A contract
in pyproject.toml lists the files that may import a library, and each imported library has one.
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
# Trainers that are named after an architecture.
TRAINERS = r"llama-?factory"
# TRL imports the aux loss of all architectures from this module.
ALLOWED = ("upstream", "transformers.models.mixtral.modeling_mixtral")


def find_wrong_imports(folder: str, tree: ast.Module) -> Iterator[str]:
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


def find_architecture_names(folder: str, tree: ast.Module) -> Iterator[str]:
    """Search identifiers and strings. Docstrings may name a model, for example of a measurement."""
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
                named = re.sub(TRAINERS, "", text.lower())
                if any(name in named for name in ARCHITECTURES):
                    yield f"line {node.lineno}: the core names an architecture: {text!r}"


def list_problems(path: Path, text: str) -> list[str]:
    folder, tree = path.relative_to(ROOT).parts[1], ast.parse(text)
    messages = list(find_wrong_imports(folder, tree))
    if path.relative_to(ROOT).parts[0] != PLUGINS:
        messages += find_architecture_names(folder, tree)
    return messages


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_follows_the_rules(path: Path) -> None:
    assert list_problems(path, path.read_text(encoding="utf-8")) == []


WRONG = {
    "import einops": "einops has no contract",
    "from torch.distributed.fsdp._fully_shard import x": "_fully_shard.x is private",
    "from torch import _C": "torch._C is private",
    "if name == 'Qwen3MoeExperts':\n    pass": "'Qwen3MoeExperts'",
    "x = f'{y} of mixtral'": "' of mixtral'",
    "def is_qwen3():\n    pass": "'is_qwen3'",
}


@pytest.mark.parametrize("text", WRONG)
def test_a_wrong_file_is_refused(text: str) -> None:
    (problem,) = list_problems(ROOT / PACKAGE / "moe" / "layer.py", text)
    assert WRONG[text] in problem


def test_upstream_may_import_private_names() -> None:
    text = '"""Measured on Qwen3."""\nfrom torch.distributed import _functional_collectives'
    assert list_problems(ROOT / PACKAGE / "upstream" / "names.py", text) == []
    assert list_problems(ROOT / PACKAGE / "moe" / "layer.py", text) != []
