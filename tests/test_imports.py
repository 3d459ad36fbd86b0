"""The import graph and the house rules, checked on the syntax tree of every source file.

ROWS is the table of contents: modules from top to bottom, each with the modules it may import. A
module imports only rows below its own, so there are no cycles. To add a module, add its row. The
row "ops.*" stands for all modules of that folder without a row of their own; a row that lists "ops"
may import the folder's modules too.
"""

import ast
import fnmatch
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CORE, PLUGINS = "hf_moe_ep", "model_patches"

# Module -> what it may import of our own; "*" is every row below.
ROWS = {
    "__init__": "apply patch training_state collate shard checkpoint routing grads describe config",
    "cli": "inspect_command files_command adapter_files",
    "inspect_command": "files_command hub_convert memory_plan shapes config",
    "files_command": "hub_convert",
    "hub_convert": (
        "patch checkpoint hub_read hub_write hub_layout manifest durable restricted hf_hub "
        "safetensors_file plan"
    ),
    "memory_plan": "shapes patch shard units state mesh config hf",
    "shapes": "hf_hub plan",
    "adapter_files": "adapter_experts",
    "adapter_experts": "patch plan",
    "apply": "patch hub_read hf_hub shard state meet safetensors_file config",
    "patch": "*",
    "describe": "state mesh hf",
    "accelerate": (
        "trainer_checkpoints shared_batches checkpoint factors shard units meet state mesh grads "
        "config hf"
    ),
    "trainer_checkpoints": "hub_read manifest restricted hf_hub meet state hf",
    "shared_batches": "state mesh config",
    "checkpoint": "hub_write hub_layout factors hf_hub state meet safetensors_file hf",
    "hub_write": "hub_layout hf_hub durable safetensors_file",
    "hub_read": "hub_layout hf_hub meet safetensors_file plan hf",
    "hub_layout": "safetensors_file plan",
    "training_state": (
        "matching named_state random_state background manifest units hf_hub plain meet state"
    ),
    "matching": "named_state",
    "named_state": "factors lora hf_hub plain hf",
    "random_state": "",
    "background": "meet",
    "manifest": "durable meet",
    "restricted": "meet",
    "shard": "units lora state mesh plan hf",
    "units": "plan hf",
    "lora": "factors state experts hf",
    "model_patches": "",
    "model_patches.*": "vision ulysses plan hf",
    "collate": "",
    "vision": "slices state comm ops hf",
    "routing": "slices state comm ops hf",
    "ulysses": "slices grads state comm hf",
    "slices": "comm",
    "moe": "recompute deepep dispatch wire header experts state ops",
    "recompute": "deepep dispatch state",
    "deepep": "wire comm ops",
    "dispatch": "wire header comm ops",
    "wire": "ops",
    "header": "comm",
    "grads": "state mesh comm",
    "state": "experts meet mesh plan config hf",
    "experts": "factors ops hf",
    "factors": "hf",
    "mesh": "config",
    "safetensors_file": "",
    "hf_hub": "hf",
    "comm": "",
    "durable": "",
    "ops": "ops.expert_mlp ops.permute ops.reference ops.autograd",
    "ops.expert_mlp": (
        "ops.self_check ops.triton_mlp ops.torch_mlp ops.layout ops.weights ops.autograd"
    ),
    "ops.self_check": "ops.triton_mlp ops.torch_mlp ops.blocks ops.layout ops.weights",
    "ops.triton_mlp": "ops.* ops.reduce ops.blocks ops.layout ops.weights",
    "ops.torch_mlp": "ops.permute ops.layout ops.weights",
    "ops.permute": "ops.reduce",
    "ops.*": "ops.gate ops.blocks ops.layout ops.weights",
    "ops.reduce": "ops.weights",
    "ops.gate": "",
    "ops.blocks": "",
    "ops.reference": "ops.layout ops.weights",
    "ops.layout": "",
    "ops.weights": "",
    "ops.autograd": "",
    "meet": "",
    "plain": "",
    "plan": "",
    "hf": "",
    "config": "",
}
# Besides torch and the standard library.
THIRD_PARTY = {
    "accelerate": "accelerate transformers",
    "adapter_files": "safetensors",
    "deepep": "deep_ep",
    "hf": "accelerate peft transformers",
    "hf_hub": "accelerate huggingface_hub peft transformers",
    "model_patches.*": "accelerate peft transformers",
    "ops.*": "triton",
    "random_state": "numpy",
    "shapes": "peft transformers",
    "shared_batches": "accelerate transformers",
    "trainer_checkpoints": "accelerate transformers",
    "ops.gate": "triton",
    "ops.reduce": "triton",
    "ops.triton_mlp": "triton",
    "ops.self_check": "triton",
}
WITHOUT_TORCH = {"config"}
READS_ENVIRONMENT = {"config"}
BUILDS_MESH = {"mesh"}
# TRL takes the aux loss of every architecture from this one.
ALLOWED = {("hf", "transformers.models.mixtral.modeling_mixtral")}
ARCHITECTURES = ("qwen", "deepseek", "mixtral", "llama", "gpt_oss", "gptoss", "olmoe")
MAX_FILE_LINES, MAX_PLUGIN_LINES = 400, 80
MAX_FUNCTION_LINES, MAX_KERNEL_LINES = 60, 120

