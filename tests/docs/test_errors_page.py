"""docs/errors.md quotes messages of the source, so that a user finds an error by its words."""

import ast
import re
from collections.abc import Iterator
from typing import Any

import pytest
from support import pages

PAGE = "docs/errors.md"
# The first cell of a row quotes one message or several.
MESSAGES = [
    message
    for row in pages.read(PAGE).splitlines()
    if row.startswith("| `")
    for message in re.findall(r"`([^`]+)`", row.split(" | ")[0])
]


def _read_texts(tree: Any) -> Iterator[str]:
    """Yield every string of a source file. A null byte replaces each value in an f-string."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(part.value if _is_text(part) else "\0" for part in node.values)
        elif _is_text(node):
            yield node.value


def _is_text(node: Any) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


@pytest.fixture(scope="module")
def texts() -> list[str]:
    files = (pages.ROOT / "hf_moe_ep").rglob("*.py")
    return [text for file in files for text in _read_texts(ast.parse(file.read_text()))]


def _quotes(message: str, text: str) -> bool:
    """Return True if `text` has the parts of `message`, separated by "...", in this order."""
    position = 0
    for part in message.split("..."):
        position = text.find(part, position)
        if position < 0:
            return False
        position += len(part)
    return True


@pytest.mark.parametrize("message", MESSAGES)
def test_a_quoted_message_exists(texts: list[str], message: str) -> None:
    assert max(map(len, message.split("..."))) >= 10, "quote at least 10 characters"
    assert any(_quotes(message, text) for text in texts)


def test_a_wrong_quote_is_noticed() -> None:
    text = "ep_size (\0) must divide num_experts (\0) of \0; try \0"
    assert _quotes("ep_size (...) must divide num_experts (...) of ...; try ...", text)
    assert not _quotes("ep_size (...) must divide experts (...)", text)
    assert not _quotes("num_experts (...) must divide ep_size", text)


def test_every_row_has_three_cells() -> None:
    rows = [row for row in pages.read(PAGE).splitlines() if row.startswith("| `")]
    assert len(rows) >= 50
    for row in rows:
        assert all(cell.strip() for cell in row.strip("|").split(" | ")), row
        assert row.count(" | ") == 2, row
