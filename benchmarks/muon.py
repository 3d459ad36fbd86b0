"""Time a step of `hf_moe_ep.Muon` on 4 CPU ranks against torch.optim.Muon in one process.

    python benchmarks/muon.py
    python benchmarks/muon.py --plan    # Muon's share of a planned step of Qwen3-30B on 8 H100

The single process holds the whole model. torch.optim.Muon accepts only matrices, so each matrix of
an expert is a separate parameter there. On both sides, only the optimizer's step is timed. If the
machine has fewer cores than ranks, wall-clock seconds say little, so the table also has the CPU
seconds of the busiest rank. Its other columns are

    sent          bytes that all ranks send in a step, counted at the collective and by hand
    operations    operations of the busiest rank / mean
    bucket        bytes of the matrices that a rank owns in its largest bucket
    peak          peak of all tensors that a step creates. While a bucket is orthogonalised, the
                  results of the previous bucket are sent back, and then the next bucket is sent to
                  its owners. Each transfer needs a tensor to send and a tensor to receive, so the
                  peak is the memory of three buckets and of a piece of Newton-Schulz

With `--plan` nothing is timed. The matrices of the whole model are assigned to 8 ranks, and the
rates of `hf-moe-ep plan` give the seconds of their operations and bytes.
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import dataclass
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from benchmark_text import describe_machine
from mixers import PeakBytes
from models import qwen3_moe
from ranks import spawn
from torch import nn

from hf_moe_ep import Muon, ParallelConfig, apply_ep_fsdp2
from hf_moe_ep.optim import muon
from hf_moe_ep.optim.matrices import find_matrix_layouts
from hf_moe_ep.planner.config import find_config
from hf_moe_ep.planner.hardware import find_hardware
from hf_moe_ep.planner.held import PlanRequest, Unsharded
from hf_moe_ep.planner.seconds import plan_step_time
from hf_moe_ep.planner.step import Batch, plan_step
from hf_moe_ep.upstream.process_groups import fake_group

VOCAB = 512


@dataclass(frozen=True)
class Sizes:
    hidden: int = 512
    intermediate: int = 256
    layers: int = 4
    experts: int = 32
    top_k: int = 4
    steps: int = 5
    bucket_bytes: int = 2**22  # 16 matrices


@dataclass(frozen=True)
class Measured:
    """The figures of one rank: seconds of a step, bytes, operations, and numbers of buckets."""

    clock: float
    cpu: float
    sent: int = 0
    by_hand: int = 0
    operations: int = 0
    buckets: int = 0
    largest_bucket: int = 0
    peak: int = 0


def _fill_gradients(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        shard = torch.randn(parameter.shape, generator=generator)
        if hasattr(parameter, "to_local"):
            shard = torch.randn(parameter.to_local().shape, generator=generator)
            parameter.grad = torch.zeros_like(parameter)
            parameter.grad.to_local().copy_(shard)
        else:
            parameter.grad = shard


def _time_steps(optimizer: Any, steps: int) -> tuple[float, float]:
    clock, cpu = [], []
    for _ in range(steps + 1):
        if dist.is_initialized():
            dist.barrier()
        start, cpu_start = time.perf_counter(), time.process_time()
        optimizer.step()
        clock.append(time.perf_counter() - start)
        cpu.append(time.process_time() - cpu_start)
    return median(clock[1:]), median(cpu[1:])


def measure_rank(rank: int, layout: dict[str, Any], sizes: Sizes) -> Measured:
    """Time Muon's steps on this rank of a sharded model, and count its work."""
    torch.manual_seed(0)
    model = qwen3_moe(sizes, VOCAB)
    apply_ep_fsdp2(model, **layout)
    optimizer = Muon(model, 1e-3)
    optimizer._bucket_bytes = sizes.bucket_bytes
    _fill_gradients(model)
    clock, cpu = _time_steps(optimizer, sizes.steps)
    sent = 0

    def count(received: Any, values: Any, **kwargs: Any) -> Any:
        nonlocal sent
        counts = list(kwargs["send_counts"])
        counts[dist.get_rank(kwargs["group"])] = 0
        sent += sum(counts) * values.element_size()
        return start(received, values, **kwargs)

    start = muon.start_all_to_all
    peaks = []
    # On a busy machine gloo's thread frees the tensors of a transfer later, so that the peak of one
    # step may contain the tensors of another bucket.
    for _ in range(3):
        sent = 0
        with patch.object(muon, "start_all_to_all", count), PeakBytes() as tensors:
            optimizer.step()
        peaks.append(tensors.peak)
    assignment = optimizer._assignment
    assert assignment is not None
    entries = assignment.matrices
    sizes_of_buckets = [
        sum(
            (matrix_range.stop - matrix_range.start)
            * entries[matrix_range.index].shape[0]
            * entries[matrix_range.index].shape[1]
            for matrix_range in bucket.ranges[dist.get_rank(bucket.group)]
        )
        * entries[0].itemsize
        for bucket in assignment.buckets
    ]
    return Measured(
        clock,
        cpu,
        sent,
        _count_bytes_by_hand(assignment),
        _count_operations(assignment, None),
        len(assignment.buckets),
        max(sizes_of_buckets, default=0),
        min(peaks),
    )


