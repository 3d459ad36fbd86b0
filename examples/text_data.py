"""Plain text for the examples: `split_text` reads and splits it, `pack` cuts it into equal blocks.

The default text needs no download: it is the documentation that CPython ships for `help()`.
The text repeats itself (`help("specialnames")` contains five other topics), so only the first copy
of a paragraph is used. Otherwise the held-out text would contain many training sentences.

Every tenth run of 16 paragraphs is held out. Training text and held-out text therefore cover the
same topics, and held-out passages are long enough to need context.
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
    """Tokenize `text` and cut it into at most `max_blocks` blocks of `block_size` tokens.

    Tokens after the last whole block are dropped. The number of blocks is rounded down to a
    multiple of `multiple_of`, because `dataloader_drop_last` would drop an incomplete batch.
    """
    ids = torch.tensor(tokenizer(text, verbose=False)["input_ids"])
    blocks = ids[: len(ids) // block_size * block_size].view(-1, block_size)[:max_blocks]
    blocks = blocks[: len(blocks) // multiple_of * multiple_of]
    if len(blocks) == 0:
        raise ValueError(
            f"the text has {len(ids)} tokens and must fill at least {multiple_of} blocks of "
            f"{block_size} tokens; use a longer text or a smaller block_size"
        )
    return [{"input_ids": block, "labels": block} for block in blocks]
