"""A stock script with the Trainer, which knows nothing of hf_moe_ep.

    python tests/support/jobs/unpatched.py --model FOLDER --output_dir OUT --use_cpu ...

FOLDER has a model. The script takes every option of TrainingArguments. With `--from_config` the
model is created from its config alone. With `--spawn N` the script starts N ranks itself.
"""

import os
import sys
from dataclasses import dataclass
from typing import Any

import torch
import torch.multiprocessing as mp
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    set_seed,
)


@dataclass
class Options:
    """Options of this script."""

    model: str
    from_config: bool = False
    spawn: int = 0


def samples() -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(3, 97, (32, 11), generator=generator)
    return [{"input_ids": row, "labels": row} for row in rows]


def train(rank: int, ranks: int, words: list[str]) -> None:
    if ranks:
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
        }
    options, arguments = HfArgumentParser((Options, TrainingArguments)).parse_args_into_dataclasses(
        words
    )
    set_seed(arguments.seed)
    if options.from_config:
        config = AutoConfig.from_pretrained(options.model)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    else:
        model = AutoModelForCausalLM.from_pretrained(options.model)
    trainer = Trainer(model, arguments, train_dataset=samples())
    trainer.train()
    trainer.save_model()


def main() -> None:
    words = sys.argv[1:]
    ranks = int(words[words.index("--spawn") + 1]) if "--spawn" in words else 0
    if ranks:
        mp.spawn(train, (ranks, words), nprocs=ranks)
    else:
        train(0, 0, words)


if __name__ == "__main__":
    main()
