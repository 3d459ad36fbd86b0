"""Plain text for the examples: read it, split it, cut it into blocks of one length.

The default text needs no download: it is the documentation that CPython ships for `help()`.
It repeats itself (`help("specialnames")` contains five other topics), so a paragraph is kept only
the first time it appears; otherwise the held-out text would be full of training sentences.

Every tenth run of 16 paragraphs is held out, so both sides cover the same topics and a held-out
passage is still long enough to need context. Nothing here knows about ranks.
"""

from pathlib import Path
from pydoc_data.topics import topics

import torch

PARAGRAPHS_PER_RUN = 16
HELD_OUT_EVERY = 10


def split_text(text_file: str | None = None) -> tuple[str, str]:
    """Return (training text, held-out text) of a file, or of Python's documentation."""
    text = (
        Path(text_file).read_text(encoding="utf-8") if text_file else "\n\n".join(topics.values())
    )
    unique = {" ".join(p.split()): p for p in reversed(text.split("\n\n"))}
    paragraphs = list(reversed(unique.values()))
    parts: tuple[list[str], list[str]] = ([], [])
    for i, paragraph in enumerate(paragraphs):
        held_out = (i // PARAGRAPHS_PER_RUN) % HELD_OUT_EVERY == HELD_OUT_EVERY - 1
        parts[held_out].append(paragraph)
    return "\n\n".join(parts[0]), "\n\n".join(parts[1])


def pack(
    tokenizer,
    text: str,
    block_size: int,
    max_blocks: int | None = None,
    multiple_of: int = 1,
) -> list[dict]:
    """Tokenize `text` and cut it into blocks of `block_size` tokens; the rest is dropped.

    So are blocks beyond a multiple of `multiple_of`, which `dataloader_drop_last` would drop.
    """
    ids = torch.tensor(tokenizer(text, verbose=False)["input_ids"])
    blocks = ids[: len(ids) // block_size * block_size].view(-1, block_size)[:max_blocks]
    blocks = blocks[: len(blocks) // multiple_of * multiple_of]
    if len(blocks) == 0:
        raise ValueError(f"the text has {len(ids)} tokens, less than one block of {block_size}")
    return [{"input_ids": block, "labels": block} for block in blocks]
