"""Measure `hub_tensors`, which streams a model's weights to an engine, on eight CPU ranks.

    python benchmarks/stream.py

The model has the shape of Qwen3-30B-A3B with an eighth of each width: 48 layers of 128 experts,
hidden size 256, 96 per expert, in bf16, with ep_size 8. The sides take turns:

    ours    `hub_tensors(model, max_bytes=..)` yields one tensor per expert, with its hub key
    stock   `full_tensor()` of one parameter after the other, as in TRL's own loop for FSDP2. The
            experts of a layer are one tensor

    above shards     the peak of the resident memory of the worst rank, minus the memory that the
                     process had before
    largest          the largest tensor that is yielded

hf_moe_ep promises a peak of at most `max_bytes` if no tensor is larger. Every side runs once before
the first turn.
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import dataclass

import torch
from benchmark_text import describe_machine, spread
from ranks import peak_mib, reset_peak, spawn
from torch.distributed.tensor import DTensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from hf_moe_ep import apply_ep_fsdp2, hub_tensors

MIB = 2**20
SIDES = ("ours", "stock")


@dataclass(frozen=True)
class Sizes:
    """The sizes of the model, and `max_bytes` in MiB."""

    world: int = 8
    hidden: int = 256
    intermediate: int = 96
    layers: int = 48
    experts: int = 128
    vocab: int = 18992
    max_mib: int = 64
    turns: int = 3


def build(sizes: Sizes, rank: int) -> torch.nn.Module:
    """Build the model with values only on rank 0, and shard it."""
    config = Qwen3MoeConfig(
        vocab_size=sizes.vocab, hidden_size=sizes.hidden, num_hidden_layers=sizes.layers,
        moe_intermediate_size=sizes.intermediate, num_experts=sizes.experts,
        num_experts_per_tok=8, num_attention_heads=32, num_key_value_heads=4,
        head_dim=sizes.hidden // 16,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device("cpu" if rank == 0 else "meta"):
        model = Qwen3MoeForCausalLM(config).to(torch.bfloat16)
    return apply_ep_fsdp2(model, ep_size=sizes.world)


def stream(side: str, model: torch.nn.Module, sizes: Sizes) -> tuple[int, int, int]:
    """Run one stream. Returns its bytes, the number of tensors, and the bytes of the largest."""
    total = count = largest = 0
    if side == "ours":
        tensors = (tensor for _, tensor in hub_tensors(model, max_bytes=sizes.max_mib * MIB))
    else:
        states = model.state_dict().values()
        tensors = (x.full_tensor() if isinstance(x, DTensor) else x for x in states)
    for tensor in tensors:
        size = tensor.numel() * 2  # bytes in bf16; masters may have another dtype
        total, count, largest = total + size, count + 1, max(largest, size)
        del tensor
    return total, count, largest


def measure(rank: int, sizes: Sizes) -> dict[str, list[tuple[float, float, int, int, int]]]:
    """Measure all turns. Returns (seconds, MiB above before, bytes, tensors, largest) of each."""
    model = build(sizes, rank)
    for side in SIDES:
        stream(side, model, sizes)
    found: dict[str, list[tuple[float, float, int, int, int]]] = {side: [] for side in SIDES}
    for _ in range(sizes.turns):
        for side in SIDES:
            torch.distributed.barrier()
            reset_peak()
            before = peak_mib()
            started = time.monotonic()
            figures = stream(side, model, sizes)
            torch.distributed.barrier()
            found[side].append((time.monotonic() - started, peak_mib() - before, *figures))
    return found


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--max-mib", type=int, default=Sizes.max_mib)
    parser.add_argument("--turns", type=int, default=Sizes.turns)
    options = parser.parse_args()
    sizes = Sizes(max_mib=options.max_mib, turns=options.turns)
    load_before = os.getloadavg()[0]
    ranks = spawn(measure, sizes.world, sizes, timeout=1200.0)
    print("\n".join(describe_machine("benchmarks/stream.py", load_before, sizes.world)))
    print("| side | seconds | above shards, MiB | tensors | MiB | largest, MiB |")
    print("|---|---|---|---|---|---|")
    for side in SIDES:
        turns = [list(turn) for turn in zip(*(found[side] for found in ranks), strict=True)]
        seconds = [max(figures[0] for figures in turn) for turn in turns]
        peaks = [max(figures[1] for figures in turn) for turn in turns]
        _, _, total, count, largest = turns[0][0]
        print(
            f"| {side} | {spread(seconds)} | {spread(peaks)} | {count} | {total / MIB:.0f} | "
            f"{largest / MIB:.1f} |"
        )
    print(f"promised: at most max_bytes = {sizes.max_mib} MiB above the shards")


if __name__ == "__main__":
    main()
