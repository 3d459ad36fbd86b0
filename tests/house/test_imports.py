"""The order of the folders, and the house rules, checked on the syntax tree of every source file.

ORDER is the table of contents, from top to bottom: a row imports itself and the rows below it,
never one above. Inside a row, and between the folders in it, imports make no circle. Names that
another project calls private stand in upstream/ alone, or as strings in the table of wraps.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CORE, PLUGINS = "hf_moe_ep", "model_patches"

ORDER = (
    "__main__",
    "__init__",
    "cli",
    "planner doctor",
    "apply",
    "patch",
    "trl",
    "integrations",
    "checkpoints",
    "placement",
    "sharding",
    "vision",
    "routing",
    "moe",
    "describe data_parallel",
    "sequence",
    "lora",
    "state",
    "dispatcher",
    "architectures",
    "derive",
    "model_patches",
    "ranks",
    "ops",
    "upstream",
    "config plan version",
)
# Besides torch and the standard library; a module has what its folders have.
THIRD_PARTY = {
    "checkpoints.hub.derived": "numpy",
    "checkpoints.hub.traced": "numpy",
    "checkpoints.storage.unpickle": "numpy",
    "checkpoints.training.rng": "numpy",
    "integrations": "accelerate transformers",
    "lora.export": "safetensors",
    "model_patches": "accelerate peft transformers",
    "moe.dispatch.deepep": "deep_ep",
    "ops": "triton",
    "ops.quantised": "bitsandbytes",
    "planner.config": "peft transformers",
    "planner.plot": "matplotlib",
    "routing.heat_map": "matplotlib",
    "upstream": "accelerate huggingface_hub peft transformers trl",
    "upstream.grpo": "numpy",
    "upstream.models": "packaging",
    "upstream.requirements": "packaging",
}
WITHOUT_TORCH = {"config", "plan"}
# cli.progress honours TQDM_DISABLE, which is a switch of tqdm and not of ours.
READS_ENVIRONMENT = {"config", "cli.progress"}
BUILDS_MESH = {"ranks.mesh"}
# TRL takes the aux loss of every architecture from this one.
ALLOWED = {("upstream", "transformers.models.mixtral.modeling_mixtral")}
ARCHITECTURES = ("qwen", "deepseek", "mixtral", "llama", "gpt_oss", "gptoss", "olmoe")
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def row_of(module: str) -> int:
    """The row of ORDER in which a module's first folder stands; ValueError where none has it."""
    first = module.partition(".")[0]
    for row, names in enumerate(ORDER):
        if first in names.split():
            return row
    raise ValueError(f"{module} is in no row of ORDER: put it into a folder that is")


def module_name(path: Path) -> str:
    """hf_moe_ep/ops/permute.py -> ops.permute; model_patches/x.py -> model_patches.x.

    The package is imported as hf_moe_ep.model_patches, which is a link to the folder at the top.
    """
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    if parts[0] == CORE:
        parts = parts[1:]
    if len(parts) > 1 and parts[-1] == "__init__":
        parts = parts[:-1]
    return ".".join(parts)


@cache
def sources() -> dict[str, Path]:
    paths = [path for folder in (CORE, PLUGINS) for path in sorted((ROOT / folder).rglob("*.py"))]
    return {module_name(path): path for path in paths}


@dataclass(frozen=True)
class Source:
    """One file, parsed."""

    module: str
    tree: ast.Module
    text: str

    @property
    def is_package(self) -> bool:
        return self.module in sources() and sources()[self.module].name == "__init__.py"

    def imports(self) -> Iterator[tuple[int, str, str]]:
        """(line, module, name) of every import, those inside functions too; name may be ""."""
        full = f"{CORE}.{self.module}"
        package = full if self.is_package else full.rpartition(".")[0]
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield node.lineno, alias.name, ""
            elif isinstance(node, ast.ImportFrom):
                base = node.module or ""
                if node.level:
                    parts = package.split(".")
                    parent = parts[: len(parts) - node.level + 1]
                    base = ".".join([*parent, *([base] if base else [])])
                for alias in node.names:
                    yield node.lineno, base, alias.name

    def own_imports(self) -> Iterator[tuple[int, str]]:
        """(line, module) of ours; `from hf_moe_ep.ranks import mesh` is the module ranks.mesh."""
        for line, base, name in self.imports():
            if base.partition(".")[0] != CORE:
                continue
            target = f"{base}.{name}".removeprefix(f"{CORE}.")
            if target not in sources():
                target = base.removeprefix(f"{CORE}.") if base != CORE else "__init__"
            yield line, target


