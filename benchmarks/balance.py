"""Compare the loss and the load of the worst layer for methods that balance experts.

    python benchmarks/balance.py                                    prints the table
    python benchmarks/balance.py --write benchmarks/results         also writes it, with a plot
    python benchmarks/balance.py --kept out/balance.jsonl           continues an interrupted run
    python benchmarks/balance.py --overhead                         times the counting of tokens

Two models of the demo's size are trained on the demo's data, for 160 steps of 16 x 128 tokens, with
the stock Trainer in one process. Each model is trained without balancing and with every method that
its architecture supports:

    model        method                                    options
    Qwen3-MoE    one auxiliary loss over all layers        router_aux_loss_coef
                 the mean of one auxiliary loss per layer  router_aux_loss_coef, aux_loss_per_layer
    GLM-4-MoE    a bias that is updated after every step   bias_update_rate

The load in a layer is the number of tokens of its busiest expert, divided by the mean over experts.
The columns of the table:

    worst layer, held-out        the largest load of a layer, on text that was not used for training
    worst layer, last 20 steps   the largest load of a layer in the last 20 steps (`expert_load`)
    worst of these steps         the largest load of a layer in the worst of these 20 steps
    all layers                   the load of the sum of all layers' counts in the last 20 steps.
                                 Stock's loss balances only this sum (`moe/aux_loss.py`)
    loss                         nats per token on the held-out text, without the auxiliary loss

GLM-4-MoE also has one shared expert per layer, which the load does not include.
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
from benchmark_text import describe_machine, spread
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
Blocks = list[dict[str, Tensor]]


@dataclass(frozen=True)
class Method:
    """A model and its balancing. The value 0 switches the loss (`aux`) or bias (`rate`) off."""

    model: str
    aux: float = 0.0
    per_layer: bool = False
    rate: float = 0.0

    @property
    def name(self) -> str:
        if self.aux:
            name = f"router_aux_loss_coef {self.aux:g}"
            return f"{name}, aux_loss_per_layer" if self.per_layer else name
        return f"bias_update_rate {self.rate:g}" if self.rate else "none"


def list_methods(aux: float, rate: float) -> tuple[Method, ...]:
    """List the rows of the table: each model without balancing, then with each method."""
    qwen, glm = "Qwen3-MoE", "GLM-4-MoE"
    stock, per_layer = Method(qwen, aux=aux), Method(qwen, aux=aux, per_layer=True)
    return Method(qwen), stock, per_layer, Method(glm), Method(glm, rate=rate)


METHODS = list_methods(aux=0.2, rate=0.01)


@dataclass(frozen=True)
class Outcome:
    """The result of one training run.

    `held_out` counts tokens as [layer][expert], `last_steps` as [step][layer][expert].
    """

    held_out: list[list[int]]
    last_steps: list[list[list[int]]]
    loss: float
    seconds: float

    @property
    def sum_of_last_steps(self) -> list[list[int]]:
        """The sum of the counts of the last steps, as [layer][expert]."""
        summed: list[list[int]] = torch.tensor(self.last_steps).sum(0).tolist()
        return summed

    @property
    def worst_step(self) -> float:
        """The load of the worst layer in the worst of the last steps."""
        return max(map(find_worst_load, self.last_steps))


Outcomes = dict[tuple[Method, int], Outcome]


def load_data(vocab_size: int = 384) -> tuple[int, Blocks, Blocks]:
    """Load the demo's data: the size of the vocabulary, training blocks and held-out blocks."""
    train_text, held_out_text = split_text()
    tokenizer = train_tokenizer(train_text, vocab_size)
    held_out = pack(tokenizer, held_out_text, BLOCK, 160, 32)
    return len(tokenizer), pack(tokenizer, train_text, BLOCK), held_out


def build_model(method: Method, vocab_size: int, seed: int) -> PreTrainedModel:
    """Build and patch a model of the size and initialisation of `examples/make_small_model.py`."""
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
        shared = {name: getattr(config, name) for name in names}
        experts = {"n_routed_experts": config.num_experts, "first_k_dense_replace": 0}
        model = Glm4MoeForCausalLM(Glm4MoeConfig(**shared, **experts, use_qk_norm=True))
    nn.init.normal_(model.get_input_embeddings().weight)
    balance = {"bias_update_rate": method.rate or None, "aux_loss_per_layer": method.per_layer}
    return patch(model, **balance)


