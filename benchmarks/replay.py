"""Measure how much of the difference between a model in bf16 and in fp32 comes from its routing.

    python benchmarks/replay.py                                prints the tables
    python benchmarks/replay.py --write benchmarks/results     also writes replay-cpu.md and a plot

A Qwen3-MoE of the demo's sizes, but with more layers, is trained for a few steps on the demo's
data, and its weights are rounded to bf16. A model with these weights runs on held-out text in three
versions:

    engine      in bf16, as in an inference engine; its routes are recorded
    live        in fp32, with the routes that the fp32 routers choose
    replayed    in fp32, with the recorded routes of the engine

`live` and `replayed` are compared with `engine`:

    same expert     share of the engine's (token, expert) pairs of a layer that `live` also chooses
    same set        share of the tokens of a layer for which `live` chooses the same set of experts
    asked           "same expert" for the choices that the routers of `replayed` would have made.
                    Earlier layers used the engine's experts, so their choices have no effect
    log p           absolute difference of a token's log-probability, mean over tokens
    loss            absolute difference of the mean loss
    gradient        norm of the difference of all gradients / norm of the engine's gradients
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from balance import Blocks, load_data
from benchmark_text import describe_machine, spread
from torch import Tensor, nn
from transformers import PreTrainedModel, Qwen3MoeForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from make_small_model import small_config

from hf_moe_ep import Routes, RoutingReplay, patch

BATCH = 8
GROUPS = ("experts", "routers", "all others", "all")
VERSIONS = ("live", "replayed")


@dataclass(frozen=True)
class Computed:
    """The log-probabilities, the loss and the gradients (by name) of one forward and backward."""

    logps: Tensor
    loss: float
    grads: Mapping[str, Tensor]


@dataclass(frozen=True)
class Compared:
    """The differences between a computation and the engine. `gradient` has a value per GROUPS."""

    logp: float
    loss: float
    gradient: Mapping[str, float]


@dataclass(frozen=True)
class Outcome:
    """The results of one batch: agreement of routes by layer, and differences by version."""

    same_expert: tuple[float, ...]
    same_set: tuple[float, ...]
    asked: tuple[float, ...]
    versions: Mapping[str, Compared]


def compute(model: nn.Module, input_ids: Tensor) -> Computed:
    """Run a batch forward and backward. The gradients are returned and removed from the model."""
    output = model(input_ids=input_ids, use_cache=False)
    logps = output.logits[:, :-1].float().log_softmax(-1)
    logps = logps.gather(-1, input_ids[:, 1:, None]).squeeze(-1)
    loss = -logps.mean()
    loss.backward()
    grads = {n: p.grad.float() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return Computed(logps.detach(), loss.item(), grads)


def find_group(name: str) -> str:
    if ".experts." in name:
        return "experts"
    return "routers" if ".gate." in name else "all others"


def compare(computed: Computed, engine: Computed) -> Compared:
    """Compute the differences between a computation and the engine on the same batch."""
    distance = dict.fromkeys(GROUPS, 0.0)
    size = dict.fromkeys(GROUPS, 0.0)
    for name, engine_grad in engine.grads.items():
        for group in (find_group(name), "all"):
            distance[group] += (computed.grads[name] - engine_grad).square().sum().item()
            size[group] += engine_grad.square().sum().item()
    gradient = {group: (distance[group] / size[group]) ** 0.5 for group in GROUPS}
    logp = (computed.logps - engine.logps).abs().mean().item()
    return Compared(logp, abs(computed.loss - engine.loss), gradient)


def compute_shares(ids: Tensor, others: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Compute for each layer the shares of pairs and of tokens that are equal in two tensors.

    Both tensors are expert ids [B, S, L, K]. The order of a token's experts does not matter.
    """
    in_others = (ids.unsqueeze(-1) == others.unsqueeze(-2)).any(-1)
    pairs = in_others.double().mean((0, 1, 3))
    tokens = in_others.all(-1).double().mean((0, 1))
    return tuple(pairs.tolist()), tuple(tokens.tolist())


def compare_precisions(engine: nn.Module, model: nn.Module, input_ids: Tensor) -> Outcome:
    """Run a batch once in the engine and twice in the model: live, and with the engine's routes."""
    recorder, replay = RoutingReplay(engine), RoutingReplay(model)
    with recorder.record() as routes:
        in_engine = compute(engine, input_ids)
    with replay.record() as live_routes:
        live = compute(model, input_ids)
    with replay.replay(Routes(routes.ids, routes.layers)):
        replayed = compute(model, input_ids)
    same_expert, same_set = compute_shares(routes.ids, live_routes.ids)
    asked = tuple(replay.last.by_layer.values())
    versions = {"live": compare(live, in_engine), "replayed": compare(replayed, in_engine)}
    return Outcome(same_expert, same_set, asked, versions)


def train(blocks: Blocks, vocab_size: int, layers: int, steps: int, seed: int) -> PreTrainedModel:
    """Build a model of the demo's sizes, and train it for `steps` steps."""
    torch.manual_seed(seed)
    config: Any = small_config(vocab_size)
    config.num_hidden_layers = layers
    model = patch(Qwen3MoeForCausalLM(config))
    nn.init.normal_(model.get_input_embeddings().weight)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
    generator = torch.Generator().manual_seed(seed)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1.0, (step + 1) / 10)
        indices = torch.randint(len(blocks), (BATCH,), generator=generator).tolist()
        input_ids = torch.stack([blocks[index]["input_ids"] for index in indices])
        model(input_ids=input_ids, labels=input_ids).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model