def parse(module: str, text: str | None = None) -> Source:
    """A file of the project, or `text` as if it stood at that place."""
    text = sources()[module].read_text(encoding="utf-8") if text is None else text
    return Source(module, ast.parse(text), text)


def check(source: Source, private: frozenset[str]) -> list[str]:
    """Everything wrong with one file; `private` are the names with an underscore of our own."""
    problems = [
        *_import_problems(source),
        *_private_problems(source, private),
        *_name_problems(source),
        *_twins(source),
        *_form_problems(source),
    ]
    return list(dict.fromkeys(problems))


def _import_problems(source: Source) -> Iterator[str]:
    row = row_of(source.module)
    for line, target in source.own_imports():
        if row_of(target) < row:
            yield (
                f"line {line}: {source.module} may not import {target}, which stands above it: "
                f"{ORDER[row_of(target)]} > {ORDER[row]}"
            )
    allowed = {"torch"} - ({"torch"} if source.module in WITHOUT_TORCH else set())
    for place, packages in THIRD_PARTY.items():
        if source.module == place or source.module.startswith(f"{place}."):
            allowed |= set(packages.split())
    for line, base, _ in source.imports():
        top = base.partition(".")[0]
        if top not in {CORE, *allowed} and top not in sys.stdlib_module_names:
            yield f"line {line}: {source.module} may not import {top}, only: {sorted(allowed)}"


def _is_private(name: str) -> bool:
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


def _private_problems(source: Source, own: frozenset[str]) -> Iterator[str]:
    """Private names of other projects: imported, or reached as an attribute."""
    if source.module.partition(".")[0] == "upstream":
        return
    for line, base, name in source.imports():
        if base.partition(".")[0] in (CORE, PLUGINS):
            continue
        found = [part for part in (*base.split("."), name) if part != "__future__"]
        for part in filter(_is_private, found):
            yield f"line {line}: {part} of {base} is private there; only upstream/ may name it"
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and _is_private(node.attr) and node.attr not in own:
            yield f"line {node.lineno}: .{node.attr} is private there; only upstream/ may name it"


def own_private_names(trees: list[ast.Module]) -> frozenset[str]:
    """Names with a leading underscore that this project defines."""
    names: set[str] = set()
    for tree in trees:
        for node in ast.walk(tree):
            match node:
                case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                    names.add(name)
                case ast.AnnAssign(target=ast.Name(id=name)) | ast.Name(id=name, ctx=ast.Store()):
                    names.add(name)
                case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                    names.add(name)
    return frozenset(filter(_is_private, names))


def _name_problems(source: Source) -> Iterator[str]:
    module = source.module
    docstrings = _docstrings(source.tree)
    for node in ast.walk(source.tree):
        line = getattr(node, "lineno", 0)
        for text in _texts(node):
            if text in ("environ", "getenv") and module not in READS_ENVIRONMENT:
                yield f"line {line}: only config.py reads environment variables"
            if text == "init_device_mesh" and module not in BUILDS_MESH:
                yield f"line {line}: only ranks/mesh.py calls init_device_mesh"
            if (module.partition(".")[0], text) in ALLOWED:
                continue
            found = [name for name in ARCHITECTURES if name in text.lower()]
            if found and not module.startswith(PLUGINS) and id(node) not in docstrings:
                yield f"line {line}: core names an architecture: {found[0]} in {text!r}"


def _texts(node: ast.AST) -> list[str]:
    """The identifiers or the string that a node spells."""
    match node:
        case ast.Name(id=text) | ast.Attribute(attr=text) | ast.arg(arg=text):
            return [text]
        case ast.FunctionDef(name=text) | ast.AsyncFunctionDef(name=text) | ast.ClassDef(name=text):
            return [text]
        case ast.Constant(value=str(text)) | ast.keyword(arg=str(text)):
            return [text]
        case ast.alias(name=text):
            return [text]
    return []


