"""Time training steps on four CPU ranks: hf_moe_ep and transformers' own expert parallelism.

    python benchmarks/step_vs_native.py                        prints the table
    python benchmarks/step_vs_native.py --ep 2 --profile       also prints the time of each op

Both sides load the same checkpoint and train on the same batch. Loss and gradients must agree to
1e-5. Otherwise the benchmark raises an error and prints no table:

    ours      `hf_moe_ep.from_pretrained(..., ep_size=...)`
    native    `from_pretrained(..., distributed_config=DistributedConfig(fsdp_size=4, ep_size=...))`

The figures:

    step           forward, backward, clipping and AdamW, until the slowest rank is done. Both
                   sides run in the same processes and take turns (A B A B ...), so a busy machine
                   slows down both. The processes keep freed memory, as a GPU's caching allocator
                   does, because with malloc's defaults, clearing pages takes up to a quarter of a
                   step
    CPU seconds    CPU time of the same steps, summed over ranks. A busy machine changes CPU time
                   less than wall-clock time
    sent           bytes that a rank sends to other ranks in the collectives of the MoE layers in
                   one step, counted when torch dispatches them. FSDP2's collectives and rows that
                   stay on their rank do not count
    saved          bytes that the MoE layers keep for backward, without parameters
    peak memory    peak of the resident memory of a rank while it loads the model, and from the
                   first step on. Each side runs in separate processes with malloc's defaults

The ranks are four processes on one machine, so no GPU and no network is measured.
"""

from __future__ import annotations

import argparse
import gc
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from benchmark_text import describe_machine, format_row
from models import qwen3_moe
from ranks import KEEP_FREED_MEMORY, peak_mib, reset_peak, spawn
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen3MoeForCausalLM
from transformers.distributed import DistributedConfig

from hf_moe_ep import clip_grad_norm_, from_pretrained
from hf_moe_ep.moe.dispatch.all_to_all import AllToAllPlanning

WORLD = 4
SIDES = ("ours", "native")
VOCAB = 1024
MAX_NORM = 1.0
TOLERANCE = 1e-5  # fp32: both sides add the same numbers in another order
WARMUP_STEPS = 2
Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Sizes:
    """The sizes of the model, and the batch of each rank."""

    ep: tuple[int, ...] = (1, 2, 4)
    hidden: int = 512
    experts: int = 64
    top_k: int = 8
    intermediate: int = 256
    layers: int = 2
    batch: int = 4
    seq: int = 128
    steps: int = 10
    seed: int = 0
    profile: bool = False


@dataclass(frozen=True)
class Paired:
    """The figures of one rank whose process runs both sides. The keys of dicts are sides."""

    seconds: dict[str, list[float]]
    cpu_seconds: dict[str, list[float]]
    sent: dict[str, dict[str, int]]
    saved: dict[str, int]
    error: float
    profiles: dict[str, str]


@dataclass(frozen=True)
class Result:
    """The results for one ep size, by rank, and the peaks of `measure_memory`, by side and rank."""

    ep: int
    ranks: list[Paired]
    peaks: dict[str, list[tuple[float, float]]]


def write_model(sizes: Sizes, directory: str | Path) -> None:
    torch.manual_seed(sizes.seed)
    model = qwen3_moe(sizes, VOCAB, max_position_embeddings=sizes.seq)
    model.save_pretrained(directory)


def make_batch(sizes: Sizes, rank: int) -> Batch:
    generator = torch.Generator().manual_seed(1000 * sizes.seed + rank + 1)
    input_ids = torch.randint(VOCAB, (sizes.batch, sizes.seq), generator=generator)
    return {"input_ids": input_ids, "labels": input_ids}


def load(side: str, directory: str, ep: int) -> nn.Module:
    if side == "ours":
        return from_pretrained(directory, ep_size=ep).train()
    config = DistributedConfig(fsdp_size=WORLD, ep_size=ep)
    return Qwen3MoeForCausalLM.from_pretrained(directory, distributed_config=config).train()


