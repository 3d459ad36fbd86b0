"""Balance of experts by each method, on the demo's data: worst layer's load and held-out loss.

    python benchmarks/balance.py                                    the table, to the terminal
    python benchmarks/balance.py --write benchmarks/results         with a plot, beside the others
    python benchmarks/balance.py --kept out/balance.jsonl           go on where a run was stopped
    python benchmarks/balance.py --overhead                         what counting costs a step

Two models of the demo's size are trained as the demo trains its own, 160 steps of 16 x 128 tokens
with the stock Trainer in one process, without any balance and with the methods that the
architecture has:

    Qwen3-MoE    the router's loss, of all layers together       router_aux_loss_coef
                 the mean of each layer's, for routers alone     and aux_loss_per_layer
    GLM-4-MoE    its correction bias, after every step           bias_update_rate

    held-out        tokens of the busiest expert over the mean, of the layer where that is greatest,
                    on text that was not trained on, without gradients
    last 20 steps   the same of the tokens of the last 20 steps, as `expert_load` counts them
    one of them     the same of that step of these 20 where it is greatest
    all layers      the same of the last 20 steps, but of the sum of an expert's tokens over layers:
                    what the loss of stock's formula knows of (`hf_moe_ep/moe/aux_loss.py`)
    loss            nats per token on the held-out text, without the router's loss

A GLM-4-MoE has one shared expert per layer besides; it has no part in the load.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from figures import setting, spread
from torch import Tensor, nn
from transformers import (
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    PreTrainedModel,
    Qwen3MoeForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from make_small_model import small_config, train_tokenizer
from text_data import pack, split_text

from hf_moe_ep import expert_load, patch
from hf_moe_ep.architectures import find_parts
from hf_moe_ep.moe import layer
from hf_moe_ep.ops.permute import count_pairs
from hf_moe_ep.routing.heat_map import draw_heat_maps
from hf_moe_ep.state import STATE, MoELayer

BLOCK = 128
BATCH = 16
LAST_STEPS = 20
TARGET = 1.5
# Trained again without balance, its first weights changed by 1e-4 of themselves, the Qwen3-MoE
# ended up to 0.0063 above or 0.0033 below (six pairs, three seeds).
NOISE = 0.01
Blocks = list[dict[str, Tensor]]


@dataclass(frozen=True)
class Method:
    """How one model is balanced; `aux` and `rate` of 0 are none."""

    model: str
    aux: float = 0.0
    per_layer: bool = False
    rate: float = 0.0

    @property
    def name(self) -> str:
        if self.aux:
            how = f"router_aux_loss_coef {self.aux:g}"
            return f"{how}, aux_loss_per_layer" if self.per_layer else how
        return f"bias_update_rate {self.rate:g}" if self.rate else "none"


def methods_with(aux: float, rate: float) -> tuple[Method, ...]:
    """Make the rows of the table: each model without balance comes before its methods."""
    qwen, glm = "Qwen3-MoE", "GLM-4-MoE"
    stock, per_layer = Method(qwen, aux=aux), Method(qwen, aux=aux, per_layer=True)
    return Method(qwen), stock, per_layer, Method(glm), Method(glm, rate=rate)


METHODS = methods_with(aux=0.2, rate=0.01)


@dataclass(frozen=True)
class Outcome:
    """What one training led to; counts by layer and expert, `last_steps` by step before that."""

    held_out: list[list[int]]
    last_steps: list[list[list[int]]]
    loss: float
    seconds: float

    @property
    def of_last_steps(self) -> list[list[int]]:
        """Counts of these steps, added up."""
        summed: list[list[int]] = torch.tensor(self.last_steps).sum(0).tolist()
        return summed

    @property
    def worst_step(self) -> float:
        """The worst layer of the worst one of these steps."""
        return max(map(worst, self.last_steps))


Outcomes = dict[tuple[Method, int], Outcome]


def load_data(vocab_size: int = 384) -> tuple[int, Blocks, Blocks]:
    """Make the demo's data: size of the vocabulary, training blocks, held-out blocks."""
    train_text, held_out_text = split_text()
    tokenizer = train_tokenizer(train_text, vocab_size)
    held_out = pack(tokenizer, held_out_text, BLOCK, 160, 32)
    return len(tokenizer), pack(tokenizer, train_text, BLOCK), held_out


def build(method: Method, vocab_size: int, seed: int) -> PreTrainedModel:
    """Make a patched model as `examples/make_small_model.py` makes the demo's."""
    set_seed(seed)
    config: Any = small_config(vocab_size)
    model: PreTrainedModel
    if method.model == "Qwen3-MoE":
        config.output_router_logits = bool(method.aux)
        config.router_aux_loss_coef = method.aux
        model = Qwen3MoeForCausalLM(config)
    else:
        names = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
        names += ("num_key_value_heads", "head_dim", "moe_intermediate_size", "initializer_range")
        names += ("num_experts_per_tok", "max_position_embeddings", "eos_token_id", "pad_token_id")
        same = {name: getattr(config, name) for name in names}
        experts = {"n_routed_experts": config.num_experts, "first_k_dense_replace": 0}
        model = Glm4MoeForCausalLM(Glm4MoeConfig(**same, **experts, use_qk_norm=True))
    nn.init.normal_(model.get_input_embeddings().weight)
    balance = {"bias_update_rate": method.rate or None, "aux_loss_per_layer": method.per_layer}
    return patch(model, **balance)