def _docstrings(tree: ast.Module) -> set[int]:
    """Bare strings: docstrings may tell where a number was measured."""
    return {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }


def _twins(source: Source) -> Iterator[str]:
    """A public name and the same with an underscore, in one file."""
    defined = {
        node.name for node in source.tree.body if isinstance(node, (*FUNCTIONS, ast.ClassDef))
    }
    visible = defined | {name for _, _, name in source.imports()}
    for name in sorted(defined):
        if name.strip("_") and name.startswith("_") and name.lstrip("_") in visible:
            yield f"{source.module} has {name} beside {name.lstrip('_')}: two names, two meanings"


def _form_problems(source: Source) -> Iterator[str]:
    if not source.text.isascii():
        lines = [i for i, line in enumerate(source.text.splitlines(), 1) if not line.isascii()]
        yield f"line {lines[0]}: only ASCII in code"
    if not source.is_package:
        return
    docstring = ast.get_docstring(source.tree) or ""
    if source.module not in ("__init__", PLUGINS) and "Never" not in docstring:
        yield f"{source.module}/__init__.py does not say what belongs there and what never does"


def circles(edges: dict[str, set[str]]) -> list[str]:
    """Every node that can reach itself, with one way round."""

    def way(here: str, goal: str, seen: set[str]) -> list[str]:
        for there in sorted(edges.get(here, ())):
            if there == goal:
                return [here, there]
            if there not in seen:
                seen.add(there)
                if rest := way(there, goal, seen):
                    return [here, *rest]
        return []

    return [" > ".join(found) for node in sorted(edges) if (found := way(node, node, set()))]


def module_edges(parsed: list[Source]) -> dict[str, set[str]]:
    """Who imports whom; a package's own file only where it imports something."""
    return {
        source.module: {target for _, target in source.own_imports()} - {source.module}
        for source in parsed
    }


def folder_edges(edges: dict[str, set[str]]) -> dict[str, set[str]]:
    """The same for folders that stand side by side in one folder."""
    found: dict[str, set[str]] = {}
    for here, targets in edges.items():
        for there in targets:
            one, other = here.split("."), there.split(".")
            common = 0
            while common < min(len(one), len(other)) and one[common] == other[common]:
                common += 1
            if common and max(len(one), len(other)) > common + 1 and common < len(one):
                parent = one[:common]
                first = ".".join([*parent, *one[common : common + 1]])
                second = ".".join([*parent, *other[common : common + 1]])
                if first != second:
                    found.setdefault(first, set()).add(second)
    return found


@cache
def all_sources() -> list[Source]:
    return [parse(module) for module in sources()]


@cache
def all_private_names() -> frozenset[str]:
    return own_private_names([source.tree for source in all_sources()])


@pytest.mark.parametrize("module", sources())
def test_source_obeys_the_house(module: str) -> None:
    problems = check(parse(module), all_private_names())
    assert not problems, f"{sources()[module].relative_to(ROOT)}\n" + "\n".join(problems)


def test_no_circle_of_modules_or_folders() -> None:
    edges = module_edges(all_sources())
    assert not circles(edges)
    assert not circles(folder_edges(edges))


def test_the_sources_are_found() -> None:
    assert {"__init__", "patch", "moe.layer", "ops.kernels.up", "model_patches"} <= set(sources())
    for row in ORDER:
        for name in row.split():
            assert any(module.partition(".")[0] == name for module in sources()), name


