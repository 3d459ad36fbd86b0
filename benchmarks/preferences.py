"""Time a DPO step with a reference model, and a supervised step on the same tokens, on 2 ranks.

    python benchmarks/preferences.py                              prints the table
    python benchmarks/preferences.py --write benchmarks/results   also writes it as Markdown

TRL's DPOTrainer prepares a policy and a reference model for each of two sides:

    ours           `patch(model, ep_size=2)`; the stock reference is patched and sharded like it
    stock FSDP2    Accelerate shards the policy by layers, TRL shards the reference as one unit

Each side runs two kinds of steps:

    DPO            the trainer's `compute_loss`, which runs both models, and its backward
    SFT            the mean loss of the same policy on the same batch, and its backward

A forward takes about a third of the time of a forward and a backward. A reference model therefore
adds a third to the time of a step, plus the all-gathers of its weights. All four kinds of steps
take turns in the same processes, so a busy machine slows down all of them. The losses of both sides
must agree to 1e-4. Otherwise the benchmark raises an error and prints no table.

The ranks are two processes on one machine, so no GPU and no network is measured.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from benchmark_text import describe_machine, spread
from models import qwen3_moe
from ranks import KEEP_FREED_MEMORY, spawn
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import Qwen3MoeForCausalLM

from hf_moe_ep import patch

WORLD = 2
SIDES = ("ours", "stock FSDP2")
STEPS = ("DPO", "SFT")
TOLERANCE = 1e-4  # in fp32; a DPO loss depends on differences of sums over hundreds of tokens
WARMUP_ROUNDS = 2
# The variables that `accelerate launch` sets. The process group exists already, so the address is
# not used.
LAUNCHED = {
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
}


@dataclass(frozen=True)
class Sizes:
    """The sizes of the models and of the data.

    Each rank has `pairs` pairs of answers. A prompt and an answer together have `seq` tokens.
    """

    pairs: int = 2
    seq: int = 256
    hidden: int = 512
    layers: int = 4
    experts: int = 64
    top_k: int = 8
    intermediate: int = 256
    vocab: int = 1024
    rounds: int = 10


@dataclass(frozen=True)
class Measured:
    """The seconds of each round and the loss of one rank, by (side, step)."""

    seconds: dict[tuple[str, str], list[float]]
    losses: dict[tuple[str, str], float]


def build(sizes: Sizes, seed: int) -> Qwen3MoeForCausalLM:
    torch.manual_seed(seed)
    return qwen3_moe(
        sizes,
        sizes.vocab,
        max_position_embeddings=2 * sizes.seq,
        eos_token_id=1,
        pad_token_id=0,
    )


def make_tokenizer(sizes: Sizes) -> Any:
    """Build a tokenizer whose words are numbers: "17" is token 17. Tokens 0 to 2 are special."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    special = {"pad_token": "<pad>", "eos_token": "<end>", "unk_token": "<unknown>"}
    names = [*special.values(), *map(str, range(len(special), sizes.vocab))]
    vocabulary = {name: number for number, name in enumerate(names)}
    words = Tokenizer(WordLevel(vocabulary, unk_token=special["unk_token"]))
    words.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, **special)


def make_pairs(sizes: Sizes) -> list[dict[str, str]]:
    """Draw the pairs of all ranks. Each pair has a prompt of seq / 8 tokens and two answers."""
    generator = torch.Generator().manual_seed(0)
    rows: list[dict[str, str]] = []
    for _ in range(WORLD * sizes.pairs):
        prompt = sizes.seq // 8
        rows.append({})
        # The trainer appends an end-of-sequence token to each answer.
        for name, length in (
            ("prompt", prompt),
            ("chosen", sizes.seq - prompt - 1),
            ("rejected", sizes.seq - prompt - 1),
        ):
            tokens = torch.randint(3, sizes.vocab, (length,), generator=generator).tolist()
            rows[-1][name] = "".join(f"{token} " for token in tokens)
    return rows


