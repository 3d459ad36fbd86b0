"""One training step on four CPU ranks: this package against transformers' own expert parallelism.

    python benchmarks/step_vs_native.py                        the table, to the terminal
    python benchmarks/step_vs_native.py --ep 2 --profile       and where the time goes, op by op

Both sides load one checkpoint with `from_pretrained`, train on one batch and must agree on loss
and gradients to 1e-5 before anything is printed:

    ours      stock model, then `apply_ep_fsdp2(model, ep_size=...)`
    native    `from_pretrained(..., distributed_config=DistributedConfig(fsdp_size=4, ep_size=...))`

    step           forward + backward + clip + AdamW, until the slowest rank is done; both sides
                   live in the same processes and take turns (A B A B ...), so a busy machine slows
                   both. The processes keep freed memory, as a GPU's caching allocator does: with
                   malloc's defaults a third of the time is the kernel clearing pages, on both sides
    CPU seconds    of the same steps, all ranks together: what a busy machine disturbs least
    sent           by one rank to others in the collectives of the MoE layers, one step, counted
                   where torch dispatches them; rows a rank keeps are not sent, FSDP2's own
                   collectives are left out
    saved          tensors that the MoE layers keep for backward, parameters excluded
    peak memory    resident memory of a rank, each side in processes of its own, malloc's defaults:
                   while loading, and from the first step on

It measures no GPU and no network: four processes on one machine.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transformers
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.distributed import DistributedConfig

from hf_moe_ep import apply_ep_fsdp2, clip_grad_norm_

WORLD = 4
SIDES = ("ours", "native")
MAX_NORM = 1.0
TOLERANCE = 1e-5  # fp32: both sides add the same numbers in another order
KEEP_FREED_MEMORY = {  # glibc: no mmap per tensor, nothing trimmed
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(2**40),
    "MALLOC_TOP_PAD_": str(2**26),
}
WARMUP_STEPS = 2
Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Sizes:
    """The model, and the batch of each rank."""

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
    """What one rank measured with both sides in its process; keys are sides."""

    seconds: dict[str, list[float]]
    cpu_seconds: dict[str, list[float]]
    sent: dict[str, dict[str, int]]
    saved: dict[str, int]
    error: float
    profiles: dict[str, str]


@dataclass(frozen=True)
class Result:
    """One ep size: per rank the paired figures, and by side the peak MiB (load, steps)."""

    ep: int
    ranks: list[Paired]
    peaks: dict[str, list[tuple[float, float]]]


def model_config(sizes: Sizes) -> Qwen3MoeConfig:
    return Qwen3MoeConfig(
        vocab_size=1024,
        hidden_size=sizes.hidden,
        intermediate_size=2 * sizes.intermediate,
        moe_intermediate_size=sizes.intermediate,
        num_hidden_layers=sizes.layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=max(sizes.hidden // 8, 8),
        num_experts=sizes.experts,
        num_experts_per_tok=sizes.top_k,
        norm_topk_prob=True,
        max_position_embeddings=sizes.seq,
    )


def write_model(sizes: Sizes, directory: str | Path) -> None:
    torch.manual_seed(sizes.seed)
    Qwen3MoeForCausalLM(model_config(sizes)).save_pretrained(directory)


def make_batch(sizes: Sizes, rank: int) -> Batch:
    generator = torch.Generator().manual_seed(1000 * sizes.seed + rank + 1)
    input_ids = torch.randint(1024, (sizes.batch, sizes.seq), generator=generator)
    return {"input_ids": input_ids, "labels": input_ids}


def load(side: str, directory: str, ep: int) -> nn.Module:
    if side == "ours":
        model = Qwen3MoeForCausalLM.from_pretrained(directory)
        return apply_ep_fsdp2(model, ep_size=ep).train()
    config = DistributedConfig(fsdp_size=WORLD, ep_size=ep)
    return Qwen3MoeForCausalLM.from_pretrained(directory, distributed_config=config).train()


def clip(side: str, model: nn.Module) -> Tensor:
    """Native parameters live on two meshes, where torch's clip raises: as transformers'
    Trainer._mixed_mesh_grad_norm does it."""
    if side == "ours":
        return clip_grad_norm_(model, MAX_NORM)
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
    """Bytes this rank sends to other ranks, by kind: rows (of hidden states), routing, counts.

    FSDP2 gathers and reduces by other collectives than these three.
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
            self._all_to_all(
                args[0], args[2], dist.distributed_c10d._resolve_process_group(args[3])
            )
        elif name == "c10d.allgather_.default":
            (tensor,) = args[1]
            others = dist.ProcessGroup.unbox(args[2]).size() - 1
            self._add(tensor, others * tensor.nbytes)
        return func(*args, **(kwargs or {}))

    def _all_to_all(self, tensor: Tensor, splits: list[int], group: dist.ProcessGroup) -> None:
        own = splits[group.rank()] if splits else tensor.shape[0] // group.size()
        self._add(tensor, tensor.nbytes - tensor[:1].nbytes * own)

    def _add(self, tensor: Tensor, num_bytes: int) -> None:
        if not tensor.is_floating_point():
            kind = "counts"
        else:
            kind = "rows" if tensor.shape[-1] == self.hidden else "routing"
        self.sent[kind] += num_bytes