class _LastStepsRecorder(TrainerCallback):
    """Records the token counts of each of the last steps."""

    def __init__(self) -> None:
        self.counts: list[list[list[int]]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step >= state.max_steps - LAST_STEPS:
            self.counts.append(expert_load(kwargs["model"]).counts.tolist())


def get_layer_state(experts: nn.Module) -> MoELayer:
    state: MoELayer = vars(experts)[STATE]
    return state


def train(method: Method, seed: int, steps: int, data: tuple[int, Blocks, Blocks]) -> Outcome:
    vocab_size, blocks, held_out = data
    model = build_model(method, vocab_size, seed)
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
        last_steps = _LastStepsRecorder()
        Trainer(model=model, args=args, train_dataset=blocks, callbacks=[last_steps]).train()
    loss, counts = evaluate(model, held_out)
    seconds = time.perf_counter() - begin
    # The first entry also has all steps before it, so it is left out.
    return Outcome(counts.tolist(), last_steps.counts[1:], loss, seconds)


@torch.no_grad()
def evaluate(model: PreTrainedModel, held_out: Blocks) -> tuple[float, Tensor]:
    """Return the mean loss per token, and the number of tokens of each expert in each layer."""
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


def find_worst_load(counts: list[list[int]]) -> float:
    """Return the largest load of a layer: the tokens of its busiest expert / mean over experts."""
    return max(max(row) * len(row) / sum(row) for row in counts)


def sum_over_layers(counts: list[list[int]]) -> list[int]:
    """Return the sum of the counts over all layers, for each expert index."""
    return [sum(column) for column in zip(*counts, strict=True)]


def format_report(outcomes: Outcomes, methods: tuple[Method, ...], seeds: list[int]) -> str:
    """Format the table, and a line for each method that says whether it reaches TARGET."""
    lines = [
        "| model | method | worst layer, held-out | worst layer, last 20 steps "
        "| worst of these steps | all layers | loss | loss minus loss without balancing, by seed |",
        "|---|---|---|---|---|---|---|---|",
    ]
    verdicts = []
    for method in methods:
        runs = [outcomes[method, seed] for seed in seeds]
        losses = [run.loss for run in runs]
        plain_losses = [outcomes[Method(method.model), seed].loss for seed in seeds]
        held_out = [find_worst_load(run.held_out) for run in runs]
        last = [find_worst_load(run.sum_of_last_steps) for run in runs]
        worst_steps = [run.worst_step for run in runs]
        all_layers = [find_worst_load([sum_over_layers(run.sum_of_last_steps)]) for run in runs]
        deltas = [loss - plain for loss, plain in zip(losses, plain_losses, strict=True)]
        is_balanced = bool(method.aux or method.rate)
        delta_cell = ", ".join(f"{value:+.4f}" for value in deltas) if is_balanced else ""
        lines.append(
            f"| {method.model} | {method.name} | {spread(held_out)} | {spread(last)} | "
            f"{spread(worst_steps)} | {spread(all_layers)} | {statistics.median(losses):.4f} "
            f"({min(losses):.4f} .. {max(losses):.4f}) | {delta_cell} |"
        )
        if is_balanced:
            below = max(held_out + last) < TARGET
            verdicts.append(
                f"{method.model}, {method.name}: the worst layer is "
                f"{'below' if below else 'NOT below'} {TARGET} with every seed; the held-out loss "
                f"minus the loss without balancing is {statistics.mean(deltas):+.4f}, the mean of "
                f"{len(seeds)} seeds. Without balancing, the losses of the seeds differ by up to "
                f"{max(plain_losses) - min(plain_losses):.4f}."
            )
    return "\n".join([*lines, "", *verdicts])


def read_outcomes(path: Path | None) -> Outcomes:
    """Read the outcomes of an earlier, interrupted run."""
    outcomes: Outcomes = {}
    if path is not None and path.exists():
        for line in path.read_text().splitlines():
            row = json.loads(line)
            outcomes[Method(**row["method"]), row["seed"]] = Outcome(**row["outcome"])
    return outcomes


def run_all(
    methods: tuple[Method, ...], seeds: list[int], steps: int, path: Path | None
) -> Outcomes:
    """Train with every method and seed whose outcome is not in the file `path`."""
    outcomes, data = read_outcomes(path), load_data()
    for seed in seeds:
        for method in methods:
            if (method, seed) in outcomes:
                continue
            outcome = outcomes[method, seed] = train(method, seed, steps, data)
            print(
                f"{method.model}, {method.name}, seed {seed}: worst layer "
                f"{find_worst_load(outcome.held_out):.2f} held-out, "
                f"{find_worst_load(outcome.sum_of_last_steps):.2f} in the last steps; loss "
                f"{outcome.loss:.4f}; {outcome.seconds:.0f} s",
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


def measure_overhead(pairs: int) -> str:
    """Time training steps of one rank of the demo, alternately with and without counting.

    The times are CPU seconds of a process with one thread, which a busy machine changes least.
    """
    torch.set_num_threads(1)
    vocab_size, blocks, _ = load_data()
    model = build_model(Method("Qwen3-MoE"), vocab_size, 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    input_ids = torch.stack([block["input_ids"] for block in blocks[:4]])

    def step() -> float:
        begin = time.process_time()
        model(input_ids=input_ids, labels=input_ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return 1e3 * (time.process_time() - begin)

    def step_without_counting() -> float:
        with mock.patch.object(layer, "count_choice", lambda *args: None):
            return step()

    for _ in range(5):
        step(), step_without_counting()
    times_with, times_without = [], []
    for index in range(pairs):
        if index % 2:
            times_with.append(step())
            times_without.append(step_without_counting())
        else:
            times_without.append(step_without_counting())
            times_with.append(step())
    ratios = sorted(a / b for a, b in zip(times_with, times_without, strict=True))
    median_ratio = statistics.median(ratios)
    moe_layer = get_layer_state(next(iter(find_parts(model).experts.values())))
    ids = torch.randint(16, (input_ids.numel(), 4))
    times, calls = [], 200
    for _ in range(pairs):
        begin = time.process_time()
        for _ in range(calls):
            layer.count_choice(moe_layer, True, ids)
        times.append(1e3 * (time.process_time() - begin) / calls)
    per_step = 4 * statistics.median(times)
    share = per_step / statistics.median(times_without)
    return "\n".join(
        [
            f"A step of one rank of the demo, 4 x 128 tokens, {pairs} pairs of steps in one "
            f"process: {spread(times_with)} ms of CPU time with counting, "
            f"{spread(times_without)} ms without; ratio of a pair, median: {median_ratio:.4f} "
            f"(quartiles {ratios[len(ratios) // 4]:.4f} .. {ratios[3 * len(ratios) // 4]:.4f}).",
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
    parser.add_argument("--kept", type=Path, help="file of finished runs, which are not repeated")
    parser.add_argument("--overhead", action="store_true", help="only time the counting of tokens")
    parser.add_argument("--pairs", type=int, default=100, help="pairs of steps with --overhead")
    parser.add_argument("--write", type=Path, help="folder for the table and the plot")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    before = os.getloadavg()[0]
    script = "benchmarks/balance.py"
    if args.overhead:
        text = measure_overhead(args.pairs)
        head, name = "# The CPU time that a step needs to count tokens per expert", "counting-cpu"
    else:
        methods = list_methods(args.aux, args.rate)
        seeds = list(range(args.seeds))
        outcomes = run_all(methods, seeds, args.steps, args.kept)
        text = format_report(outcomes, methods, seeds)
        head, name = "# Balance of experts, by method", "balance-cpu"
        text += "\n\nMedians (smallest .. largest). The top of the script explains the columns."
    print(text)
    if args.write:
        lines = [head, "", *describe_machine(script, before, 1), "", text, ""]
        (args.write / f"{name}.md").write_text("\n".join(lines))
        if not args.overhead:
            plot(outcomes, methods, seeds[0], args.write / f"{name}.png")


if __name__ == "__main__":
    main()
