"""Measure the time that a sharded vision tower costs in steps without pictures.

    python benchmarks/dummy_pass.py                            prints the table
    python benchmarks/dummy_pass.py --write benchmarks/results

Every rank trains the model of `make demo-vision` on text without pictures. The benchmark runs three
kinds of steps in turn:

    bare      no rank checks whether a batch has pictures. This is the time of the language model
    rests     the default. The ranks compare their batches, no rank has pictures, and the tower
              does not run
    dummy     the ranks behave as if another rank had a picture: each rank runs the tower once, on
              one patch of zeros. The step includes the tower's collectives and, unless the tower is
              frozen, its update by AdamW. In training, other ranks would run the tower on their
              pictures at the same time, which takes longer than one patch

The steps are measured with a tower that is trained, and again with a frozen tower. The ranks are
four processes on one machine, so no GPU and no network is measured.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from benchmark_text import describe_machine, format_row
from ranks import KEEP_FREED_MEMORY, spawn
from torch import nn
from transformers import Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration

from hf_moe_ep import apply_ep_fsdp2, clip_grad_norm_
from hf_moe_ep.vision.tower import TowerOnce

WORLD, ROWS, LENGTH, VOCAB = 4, 8, 128, 320
WARMUP_STEPS = 2


def build(frozen: bool) -> nn.Module:
    torch.manual_seed(0)
    config = Qwen3VLMoeConfig(
        text_config={
            "vocab_size": VOCAB,
            "hidden_size": 96,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 24,
            "moe_intermediate_size": 80,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "mrope_section": [4, 4, 4]},
        },
        vision_config={
            "depth": 2,
            "hidden_size": 64,
            "num_heads": 4,
            "intermediate_size": 128,
            "patch_size": 4,
            "temporal_patch_size": 2,
            "spatial_merge_size": 2,
            "out_hidden_size": 96,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0],
        },
        image_token_id=VOCAB - 1,
        video_token_id=VOCAB - 2,
    )
    model = Qwen3VLMoeForConditionalGeneration(config)
    model.model.visual.requires_grad_(not frozen)
    return apply_ep_fsdp2(model, ep_size=2).train()


def time_rank(rank: int, steps: int, frozen: bool) -> dict[str, list[float]]:
    """Time each step. Returns the seconds by kind of step."""
    model = build(frozen)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    generator = torch.Generator().manual_seed(rank)
    input_ids = torch.randint(VOCAB - 2, (ROWS, LENGTH), generator=generator)
    ask_ranks = TowerOnce._seen_anywhere

    def pretend_pictures(*args: Any) -> list[bool]:
        """Ask all ranks as in `rests`, but return that another rank has an image and a video."""
        return [True for _ in ask_ranks(*args)]

    # For "bare", the list of kinds of pictures is empty, so the tower does not run.
    kinds = {"bare": lambda *args: [], "rests": ask_ranks, "dummy": pretend_pictures}
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    for step in range(WARMUP_STEPS + steps):
        for kind, answer in kinds.items():
            dist.barrier()
            start = time.perf_counter()
            with patch.object(TowerOnce, "_seen_anywhere", answer):
                model(input_ids=input_ids, labels=input_ids).loss.backward()
            clip_grad_norm_(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            dist.barrier()
            if step >= WARMUP_STEPS:
                seconds[kind].append(time.perf_counter() - start)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--write", type=Path, help="also write dummy-pass-cpu.md to this folder")
    args = parser.parse_args()
    load_before = os.getloadavg()[0]
    options = {"timeout": 600.0, "environment": KEEP_FREED_MEMORY}
    cells = []
    for tower in ("trained", "frozen"):
        seconds = spawn(time_rank, WORLD, args.steps, tower == "frozen", **options)[0]
        for kind in ("rests", "dummy"):
            cells.append(format_row(f"{tower} | {kind}", seconds[kind], seconds["bare"]))
    text = "\n".join(
        [
            "# A vision tower, and steps of text alone\n",
            *describe_machine("benchmarks/dummy_pass.py", load_before, WORLD),
            f"- the model of `make demo-vision`, ep 2; {ROWS} x {LENGTH} tokens per rank\n",
            "| tower | kind | seconds per step | bare | ratio |\n|---|---|---|---|---|",
            *(f"| {cell} |" for cell in cells),
            f"\nMedian (min .. max) of {args.steps} steps; ratios are taken step by step. The "
            "kinds of steps are explained at the top of `benchmarks/dummy_pass.py`.\n",
        ]
    )
    print(text)
    if args.write:
        args.write.mkdir(parents=True, exist_ok=True)
        (args.write / "dummy-pass-cpu.md").write_text(text)


if __name__ == "__main__":
    main()