@contextmanager
def saved_bytes(model: nn.Module) -> Iterator[Counter[str]]:
    """Count the storages that autograd saves inside every experts module's forward."""
    total: Counter[str] = Counter()
    watched = [module for module in model.modules() if hasattr(module, "gate_up_proj")]
    watched = [module for module in watched if isinstance(module.gate_up_proj, Tensor)]
    stock = [vars(module).get("forward") for module in watched]
    for module in watched:
        module.forward = _watch(module, module.forward, total)
    try:
        yield total
    finally:
        for module, forward in zip(watched, stock, strict=True):
            del module.forward
            if forward is not None:
                module.forward = forward


def _watch(module: nn.Module, forward: Callable[..., Any], total: Counter[str]) -> Any:
    def storage(tensor: Tensor) -> torch.UntypedStorage:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        return local.untyped_storage()

    def watching(*args: Any, **kwargs: Any) -> Any:
        seen: dict[int, int] = {}
        skip = {storage(p).data_ptr() for p in module.parameters()}

        def pack(tensor: Tensor) -> Tensor:
            held = storage(tensor)
            if held.data_ptr() not in skip:
                seen[held.data_ptr()] = held.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out = forward(*args, **kwargs)
        total["bytes"] += sum(seen.values())
        return out

    return watching


def check_equal(models: dict[str, nn.Module], losses: dict[str, Tensor]) -> float:
    """The largest relative difference of loss and gradients; raises above TOLERANCE."""
    pairs = {"loss": (losses["ours"], losses["native"])}
    wanted = dict(models["native"].named_parameters())
    ours = dict(models["ours"].named_parameters())
    if ours.keys() != wanted.keys():
        raise RuntimeError(f"the sides differ in parameters {sorted(ours.keys() ^ wanted.keys())}")
    pairs |= {name: (ours[name].grad, wanted[name].grad) for name in ours}
    worst = 0.0
    for name, pair in pairs.items():
        got, want = (t.full_tensor() if isinstance(t, DTensor) else t for t in pair)
        error = float((got - want).abs().max() / want.abs().max().clamp(min=1e-30))
        if not error <= TOLERANCE:
            raise RuntimeError(
                f"the sides disagree on {name}: {error:.1e} relative, allowed {TOLERANCE:.0e}; "
                f"no figures of unequal computations (rounding may flip one token's expert: "
                f"another --seed tells)"
            )
        worst = max(worst, error)
    return worst


def paired_rank(rank: int, sizes: Sizes, directory: str) -> dict[int, Paired]:
    return {ep: _paired(rank, sizes, directory, ep) for ep in sizes.ep}


def _paired(rank: int, sizes: Sizes, directory: str, ep: int) -> Paired:
    models = {side: load(side, directory, ep) for side in SIDES}
    batch = make_batch(sizes, rank)
    losses: dict[str, Tensor] = {}
    sent: dict[str, dict[str, int]] = {}
    saved: dict[str, int] = {}
    for side, model in models.items():
        with saved_bytes(model) as total, SentBytes(sizes.hidden) as wire:
            loss = model(**batch).loss
            loss.backward()
        losses[side], sent[side], saved[side] = loss.detach(), dict(wire.sent), total["bytes"]
    error = check_equal(models, losses)
    optimizers = {side: torch.optim.AdamW(models[side].parameters(), lr=1e-4) for side in SIDES}
    seconds, cpu = _time_in_turns(models, optimizers, batch, sizes.steps)
    profiles = {}
    if sizes.profile:
        for side in SIDES:
            profiles[side] = _profile(side, models[side], optimizers[side], batch)
    return Paired(seconds, cpu, sent, saved, error, profiles)


