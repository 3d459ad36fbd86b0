"""docs/upstream.md names exactly the functions that are replaced in the whole process."""

import re

from support import pages

from hf_moe_ep.integrations.install import PROCESS
from hf_moe_ep.runner.hook import LOADERS


def test_the_page_names_every_function_that_is_replaced() -> None:
    _, *tables = pages.read("docs/upstream.md").split("| Function | Needed for")
    lines = [line for table in tables for line in table.partition("\n\n")[0].splitlines()]
    rows = [line for line in lines if line.startswith("| `")]
    cells = " ".join(re.sub(r"\(.*\)", "", row.split(" | ")[0]) for row in rows)
    named = {name.split(".")[-1] + name_owner(name) for name in re.findall(r"`([\w.]+)`", cells)}
    assert named == {
        row.name + name_owner(row.target.replace(":", ".")) for row in (*PROCESS, *LOADERS)
    }


def name_owner(target: str) -> str:
    """Return the class of a method, such as " of Trainer", or "" for a function of a module."""
    *_, before, _ = ("", *target.split("."))
    return f" of {before}" if before[:1].isupper() else ""
