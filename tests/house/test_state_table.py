"""The table in `state.py` has a row for every place that hides state, and no other row.

Read from the syntax trees: attributes that are set on objects of others, names of ours on them,
module globals that can change, caches, and what runs at the interpreter's end.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from hf_moe_ep import state

PACKAGE = Path(state.__file__).parent
PREFIX = "_hf_moe_ep"
MUTABLE = ("{}", "[]", "set()", "dict()", "list()")
# Objects that a function made itself or was given to fill: no state once it has returned.
FILLED = {
    ("checkpoints/storage/unpickle.py", "found"): "metadata that was just read",
    ("checkpoints/storage/unpickle.py", "found.storage_meta"): "metadata that was just read",
    ("checkpoints/training/save.py", "snapshot"): "the copies of one save",
    ("sequence/ulysses.py", "module"): "a copy of the attention module, made for this call",
    ("upstream/attention_interface.py", "module"): "the copy",
    ("vision/positions.py", "bare"): "an instance without weights, made for a collator",
    ("planner/extrapolate.py", "text"): "of a copy of a config",
    ("planner/step.py", "state"): "of a model that the plan built",
    ("planner/counted.py", "parameter"): "of the same model",
    ("planner/counted.py", "shard"): "of an optimizer of the same model",
}


class Write(NamedTuple):
    """Something that outlives the statement; `name` is None where the source does not tell."""

    file: str
    line: int
    owner: str
    name: str | None


def read_table(docstring: str) -> dict[str, set[str]]:
    """File -> names, of all rows."""
    table: dict[str, set[str]] = defaultdict(set)
    for line in docstring.splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) == 3 and cells[0].endswith(".py"):
            table[cells[0]].update(cells[1].split())
    return table


def find_writes(file: str, tree: ast.Module) -> Iterator[Write]:
    """Every write that needs a row."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id="setattr" | "delattr"), args=[owner, name, *_]):
                known = name.value if isinstance(name, ast.Constant) else None
                if isinstance(name, ast.Name) and name.id.isupper():
                    known = _constant(tree, name.id)
                yield Write(file, node.lineno, ast.unparse(owner), known)
            case ast.Attribute(ctx=ast.Store(), value=owner, attr=name):
                if ast.unparse(owner) not in ("self", "ctx"):
                    yield Write(file, node.lineno, ast.unparse(owner), name)
            case ast.Subscript(
                ctx=ast.Store(), value=ast.Call(func=ast.Name(id="vars" | "globals"))
            ):
                known = node.slice.value if isinstance(node.slice, ast.Constant) else None
                yield Write(file, node.lineno, ast.unparse(node.value), known)
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
    """Return the string of a module's constant, or the name of an imported one."""
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id=found)], value=ast.Constant(value=str(text))):
                if found == name:
                    return text
    return name


def missing(writes: list[Write], table: dict[str, set[str]]) -> list[str]:
    """The writes that no row tells of."""
    problems = []
    for write in writes:
        names = table.get(write.file, set())
        told = bool(names) if write.name is None else write.name in names
        if not told and (write.file, write.owner) not in FILLED:
            problems.append(f"{write.file}:{write.line} sets {write.name} of {write.owner}")
    return problems


def words(tree: ast.Module) -> set[str]:
    """Every identifier and string of a file."""
    found: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=text) | ast.Attribute(attr=text) | ast.Constant(value=str(text)):
                found.add(text)
            case ast.FunctionDef(name=text) | ast.ClassDef(name=text) | ast.alias(name=text):
                found.add(text)
    return found


def sources() -> dict[str, ast.Module]:
    return {
        path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted(PACKAGE.rglob("*.py"))
    }


def test_every_place_is_in_the_table() -> None:
    table = read_table(state.__doc__ or "")
    writes = [write for file, tree in sources().items() for write in find_writes(file, tree)]
    assert len(writes) > len(FILLED)
    assert not missing(writes, table), "\n".join(
        ["no row of the table in hf_moe_ep/state.py tells of:", *missing(writes, table)]
    )


def test_every_row_is_a_place() -> None:
    trees = sources()
    table = read_table(state.__doc__ or "")
    assert table
    for file, names in table.items():
        assert file in trees, f"the table names {file}, which is not there"
        gone = names - words(trees[file])
        assert not gone, f"the table names {sorted(gone)} in {file}, which are not there"


def test_what_is_filled_is_written_somewhere() -> None:
    """An exception must not outlive its reason."""
    writes = [write for file, tree in sources().items() for write in find_writes(file, tree)]
    assert FILLED.keys() <= {(write.file, write.owner) for write in writes}


ADDED = {
    "a name of ours on a module": "def f(m):\n    m._hf_moe_ep_something = 1",
    "by setattr": "def f(m):\n    setattr(m, '_hf_moe_ep_something', 1)",
    "in vars": "def f(m):\n    vars(m)['kept'] = 1",
    "a function of others": "import torch\ndef f(g):\n    torch.topk = g",
    "by a name that nobody knows": "def f(m, name, g):\n    setattr(m, name, g)",
    "a module global": "_SEEN: dict[str, int] = {}",
    "a counter": "def f():\n    global _COUNT\n    _COUNT += 1",
    "what runs at the end": "import atexit\ndef f(g):\n    atexit.register(g)",
    "a module global by name": "globals()['_SEEN'] = 1",
    "a cache": "import functools\n@functools.cache\ndef f(): ...",
}


@pytest.mark.parametrize("name", ADDED)
def test_a_new_place_is_seen(name: str) -> None:
    writes = list(find_writes("ranks/mesh.py", ast.parse(ADDED[name])))
    assert missing(writes, read_table(state.__doc__ or ""))


def test_a_new_name_in_a_file_of_the_table_is_seen() -> None:
    text = "def f(m):\n    setattr(m, '_hf_moe_ep_something', 1)"
    writes = list(find_writes("moe/layer.py", ast.parse(text)))
    assert missing(writes, read_table(state.__doc__ or ""))