class _LastSteps(TrainerCallback):
    """Keeps the load of each of the last steps."""

    def __init__(self) -> None:
        self.counts: list[list[list[int]]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step >= state.max_steps - LAST_STEPS:
            self.counts.append(expert_load(kwargs["model"]).counts.tolist())


def layer_state(experts: nn.Module) -> MoELayer:
    found: MoELayer = vars(experts)[STATE]
    return found


def train(method: Method, seed: int, steps: int, data: tuple[int, Blocks, Blocks]) -> Outcome:
    vocab_size, blocks, held_out = data
    model = build(method, vocab_size, seed)
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder,
            use_cpu=True,
            seed=seed,
            per_device_train_batch_size=BATCH,
            max_steps=steps,
            learning_rate=6e-3,
            warmup_steps=20,
            lr_scheduler_type="cosine",
            weight_decay=0.1,
            adam_beta2=0.95,
            dataloader_drop_last=True,
            logging_steps=steps,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        kept_steps = _LastSteps()
        Trainer(model=model, args=args, train_dataset=blocks, callbacks=[kept_steps]).train()
    loss, counts = score(model, held_out)
    seconds = time.perf_counter() - begin
    # The first of them are all steps before.
    return Outcome(counts.tolist(), kept_steps.counts[1:], loss, seconds)


@torch.no_grad()
def score(model: PreTrainedModel, held_out: Blocks) -> tuple[float, Tensor]:
    """Return the mean loss per token, and how many tokens each expert of each layer had."""
    model.eval()
    experts = find_parts(model).experts.values()
    num_experts = find_parts(model).num_experts
    counts = torch.zeros(len(experts), num_experts, dtype=torch.int64)

    def count(index: int, _: nn.Module, args: tuple[Any, ...]) -> None:
        counts[index] += count_pairs(args[1], num_experts)

    hooks = [e.register_forward_pre_hook(partial(count, i)) for i, e in enumerate(experts)]
    total, tokens = 0.0, 0
    for input_ids in torch.stack([block["input_ids"] for block in held_out]).split(8):
        logits = model(input_ids=input_ids, output_router_logits=False).logits[:, :-1]
        targets = input_ids[:, 1:].flatten()
        total += float(nn.functional.cross_entropy(logits.flatten(0, 1), targets, reduction="sum"))
        tokens += targets.numel()
    for hook in hooks:
        hook.remove()
    return total / tokens, counts


def worst(counts: list[list[int]]) -> float:
    """Busiest expert over the mean, of the layer where that is greatest."""
    return max(max(row) * len(row) / sum(row) for row in counts)


def summed(counts: list[list[int]]) -> list[int]:
    """Add up what an expert of each number had in all layers."""
    return [sum(column) for column in zip(*counts, strict=True)]


def report(outcomes: Outcomes, methods: tuple[Method, ...], seeds: list[int]) -> str:
    """Make the table, and a line for each method that says whether it does what it is for."""
    lines = [
        "| model | method | worst layer, held-out | worst layer, last 20 steps | in one of them "
        "| all layers | loss | loss - that without balance, seed by seed |",
        "|---|---|---|---|---|---|---|---|",
    ]
    verdicts = []
    for method in methods:
        found = [outcomes[method, seed] for seed in seeds]
        plain = [outcomes[Method(method.model), seed].loss for seed in seeds]
        held_out = [worst(outcome.held_out) for outcome in found]
        last = [worst(outcome.of_last_steps) for outcome in found]
        one = [outcome.worst_step for outcome in found]
        losses = [outcome.loss for outcome in found]
        together = [worst([summed(outcome.of_last_steps)]) for outcome in found]
        apart = [loss - other for loss, other in zip(losses, plain, strict=True)]
        beside = ", ".join(f"{value:+.4f}" for value in apart) if method.aux or method.rate else ""
        lines.append(
            f"| {method.model} | {method.name} | {spread(held_out)} | {spread(last)} | "
            f"{spread(one)} | {spread(together)} | "
            f"{statistics.median(losses):.4f} ({min(losses):.4f} .. {max(losses):.4f}) | {beside} |"
        )
        if beside:
            below = max(held_out + last) < TARGET
            verdicts.append(
                f"{method.model}, {method.name}: the worst layer is "
                f"{'below' if below else 'NOT below'} {TARGET} with every seed; the held-out loss "
                f"is {statistics.mean(apart):+.4f} beside none on the mean of {len(seeds)} seeds, "
                f"which by themselves make {max(plain) - min(plain):.4f} of difference."
            )
    return "\n".join([*lines, "", *verdicts])


def kept(path: Path | None) -> Outcomes:
    """Read what an earlier run has kept."""
    outcomes: Outcomes = {}
    if path is not None and path.exists():
        for line in path.read_text().splitlines():
            row = json.loads(line)
            outcomes[Method(**row["method"]), row["seed"]] = Outcome(**row["outcome"])
    return outcomes


def run_all(
    methods: tuple[Method, ...], seeds: list[int], steps: int, path: Path | None
) -> Outcomes:
    """Train whatever is not there yet."""
    outcomes, data = kept(path), load_data()
    for seed in seeds:
        for method in methods:
            if (method, seed) in outcomes:
                continue
            outcome = outcomes[method, seed] = train(method, seed, steps, data)
            print(
                f"{method.model}, {method.name}, seed {seed}: worst layer "
                f"{worst(outcome.held_out):.2f} held-out, {worst(outcome.of_last_steps):.2f} "
                f"in the last steps; loss {outcome.loss:.4f}; {outcome.seconds:.0f} s",
                flush=True,
            )
            if path is not None:
                row = {"method": asdict(method), "seed": seed, "outcome": asdict(outcome)}
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    return outcomes


def plot(outcomes: Outcomes, methods: tuple[Method, ...], seed: int, path: Path) -> None:
    maps = [torch.tensor(outcomes[method, seed].held_out) for method in methods]
    draw_heat_maps(maps, [f"{method.model}\n{method.name}" for method in methods], path)


def overhead(pairs: int) -> str:
    """Time a training step of a rank of the demo with counting and without, by turns.

    In CPU time of the process, one thread: what a busy machine disturbs least.
    """
    torch.set_num_threads(1)
    vocab_size, blocks, _ = load_data()
    model = build(Method("Qwen3-MoE"), vocab_size, 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    input_ids = torch.stack([block["input_ids"] for block in blocks[:4]])

    def step() -> float:
        begin = time.process_time()
        model(input_ids=input_ids, labels=input_ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return 1e3 * (time.process_time() - begin)

    def step_without() -> float:
        with mock.patch.object(layer, "count_choice", lambda *args: None):
            return step()

    for _ in range(5):
        step(), step_without()
    with_counts, without = [], []
    for index in range(pairs):
        if index % 2:
            with_counts.append(step())
            without.append(step_without())
        else:
            without.append(step_without())
            with_counts.append(step())
    ratios = sorted(a / b for a, b in zip(with_counts, without, strict=True))
    middle = statistics.median(ratios)
    moe_layer = layer_state(next(iter(find_parts(model).experts.values())))
    ids = torch.randint(16, (input_ids.numel(), 4))
    times, calls = [], 200
    for _ in range(pairs):
        begin = time.process_time()
        for _ in range(calls):
            layer.count_choice(moe_layer, True, ids)
        times.append(1e3 * (time.process_time() - begin) / calls)
    per_step = 4 * statistics.median(times)
    share = per_step / statistics.median(without)
    return "\n".join(
        [
            f"A step of one rank of the demo, 4 x 128 tokens, {pairs} pairs of steps in one "
            f"process: {spread(with_counts)} ms of CPU time with counting, {spread(without)} ms "
            f"without; ratio of a pair, median: {middle:.4f} (quartiles "
            f"{ratios[len(ratios) // 4]:.4f} .. {ratios[3 * len(ratios) // 4]:.4f}).",
            "",
            f"Counting alone, four layers of 512 tokens, top-4 of 16: {per_step:.3f} ms, "
            f"{share:.2%} of that step.",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--aux", type=float, default=METHODS[1].aux)
    parser.add_argument("--rate", type=float, default=METHODS[-1].rate)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--kept", type=Path, help="one line for each training that is done")
    parser.add_argument("--overhead", action="store_true", help="what counting costs, alone")
    parser.add_argument("--pairs", type=int, default=100, help="of steps, for --overhead")
    parser.add_argument("--write", type=Path, help="folder for the table and the plot")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    before = os.getloadavg()[0]
    script = "benchmarks/balance.py"
    if args.overhead:
        text = overhead(args.pairs)
        head, name = "# What counting tokens per expert costs a step", "counting-cpu"
    else:
        methods = methods_with(args.aux, args.rate)
        seeds = list(range(args.seeds))
        outcomes = run_all(methods, seeds, args.steps, args.kept)
        text = report(outcomes, methods, seeds)
        head, name = "# Balance of experts, by method", "balance-cpu"
        text += (
            "\n\nMedians (smallest .. largest); what the columns say is at the top of the script."
        )
    print(text)
    if args.write:
        lines = [head, "", *setting(script, before, 1), "", text, ""]
        (args.write / f"{name}.md").write_text("\n".join(lines))
        if not args.overhead:
            plot(outcomes, methods, seeds[0], args.write / f"{name}.png")


if __name__ == "__main__":
    main()