def _time_in_turns(
    models: dict[str, nn.Module],
    optimizers: dict[str, torch.optim.Optimizer],
    batch: Batch,
    steps: int,
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Seconds and this rank's CPU seconds of each step, by side."""
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    cpu: dict[str, list[float]] = {side: [] for side in SIDES}
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
    averages = profiler.key_averages()
    return averages.table(sort_by="self_cpu_time_total", row_limit=30, max_name_column_width=50)


def memory_rank(rank: int, sizes: Sizes, directory: str, ep: int, side: str) -> tuple[float, float]:
    """Peak resident MiB while loading and sharding, and over three training steps."""
    batch = make_batch(sizes, rank)
    _reset_peak()
    model = load(side, directory, ep)
    loading = _peak_mib()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    _reset_peak()
    for _ in range(3):
        train_step(side, model, optimizer, batch)
    return loading, _peak_mib()


def _reset_peak() -> None:
    """Return freed memory to the system and start a new peak (Linux: proc_pid_clear_refs(5))."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def _peak_mib() -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("/proc/self/status has no VmHWM")


def spawn(
    fn: Callable[..., Any], *args: Any, timeout: float, environment: dict[str, str] | None = None
) -> list[Any]:
    """`fn(rank, *args)` on WORLD gloo ranks of one thread each; values in rank order."""
    # Before the children start: OpenMP and malloc read theirs when a process begins.
    child = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **(environment or {})}
    with tempfile.TemporaryDirectory(prefix="step_vs_native_") as folder:
        with _environment(child):
            context = mp.spawn(_rank_main, (folder, fn, args, timeout), nprocs=WORLD, join=False)
        deadline = time.monotonic() + timeout
        while not context.join(timeout=1.0):
            if time.monotonic() > deadline:
                for process in context.processes:
                    process.kill()
                raise TimeoutError(f"{fn.__name__}: the ranks had not finished after {timeout} s")
        return [torch.load(f"{folder}/{rank}", weights_only=False) for rank in range(WORLD)]


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _rank_main(
    rank: int, folder: str, fn: Callable[..., Any], args: tuple[Any, ...], timeout: float
) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(WORLD)}
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(f"{folder}/store", WORLD),
        rank=rank,
        world_size=WORLD,
        timeout=timedelta(seconds=timeout),
    )
    torch.save(fn(rank, *args), f"{folder}/{rank}")
    dist.destroy_process_group()


def measure(sizes: Sizes, memory: bool = True, timeout: float = 900.0) -> list[Result]:
    """All figures of every ep size; raises where the sides do not compute the same."""
    results = []
    with tempfile.TemporaryDirectory(prefix="step_vs_native_model_") as directory:
        write_model(sizes, directory)
        by_rank = spawn(
            paired_rank, sizes, directory, timeout=timeout, environment=KEEP_FREED_MEMORY
        )
        for ep in sizes.ep:
            peaks = {
                side: spawn(memory_rank, sizes, directory, ep, side, timeout=timeout)
                for side in SIDES
                if memory
            }
            results.append(Result(ep, [measured[ep] for measured in by_rank], peaks))
    return results


def report(results: list[Result], setting: list[str]) -> str:
    """Markdown: the setting, one table, and the profiles if there are any."""
    lines = ["# One training step: hf_moe_ep against transformers' own expert parallelism", ""]
    lines += [
        *setting,
        "",
        "| ep | figure | ours | native | ours / native |",
        "|---|---|---|---|---|",
    ]
    for result in results:
        lines += [f"| {result.ep} | {row} |" for row in _rows(result)]
    worst = max(rank.error for result in results for rank in result.ranks)
    lines += [
        "",
        "Median (min .. max) over steps for seconds, over ranks for the rest; the ratio is taken "
        "step by step and rank by rank, below 1 is better. Loss and gradients of both sides were "
        f"equal to {worst:.1e} relative (fp32). Every figure is explained at the top of "
        "`benchmarks/step_vs_native.py`.",
    ]
    for result in results:
        for side, text in result.ranks[0].profiles.items():
            lines += ["", f"ep {result.ep}, {side}, one step of rank 0:", "```", text, "```"]
    return "\n".join(lines) + "\n"


def _rows(result: Result) -> Iterator[str]:
    ranks, mib = result.ranks, 2**20
    first = ranks[0].seconds
    yield _row("step, s", first["ours"], first["native"])
    cpu = {
        side: [sum(step) for step in zip(*(r.cpu_seconds[side] for r in ranks))] for side in SIDES
    }
    yield _row("CPU seconds per step, 4 ranks", cpu["ours"], cpu["native"])
    for kind in ("rows", "routing", "counts"):
        unit, divisor = ("KiB", 1024) if kind == "counts" else ("MiB", mib)
        ours, native = ([r.sent[side][kind] / divisor for r in ranks] for side in SIDES)
        yield _row(f"sent per rank: {kind}, {unit}", ours, native)
    totals = ([sum(r.sent[side].values()) / mib for r in ranks] for side in SIDES)
    yield _row("sent per rank: all, MiB", *totals)
    yield _row("saved for backward, MiB", *([r.saved[side] / mib for r in ranks] for side in SIDES))
    if result.peaks:
        for index, phase in enumerate(("loading", "training")):
            peaks = ([peak[index] for peak in result.peaks[side]] for side in SIDES)
            yield _row(f"peak memory per rank, {phase}, MiB", *peaks)


def _row(name: str, ours: list[float], native: list[float]) -> str:
    ratios = [a / b for a, b in zip(ours, native, strict=True) if b]
    cells = [_spread(ours), _spread(native), _spread(ratios) if ratios else "-"]
    return " | ".join([name, *cells])


def _spread(values: list[float]) -> str:
    low, middle, high = min(values), statistics.median(values), max(values)
    digits = 0 if middle >= 100 else 1 if middle >= 10 else 2
    if f"{low:.{digits}f}" == f"{high:.{digits}f}":
        return f"{middle:.{digits}f}"
    return f"{middle:.{digits}f} ({low:.{digits}f} .. {high:.{digits}f})"


def _setting(sizes: Sizes, arguments: list[str], load_before: float) -> list[str]:
    info = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":", 1)[1].strip() for line in info if line.startswith("model name")]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    commit = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    described = subprocess.run(commit, capture_output=True, text=True, check=False).stdout.strip()
    command = shlex.join(["python", "benchmarks/step_vs_native.py", *arguments])
    return [
        f"- command: `{command}`",
        f"- model: Qwen3-MoE, {sizes.layers} layers, hidden {sizes.hidden}, top-{sizes.top_k} of "
        f"{sizes.experts} experts of {sizes.intermediate}, fp32; {sizes.batch} x {sizes.seq} "
        f"tokens per rank, {WORLD} gloo ranks of one thread each, {sizes.steps} steps",
        f"- machine: {(names or [platform.machine()])[0]}, {len(os.sched_getaffinity(0))} cores, "
        f"{memory:.0f} GiB; load average {load_before:.1f} before the run, "
        f"{os.getloadavg()[0]:.1f} at its end, of which {WORLD} are the ranks",
        f"- versions: torch {torch.__version__}, transformers {transformers.__version__}, Python "
        f"{platform.python_version()}; commit {described}; {time.strftime('%Y-%m-%d')}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    defaults = Sizes()
    parser.add_argument("--ep", type=int, nargs="+", default=list(defaults.ep))
    for name in ("hidden", "experts", "top_k", "intermediate", "layers", "batch", "seq", "steps"):
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=int, default=getattr(defaults, name))
    parser.add_argument("--seed", type=int, default=defaults.seed)
    parser.add_argument("--profile", action="store_true", help="add a table of ops for each side")
    parser.add_argument("--write", type=Path, help="also write the report to this Markdown file")
    args = vars(parser.parse_args())
    path = args.pop("write")
    sizes = Sizes(**args | {"ep": tuple(args["ep"])})
    load_before = os.getloadavg()[0]
    results = measure(sizes)
    text = report(results, _setting(sizes, sys.argv[1:], load_before))
    print(text)
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


if __name__ == "__main__":
    main()
