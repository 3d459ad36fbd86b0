"""Measure the bytes and the time of one MoE layer's dispatch: hf_moe_ep against transformers.

    python benchmarks/dispatch.py                             prints the tables
    python benchmarks/dispatch.py --write benchmarks/results  also writes dispatch-cpu.md and a plot

Four gloo ranks run dispatch and combine, forward and backward, without a model and without matrix
products:

    ours      AllToAll.start_plan, start, finish, start_combine, finish
              (hf_moe_ep/moe/dispatch/all_to_all.py). It sends one row per token and rank, and the
              rank of the experts applies the routing weights
    theirs    AllToAllEP (transformers/distributed/expert_parallel.py), which is called directly, as
              by models that are trained with DistributedConfig(ep_size=...). It sends one row per
              token and expert, and the rank of the token applies the routing weights

Each case first runs with experts that each multiply by a number. The output and the gradients (of x
and of the weights) of both sides must be within 1e-5 of a formula that needs no communication.
Bytes and seconds are measured with identity experts, and the sides take turns (A B A B ...). The
figures:

    rows           hidden states sent to other ranks; rows that stay on their rank do not count
    lower bound    one row for each distinct pair of a token and another rank, out and back, forward
                   and backward. This is the minimum if whole rows go directly to the ranks that
                   need them. Our bytes must equal this bound, or the benchmark raises an error
    routing        bytes of the rows' expert ids, their routing weights and the gradients of these
                   weights, including the columns that pad a message
    counts         the small exchange of the numbers of rows to receive
    ms             time until the slowest rank is done, including the final barrier
    skewed         experts are drawn by a Zipf law, and the busy experts are spread over the ranks

The last table is computed, not measured. A token with k distinct experts of E, drawn uniformly,
needs ep * (1 - C(E - E/ep, k) / C(E, k)) ranks on average. Of these ranks, (ep - 1) / ep are not
the token's own rank. The time is bytes / bandwidth on the slower of NVLink (8 GPUs per node) and
RDMA, without latency and imbalance. DeepEP V1 publishes these bandwidths for H800 (docs/legacy.md,
the lower of dispatch and combine): 153 GB/s NVLink for EP8, 50 GB/s RDMA for EP64. DeepEP's tests
also count rows that stay on their GPU or node (DeepEP issues 51, 285), so the links carry 7/8 of
these rates: 134 and 44 GB/s. The rates on the link are lower for EP32 (57 published, 43 on the
link) and for EP16 (43 published, 22 on the link), where forwarding within nodes is the limit.
"""

from __future__ import annotations

import argparse
import itertools
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, fields
from math import comb
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from benchmark_text import describe_machine, spread
from ranks import KEEP_FREED_MEMORY, spawn
from step_vs_native import TOLERANCE, WARMUP_STEPS, WORLD, SentBytes
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers.distributed.expert_parallel import AllToAllEP

from hf_moe_ep.dispatcher import Header, Tokens
from hf_moe_ep.moe.dispatch.all_to_all import AllToAll
from hf_moe_ep.ops.columns import ALIGNMENT

SIDES = ("ours", "theirs")
KINDS = ("rows", "routing", "counts")
FP32, INT64 = 4, 8
# The first fields of a Header: training with gradients.
TRAINING_HEADER = (0, 0, True, True, False, False)

# Bandwidths of the computed table: bytes per second that leave a GPU (see the module docstring).
NVLINK, RDMA = 153e9 * 7 / 8, 50e9 * 7 / 8
GPUS, GPUS_PER_NODE, GPU_TOKENS = (8, 16, 32, 64, 128, 256, 512), 8, 4096
# Name, experts, top-k, hidden; bf16.
MODELS = (("Qwen3-30B-A3B", 128, 8, 2048), ("DeepSeek-V3's sizes", 256, 8, 7168))


@dataclass(frozen=True)
class Case:
    top_k: int
    experts: int
    ep: int
    routing: str


@dataclass(frozen=True)
class Sizes:
    """The sizes of a measurement. `tokens` is the number of tokens of each rank."""

    tokens: int = 512
    hidden: int = 512
    repeats: int = 12
    seed: int = 0


@dataclass(frozen=True)
class Measured:
    """The figures of one rank in one case: bytes `sent[side][kind]`, `seconds[side]` per turn."""

    tokens: int
    sent: dict[str, dict[str, int]]
    bound: int
    error: float
    seconds: dict[str, list[float]]


