"""Measure the memory that four CPU ranks need to load and to save a checkpoint in hub layout.

    python benchmarks/checkpoint.py                              prints the tables
    python benchmarks/checkpoint.py --write benchmarks/results   also writes Markdown and a plot

The checkpoint is a Qwen3-MoE with one key per expert, as on the hub. Its files are in the page
cache. Three methods load it, and two of them also save it:

    ours      `hf_moe_ep.from_pretrained(folder, ep_size=..)`, then our `save_pretrained`
    native    transformers' `from_pretrained(.., distributed_config=DistributedConfig(fsdp_size=4,
              ep_size=..))`, then its `model.save_pretrained`
    whole     transformers' `from_pretrained` on every rank, then `apply_ep_fsdp2(ep_size=..)`

Every row comes from new processes with malloc's defaults. They load and save a tiny model first, so
that imports and connections are not measured. The checkpoints that `ours` and `native` save must
equal the original byte for byte. Otherwise the benchmark raises an error and prints no figures.

    above shards     peak of the anonymous and shared memory, which is sampled every millisecond,
                     minus the memory that the process had before, minus its local shards. The table
                     has MiB, and multiples of the largest tensor (one layer's stacked weight)
    with file pages  the same difference for all resident memory (VmHWM, exact), which includes the
                     mapped pages of the checkpoint. The system can reclaim these pages
    read             bytes that a rank reads with read calls and from mapped pages
    seconds          time until the slowest rank is done. Our save includes fsync and sha256, which
                     transformers' save does not have

hf_moe_ep promises peaks above shards of at most 1.5 (load) and 2 (save) times the largest tensor,
on every rank.
"""

from __future__ import annotations

import argparse
import gc
import os
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from benchmark_text import describe_machine, spread
from ranks import peak_mib, reset_peak, spawn
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.distributed import DistributedConfig

import hf_moe_ep
from hf_moe_ep.checkpoints.storage.safetensors_file import Reader, read_index

WORLD = 4
MIB = 2**20
METHODS = {"ours": "hf_moe_ep", "native": "transformers", "whole": "stock, then apply_ep_fsdp2"}
SAVING = ("ours", "native")
PROMISED = {"load": 1.5, "save": 2.0}  # in multiples of the largest tensor


@dataclass(frozen=True)
class Sizes:
    """The sizes of the model, which by default has 1.0 GiB."""

    hidden: int = 512
    layers: int = 8
    experts: int = 64
    intermediate: int = 320
    vocab: int = 8192
    file_mb: int = 200
    repeats: int = 1
    ep: tuple[int, ...] = (1, 2, 4)

    @property
    def largest(self) -> int:
        """The bytes of one layer's gate_up_proj in fp32."""
        return self.experts * 2 * self.intermediate * self.hidden * 4


TINY = Sizes(hidden=32, layers=2, intermediate=16, vocab=64)


@dataclass(frozen=True)
class Figures:
    """The figures of one load or save on one rank.

    `peak` (anonymous and shared memory) and `resident` (all memory) are bytes above the memory that
    the process had before, without its shards.
    """

    seconds: float
    peak: int
    resident: int
    read: int


@dataclass(frozen=True)
class Measured:
    """The figures of one rank in one process. `shards` is the size of its shards in bytes."""

    shards: int
    load: Figures
    save: Figures | None


Results = dict[tuple[int, str], list[list[Measured]]]  # [ep, method][repeat][rank]


def write_model(_: int, sizes: Sizes, directory: str) -> None:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=sizes.vocab,
        hidden_size=sizes.hidden,
        moe_intermediate_size=sizes.intermediate,
        num_hidden_layers=sizes.layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=sizes.hidden // 8,
        num_experts=sizes.experts,
        num_experts_per_tok=4,
    )
    model = Qwen3MoeForCausalLM(config)
    model.save_pretrained(directory, max_shard_size=f"{sizes.file_mb}MB")


def load(method: str, directory: str, ep: int) -> nn.Module:
    if method == "ours":
        return hf_moe_ep.from_pretrained(directory, ep_size=ep)
    if method == "whole":
        model = Qwen3MoeForCausalLM.from_pretrained(directory)
        return hf_moe_ep.apply_ep_fsdp2(model, ep_size=ep)
    config = DistributedConfig(fsdp_size=WORLD, ep_size=ep)
    return Qwen3MoeForCausalLM.from_pretrained(directory, distributed_config=config)


def save(method: str, model: Any, directory: str, sizes: Sizes) -> None:
    write = hf_moe_ep.save_pretrained if method == "ours" else type(model).save_pretrained
    write(model, directory, max_shard_size=f"{sizes.file_mb}MB")


