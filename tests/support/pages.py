"""Read the code blocks, links and words in backticks of the pages for users.

text before        a link is [words](target#anchor)
```python          Block("docs/x.md", 0, "python", "import torch\n")
import torch
```
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
GENERATED = ("docs/api.md", "docs/architectures.md", "docs/command-line.md")  # by docs/hooks.py


class Block(NamedTuple):
    """A fenced block; `number` counts the blocks of its language in the page."""

    page: str
    number: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}, {self.language} block {self.number}"


def names() -> list[str]:
    """List the pages: README.md, those of docs/, and two more that these link to."""
    docs = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.md"))
    return ["README.md", "CONTRIBUTING.md", "examples/README.md", *docs]


def read(page: str) -> str:
    return (ROOT / page).read_text()


def blocks(page: str, text: str | None = None) -> list[Block]:
    """Return the fenced blocks of a page, in order.

    Raises:
        ValueError: a fence names no language, or a block is indented instead of fenced. Tests would
            not know how to check such a block.
    """
    result: list[Block] = []
    inside: list[str] | None = None
    language = ""
    before = ""
    for line in (read(page) if text is None else text).splitlines():
        if line.startswith("```"):
            if inside is None:
                language, inside = line[3:].strip(), []
                if not language:
                    raise ValueError(f"{page}: a block without a language after {before!r}")
            else:
                number = sum(block.language == language for block in result)
                result.append(Block(page, number, language, "\n".join(inside) + "\n"))
                inside = None
        elif inside is not None:
            inside.append(line)
        elif line.startswith("    ") and not before.strip():
            raise ValueError(f"{page}: fence the indented block {line.strip()!r}")
        before = line
    if inside is not None:
        raise ValueError(f"{page}: the last block has no end")
    return result


def prose(page: str) -> str:
    """Return a page without its blocks."""
    return re.sub(r"^```.*?^```$", "", read(page), flags=re.DOTALL | re.MULTILINE)


def spans(page: str) -> list[str]:
    """Return the words in backticks outside of fenced blocks."""
    return re.findall(r"(?<!`)`([^`\n]+)`(?!`)", prose(page))


def links(page: str) -> Iterator[tuple[str, str]]:
    """Yield (file, anchor) of a page's links and pictures, except those that lead to web sites."""
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if not target.startswith(("http://", "https://")):
            file, _, anchor = target.partition("#")
            yield file, anchor


def target(page: str, link: str) -> str:
    """Return the path, relative to the root, of the file that a link of `page` leads to."""
    if not link:
        return page
    path = (ROOT / page).parent / link
    return path.resolve().relative_to(ROOT).as_posix()