def _count_bytes_by_hand(assignment: Any) -> int:
    """Compute the bytes that a rank sends in a step, as an average over the ranks.

    The factor is 2, because the elements of a sharded matrix are sent to its owner and back. The
    owner has 1 / ranks of the elements already.
    """
    nbytes = 0
    for entry in assignment.matrices:
        shard = entry.sharding
        if shard.group is not None:
            elements = shard.experts * entry.layout.parts * entry.shape[0] * entry.shape[1]
            ranks = len(shard.bounds)
            nbytes += 2 * elements * (ranks - 1) // ranks * entry.itemsize // ranks
    return nbytes


def _count_operations(assignment: Any, rank: int | None) -> int:
    """Count the operations of rank `rank` of each group. None means this rank."""
    owned = list(assignment.whole)
    for bucket in assignment.buckets:
        owned += bucket.ranges[dist.get_rank(bucket.group) if rank is None else rank]
    return sum(
        (matrix_range.stop - matrix_range.start) * assignment.matrices[matrix_range.index].flops
        for matrix_range in owned
    )


def measure_stock(rank: int, sizes: Sizes) -> Measured:
    """Time torch.optim.Muon on all matrices of the model, and AdamW on its other parameters."""
    from hf_moe_ep import patch as patch_model

    torch.manual_seed(0)
    model = qwen3_moe(sizes, VOCAB)
    patch_model(model)
    layouts = find_matrix_layouts(model).matrix_layouts
    matrices = []
    for parameter, layout in layouts.items():
        values = layout.stacked_view(parameter.detach())
        rows = layout.matrix_shape(values.shape)[0]
        for part in range(layout.parts):
            matrices += layout.view_block(values, 0, rows * layout.parts, part, rows).unbind()
    copies = [nn.Parameter(matrix.clone()) for matrix in matrices]
    for copy in copies:
        copy.grad = torch.randn_like(copy)
    _fill_gradients(model)
    rest = [p for p in model.parameters() if p not in layouts]
    adamw = torch.optim.AdamW(rest, 1e-3, fused=True)
    stock = torch.optim.Muon(copies, 1e-3)

    class Both:
        def step(self) -> None:
            stock.step()
            adamw.step()

    return Measured(*_time_steps(Both(), sizes.steps))


