"""The table in `state.py` has a row for every place in the source that hides state, and no other.

The syntax trees are searched for attributes that are set on foreign objects, names with our prefix,
mutable module globals, caches and atexit handlers.
"""

from __future__ import annotations

import ast
import functools
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from hf_moe_ep import state

PACKAGE = Path(state.__file__).parent
PREFIX = "_hf_moe_ep"
MUTABLE = ("{}", "[]", "set()", "dict()", "list()")
# Objects that a function has created, or has to fill: they hide no state after it returns.
FILLED = {
    ("checkpoints/storage/unpickle.py", "loaded"): "metadata that was just read",
    ("checkpoints/storage/unpickle.py", "loaded.storage_meta"): "metadata that was just read",
    ("compiled/subclasses.py", "copy"): "a copy of a function, made for one compilation",
    ("sequence/ulysses.py", "module"): "a copy of the attention module, made for this call",
    ("upstream/attention_interface.py", "module"): "the copy",
    ("sharding/whole_experts.py", "probe"): "a module made to ask FSDP2 for a layout",
    ("vision/positions.py", "bare"): "an instance without weights, made for a collator",
    ("integrations/prompts.py", "holder"): "a module made to call functional_call",
    ("planner/extrapolate.py", "text"): "of a copy of a config",
    ("planner/step.py", "state"): "of a model that the plan built",
    ("planner/counted.py", "parameter"): "of the same model",
    ("planner/counted.py", "shard"): "of an optimizer of the same model",
}


class Write(NamedTuple):
    """A write that lasts longer than its statement; `name` is None if the source computes it."""

    file: str
    line: int
    owner: str
    name: str | None


def read_table(docstring: str) -> dict[str, set[str]]:
    """Return the names of each file in the table."""
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
    """Return the string of a module's constant, or the constant's name if it is imported."""
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id=target)], value=ast.Constant(value=str(text))):
                if target == name:
                    return text
    return name


def list_missing(writes: list[Write], table: dict[str, set[str]]) -> list[str]:
    """Describe the writes that have no row in the table."""
    problems = []
    for write in writes:
        names = table.get(write.file, set())
        has_row = bool(names) if write.name is None else write.name in names
        if not has_row and (write.file, write.owner) not in FILLED:
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
    """An entry of FILLED must be removed when its code is gone."""
    writes = [write for file, tree in parse_sources().items() for write in find_writes(file, tree)]
    assert FILLED.keys() <= {(write.file, write.owner) for write in writes}


NEW_WRITES = {
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


@pytest.mark.parametrize("name", NEW_WRITES)
def test_a_new_write_is_found(name: str) -> None:
    writes = list(find_writes("ranks/mesh.py", ast.parse(NEW_WRITES[name])))
    assert list_missing(writes, read_table(state.__doc__ or ""))


def test_a_new_name_in_a_file_of_the_table_is_found() -> None:
    text = "def f(m):\n    setattr(m, '_hf_moe_ep_something', 1)"
    writes = list(find_writes("moe/layer.py", ast.parse(text)))
    assert list_missing(writes, read_table(state.__doc__ or ""))
