"""The table in `state.py` has a row for every place in the source that hides state, and no other.

The syntax trees are searched for attributes that are set on foreign objects, names with our prefix,
mutable module globals, caches and atexit handlers. A write to a declared field of one of our
dataclasses needs no row, because the class describes the field. Syntax trees have no types, so the
class of an object is derived from the name of its variable (`OUR_CLASSES`).
"""

from __future__ import annotations

import ast
import functools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from hf_moe_ep import state
from hf_moe_ep.pipeline.stage import Boundary, Stage
from hf_moe_ep.sequence.mixers import LayerSlice

PACKAGE = Path(state.__file__).parent
PREFIX = "_hf_moe_ep"
MUTABLE = ("{}", "[]", "set()", "dict()", "list()")
# Objects that a function has created or has to fill. They hide no state after the function returns.
FILLED = {
    ("checkpoints/storage/unpickle.py", "loaded"): "metadata that was just read",
    ("checkpoints/storage/unpickle.py", "loaded.storage_meta"): "metadata that was just read",
    ("compiled/function.py", "copy"): "a copy of a function, made for one compilation",
    ("sequence/ulysses.py", "module"): "a copy of the attention module, made for this call",
    ("upstream/attention_interface.py", "module"): "the same copy",
    ("sharding/whole_experts.py", "probe"): "a module made to ask FSDP2 for a layout",
    ("vision/positions.py", "bare"): "an instance without weights, made for a collator",
    ("integrations/prompts.py", "holder"): "a module made to call functional_call",
    ("planner/extrapolate.py", "text"): "of a copy of a config",
    ("planner/counted.py", "parameter"): "of the same model",
    ("planner/counted.py", "shard"): "of an optimizer of the same model",
}
# The names of variables that hold one of our dataclasses, and the classes.
OUR_CLASSES: dict[str, list[Any]] = {
    "state": [state.ModelState],
    "old_state": [state.ModelState],
    "layer": [state.MoELayer, LayerSlice],
    "stage": [Stage],
    "boundary": [Boundary],
}
OUR_FIELDS = {
    variable: {field.name for kind in kinds for field in fields(kind)}
    for variable, kinds in OUR_CLASSES.items()
}


class Write(NamedTuple):
    """A write that lasts longer than its statement; `name` is None if the source computes it."""

    file: str
    line: int
    owner: str
    name: str | None


def read_table(docstring: str) -> dict[str, set[str]]:
    """Return the names in the table, by file."""
    table: dict[str, set[str]] = defaultdict(set)
    for line in docstring.splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) == 3 and cells[0].endswith(".py"):
            table[cells[0]].update(cells[1].split())
    return table


def find_writes(file: str, tree: ast.Module) -> Iterator[Write]:
    """Yield every write that needs a row."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id="replaced")) if file.startswith("planner/"):
                pass  # during a plan, which runs alone
            case ast.Call(
                func=ast.Name(id="setattr" | "delattr" | "replaced"), args=[owner, name, *_]
            ):
                written = name.value if isinstance(name, ast.Constant) else None
                if isinstance(name, ast.Name) and name.id.isupper():
                    written = _constant(tree, name.id)
                yield Write(file, node.lineno, ast.unparse(owner), written)
            case ast.Attribute(ctx=ast.Store(), value=owner, attr=name):
                if ast.unparse(owner) not in ("self", "ctx"):
                    yield Write(file, node.lineno, ast.unparse(owner), name)
            case ast.Subscript(
                ctx=ast.Store(), value=ast.Call(func=ast.Name(id="vars" | "globals"))
            ):
                written = node.slice.value if isinstance(node.slice, ast.Constant) else None
                yield Write(file, node.lineno, ast.unparse(node.value), written)
            case ast.Call(func=ast.Attribute(value=ast.Name(id="atexit"), attr="register")):
                yield Write(file, node.lineno, "atexit", "register")
            case ast.Constant(value=str(text)) if text.startswith(PREFIX):
                yield Write(file, node.lineno, "", text)
            case ast.Global(names=names) | ast.Nonlocal(names=names):
                yield from (Write(file, node.lineno, "global", name) for name in names)
            case ast.FunctionDef(name=name, decorator_list=decorators):
                if any("cache" in ast.unparse(decorator) for decorator in decorators):
                    yield Write(file, node.lineno, "", name)
    for statement in tree.body:
        match statement:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=value)
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
            ):
                if ast.unparse(value) in MUTABLE:
                    yield Write(file, statement.lineno, "", name)


def _constant(tree: ast.Module, name: str) -> str:
    """Return the string of a module's constant, or the name of a constant that is imported."""
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id=target)], value=ast.Constant(value=str(text))):
                if target == name:
                    return text
    return name