def draw(case: Case, sizes: Sizes, rank: int) -> Tensor:
    """Draw the expert ids [T, K] of one rank."""
    common = torch.Generator().manual_seed(sizes.seed)
    per_rank = torch.Generator().manual_seed(1000 * sizes.seed + rank + 1)
    likelihood_E = torch.ones(case.experts)
    if case.routing == "skewed":
        likelihood_E = 1 / (1.0 + torch.randperm(case.experts, generator=common))
    # The top-k of log-likelihoods plus Gumbel noise are k draws without replacement.
    noise_TE = -torch.empty(sizes.tokens, case.experts).exponential_(generator=per_rank).log()
    return (likelihood_E.log() + noise_TE).topk(case.top_k, dim=1).indices


class Problem:
    """The tokens of one rank, with functions that compute the result of both sides and the truth.

    Each expert only multiplies by a number, so the truth needs no communication.
    """

    def __init__(self, ids_TK: Tensor, num_experts: int, hidden: int, mesh: DeviceMesh) -> None:
        generator = torch.Generator().manual_seed(dist.get_rank() + 1)
        tokens = ids_TK.shape[0]
        self.mesh, self.ids_TK = mesh, ids_TK
        self.x_TH = torch.randn(tokens, hidden, generator=generator).requires_grad_()
        self.weights_TK = torch.rand(ids_TK.shape, generator=generator).requires_grad_()
        self.upstream_TH = torch.randn(tokens, hidden, generator=generator)
        self.scale_E = torch.linspace(0.5, 1.5, num_experts)
        self.local = num_experts // mesh["ep"].size()
        self.scale_L = self.scale_E.split(self.local)[mesh["ep"].get_local_rank()]

    def run(self, side: str, *, identity: bool) -> tuple[Tensor, ...]:
        """Compute out_TH and the gradients of x_TH and weights_TK."""
        run = self._ours if side == "ours" else self._theirs
        return self._with_gradients(run(identity))

    def truth(self) -> tuple[Tensor, ...]:
        weights_TK = self.weights_TK * self.scale_E[self.ids_TK]
        return self._with_gradients(self.x_TH * weights_TK.sum(1, keepdim=True))

    def _with_gradients(self, out_TH: Tensor) -> tuple[Tensor, ...]:
        return out_TH, *torch.autograd.grad(out_TH, (self.x_TH, self.weights_TK), self.upstream_TH)

    def _ours(self, identity: bool) -> Tensor:
        header = Header(*TRAINING_HEADER, self.ids_TK.shape[1], self.x_TH.element_size())
        group, num_experts = self.mesh["ep"].get_group(), len(self.scale_E)
        dispatcher = AllToAll(group, num_experts)
        tokens = Tokens(self.x_TH, self.weights_TK, self.ids_TK)
        planning = dispatcher.start_plan(self.ids_TK, header)
        dispatcher.prepare(tokens)
        (exchange,) = planning.finish()
        arrived = exchange.start(tokens)
        rows_RH, weights_RK, ids_RK = arrived.finish()
        scale_L = torch.ones(self.local) if identity else self.scale_L
        # Id L marks experts of other ranks.
        weights_RK = weights_RK * torch.cat([scale_L, torch.zeros(1)])[ids_RK]
        return arrived.start_combine(rows_RH * weights_RK.sum(1, keepdim=True)).finish()

    def _theirs(self, identity: bool) -> Tensor:
        def forward(rows_RH: Tensor, ids_R1: Tensor, weights_R1: Tensor) -> Tensor:
            return rows_RH if identity else rows_RH * self.scale_L[ids_R1]

        experts = SimpleNamespace(num_experts=self.local, forward=forward)
        exchange = AllToAllEP(experts, self.mesh["ep"], self.mesh["tp"])
        return exchange(self.x_TH, self.ids_TK, self.weights_TK)


def check_equal(problem: Problem) -> float:
    """Return the largest relative difference from the truth. Raise if it is above TOLERANCE."""
    names, worst = ("output", "gradient of x", "gradient of the weights"), 0.0
    for side in SIDES:
        tensors = zip(names, problem.run(side, identity=False), problem.truth(), strict=True)
        for name, actual, true in tensors:
            error = float((actual - true).detach().abs().max() / true.detach().abs().max())
            if not error <= TOLERANCE:
                raise RuntimeError(f"{side}: {name} is off by {error:.1e}, allowed {TOLERANCE:.0e}")
            worst = max(worst, error)
    return worst


