"""A DPO step with a reference model, against a supervised step over the same tokens, on two ranks.

    python benchmarks/preferences.py                              the table, to the terminal
    python benchmarks/preferences.py --write benchmarks/results   also as Markdown

TRL's DPOTrainer prepares a policy and a reference, once for each side:

    ours           `patch(model, ep_size=2)`; the reference is stock, and sharded like the policy
    stock FSDP2    Accelerate shards the policy by layers, TRL the reference as one unit

    DPO            the trainer's `compute_loss`, which asks both models, and its backward
    SFT            the mean loss of the same policy over the same batch, and its backward

A forward is about a third of a forward and its backward, so a reference costs a third more and
what its weights cost to gather. All four take turns in the same processes, so a busy machine slows
all of them. Losses of both sides must agree to 1e-4 before anything is printed.

It measures no GPU and no network: two processes on one machine.
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
from figures import setting, spread
from models import qwen3_moe
from ranks import KEEP_FREED_MEMORY, spawn
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import Qwen3MoeForCausalLM

from hf_moe_ep import patch

WORLD = 2
SIDES = ("ours", "stock FSDP2")
STEPS = ("DPO", "SFT")
TOLERANCE = 1e-4  # fp32: a DPO loss is of differences of sums over hundreds of tokens
WARMUP_ROUNDS = 2
# As `accelerate launch` has it. Ranks have met already, so nobody listens at the address.
LAUNCHED = {
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
}


@dataclass(frozen=True)
class Sizes:
    """The models, and a rank's pairs of answers; each answer has `seq` tokens, most of them new."""

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
    """Seconds of each round, and the loss, by side and step."""

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
    """Words are numbers: "17" is token 17, except for the first three."""
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
    """Return the pairs of all ranks: a prompt of an eighth, and two answers of equal lengths."""
    generator = torch.Generator().manual_seed(0)
    rows: list[dict[str, str]] = []
    for _ in range(WORLD * sizes.pairs):
        prompt = sizes.seq // 8
        rows.append({})
        # An end is added to each answer.
        for name, length in (
            ("prompt", prompt),
            ("chosen", sizes.seq - prompt - 1),
            ("rejected", sizes.seq - prompt - 1),
        ):
            tokens = torch.randint(3, sizes.vocab, (length,), generator=generator).tolist()
            rows[-1][name] = "".join(f"{token} " for token in tokens)
    return rows


def make_trainer(side: str, sizes: Sizes, folder: str) -> Any:
    """A DPOTrainer that has sharded both models, in a step that changes nothing."""
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
            # Stock's is of each rank's batch, and so another loss.
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
            raise RuntimeError(f"{side}: a {type(model).__name__} is not sharded; no figures then")
    return trainer


def loss_of(step: str, trainer: Any, batch: dict[str, Tensor]) -> Tensor:
    if step == "DPO":
        return trainer.compute_loss(trainer.model_wrapped, dict(batch))
    labels = batch["input_ids"].masked_fill(batch["completion_mask"] == 0, -100)
    inputs = {key: batch[key] for key in ("input_ids", "attention_mask")}
    # As DPOTrainer asks its policy.
    model = trainer.model_wrapped
    return model(**inputs, labels=labels, use_cache=False, fused_lm_head=True).loss


def measure_rank(rank: int, sizes: Sizes) -> Measured:
    with tempfile.TemporaryDirectory(prefix="preferences_") as folder:
        trainers = {side: make_trainer(side, sizes, folder) for side in SIDES}
    places = [(side, step) for side in SIDES for step in STEPS]
    seconds: dict[tuple[str, str], list[float]] = {place: [] for place in places}
    losses = {}
    mine = range(rank * sizes.pairs, (rank + 1) * sizes.pairs)
    batches = {
        side: one.data_collator([one.train_dataset[row] for row in mine])
        for side, one in trainers.items()
    }
    shape = tuple(batches["ours"]["input_ids"].shape)
    if shape != (2 * sizes.pairs, sizes.seq):
        raise RuntimeError(f"a batch is {shape}; no figures then")
    for number in range(WARMUP_ROUNDS + sizes.rounds):
        for side, step in places:
            trainer = trainers[side]
            dist.barrier()
            start = time.perf_counter()
            loss = loss_of(step, trainer, batches[side])
            trainer.accelerator.backward(loss)
            dist.barrier()
            if number >= WARMUP_ROUNDS:
                seconds[side, step].append(time.perf_counter() - start)
            losses[side, step] = float(loss.detach())
            trainer.model.zero_grad()
    return Measured(seconds, losses)


def check_equal(ranks: list[Measured]) -> float:
    """The largest relative difference between losses of the sides; raises above TOLERANCE."""
    errors = [0.0]
    for step in STEPS:
        for rank, measured in enumerate(ranks):
            ours, stock = (measured.losses[side, step] for side in SIDES)
            errors.append(abs(ours - stock) / abs(stock))
            if not errors[-1] <= TOLERANCE:
                raise RuntimeError(
                    f"the sides disagree on the {step} loss of rank {rank}: {ours} and {stock}, "
                    f"allowed {TOLERANCE:.0e} relative; no figures then"
                )
    return max(errors)


def report(sizes: Sizes, ranks: list[Measured], about: list[str]) -> str:
    """Markdown: what ran where, and one table."""
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
    text = report(sizes, ranks, setting("benchmarks/preferences.py", load_before, WORLD))
    print(text)
    if args.write:
        args.write.mkdir(parents=True, exist_ok=True)
        (args.write / "preferences-cpu.md").write_text(text)


if __name__ == "__main__":
    main()