def sets_declared_field(write: Write) -> bool:
    """Return True for a write like `state.extra = ..` or `self._state.extra = ..`."""
    variable = write.owner.rpartition(".")[2].removeprefix("_")
    return write.name in OUR_FIELDS.get(variable, ())


def list_missing(writes: list[Write], table: dict[str, set[str]]) -> list[str]:
    """Describe the writes that need a row in the table and have none."""
    problems = []
    for write in writes:
        names = table.get(write.file, set())
        has_row = bool(names) if write.name is None else write.name in names
        needs_row = (write.file, write.owner) not in FILLED and not sets_declared_field(write)
        if needs_row and not has_row:
            problems.append(f"{write.file}:{write.line} sets {write.name} of {write.owner}")
    return problems


def collect_words(tree: ast.Module) -> set[str]:
    """Return every identifier and string of a file."""
    words: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=text) | ast.Attribute(attr=text) | ast.Constant(value=str(text)):
                words.add(text)
            case ast.FunctionDef(name=text) | ast.ClassDef(name=text) | ast.alias(name=text):
                words.add(text)
    return words


@functools.cache
def parse_sources() -> dict[str, ast.Module]:
    return {
        path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted(PACKAGE.rglob("*.py"))
    }


def test_every_write_is_in_the_table() -> None:
    table = read_table(state.__doc__ or "")
    writes = [write for file, tree in parse_sources().items() for write in find_writes(file, tree)]
    assert len(writes) > len(FILLED)
    assert not list_missing(writes, table), "\n".join(
        ["the table in hf_moe_ep/state.py has no row for:", *list_missing(writes, table)]
    )


def test_every_row_names_existing_code() -> None:
    trees = parse_sources()
    table = read_table(state.__doc__ or "")
    assert table
    for file, names in table.items():
        assert file in trees, f"the table names {file}, which does not exist"
        unknown = names - collect_words(trees[file])
        assert not unknown, f"the table names {sorted(unknown)} in {file}, which it does not have"


def test_exceptions_of_the_table_are_still_written() -> None:
    """An entry of FILLED must be removed together with the code that it names."""
    writes = [write for file, tree in parse_sources().items() for write in find_writes(file, tree)]
    assert FILLED.keys() <= {(write.file, write.owner) for write in writes}


def test_no_row_repeats_a_declared_field() -> None:
    table = read_table(state.__doc__ or "")
    writes = [write for file, tree in parse_sources().items() for write in find_writes(file, tree)]
    by_name: dict[tuple[str, str | None], list[bool]] = defaultdict(list)
    for write in writes:
        by_name[write.file, write.name].append(sets_declared_field(write))
    rows = {(file, name) for file, names in table.items() for name in names}
    assert not [row for row in rows & by_name.keys() if all(by_name[row])]


NEW_WRITES = {
    "a name of ours on a module": "def f(m):\n    m._hf_moe_ep_something = 1",
    "an attribute of a state that is not a field": "def f(state):\n    state.something = 1",
    "the name of a field on another object": "def f(model):\n    model.extra = 1",
    "by setattr": "def f(m):\n    setattr(m, '_hf_moe_ep_something', 1)",
    "an item of vars": "def f(m):\n    vars(m)['kept'] = 1",
    "a function of another package": "import torch\ndef f(g):\n    torch.topk = g",
    "a computed name": "def f(m, name, g):\n    setattr(m, name, g)",
    "a module global": "_SEEN: dict[str, int] = {}",
    "a counter": "def f():\n    global _COUNT\n    _COUNT += 1",
    "an atexit handler": "import atexit\ndef f(g):\n    atexit.register(g)",
    "a module global by name": "globals()['_SEEN'] = 1",
    "a cache": "import functools\n@functools.cache\ndef f(): ...",
}


@pytest.mark.parametrize("name", NEW_WRITES)
def test_a_new_write_is_found(name: str) -> None:
    writes = list(find_writes("ranks/mesh.py", ast.parse(NEW_WRITES[name])))
    assert list_missing(writes, read_table(state.__doc__ or ""))


def test_a_new_name_in_a_file_of_the_table_is_found() -> None:
    text = "def f(m):\n    setattr(m, '_hf_moe_ep_something', 1)"
    writes = list(find_writes("moe/layer.py", ast.parse(text)))
    assert list_missing(writes, read_table(state.__doc__ or ""))