Function = ast.FunctionDef | ast.AsyncFunctionDef


def row_of(module: str) -> str | None:
    """The row that rules a module: its own, else the pattern of its folder."""
    if module in ROWS:
        return module
    return next((row for row in ROWS if "*" in row and fnmatch.fnmatch(module, row)), None)


def allowed_rows(row: str) -> set[str]:
    if ROWS[row] == "*":
        names = list(ROWS)
        return set(names[names.index(row) + 1 :])
    return set(ROWS[row].split())


def module_name(path: Path) -> str:
    """hf_moe_ep/ops/permute.py -> ops.permute; model_patches/x.py -> model_patches.x."""
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    if parts[0] == CORE:
        parts = parts[1:]
    if len(parts) > 1 and parts[-1] == "__init__":
        parts = parts[:-1]
    return ".".join(parts)


def sources() -> dict[str, Path]:
    paths = [path for folder in (CORE, PLUGINS) for path in sorted((ROOT / folder).rglob("*.py"))]
    return {module_name(path): path for path in paths}


def check(module: str, source: str, modules: set[str]) -> list[str]:
    """Everything wrong with one file; `modules` are all modules of the project."""
    row = row_of(module)
    if row is None:
        return [f"{module} has no row in ROWS: add one where it belongs"]
    tree = ast.parse(source)
    problems = [
        *_import_problems(module, row, tree, modules),
        *_name_problems(row, tree),
        *_size_problems(module, source, tree),
    ]
    return list(dict.fromkeys(problems))  # `from x import a, b` is one problem, not two


def _import_problems(module: str, row: str, tree: ast.Module, modules: set[str]) -> Iterator[str]:
    own = allowed_rows(row)
    third_party = set(THIRD_PARTY.get(row, "").split())
    if row not in WITHOUT_TORCH:
        third_party.add("torch")
    for line, name in _imported(module, tree, modules):
        top = name.partition(".")[0]
        if top in (CORE, PLUGINS):
            target = name.removeprefix(f"{CORE}.")
            target_row = row_of("__init__" if target == CORE else target)
            inside = any(target.startswith(f"{name}.") for name in own)
            if target_row not in own and not inside and target != module:
                yield f"line {line}: {module} may not import {target}, only: {sorted(own)}"
        elif top not in third_party and top not in sys.stdlib_module_names:
            yield f"line {line}: {module} may not import {top}, only: {sorted(third_party)}"


def _imported(module: str, tree: ast.Module, modules: set[str]) -> Iterator[tuple[int, str]]:
    """(line, absolute module name) of every import, those inside functions included."""
    package = _package(module, modules)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = package.split(".")
                parent = parts[: len(parts) - node.level + 1]
                base = ".".join([*parent, *([base] if base else [])])
            for alias in node.names:  # `from hf_moe_ep import mesh` imports a module or a name
                full = f"{base}.{alias.name}"
                is_module = full.removeprefix(f"{CORE}.") in modules.union(ROWS)
                yield node.lineno, full if is_module else base


def _package(module: str, modules: set[str]) -> str:
    """The package that relative imports of this module start from."""
    full = module if module.partition(".")[0] == PLUGINS else f"{CORE}.{module}"
    is_package = any(other.startswith(f"{module}.") for other in modules)
    return full if is_package else full.rpartition(".")[0]


def _name_problems(row: str, tree: ast.Module) -> Iterator[str]:
    docstrings = _docstrings(tree)
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        for text in _texts(node):
            if text in ("environ", "getenv") and row not in READS_ENVIRONMENT:
                yield f"line {line}: only config.py reads environment variables"
            if text == "init_device_mesh" and row not in BUILDS_MESH:
                yield f"line {line}: only mesh.py calls init_device_mesh"
            if (row, text) in ALLOWED:
                continue
            found = [name for name in ARCHITECTURES if name in text.lower()]
            if found and not row.startswith(PLUGINS) and id(node) not in docstrings:
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


def _size_problems(module: str, source: str, tree: ast.Module) -> Iterator[str]:
    num_lines = len(source.splitlines())
    limit = MAX_PLUGIN_LINES if module.startswith(PLUGINS) else MAX_FILE_LINES
    if num_lines > limit:
        yield f"{module} has {num_lines} lines, the limit is {limit}"
    if not source.isascii():
        lines = [i for i, line in enumerate(source.splitlines(), 1) if not line.isascii()]
        yield f"line {lines[0]}: only ASCII in code"
    for node in ast.walk(tree):
        if isinstance(node, Function):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            limit = MAX_KERNEL_LINES if _is_kernel(node) else MAX_FUNCTION_LINES
            if length > limit:
                yield f"line {node.lineno}: {node.name} has {length} lines, the limit is {limit}"