def count_shard_bytes(model: nn.Module) -> int:
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}
    return sum((t.to_local() if isinstance(t, DTensor) else t).nbytes for t in tensors.values())


class Watch:
    """Measure the time, the peak memory and the bytes read in a block that every rank enters."""

    def __enter__(self) -> Watch:
        dist.barrier()
        reset_peak()
        self._before = self._highest = _read_memory()
        self._samples, self._stop = 0, threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._read = _read_num_bytes_read()
        self._start = time.perf_counter()
        self._thread.start()
        return self

    def _sample(self) -> None:
        while not self._stop.wait(0.001):
            self._samples += self._update_peak()[-1]

    def _update_peak(self) -> tuple[int, ...]:
        now = _read_memory()
        self._highest = tuple(max(pair) for pair in zip(now, self._highest, strict=True))
        return now

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if error is None:
            dist.barrier()
        self._seconds = time.perf_counter() - self._start
        self._read = _read_num_bytes_read() - self._read
        self._stop.set()
        self._thread.join()
        self._update_peak()
        self._resident = int(peak_mib() * MIB)

    def make_figures(self, shards: int) -> Figures:
        """Return the figures, without the local shards, whose size in bytes is `shards`."""
        (private, mapped, _), (peak, mapped_peak, _) = self._before, self._highest
        read = self._read - self._samples + mapped_peak - mapped
        resident = self._resident - private - mapped - shards
        return Figures(self._seconds, peak - private - shards, resident, read)


def _read_memory() -> tuple[int, ...]:
    """Return the bytes of anonymous and shared memory, of file pages, and of the text read here."""
    text = Path("/proc/self/status").read_text()
    kib = {line.split(":")[0]: line.split()[1] for line in text.splitlines() if "Rss" in line}
    private, mapped = int(kib["RssAnon"]) + int(kib["RssShmem"]), int(kib["RssFile"])
    return 1024 * private, 1024 * mapped, len(text)


def _read_num_bytes_read() -> int:
    """Return the bytes of all read calls so far: from disk and page cache, not from sockets."""
    return int(Path("/proc/self/io").read_text().split()[1])


def measure_rank(
    rank: int, sizes: Sizes, directories: tuple[str, str], output: str, ep: int, method: str
) -> Measured:
    tiny, directory = directories
    model = load(method, tiny, ep)
    if method in SAVING:
        save(method, model, f"{output}/tiny", sizes)
    del model
    gc.collect()
    with Watch() as loading:
        model = load(method, directory, ep)
    shards = count_shard_bytes(model)
    if method not in SAVING:
        return Measured(shards, loading.make_figures(shards), None)
    with Watch() as saving:
        save(method, model, f"{output}/model", sizes)
    return Measured(shards, loading.make_figures(shards), saving.make_figures(0))


def check_equal(directory: str, saved: str) -> None:
    """Raise if two checkpoints differ in a key or in a byte."""
    index, saved_index = read_index(directory), read_index(saved)
    if index.keys() != saved_index.keys():
        different = sorted(index.keys() ^ saved_index.keys())
        raise RuntimeError(f"the saved checkpoint and the loaded one differ in keys {different}")
    with Reader() as reader:
        for key, entry in index.items():
            whole = tuple((0, size) for size in entry.shape)
            if not torch.equal(reader.read(entry, whole), reader.read(saved_index[key], whole)):
                raise RuntimeError(f"the saved values of {key} differ from the loaded ones")


def measure(sizes: Sizes, timeout: float = 600.0) -> Results:
    """Measure every method with every ep size, `sizes.repeats` times in turn."""
    results: Results = {(ep, method): [] for ep in sizes.ep for method in METHODS}
    with tempfile.TemporaryDirectory(prefix="checkpoint_benchmark_") as folder:
        directories = f"{folder}/tiny", f"{folder}/model"
        for model, directory in zip((TINY, sizes), directories, strict=True):
            spawn(write_model, 1, model, directory, timeout=timeout)
        for repeat in range(sizes.repeats):
            for ep, method in results:
                output = f"{folder}/{method} {ep} {repeat}"
                arguments = sizes, directories, output, ep, method
                results[ep, method].append(spawn(measure_rank, WORLD, *arguments, timeout=timeout))
                if method in SAVING:
                    check_equal(directories[1], f"{output}/model")
    return results


def find_worst_peak(sizes: Sizes, results: Results, what: str, method: str = "ours") -> float:
    """Return the highest peak of any rank, in multiples of the largest tensor."""
    peaks = [
        getattr(rank, what).peak
        for (_, name), repeats in results.items()
        for repeat in repeats
        for rank in repeat
        if name == method
    ]
    return max(peaks) / sizes.largest