def measure_layouts(sizes: Sizes, world: int) -> dict[str, list[Measured]]:
    """Measure the ranks of each layout.

    Raises:
        AssertionError: the ranks of a layout sent another number of bytes than the formula says.
    """
    layouts = {
        f"ep {world}": {"ep_size": world},
        f"ep {world // 2}, whole experts": {"ep_size": world // 2, "expert_shard_dim": 0},
        f"ep {world // 2}, rows of experts": {"ep_size": world // 2, "expert_shard_dim": 1},
    }
    measured = {}
    for name, layout in layouts.items():
        measured[name] = spawn(measure_rank, world, layout, sizes, timeout=600.0)
        sent, by_hand = (sum(getattr(r, n) for r in measured[name]) for n in ("sent", "by_hand"))
        assert sent == by_hand, f"{name}: {sent} bytes were sent, by hand {by_hand}"
    return measured


def report(
    sizes: Sizes, machine: list[str], stock: Measured, measured: dict[str, list[Measured]]
) -> str:
    """Format the page."""
    lines = [
        *machine,
        f"- {sizes}",
        f"- torch.optim.Muon in one process: {stock.clock:.3f} s, {stock.cpu:.3f} CPU seconds",
        "",
        "| layout | seconds, x one process | CPU seconds of the busiest rank, x one process "
        "| MB sent by all ranks | by hand | operations, busiest / mean | buckets "
        "| MB of the largest bucket | peak, MB |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, ranks in measured.items():
        sent, by_hand = sum(r.sent for r in ranks), sum(r.by_hand for r in ranks)
        operations = [r.operations for r in ranks]
        level = max(operations) * len(ranks) / sum(operations)
        lines.append(
            f"| {name} | {max(r.clock for r in ranks) / stock.clock:.2f} | "
            f"{max(r.cpu for r in ranks) / stock.cpu:.2f} | {sent / 1e6:.2f} | "
            f"{by_hand / 1e6:.2f} | {level:.3f} | {ranks[0].buckets} | "
            f"{max(r.largest_bucket for r in ranks) / 1e6:.2f} | "
            f"{max(r.peak for r in ranks) / 1e6:.2f} |"
        )
    return "\n".join(lines)


def count_work_of_rank(config: Any, parallel: ParallelConfig, world: int) -> tuple[int, int]:
    """Assign a model's matrices to ranks, without allocating them.

    Returns:
        The operations of the busiest rank, and the bytes that a rank sends.
    """
    request = PlanRequest(config, parallel, world, torch.bfloat16, "fp32", "none", None, "both")
    with fake_group(0, world), torch.no_grad():
        model = (built := Unsharded.of(request)).model
        built.shard()
        optimizer = Muon(model, 1e-3)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        updates = [
            update
            for group in optimizer.param_groups
            if group["use_muon"]
            for update in optimizer._update_momentum(group, group["params"])
        ]
        with patch.object(muon, "check_alike"), patch.object(muon, "_check_others_assign"):
            assignment = optimizer._assign(updates)
        operations = max(_count_operations(assignment, rank) for rank in range(world))
        sent = _count_bytes_by_hand(assignment)
    return operations, sent


def plan_share(shape: str, gpu: str, world: int, seq: int, batch: int) -> str:
    """Plan the share of Muon in a step of `batch` sequences over `world` GPUs, with ep = world."""
    parallel = ParallelConfig(ep_size=world, compile_layers=True)
    config, hardware = find_config(shape), find_hardware(gpu)
    micro = Batch(seq, checkpointing=True)
    plan = plan_step(config, parallel, world_size=world, batch=micro, optimizer="adamw_fused")
    tokens = seq * batch // world
    step = plan_step_time(plan, hardware, micro_batches=batch // world, tokens=tokens)
    operations, sent = count_work_of_rank(config, parallel, world)
    rate = hardware.matmul_flops["bfloat16"] * hardware.find_reached_fraction("matmul", "bfloat16")
    seconds = operations / rate
    transfer = sent / (hardware.in_node_bandwidth * hardware.fractions["in_node"])
    whole = step.seconds + seconds + transfer
    return "\n".join(
        [
            f"{shape} on {world} {gpu}, ep {world}, {batch} x {seq} tokens, planned, not measured:",
            f"- matrices of the busiest rank: {operations / 1e12:.1f} TFLOP, {seconds:.3f} s",
            f"- sent by a rank: {sent / 1e6:.0f} MB, {transfer:.3f} s if nothing hides them",
            f"- step with fused AdamW: {step.seconds:.2f} s; share of Muon: "
            f"{(seconds + transfer) / whole:.1%}",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plan", action="store_true", help="plan the share on GPUs instead")
    if parser.parse_args().plan:
        print(plan_share("Qwen/Qwen3-30B-A3B", "h100", 8, 4096, 64))
        return
    load, sizes = os.getloadavg()[0], Sizes()
    (stock,) = spawn(measure_stock, 1, sizes, timeout=600.0)
    measured = measure_layouts(sizes, 4)
    print(report(sizes, describe_machine("benchmarks/muon.py", load, 4), stock, measured))


if __name__ == "__main__":
    main()
