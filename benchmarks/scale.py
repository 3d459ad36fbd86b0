"""Measure start-up and checkpoints on one rank of 8 to 1,024: seconds, memory, bytes received.

    python benchmarks/scale.py                              prints the tables
    python benchmarks/scale.py --write benchmarks/results   also writes scale-cpu.md

The model has as many tensors as Qwen3-235B-A22B (94 layers, AdamW), but all of them are small, so
that the costs depend only on the numbers of tensors and ranks. One rank is simulated at a time, in
a separate process. Its process group is torch's fake group, whose collectives return immediately.
The network is not measured; instead, the benchmark counts the bytes that a rank would receive. Rows
with the word "before" show how torch, or an earlier version of this package, does the same work.

    sharding    the rank patches and shards a model, and calls of torch's `new_group` are counted.
                Before: if a mesh axis has one rank, torch makes every rank create a group for each
                rank
    agreeing    bytes that a rank receives when ranks compare model, config and state. Before:
                every rank gathered every value
    planning    the ranks decide which rank writes which tensors. Before: rank 0 gathers the plans
                of all ranks, merges them and sends them back (torch.distributed.checkpoint, DCP),
                and the table shows the cost on rank 0. "by Accelerate" is the work of rank 0 when
                Accelerate or the Trainer saves with DCP. "told for it" has the bytes that rank 0
                receives for this
    finding     a rank finds its tensors in the files of a checkpoint, and reads them. Before: every
                rank reads all headers first, as DCP does. "as saved": as many ranks load as have
                saved. "half": half as many ranks load, and the last of them is measured
    manifest    bytes that rank 0 and another rank receive when a checkpoint is committed. Before:
                all ranks gathered all lists of files
    hub         `from_pretrained` finds 36,000 tensors in files in hub layout, with any number of
                ranks
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch as swapped

import torch
import torch.distributed as dist
from benchmark_text import describe_machine
from ranks import peak_mib, reset_peak
from torch import Tensor
from torch.distributed.checkpoint.default_planner import (
    DefaultSavePlanner,
    create_default_local_load_plan,
)
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from hf_moe_ep import ParallelConfig, apply_ep_fsdp2, patch
from hf_moe_ep.checkpoints.hub.read import find_weights
from hf_moe_ep.checkpoints.storage import part_files
from hf_moe_ep.checkpoints.storage.part_files import make_file_name, write_parts
from hf_moe_ep.checkpoints.storage.planner import SpreadPlanner
from hf_moe_ep.checkpoints.storage.safetensors_file import Writer
from hf_moe_ep.checkpoints.storage.spread import Spread
from hf_moe_ep.checkpoints.training.folder import find_ranks_needed
from hf_moe_ep.checkpoints.training.state_file import SavedTensor, StateFile, compute_digest
from hf_moe_ep.checkpoints.training.tensors import collect
from hf_moe_ep.etp import list_stock_parts
from hf_moe_ep.sharding import checks
from hf_moe_ep.state import patched_state
from hf_moe_ep.upstream.process_groups import fake_group

WORLDS = (8, 64, 256, 1024)
# The largest numbers of ranks for which DCP is measured: plans of 1,024 ranks would be 3.5 million
# objects.
DCP_PLANS, DCP_FILES = 64, 256
# The checkpoint has 12 parameters per layer, in 3 copies (values and AdamW's two moments). All of
# these tensors have COLUMNS columns.
LAYERS, KINDS, COPIES = 94, 12, 3
COLUMNS = 2


def run_in_new_process(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function in a new process. Returns its result."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe()
    process = context.Process(target=_child, args=(sender, function, args))
    process.start()
    sender.close()
    try:
        result = receiver.recv()
    except EOFError:
        raise RuntimeError(
            f"the process of {function.__name__}{args} ended without a result"
        ) from None
    finally:
        process.join()
    return result


def _child(pipe: Any, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    pipe.send(function(*args))
    pipe.close()


class Watch:
    """Measure the `seconds` of a block, and the growth of peak memory in it (`mib`)."""

    def __enter__(self) -> Watch:
        gc.collect()
        reset_peak()
        self._before, self._start = peak_mib(), time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = time.perf_counter() - self._start
        self.mib = peak_mib() - self._before


def _build_model(layers: int, num_experts: int = 8) -> Qwen3MoeForCausalLM:
    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=16,
        moe_intermediate_size=8,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=num_experts,
        num_experts_per_tok=2,
    )
    return Qwen3MoeForCausalLM(config)


def shard_and_plan(world: int, layers: int) -> dict[str, Any]:
    """Shard a model as one rank of `world`, and plan a save of the model and of AdamW."""
    groups, gathered_bytes = [0], [0]
    new_group, find_differing = dist.new_group, checks.find_differing

    def counting_new_group(*args: Any, **kwargs: Any) -> Any:
        groups[0] += 1
        return new_group(*args, **kwargs)

    def counting_differing(value: Any, group: Any = None) -> Any:
        gathered_bytes[0] += len(pickle.dumps(value)) * world
        return find_differing(value, group)

    with fake_group(world // 2, world):
        model = _build_model(layers)
        with (
            Watch() as sharding,
            swapped.object(dist.device_mesh, "new_group", counting_new_group),
            swapped.object(dist, "new_group", counting_new_group),
            swapped.object(checks, "find_differing", counting_differing),
        ):
            patch(model, ParallelConfig(ep_size=8))
            apply_ep_fsdp2(model)
        optimizer = torch.optim.AdamW(model.parameters())
        for p in model.parameters():
            moments = {key: torch.zeros_like(p) for key in ("exp_avg", "exp_avg_sq")}
            optimizer.state[p] = {"step": torch.tensor(1.0), **moments}
        with Watch() as planning:
            named = collect(model, optimizer)
            forms = named.describe_tensors()
            named.list_own_files(forms, 1 << 30)
            layout = {"world_size": world}
            content = StateFile(layout, {}, None, forms, named.scalars, named.optimizer).to_json()
            state_digest = compute_digest(content)
        state = {"model": dict(model.named_parameters()), "optimizer": name_moments(optimizer)}
        planner = SpreadPlanner()
        with Watch() as by_accelerate:
            planner.set_up_planner(state, None, True)
            plan = planner.create_local_plan()
            planner.create_global_plan([plan] * world)
    return {
        "by Accelerate": (by_accelerate.seconds, by_accelerate.mib),
        "told for it": len(pickle.dumps(plan)) * world,
        "tensors": len(forms),
        "sharding": (sharding.seconds, sharding.mib),
        "groups": groups[0],
        "gathered": gathered_bytes[0] + len(pickle.dumps(state_digest)) * world,
        "agreed": 2 * 64 + 8,
        "planning": (planning.seconds, planning.mib),
    }


def name_moments(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the state of an optimizer as a flat dict: "7.exp_avg" belongs to parameter 7."""
    states = enumerate(optimizer.state.values())
    return {f"{index}.{key}": value for index, state in states for key, value in state.items()}