BAD = {
    "a row above": (
        "ranks.mesh",
        "from hf_moe_ep.sharding.shard import x",
        "may not import sharding",
    ),
    "above, relative": ("ranks.mesh", "from ..moe import layer", "may not import moe.layer"),
    "above, by name": ("ranks.mesh", "from hf_moe_ep import patch", "may not import patch"),
    "above, inside": (
        "ranks.mesh",
        "def f():\n    import hf_moe_ep.patch",
        "line 2: ranks.mesh may",
    ),
    "the root": ("moe.layer", "from hf_moe_ep import patch_model", "may not import __init__"),
    "up from ops": ("ops.permute", "from ..moe.layer import x", "may not import moe.layer"),
    "core in a plugin": (
        "model_patches.qwen3_moe",
        "from hf_moe_ep.state import x",
        "may not import state",
    ),
    "transformers": ("moe.layer", "import transformers.models", "may not import transformers"),
    "triton": ("moe.experts", "import triton.language as tl", "may not import triton"),
    "unknown package": ("upstream.names", "import einops", "may not import einops"),
    "torch in config": ("config", "import torch", "config may not import torch"),
    "private import": (
        "sharding.shard",
        "from torch.distributed.fsdp._fully_shard import x",
        "_fully_shard of torch",
    ),
    "private name": ("moe.layer", "from torch import _C", "_C of torch is private"),
    "private attribute": (
        "moe.layer",
        "x = model._no_split_modules",
        "._no_split_modules is private there",
    ),
    "environment": (
        "ranks.mesh",
        "import os\nn = os.environ['RANK']",
        "line 2: only config.py reads",
    ),
    "getenv": ("ranks.together", "from os import getenv", "only config.py reads"),
    "mesh": ("sharding.shard", "x = init_device_mesh('cpu', (2,))", "only ranks/mesh.py calls"),
    "architecture": (
        "upstream.names",
        "if name == 'Qwen3MoeExperts':\n    pass",
        "names an architecture: qwen",
    ),
    "in an f-string": ("moe.layer", "x = f'{y} of mixtral'", "names an architecture: mixtral"),
    "in a name": ("upstream.names", "def is_qwen3():\n    pass", "names an architecture: qwen"),
    "unknown folder": ("utils.helpers", "", "utils.helpers is in no row"),
    "twins": ("moe.layer", "def run(): ...\ndef _run(): ...", "has _run beside run"),
    "a twin of an import": (
        "moe.layer",
        "from hf_moe_ep.state import find_state\ndef _find_state(): ...",
        "has _find_state beside find_state",
    ),
    "not ASCII": ("moe.layer", "x = 1\n# caf\u00e9", "line 2: only ASCII"),
    "a silent folder": ("moe", '"""Some files."""', "does not say what belongs there"),
}
GOOD = {
    "moe.layer": '"""Measured on Qwen3."""\nfrom .dispatch import counts\nimport torch, math',
    "patch": "from . import config\nfrom .ops import permute\nimport hf_moe_ep.moe.layer",
    "moe.dispatch.counts": "from hf_moe_ep.ops.permute import permute\nfrom ...ranks import mesh",
    "ops.kernels.up": "import triton\nfrom . import blocks\n",
    "upstream.names": "from torch.distributed import _functional_collectives\nx = y._anything\n",
    "state": "class A:\n    def f(self):\n        self._kept = 1\n\nx = A()._kept\n",
}


@pytest.mark.parametrize("name", BAD)
def test_a_wrong_source_is_refused(name: str) -> None:
    module, text, message = BAD[name]
    try:
        source = parse(module, text)
        problems = check(source, own_private_names([source.tree]))
    except ValueError as error:
        problems = [str(error)]
    assert any(message in problem for problem in problems), problems


@pytest.mark.parametrize("module", GOOD)
def test_a_right_source_passes(module: str) -> None:
    source = parse(module, GOOD[module])
    assert check(source, own_private_names([source.tree])) == []


def test_circles_are_found() -> None:
    texts = {
        "moe.layer": "from hf_moe_ep.moe.experts import x",
        "moe.experts": "from hf_moe_ep.moe import layer",
        "moe.recompute": "from hf_moe_ep.moe.experts import x",
    }
    edges = module_edges([parse(module, text) for module, text in texts.items()])
    assert circles(edges) == [
        "moe.experts > moe.layer > moe.experts",
        "moe.layer > moe.experts > moe.layer",
    ]


def test_circles_of_folders_are_found() -> None:
    texts = {
        "checkpoints.hub.read": "from hf_moe_ep.checkpoints.storage.atomic import x",
        "checkpoints.storage.manifest": "from hf_moe_ep.checkpoints.hub.pieces import x",
    }
    edges = module_edges([parse(module, text) for module, text in texts.items()])
    assert not circles(edges)
    assert "checkpoints.hub > checkpoints.storage > checkpoints.hub" in circles(folder_edges(edges))