def count_lower_bound(ids: list[list[list[int]]], rank: int, local: int, row_bytes: int) -> int:
    """Count the bytes of rows that `rank` must send, out and back. `ids` are [rank][token][k]."""
    needed = [[{expert // local for expert in token} for token in tokens] for tokens in ids]
    out = sum(len(ranks - {rank}) for ranks in needed[rank])
    back = sum(rank in ranks for ranks in itertools.chain(*needed[:rank], *needed[rank + 1 :]))
    # Rows go out in dispatch and in the backward of combine, and go back in combine and in the
    # backward of dispatch.
    return 2 * (out + back) * row_bytes


def measure_case(
    ids_TK: Tensor, num_experts: int, hidden: int, mesh: DeviceMesh, repeats: int
) -> Measured:
    """Check both sides, count their bytes, then time them. The tp axis of `mesh` has size 1."""
    problem = Problem(ids_TK, num_experts, hidden, mesh)
    error = check_equal(problem)
    sent = {}
    for side in SIDES:
        with SentBytes(hidden) as counter:
            problem.run(side, identity=True)
        sent[side] = dict(counter.sent)
    all_ids: list[list[list[int]]] = [[]] * mesh["ep"].size()
    dist.all_gather_object(all_ids, ids_TK.tolist(), group=mesh["ep"].get_group())
    bound = count_lower_bound(all_ids, mesh["ep"].get_local_rank(), problem.local, hidden * FP32)
    if sent["ours"]["rows"] != bound:
        raise RuntimeError(f"ours sent {sent['ours']['rows']} bytes of rows, the bound is {bound}")
    return Measured(len(ids_TK), sent, bound, error, _time_in_turns(problem, repeats))


def _time_in_turns(problem: Problem, repeats: int) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    for side in SIDES * (WARMUP_STEPS + repeats):
        dist.barrier()
        start = time.perf_counter()
        problem.run(side, identity=True)
        dist.barrier()
        seconds[side].append(time.perf_counter() - start)
    return {side: values[WARMUP_STEPS:] for side, values in seconds.items()}


def build_mesh(ep: int) -> DeviceMesh:
    return init_device_mesh("cpu", (WORLD // ep, ep, 1), mesh_dim_names=("outer", "ep", "tp"))


def measure_rank(rank: int, cases: list[Case], sizes: Sizes) -> list[Measured]:
    results, meshes = [], {ep: build_mesh(ep) for ep in sorted({case.ep for case in cases})}
    for number, case in enumerate(cases, 1):
        ids_TK, mesh = draw(case, sizes, rank), meshes[case.ep]
        results.append(measure_case(ids_TK, case.experts, sizes.hidden, mesh, sizes.repeats))
        if rank == 0:
            print(f"[{number}/{len(cases)}] {case}: sides agree", flush=True)
    return results


def measure(cases: list[Case], sizes: Sizes, timeout: float = 900.0) -> dict[Case, list[Measured]]:
    """Measure all cases. Returns the figures of all ranks by case."""
    options = {"timeout": timeout, "environment": KEEP_FREED_MEMORY}
    by_rank = spawn(measure_rank, WORLD, cases, sizes, **options)
    return dict(zip(cases, map(list, zip(*by_rank, strict=True)), strict=True))


def compute_bytes_per_token(ranks: list[Measured]) -> dict[str, dict[str, float]]:
    """Compute the bytes per token over all ranks, by side and kind, with the lower bound."""
    tokens = sum(rank.tokens for rank in ranks)
    sent = {
        side: {kind: sum(rank.sent[side][kind] for rank in ranks) / tokens for kind in KINDS}
        for side in SIDES
    }
    return sent | {"lower bound": {"rows": sum(rank.bound for rank in ranks) / tokens}}


def expect_num_ranks(ep: int, experts: int, top_k: int) -> float:
    """Return how many ranks (with its own) a token is expected to need under uniform routing."""
    return ep * (1 - comb(experts - experts // ep, top_k) / comb(experts, top_k))


def expect_bytes(
    ep: int, experts: int, top_k: int, *, hidden: int, itemsize: int, tokens: int
) -> dict[str, dict[str, float]]:
    """Compute the expected result of `per_token` under uniform routing."""
    others, row = expect_num_ranks(ep, experts, top_k) * (ep - 1) / ep, 4 * hidden * itemsize
    num_counts = len(fields(Header)) + 1 + experts // ep
    # Forward sends weights and ids behind each row. Backward sends the gradients of the weights.
    routing_columns = sum(
        -(-(hidden + numbers * FP32 // itemsize) // ALIGNMENT) * ALIGNMENT - hidden
        for numbers in (2 * top_k, top_k)
    )
    return {
        "ours": {
            "rows": others * row,
            "routing": others * routing_columns * itemsize,
            "counts": (ep - 1) * num_counts * INT64 / tokens,
        },
        "theirs": {
            "rows": top_k * (ep - 1) / ep * row,
            "routing": 0.0,
            "counts": (experts - experts // ep) * INT64 / tokens,
        },
        "lower bound": {"rows": others * row},
    }


def compute_milliseconds(bytes_per_token: float, ep: int, tokens: int) -> float:
    """Compute the time of one layer on the slower link. Up to ep 8, all ranks are in one node."""
    in_node = (min(ep, GPUS_PER_NODE) - 1) / (ep - 1)
    return 1e3 * max(in_node / NVLINK, (1 - in_node) / RDMA) * bytes_per_token * tokens


MEASURED_HEADER = (
    "| top-k | experts | ep | routing drawn | rows, KiB: ours | theirs | lower bound "
    "| routing, B: ours | theirs | counts, B: ours | theirs | all bytes, ours / theirs "
    "| ms: ours | theirs | ours / theirs |\n|" + "---|" * 15
)
MODEL_HEADER = (
    "| model | GPUs | ep | rows out: ours | copies | KiB: ours | copies | ours / copies "
    "| ms: ours | copies |\n|" + "---|" * 10
)


def format_measured_row(case: Case, ranks: list[Measured]) -> str:
    sent, seconds = compute_bytes_per_token(ranks), ranks[0].seconds
    ours, theirs = sent["ours"], sent["theirs"]
    ratios = [a / b for a, b in zip(*(seconds[side] for side in SIDES), strict=True)]
    cells = [
        *map(str, (case.top_k, case.experts, case.ep, case.routing)),
        *(f"{kinds['rows'] / 1024:.2f}" for kinds in sent.values()),
        *(f"{side[kind]:.1f}" for kind in KINDS[1:] for side in (ours, theirs)),
        f"{sum(ours.values()) / sum(theirs.values()):.3f}",
        *(spread([1e3 * value for value in seconds[side]]) for side in SIDES),
        spread(ratios),
    ]
    return "| " + " | ".join(cells) + " |"


def format_model_rows() -> Iterable[str]:
    for (name, experts, top_k, hidden), gpus in itertools.product(MODELS, GPUS):
        ep = min(gpus, experts)
        sent = expect_bytes(ep, experts, top_k, hidden=hidden, itemsize=2, tokens=GPU_TOKENS)
        ours, theirs = (sum(sent[side].values()) for side in SIDES)
        rows = [sent[side]["rows"] / (8 * hidden) for side in SIDES]
        times = [compute_milliseconds(total, ep, GPU_TOKENS) for total in (ours, theirs)]
        yield (
            f"| {name} | {gpus} | {ep} | {rows[0]:.2f} | {rows[1]:.2f} | {ours / 1024:.1f} "
            f"| {theirs / 1024:.1f} | {ours / theirs:.3f} | {times[0]:.2f} | {times[1]:.2f} |"
        )


def report(results: dict[Case, list[Measured]], sizes: Sizes, about: list[str]) -> str:
    worst = max(rank.error for ranks in results.values() for rank in ranks)
    models = "; ".join(f"{name}: top-{k} of {e}, hidden {h}" for name, e, k, h in MODELS)
    lines = [
        "# What one MoE layer sends: hf_moe_ep against transformers' own all-to-all\n",
        *about,
        f"- {sizes.tokens} tokens per rank, hidden {sizes.hidden}, fp32; {WORLD} gloo ranks of one "
        f"thread each, {sizes.repeats} turns; forward + backward, experts that only multiply\n",
        "## Measured\n",
        MEASURED_HEADER,
        *(format_measured_row(case, ranks) for case, ranks in results.items()),
        "\nKiB and B per token of the batch, all ranks together. ms: median (min .. max); the last "
        "column is taken turn by turn, below 1 is better. Output and gradients of both sides are "
        f"within {worst:.1e} of the truth (fp32).",
        "\n## Computed: a model, not a measurement\n",
        MODEL_HEADER,
        *format_model_rows(),
        f"\nbf16, {GPU_TOKENS} tokens per GPU, forward + backward of one layer, uniform routing (a "
        "router that favours few nodes, as DeepSeek's does, gains more). Models: " + models,
        "\n`copies`: a row per token and expert. Rows out: per token to other ranks, one way. KiB: "
        "per token, all bytes. ep is the number of GPUs, at most that of experts. With one expert "
        "on each rank nothing is saved, and ours sends its routing on top. ms: bytes over "
        f"{NVLINK / 1e9:.0f} GB/s NVLink within 8 GPUs, {RDMA / 1e9:.0f} GB/s RDMA between them "
        "(DeepEP V1). Every figure is explained at the top of `benchmarks/dispatch.py`.",
    ]
    return "\n".join(lines) + "\n"


def plot(results: dict[Case, list[Measured]], sizes: Sizes, path: Path) -> None:
    """Plot bytes per token over ep for each top-k: computed lines and measured points."""
    from matplotlib import pyplot

    experts = max(case.experts for case in results)
    panels = sorted({case.top_k for case in results})
    size = (4.2 * len(panels), 3.8)
    figure, axes = pyplot.subplots(ncols=len(panels), figsize=size, squeeze=False)
    ep_sizes = [ep for ep in (2, 4, 8, 16, 32, 64) if experts % ep == 0]
    options = {"hidden": sizes.hidden, "itemsize": FP32, "tokens": sizes.tokens}
    styles = {"theirs": ("C1", "-"), "ours": ("C0", "-"), "lower bound": ("black", "--")}
    for top_k, axis in zip(panels, axes[0], strict=True):
        lines = [expect_bytes(ep, experts, top_k, **options) for ep in ep_sizes]
        for side, (color, style) in styles.items():
            totals = [sum(line[side].values()) / 1024 for line in lines]
            axis.plot(ep_sizes, totals, style, color=color, label=f"{side}, by the formula")
        for routing, marker, size in (("uniform", "o", 5), ("skewed", "x", 10)):
            points = {
                case.ep: compute_bytes_per_token(ranks)
                for case, ranks in results.items()
                if (case.top_k, case.experts, case.routing) == (top_k, experts, routing)
            }
            for side in SIDES:
                totals = [sum(sent[side].values()) / 1024 for sent in points.values()]
                label, color = f"{side}, measured, {routing}", styles[side][0]
                axis.plot(list(points), totals, marker, ms=size, color=color, label=label)
        axis.set_xscale("log", base=2)
        axis.set_ylim(bottom=0)
        axis.set_xticks(ep_sizes, map(str, ep_sizes))
        axis.set(title=f"top-{top_k} of {experts}", xlabel="ep_size")
    axes[0][0].set_ylabel("KiB sent per token and layer,\nforward + backward")
    axes[0][0].legend(fontsize="x-small")
    figure.savefig(path, dpi=120, bbox_inches="tight")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--top-k", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--experts", type=int, nargs="+", default=[8, 32, 128])
    parser.add_argument("--ep", type=int, nargs="+", default=[2, 4], choices=[2, 4])
    for field in fields(Sizes):
        parser.add_argument(f"--{field.name}", type=int, default=field.default)
    parser.add_argument("--write", type=Path, help="folder for the tables and the plot")
    args = parser.parse_args()
    if max(args.top_k) > min(args.experts):
        parser.error(f"--top-k {max(args.top_k)} is more than --experts {min(args.experts)}")
    sizes = Sizes(**{field.name: getattr(args, field.name) for field in fields(Sizes)})
    grid = itertools.product(args.top_k, args.experts, args.ep, ("uniform", "skewed"))
    load = os.getloadavg()[0]
    results = measure(list(itertools.starmap(Case, grid)), sizes)
    text = report(results, sizes, describe_machine("benchmarks/dispatch.py", load, WORLD))
    print(text)
    if args.write:
        args.write.mkdir(parents=True, exist_ok=True)
        (args.write / "dispatch-cpu.md").write_text(text)
        plot(results, sizes, args.write / "dispatch-cpu.png")


if __name__ == "__main__":
    main()