def count_groups_of_torch(world: int) -> int:
    """Count torch's calls of `new_group` for the same meshes, which have axes of one rank."""
    with fake_group(world // 2, world):
        stock = dist.device_mesh.new_group
        with swapped.object(dist.device_mesh, "new_group", wraps=stock) as new_group:
            for sizes in ((1, world // 8, 8), (1, world), (world, 1)):
                init_device_mesh("cpu", sizes)
    return int(new_group.call_count)


def _list_names(layers: int) -> list[str]:
    kinds = [
        f"layers.{layer}.kind_{kind}.weight" for layer in range(layers) for kind in range(KINDS)
    ]
    return [
        f"{copy}.{name}" for copy in ("model", "exp_avg", "exp_avg_sq")[:COPIES] for name in kinds
    ]


def _make_dtensors(layers: int, rows: int, world: int, rank: int) -> dict[str, Tensor]:
    """Return DTensors of `rows` rows, split evenly over the ranks of the current process group."""
    mesh, shape = init_device_mesh("cpu", (world,)), torch.Size((rows, COLUMNS))
    return {
        name: DTensor.from_local(
            torch.zeros(rows // world, COLUMNS),
            mesh,
            [Shard(0)],
            run_check=False,
            shape=shape,
            stride=(COLUMNS, 1),
        )
        for name in _list_names(layers)
    }


def plan_by_dcp(world: int, layers: int) -> dict[str, Any]:
    """Measure how rank 0 merges the plans of all ranks, and count the bytes that rank 0 gathers."""
    plans, size = [], 0
    for rank in range(world):
        with fake_group(rank, world):
            planner = DefaultSavePlanner()
            planner.set_up_planner(_make_dtensors(layers, world, world, rank), None, rank == 0)
            text = pickle.dumps(planner.create_local_plan())
        size += len(text)
        plans.append(text)
    planner = DefaultSavePlanner()
    planner.set_up_planner({}, None, True)
    with Watch() as watch:
        planner.create_global_plan([pickle.loads(text) for text in plans])
    return {"planning": (watch.seconds, watch.mib), "gathered": size}


def write_files(folder: Path, world: int, layers: int) -> None:
    """Write a checkpoint as `world` ranks do. Rank r writes row r of each tensor."""
    values = torch.zeros(1, COLUMNS)
    for rank in range(world):
        index_ranges = ((rank, rank + 1), (0, COLUMNS))
        write_parts(folder, rank, [dict.fromkeys(_list_names(layers), (index_ranges, values))])


def read_by_dcp(folder: Path, world: int, layers: int) -> tuple[float, float]:
    with fake_group(world // 2, world):
        targets = _make_dtensors(layers, world, world, world // 2)
        with Watch() as watch:
            metadata = HuggingFaceStorageReader(os.fspath(folder)).read_metadata()
            create_default_local_load_plan(targets, metadata)
    return watch.seconds, watch.mib


def read_ours(folder: Path, saved_by: int, world: int, layers: int) -> tuple[float, float, int]:
    """Read the part of the last of `world` ranks from files that `saved_by` ranks have written.

    Returns (seconds, MiB, number of headers that were read).
    """
    rank = world - 1
    with fake_group(rank, world):
        targets = _make_dtensors(layers, saved_by, world, rank)
        spread = Spread((saved_by,), tuple(range(saved_by)), (0,))
        form = SavedTensor([saved_by, COLUMNS], torch.float32, spread)
        saved = StateFile({}, tensors=dict.fromkeys(targets, form))
        names = [make_file_name(writer, 1, 1) for writer in range(saved_by)]
        with Watch() as watch:
            parts = {name: list_stock_parts(tensor, None) for name, tensor in targets.items()}
            ranks = find_ranks_needed(parts, saved) or set()
            names = [name for name in names if part_files.find_writer(name) in ranks]
            number = part_files.read_parts((folder / name for name in names), parts)
    return watch.seconds, watch.mib, number


def count_manifest_bytes(world: int) -> dict[str, int]:
    """Count the pickled bytes that ranks receive when a checkpoint is committed."""
    tensors = {f"tensors/{make_file_name(rank, 1, 1)}": 10**9 for rank in range(world)}
    others = {f"random-{rank:05d}.json": 10**4 for rank in range(world)}
    others |= dict.fromkeys(("state.json", "config.json", "hf_moe_ep.json"), 10**6)
    entry = {"size": 10**9, "sha256": "0" * 64}
    bytes_of_rank = len(pickle.dumps({make_file_name(0, 1, 1): entry}))
    return {
        "before": world * (len(pickle.dumps(tensors | others)) + 2 * bytes_of_rank),
        "first": 2 * world * bytes_of_rank + 4 * 8,
        "another": len(pickle.dumps(others)) + 4 * 8,
    }


def find_on_hub(layers: int, num_experts: int) -> tuple[float, float, int]:
    """Match the keys of a checkpoint, which has one key per expert, with a model on meta."""
    with torch.device("meta"):
        model = _build_model(layers, num_experts)
    state = patched_state(patch(model, ParallelConfig(ep_size=8)))
    names = [name for name, _ in model.named_parameters()]
    shapes = {}
    for name, p in model.named_parameters():
        if ".experts." not in name:
            shapes[name] = tuple(p.shape)
            continue
        stem = name.rpartition(".")[0]
        for expert in range(num_experts):
            shapes[f"{stem}.{expert}.gate_proj.weight"] = (8, 16)
            shapes[f"{stem}.{expert}.up_proj.weight"] = (8, 16)
            shapes[f"{stem}.{expert}.down_proj.weight"] = (16, 8)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "model.safetensors")
        header = [(key, shape, torch.float32) for key, shape in shapes.items()]
        with Writer(file, header) as writer:
            for key, shape, _ in header:
                index_ranges = tuple((0, size) for size in shape)
                writer.write(key, shape, index_ranges, torch.zeros(shape))
        with Watch() as watch:
            find_weights(model, folder, state.plan, names)
    return watch.seconds, watch.mib, len(shapes)


def run_all(worlds: tuple[int, ...], layers: int) -> dict[int, dict[str, Any]]:
    """Measure all figures, by number of ranks."""
    rows: dict[int, dict[str, Any]] = {}
    for world in worlds:
        row = rows[world] = run_in_new_process(shard_and_plan, world, layers)
        row["manifest"] = count_manifest_bytes(world)
        row["groups of torch"] = run_in_new_process(count_groups_of_torch, world)
        row["dcp plan"] = (
            run_in_new_process(plan_by_dcp, world, layers) if world <= DCP_PLANS else None
        )
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            write_files(folder, world, layers)
            if world <= DCP_FILES:
                row["dcp"] = run_in_new_process(read_by_dcp, folder, world, layers)
            row["as saved"] = run_in_new_process(read_ours, folder, world, world, layers)
            row["half"] = run_in_new_process(read_ours, folder, world, world // 2, layers)
        print(f"{world} ranks: {row}", file=sys.stderr)
    return rows


def _format_cost(cost: tuple[float, ...] | None) -> str:
    """Format seconds, MiB and, if it is known, the number of headers."""
    if cost is None:
        return "not run"
    headers = f", {cost[2]} headers" if len(cost) > 2 else ""
    return f"{cost[0]:.2f} s, {cost[1]:.0f} MiB{headers}"


def _format_size(number: int) -> str:
    return f"{number:,} B" if number < 10_000 else f"{number / 2**20:.2f} MiB"


def report(figures: dict[int, dict[str, Any]], hub: tuple[float, float, int]) -> str:
    """Format the table as Markdown."""
    worlds = list(figures)

    def line(name: str, cells: list[str]) -> str:
        return f"| {name} | " + " | ".join(cells) + " |"

    rows = [figures[world] for world in worlds]
    text = [
        line("of one rank", [f"{world} ranks" for world in worlds]),
        "|---|" + "---|" * len(worlds),
        line("sharding", [_format_cost(row["sharding"]) for row in rows]),
        line("calls of `new_group`, before", [f"{row['groups of torch']:,}" for row in rows]),
        line("calls of `new_group`", [f"{row['groups']:,}" for row in rows]),
        line("agreeing, before", [_format_size(row["gathered"]) for row in rows]),
        line("agreeing", [_format_size(row["agreed"]) for row in rows]),
        line(
            "planning a save, before (rank 0)",
            [_format_cost(row["dcp plan"] and row["dcp plan"]["planning"]) for row in rows],
        ),
        line(
            "gathered for it, before (rank 0)",
            [
                _format_size(row["dcp plan"]["gathered"]) if row["dcp plan"] else "not run"
                for row in rows
            ],
        ),
        line("planning a save, nothing gathered", [_format_cost(row["planning"]) for row in rows]),
        line(
            "planning by Accelerate (rank 0)", [_format_cost(row["by Accelerate"]) for row in rows]
        ),
        line("told for it (rank 0)", [_format_size(row["told for it"]) for row in rows]),
        line("finding, before (headers alone)", [_format_cost(row.get("dcp")) for row in rows]),
        line("finding and reading, as saved", [_format_cost(row["as saved"]) for row in rows]),
        line("finding and reading, half", [_format_cost(row["half"]) for row in rows]),
        line("manifest, before", [_format_size(row["manifest"]["before"]) for row in rows]),
        line("manifest, rank 0", [_format_size(row["manifest"]["first"]) for row in rows]),
        line("manifest, another rank", [_format_size(row["manifest"]["another"]) for row in rows]),
        f"\nhub: {hub[2]:,} tensors are found in {_format_cost(hub[:2])}, with any number of "
        f"ranks.\n",
    ]
    return "\n".join(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--worlds", type=int, nargs="+", default=WORLDS)
    parser.add_argument("--write", type=Path, help="also write scale-cpu.md to this folder")
    args = parser.parse_args()
    load_before = os.getloadavg()[0]
    figures = run_all(tuple(args.worlds), LAYERS)
    hub = run_in_new_process(find_on_hub, LAYERS, 128)
    text = "\n".join(
        [
            "# Start-up and checkpoints on 8 to 1,024 ranks\n",
            *describe_machine("benchmarks/scale.py", load_before, 1),
            f"- {figures[args.worlds[0]]['tensors']:,} tensors of a model of {LAYERS} layers with "
            f"AdamW where it is sharded and planned, {LAYERS * KINDS * COPIES:,} where files are "
            f"read; ep 8; one run of each; `before` is torch's own code, measured in the same run "
            f"(DCP up to {DCP_PLANS} and {DCP_FILES} ranks); bytes are pickled sizes\n",
            report(figures, hub),
            "The top of `benchmarks/scale.py` explains the rows. MiB: peak of resident memory "
            "above the memory that the process had before.\n",
        ]
    )
    print(text)
    if args.write:
        args.write.mkdir(parents=True, exist_ok=True)
        (args.write / "scale-cpu.md").write_text(text)


if __name__ == "__main__":
    main()