def _is_kernel(node: Function) -> bool:
    return any("triton.jit" in ast.unparse(decorator) for decorator in node.decorator_list)


def test_rows_import_only_rows_below() -> None:
    order = {row: index for index, row in enumerate(ROWS)}
    for row in ROWS:
        for target in allowed_rows(row):
            assert target in order, f"{row} lists {target}, which has no row"
            assert order[target] > order[row], f"{row} lists {target}, which is not below it"
    assert set(THIRD_PARTY) | WITHOUT_TORCH | READS_ENVIRONMENT | BUILDS_MESH <= set(ROWS)


@pytest.mark.parametrize("module", sources())
def test_source_obeys_the_table(module: str) -> None:
    modules = sources()
    problems = check(module, modules[module].read_text(encoding="utf-8"), set(modules))
    assert not problems, f"{modules[module].relative_to(ROOT)}\n" + "\n".join(problems)


def test_the_sources_are_found() -> None:
    assert {"__init__", "patch", "model_patches"} <= set(sources())


_LONG = "def long():\n" + "    x = 1\n" * 60
_KERNEL = "@triton.jit\n" + _LONG
BAD = {
    "a row above": ("mesh", "from hf_moe_ep.shard import x", "mesh may not import shard"),
    "above, relative": ("mesh", "from .shard import x", "mesh may not import shard"),
    "above, by name": ("mesh", "from hf_moe_ep import shard", "mesh may not import shard"),
    "above, dot only": ("mesh", "from . import shard", "mesh may not import shard"),
    "above, inside": ("mesh", "def f():\n    import hf_moe_ep.shard", "line 2: mesh may not"),
    "below, unlisted": ("shard", "from hf_moe_ep import comm", "shard may not import comm"),
    "the root": ("moe", "from hf_moe_ep import patch_model", "moe may not import hf_moe_ep"),
    "a sibling op": ("ops.permute", "from .swiglu import x", "may not import ops.swiglu"),
    "up from ops": ("ops.permute", "from ..comm import x", "may not import comm"),
    "a plugin": ("shard", "import model_patches.a", "may not import model_patches"),
    "core in a plugin": ("model_patches.qwen3_moe", "from hf_moe_ep.comm import x", "import comm"),
    "transformers": ("moe", "import transformers.models", "may not import transformers"),
    "triton": ("experts", "import triton.language as tl", "may not import triton"),
    "unknown package": ("hf", "import einops", "may not import einops"),
    "torch in config": ("config", "import torch", "config may not import torch"),
    "environment": ("mesh", "import os\nn = os.environ['RANK']", "line 2: only config.py reads"),
    "getenv": ("comm", "from os import getenv", "only config.py reads"),
    "mesh": ("shard", "x = init_device_mesh('cpu', (2,))", "only mesh.py calls"),
    "architecture": (
        "hf",
        "if name == 'Qwen3MoeExperts':\n    pass",
        "names an architecture: qwen",
    ),
    "in an f-string": ("moe", "x = f'{y} of mixtral'", "names an architecture: mixtral"),
    "in a name": ("hf", "def is_qwen3():\n    pass", "names an architecture: qwen"),
    "unknown module": ("utils", "", "utils has no row in ROWS"),
    "long file": ("moe", "x = 1\n" * 401, "moe has 401 lines, the limit is 400"),
    "long plugin": ("model_patches.a", "x = 1\n" * 81, "81 lines, the limit is 80"),
    "long function": ("moe", _LONG, "line 1: long has 61 lines, the limit is 60"),
    "long kernel": ("ops.swiglu", _KERNEL + "    x = 1\n" * 60, "121 lines, the limit is 120"),
    "not ASCII": ("moe", "x = 1\n# caf\u00e9", "line 2: only ASCII"),
}
GOOD = {
    "moe": '"""Measured on Qwen3."""\nfrom hf_moe_ep.dispatch import combine\nimport torch, math',
    "patch": "from . import hf, mesh\nfrom .ops import permute\nimport model_patches",
    "dispatch": "from hf_moe_ep.ops.permute import permute\nfrom .ops import reference, permute",
    "ops.swiglu": "import triton\nfrom . import blocks\n" + _KERNEL,
    "ops": "from .permute import permute\nfrom .reference import y",
    "config": "import os\nx = os.environ.get('HF_MOE_EP_EP_SIZE')",
    "model_patches.qwen3_moe": "from hf_moe_ep.plan import ModelPlan\nx = 'qwen3_moe'",
}
_MODULES = {row for row in ROWS if "*" not in row} | {
    "ops.permute",
    "ops.swiglu",
    "model_patches.qwen3_moe",
}


@pytest.mark.parametrize("case", BAD)
def test_checker_reports(case: str) -> None:
    module, source, message = BAD[case]
    problems = check(module, source, _MODULES)
    assert len(problems) == 1 and message in problems[0], problems


@pytest.mark.parametrize("module", GOOD)
def test_checker_accepts(module: str) -> None:
    allowed = check(module, GOOD[module], _MODULES)
    assert allowed == [], allowed