def copy_in_two_precisions(model: PreTrainedModel) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Return the engine in bf16, and a model in fp32 whose weights have the same values."""
    engine = copy.deepcopy(model).to(torch.bfloat16)
    return engine, copy.deepcopy(engine).float()


def run(layers: int, steps: int, seeds: int, batches: int) -> Iterator[Outcome]:
    """Train a model per seed, and yield the outcome of each of its batches."""
    vocab_size, blocks, held_out = load_data()
    for seed in range(seeds):
        engine, model = copy_in_two_precisions(train(blocks, vocab_size, layers, steps, seed))
        for start in range(0, batches * BATCH, BATCH):
            rows = held_out[start : start + BATCH]
            yield compare_precisions(engine, model, torch.stack([row["input_ids"] for row in rows]))


def report(outcomes: list[Outcome]) -> str:
    """Format both tables as Markdown."""
    lines = [
        "| layer | same expert | same set | asked |",
        "|---|---|---|---|",
    ]
    for layer in range(len(outcomes[0].same_expert)):
        columns = (
            [100 * getattr(outcome, name)[layer] for outcome in outcomes]
            for name in ("same_expert", "same_set", "asked")
        )
        lines.append(f"| {layer} | {' | '.join(f'{spread(column)} %' for column in columns)} |")
    lines += [
        "",
        "| distance from the engine | live | replayed | replayed / live |",
        "|---|---|---|---|",
    ]
    for name, scale in (("log p", 1e3), ("loss", 1e3), *((group, 1e2) for group in GROUPS)):
        live, replayed = (
            [scale * get_value(o.versions[version], name) for o in outcomes] for version in VERSIONS
        )
        live_median = statistics.median(live)
        ratio = f"{statistics.median(replayed) / live_median:.2f}" if live_median else "-"
        what = f"gradient of {name}, %" if name in GROUPS else f"{name}, thousandths"
        lines.append(f"| {what} | {spread(live)} | {spread(replayed)} | {ratio} |")
    return "\n".join(lines)


def get_value(compared: Compared, name: str) -> float:
    if name in GROUPS:
        return compared.gradient[name]
    return compared.loss if name == "loss" else compared.logp


def plot(outcomes: list[Outcome], path: Path) -> None:
    """Plot the agreement of routes by layer, and the differences of `live` and `replayed`."""
    import matplotlib.pyplot as plt

    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(12, 3.6), layout="constrained")
    labels = {
        "same_set": "all experts of a token",
        "same_expert": "experts",
        "asked": "experts, behind replayed layers",
    }
    for name, label in labels.items():
        columns = zip(*(getattr(outcome, name) for outcome in outcomes), strict=True)
        medians = [100 * statistics.median(column) for column in columns]
        left.plot(range(len(medians)), medians, marker="o", label=label)
    left.set(title="fp32 routers choose as bf16 did", xlabel="layer", ylabel="%")
    left.legend()
    for axes, shown, title in (
        (middle, ("log p",), "distance of log p, mean over tokens"),
        (right, GROUPS, "distance of gradients, relative"),
    ):
        for number, version in enumerate(VERSIONS):
            heights = [
                statistics.median(get_value(o.versions[version], n) for o in outcomes)
                for n in shown
            ]
            x = [index + 0.4 * number for index in range(len(shown))]
            axes.bar(x, heights, width=0.36, label=version)
        axes.set_xticks([index + 0.2 for index in range(len(shown))], shown)
        axes.set(title=title)
        axes.legend()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--steps", type=int, default=40, help="training steps")
    parser.add_argument("--seeds", type=int, default=2, help="number of models")
    parser.add_argument("--batches", type=int, default=3, help="held-out batches of each model")
    parser.add_argument("--write", type=Path, help="folder for the tables and the plot")
    args = parser.parse_args()
    before = os.getloadavg()[0]
    outcomes: list[Outcome] = []
    for outcome in run(args.layers, args.steps, args.seeds, args.batches):
        outcomes.append(outcome)
        live, replayed = (outcome.versions[version] for version in VERSIONS)
        print(
            f"batch {len(outcomes)}: log p {live.logp:.5f} live, {replayed.logp:.5f} replayed; "
            f"gradient {live.gradient['all']:.4f}, {replayed.gradient['all']:.4f}",
            flush=True,
        )
    text = report(outcomes)
    print(text)
    if args.write:
        head = "# Routing replay between bf16 and fp32 of one model"
        notes = (
            f"{args.seeds} models of {args.layers} layers, top-4 of 16 experts, trained for "
            f"{args.steps} steps; {args.batches} batches of {BATCH} x 128 held-out tokens for each."
            f" Medians (smallest .. largest) over batches. The top of the script explains the rows."
        )
        lines = [
            head,
            "",
            *describe_machine("benchmarks/replay.py", before, 1),
            "",
            notes,
            "",
            text,
            "",
        ]
        (args.write / "replay-cpu.md").write_text("\n".join(lines))
        plot(outcomes, args.write / "replay-cpu.png")


if __name__ == "__main__":
    main()