def make_trainer(side: str, sizes: Sizes, folder: str) -> Any:
    """Create a DPOTrainer, and let it shard both models in a step with learning rate 0."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    policy, reference = build(sizes, seed=0), build(sizes, seed=1)
    if side == "ours":
        patch(policy, ep_size=WORLD)
    trainer = DPOTrainer(
        policy,
        ref_model=reference,
        args=DPOConfig(
            output_dir=folder,
            per_device_train_batch_size=sizes.pairs,
            max_length=2 * sizes.seq,
            max_steps=1,
            learning_rate=0.0,
            # Stock computes the auxiliary loss on each rank's own batch, so losses would differ.
            router_aux_loss_coef=0.0,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_list(make_pairs(sizes)),
        processing_class=make_tokenizer(sizes),
    )
    trainer.train()
    for model in (trainer.model, trainer.ref_model):
        if not all(isinstance(parameter, DTensor) for parameter in model.parameters()):
            raise RuntimeError(f"{side}: {type(model).__name__} is not sharded on this rank")
    return trainer


def compute_loss(step: str, trainer: Any, batch: dict[str, Tensor]) -> Tensor:
    if step == "DPO":
        return trainer.compute_loss(trainer.model_wrapped, dict(batch))
    labels = batch["input_ids"].masked_fill(batch["completion_mask"] == 0, -100)
    inputs = {key: batch[key] for key in ("input_ids", "attention_mask")}
    # DPOTrainer calls its policy with these arguments.
    model = trainer.model_wrapped
    return model(**inputs, labels=labels, use_cache=False, fused_lm_head=True).loss


def measure_rank(rank: int, sizes: Sizes) -> Measured:
    with tempfile.TemporaryDirectory(prefix="preferences_") as folder:
        trainers = {side: make_trainer(side, sizes, folder) for side in SIDES}
    cases = [(side, step) for side in SIDES for step in STEPS]
    seconds: dict[tuple[str, str], list[float]] = {case: [] for case in cases}
    losses = {}
    rows = range(rank * sizes.pairs, (rank + 1) * sizes.pairs)
    batches = {
        side: trainer.data_collator([trainer.train_dataset[row] for row in rows])
        for side, trainer in trainers.items()
    }
    shape, expected = tuple(batches["ours"]["input_ids"].shape), (2 * sizes.pairs, sizes.seq)
    if shape != expected:
        raise RuntimeError(f"a batch has the shape {shape}, but must have {expected}")
    for number in range(WARMUP_ROUNDS + sizes.rounds):
        for side, step in cases:
            trainer = trainers[side]
            dist.barrier()
            start = time.perf_counter()
            loss = compute_loss(step, trainer, batches[side])
            trainer.accelerator.backward(loss)
            dist.barrier()
            if number >= WARMUP_ROUNDS:
                seconds[side, step].append(time.perf_counter() - start)
            losses[side, step] = float(loss.detach())
            trainer.model.zero_grad()
    return Measured(seconds, losses)


def check_equal(ranks: list[Measured]) -> float:
    """Return the largest relative difference of the sides' losses. Raise if above TOLERANCE."""
    errors = [0.0]
    for step in STEPS:
        for rank, measured in enumerate(ranks):
            ours, stock = (measured.losses[side, step] for side in SIDES)
            errors.append(abs(ours - stock) / abs(stock))
            if not errors[-1] <= TOLERANCE:
                raise RuntimeError(
                    f"the sides disagree on the {step} loss of rank {rank}: {ours} (ours) and "
                    f"{stock} (stock), allowed relative difference {TOLERANCE:.0e}"
                )
    return max(errors)


def report(sizes: Sizes, ranks: list[Measured], about: list[str]) -> str:
    """Format the machine and the table as Markdown."""
    error, seconds = check_equal(ranks), ranks[0].seconds
    lines = [
        "# A DPO step with a reference, against a supervised step over the same tokens\n",
        *about,
        f"- model: Qwen3-MoE, {sizes.layers} layers, hidden {sizes.hidden}, top-{sizes.top_k} of "
        f"{sizes.experts} experts of {sizes.intermediate}, fp32; {sizes.pairs} pairs of "
        f"{sizes.seq} tokens each per rank, {WORLD} gloo ranks of one thread each, "
        f"{sizes.rounds} rounds\n",
        "| | DPO, s | SFT, s | DPO / SFT |\n|---|---|---|---|",
    ]
    for side in SIDES:
        dpo, sft = (seconds[side, step] for step in STEPS)
        ratios = [a / b for a, b in zip(dpo, sft, strict=True)]
        lines.append(f"| {side} | {spread(dpo)} | {spread(sft)} | {spread(ratios)} |")
    both = zip(*(seconds[side, "DPO"] for side in SIDES), strict=True)
    lines += [
        f"| ours / stock FSDP2 | {statistics.median(a / b for a, b in both):.2f} | | |",
        f"\nForward and backward, median (min .. max) over rounds; ratios are taken round by "
        f"round. Losses of both sides are equal to {error:.1e} relative. Every figure is explained "
        f"at the top of `benchmarks/preferences.py`.",
    ]
    return "\n".join(lines) + "\n"


def measure(sizes: Sizes, timeout: float = 900.0) -> list[Measured]:
    environment = KEEP_FREED_MEMORY | LAUNCHED
    return spawn(measure_rank, WORLD, sizes, timeout=timeout, environment=environment)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in vars(Sizes()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--write", type=Path, help="also write the report to this folder")
    args = parser.parse_args()
    sizes = Sizes(**{name: getattr(args, name) for name in vars(Sizes())})
    load_before = os.getloadavg()[0]
    ranks = measure(sizes)
    text = report(sizes, ranks, describe_machine("benchmarks/preferences.py", load_before, WORLD))
    print(text)
    if args.write:
        args.write.mkdir(parents=True, exist_ok=True)
        (args.write / "preferences-cpu.md").write_text(text)


if __name__ == "__main__":
    main()