def list_broken_promises(sizes: Sizes, results: Results) -> list[str]:
    """List the promises that hf_moe_ep does not keep."""
    peaks = {what: find_worst_peak(sizes, results, what) for what in PROMISED}
    return [
        f"{what}: {peaks[what]:.2f} of the largest tensor, promised {promised}"
        for what, promised in PROMISED.items()
        if peaks[what] > promised
    ]


def format_report(sizes: Sizes, results: Results, machine: list[str]) -> str:
    experts = sizes.layers * sizes.experts * 3 * sizes.hidden * sizes.intermediate * 4
    lines = [
        "# A checkpoint of the hub: memory to load and to save it\n",
        *machine,
        f"- model: Qwen3-MoE, {sizes.layers} layers, hidden {sizes.hidden}, {sizes.experts} "
        f"experts of {sizes.intermediate}, fp32, {experts / MIB:.0f} MiB of experts; the largest "
        f"tensor is gate_up_proj of a layer, {sizes.largest / MIB:.0f} MiB; {WORLD} gloo ranks of "
        f"one thread each\n",
    ]
    for what in PROMISED:
        lines += [
            f"| {what} | ep | above shards, largest tensors: rank 0 | other ranks "
            "| above shards, MiB: rank 0 | other ranks | with file pages, MiB: rank 0 "
            "| other ranks | shards, MiB | read, MiB | seconds |",
            "|---|---|---|---|---|---|---|---|---|---|---|",
            *(
                f"| {METHODS[method]} | {ep} | {_format_cells(sizes, repeats, what)} |"
                for (ep, method), repeats in results.items()
                if what == "load" or method in SAVING
            ),
            "",
        ]
    lines += [
        f"Promised of hf_moe_ep to {what}: {promised} largest tensors above its shards on every "
        f"rank; the highest is {find_worst_peak(sizes, results, what):.2f}."
        for what, promised in PROMISED.items()
    ]
    lines.append(
        f"\nMedian (min .. max) over ranks; runs: {sizes.repeats}. Every figure is explained at "
        "the top of `benchmarks/checkpoint.py`."
    )
    return "\n".join(lines) + "\n"


def _format_cells(sizes: Sizes, repeats: list[list[Measured]], what: str) -> str:
    first = [repeat[0] for repeat in repeats]
    others = [rank for repeat in repeats for rank in repeat[1:]]
    columns = [[getattr(rank, what) for rank in ranks] for ranks in (first, others)]
    cells = [spread([figures.peak / sizes.largest for figures in column]) for column in columns]
    cells += [spread([figures.peak / MIB for figures in column]) for column in columns]
    cells += [spread([figures.resident / MIB for figures in column]) for column in columns]
    cells.append(spread([rank.shards / MIB for rank in (*first, *others)]))
    read = [figures.read / MIB for column in columns for figures in column]
    cells.append(spread(read) if what == "load" else "")
    cells.append(spread([getattr(repeat[0], what).seconds for repeat in repeats]))
    return " | ".join(cells)


def plot(sizes: Sizes, results: Results, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True)
    bars = [key for key in results if key[1] in SAVING]
    for axis, (what, promised) in zip(axes, PROMISED.items(), strict=True):
        for number, (ep, method) in enumerate(bars):
            heights = [
                max(getattr(repeat[rank], what).peak for repeat in results[ep, method]) / MIB
                for rank in range(WORLD)
            ]
            x = [rank + (number - (len(bars) - 1) / 2) * 0.8 / len(bars) for rank in range(WORLD)]
            axis.bar(x, heights, 0.8 / len(bars), label=f"{METHODS[method]}, ep {ep}")
        line = promised * sizes.largest / MIB
        axis.axhline(line, color="black", linestyle=":", label="promised of hf_moe_ep")
        axis.set(title=what, xlabel="rank", xticks=range(WORLD))
    axes[0].set_ylabel("peak above local shards, MiB")
    axes[1].legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in vars(Sizes()).items():
        if type(default) is int:
            parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--ep", type=int, nargs="+", default=Sizes.ep)
    parser.add_argument("--write", type=Path, help="folder for checkpoint-cpu.md and its plot")
    args = parser.parse_args()
    sizes = Sizes(**{name: getattr(args, name) for name in vars(Sizes())} | {"ep": tuple(args.ep)})
    load_before = os.getloadavg()[0]
    results = measure(sizes)
    text = format_report(
        sizes, results, describe_machine("benchmarks/checkpoint.py", load_before, WORLD)
    )
    print(text)
    if args.write:
        args.write.mkdir(parents=True, exist_ok=True)
        (args.write / "checkpoint-cpu.md").write_text(text)
        plot(sizes, results, args.write / "checkpoint-cpu.png")
    if problems := list_broken_promises(sizes, results):
        raise SystemExit("a promise is broken: " + "; ".join(problems))


if __name__ == "__main__":
    main()