def clip(side: str, model: nn.Module) -> Tensor:
    """Clip the gradients of a side. torch's function raises if parameters are on two meshes."""
    if side == "ours":
        return clip_grad_norm_(model, MAX_NORM)
    # transformers' Trainer._mixed_mesh_grad_norm does the same.
    by_mesh: dict[Any, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        by_mesh.setdefault(parameter.grad.device_mesh, []).append(parameter)
    norms = [
        nn.utils.get_total_norm([p.grad for p in members]).full_tensor()
        for members in by_mesh.values()
    ]
    total = torch.linalg.vector_norm(torch.stack(norms))
    for members in by_mesh.values():
        nn.utils.clip_grads_with_norm_(members, MAX_NORM, total)
    return total


def train_step(side: str, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
    model(**batch).loss.backward()
    clip(side, model)
    optimizer.step()
    optimizer.zero_grad()


class SentBytes(TorchDispatchMode):
    """Counts the bytes that this rank sends to other ranks: rows of hidden states, routing, counts.

    It counts all all-to-alls, and all-gathers of integers. FSDP2 uses neither of them. The columns
    of a message behind the columns of a row are routing. Integers are counts.
    """

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.hidden, self.sent = hidden, Counter(rows=0, routing=0, counts=0)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = str(func)
        if name == "c10d.alltoall_base_.default":
            self._all_to_all(args[1], args[4], dist.ProcessGroup.unbox(args[2]))
        elif name == "_c10d_functional.all_to_all_single.default":
            group = dist.distributed_c10d._resolve_process_group(args[3])
            self._all_to_all(args[0], args[2], group)
        elif name == "c10d._allgather_base_.default" and not args[1].is_floating_point():
            others = dist.ProcessGroup.unbox(args[2]).size() - 1
            self._add(args[1], others * args[1].nbytes)
        return func(*args, **(kwargs or {}))

    def _all_to_all(self, tensor: Tensor, splits: list[int], group: dist.ProcessGroup) -> None:
        num_local = splits[group.rank()] if splits else tensor.shape[0] // group.size()
        self._add(tensor, tensor.nbytes - tensor[:1].nbytes * num_local)

    def _add(self, tensor: Tensor, num_bytes: int) -> None:
        columns = tensor.shape[-1]
        if not tensor.is_floating_point():
            self.sent["counts"] += num_bytes
        elif columns < self.hidden:
            self.sent["routing"] += num_bytes
        else:
            rows_bytes = num_bytes // columns * self.hidden
            self.sent["rows"] += rows_bytes
            self.sent["routing"] += num_bytes - rows_bytes


@contextmanager
def count_saved_bytes(model: nn.Module) -> Iterator[Counter[str]]:
    """Inside the block, count the bytes that autograd saves in the forward of each experts module.

    Our side also keeps the tensors of its exchanges. Autograd does not save these tensors, so their
    bytes are added.
    """
    total: Counter[str] = Counter()
    finish = AllToAllPlanning.finish

    def counting_finish(planning: AllToAllPlanning) -> Any:
        exchanges = finish(planning)
        values = [value for exchange in exchanges for value in vars(exchange).values()]
        storages = [_get_storage(value) for value in values if isinstance(value, Tensor)]
        total["bytes"] += sum({s.data_ptr(): s.nbytes() for s in storages}.values())
        return exchanges

    with ExitStack() as stack:
        stack.enter_context(patch.object(AllToAllPlanning, "finish", counting_finish))
        for module in model.modules():
            if "gate_up_proj" in module._parameters:
                counting_forward = _count_saved(module, module.forward, total)
                stack.enter_context(patch.object(module, "forward", counting_forward))
        yield total


def _count_saved(module: nn.Module, forward: Callable[..., Any], total: Counter[str]) -> Any:
    def counting_forward(*args: Any, **kwargs: Any) -> Any:
        saved: dict[int, int] = {}  # bytes by storage, so that views of a storage count once
        parameters = {_get_storage(p).data_ptr() for p in module.parameters()}

        def pack(tensor: Tensor) -> Tensor:
            if _get_storage(tensor).data_ptr() not in parameters:
                saved[_get_storage(tensor).data_ptr()] = _get_storage(tensor).nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out = forward(*args, **kwargs)
        total["bytes"] += sum(saved.values())
        return out

    return counting_forward


def _get_storage(tensor: Tensor) -> torch.UntypedStorage:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage()


def check_equal(models: dict[str, nn.Module], losses: dict[str, Tensor]) -> float:
    """Return the largest relative difference of loss and gradients. Raise if above TOLERANCE."""
    pairs = {"loss": (losses["ours"], losses["native"])}
    ours, native = (dict(models[side].named_parameters()) for side in SIDES)
    if ours.keys() != native.keys():
        raise RuntimeError(f"the sides differ in parameters {sorted(ours.keys() ^ native.keys())}")
    pairs |= {name: (ours[name].grad, native[name].grad) for name in ours}
    errors = []
    for name, pair in pairs.items():
        actual, true = (t.full_tensor() if isinstance(t, DTensor) else t for t in pair)
        errors.append(float((actual - true).abs().max() / true.abs().max().clamp(min=1e-30)))
        if not errors[-1] <= TOLERANCE:
            raise RuntimeError(
                f"the sides disagree on {name}: relative difference {errors[-1]:.1e}, allowed "
                f"{TOLERANCE:.0e}; ties in a topk can cause this, so try another --seed"
            )
    return max(errors)


def measure_rank(rank: int, sizes: Sizes, directory: str) -> dict[int, Paired]:
    measured = {}
    for ep in sizes.ep:
        measured[ep] = _measure_sides(rank, sizes, directory, ep)
        gc.collect()  # frees the sharded model, which has reference cycles
    return measured


def _measure_sides(rank: int, sizes: Sizes, directory: str, ep: int) -> Paired:
    models = {side: load(side, directory, ep) for side in SIDES}
    batch = make_batch(sizes, rank)
    losses: dict[str, Tensor] = {}
    optimizers: dict[str, torch.optim.Optimizer] = {}
    sent, saved = {}, {}
    for side, model in models.items():
        with count_saved_bytes(model) as total, SentBytes(sizes.hidden) as counter:
            loss = model(**batch).loss
            loss.backward()
        losses[side], sent[side], saved[side] = loss.detach(), dict(counter.sent), total["bytes"]
        optimizers[side] = torch.optim.AdamW(model.parameters(), lr=1e-4)
    error = check_equal(models, losses)
    seconds, cpu = _time_in_turns(models, optimizers, batch, sizes.steps)
    profiles = {
        side: _profile(side, models[side], optimizers[side], batch)
        for side in SIDES
        if sizes.profile
    }
    return Paired(seconds, cpu, sent, saved, error, profiles)


def _time_in_turns(
    models: dict[str, nn.Module],
    optimizers: dict[str, torch.optim.Optimizer],
    batch: Batch,
    steps: int,
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Time the steps of both sides in turn. Returns seconds and CPU seconds of steps by side."""
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    cpu: dict[str, list[float]] = {side: [] for side in SIDES}
    for optimizer in optimizers.values():
        optimizer.zero_grad()
    for step in range(WARMUP_STEPS + steps):
        for side in SIDES:
            dist.barrier()
            start, cpu_start = time.perf_counter(), time.process_time()
            train_step(side, models[side], optimizers[side], batch)
            dist.barrier()
            if step >= WARMUP_STEPS:
                seconds[side].append(time.perf_counter() - start)
                cpu[side].append(time.process_time() - cpu_start)
    return seconds, cpu


def _profile(side: str, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> str:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        train_step(side, model, optimizer, batch)
        dist.barrier()
    table = profiler.key_averages().table
    return table(sort_by="self_cpu_time_total", row_limit=30, max_name_column_width=50)


def measure_memory(
    rank: int, sizes: Sizes, directory: str, ep: int, side: str
) -> tuple[float, float]:
    """Measure the peak resident MiB of loading and sharding, and of three training steps."""
    batch = make_batch(sizes, rank)
    reset_peak()
    model = load(side, directory, ep)
    loading = peak_mib()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    reset_peak()
    for _ in range(3):
        train_step(side, model, optimizer, batch)
    return loading, peak_mib()


def measure(sizes: Sizes, memory: bool = True, timeout: float = 900.0) -> list[Result]:
    """Measure every ep size. Raises RuntimeError if the sides compute different results."""
    results = []
    with tempfile.TemporaryDirectory(prefix="step_vs_native_model_") as directory:
        write_model(sizes, directory)
        options = {"timeout": timeout, "environment": KEEP_FREED_MEMORY}
        by_rank = spawn(measure_rank, WORLD, sizes, directory, **options)
        for ep in sizes.ep:
            peaks = {
                side: spawn(measure_memory, WORLD, sizes, directory, ep, side, timeout=timeout)
                for side in SIDES
                if memory
            }
            results.append(Result(ep, [measured[ep] for measured in by_rank], peaks))
    return results


def report(sizes: Sizes, results: list[Result], about: list[str]) -> str:
    """Format the machine, the table and all profiles as Markdown."""
    worst = max(rank.error for result in results for rank in result.ranks)
    lines = [
        "# One training step: hf_moe_ep against transformers' own expert parallelism\n",
        *about,
        f"- model: Qwen3-MoE, {sizes.layers} layers, hidden {sizes.hidden}, top-{sizes.top_k} of "
        f"{sizes.experts} experts of {sizes.intermediate}, fp32; {sizes.batch} x {sizes.seq} "
        f"tokens per rank, {WORLD} gloo ranks of one thread each, {sizes.steps} steps\n",
        "| ep | figure | ours | native | ours / native |\n|---|---|---|---|---|",
        *(f"| {result.ep} | {cells} |" for result in results for cells in _format_rows(result)),
        "\nMedian (min .. max), over steps for seconds and over ranks for the rest; ratios are "
        "taken step by step and rank by rank, below 1 is better. Loss and gradients of both sides "
        f"are equal to {worst:.1e} relative (fp32). Every figure is explained at the top of "
        "`benchmarks/step_vs_native.py`.",
    ]
    for result in results:
        for side, ops in result.ranks[0].profiles.items():
            lines.append(f"\nep {result.ep}, {side}, one step of rank 0:\n```\n{ops}\n```")
    return "\n".join(lines) + "\n"


def _format_rows(result: Result) -> Iterator[str]:
    ranks, mib = result.ranks, 2**20
    yield format_row("step, s", *(ranks[0].seconds[side] for side in SIDES))
    by_step = (zip(*(r.cpu_seconds[side] for r in ranks)) for side in SIDES)
    cpu = ([sum(step) for step in steps] for steps in by_step)
    yield format_row("CPU seconds per step, 4 ranks", *cpu)
    for kind in ("rows", "routing", "counts"):
        unit, divisor = ("KiB", 1024) if kind == "counts" else ("MiB", mib)
        ours, native = ([r.sent[side][kind] / divisor for r in ranks] for side in SIDES)
        yield format_row(f"sent per rank: {kind}, {unit}", ours, native)
    totals = ([sum(r.sent[side].values()) / mib for r in ranks] for side in SIDES)
    yield format_row("sent per rank: all, MiB", *totals)
    yield format_row(
        "saved for backward, MiB", *([r.saved[side] / mib for r in ranks] for side in SIDES)
    )
    if result.peaks:
        for index, phase in enumerate(("loading", "training")):
            peaks = ([peak[index] for peak in result.peaks[side]] for side in SIDES)
            yield format_row(f"peak memory per rank, {phase}, MiB", *peaks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    defaults = Sizes()
    parser.add_argument("--ep", type=int, nargs="+", default=list(defaults.ep))
    for name, default in vars(defaults).items():
        if type(default) is int:
            parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--profile", action="store_true", help="add a table of ops for each side")
    parser.add_argument("--write", type=Path, help="also write the report to this Markdown file")
    args = parser.parse_args()
    chosen = {name: getattr(args, name) for name in vars(defaults)}
    sizes = Sizes(**chosen | {"ep": tuple(args.ep)})
    load_before = os.getloadavg()[0]
    results = measure(sizes)
    text = report(
        sizes, results, describe_machine("benchmarks/step_vs_native.py", load_before, WORLD)
    )
    print(text)
    if args.write:
        args.write.parent.mkdir(parents=True, exist_ok=True)
        args.write.write_text(text)


if __name__ == "__main__":
    main()
