"""Find the parallel layouts of a model on N GPUs that training accepts and that fit.

    found = find_layouts(Asked("Qwen/Qwen3-30B-A3B", gpus=16, limit=80 * 2**30, seq=4096, batch=32))
    found.fit[0].layout.patch_line(), found.fit[0].step.peak

A layout has an ep_size, etp_size, sp_size, cp_size and dp_replicate_size (together a grid), a
number of sequences per forward of a data rank (gradient accumulation covers its other sequences),
dispatch_chunks, and activation checkpointing or not. The experts are split over powers of two of
ranks; where this is more than ep_size can be, because the model has few experts, etp_size ranks
share each expert. The other sizes to try are powers of two. Training's own code decides if it
accepts a grid: it patches and shards a few layers over a fake process group. Memory is planned by
`step.py` and, if hardware is given, seconds by `seconds.py`.

Each plan takes seconds to compute, so the search tries few layouts:

    1. It plans every grid with one sequence per forward and with checkpointing, which needs least
       memory. If a grid takes more than FAR times the limit, larger ep_sizes with the same
       dp_replicate_size are skipped.
    2. It plans more variants of the best CLOSER_LOOK grids that fit: without checkpointing, and
       with as many sequences per forward as fit (all, or a power of two). The first number to try
       comes from a straight line between the memory of one sequence and the memory of all.
    3. With hardware, it plans the fastest layout with ep_size > 1 for each number in CHUNKS.

sp_size > 1 is tried only if nothing fits without it, or if the request sets it. If nothing fits
with any sp_size, cp_size > 1 is tried with the largest sp_size that training accepts: heads are
split inside a node, and the sequence over nodes. If the request sets an ep_size larger than a node,
it is tried with the default dispatcher and with the hierarchical dispatcher.

With hardware, the fastest layout comes first. Without hardware, layouts without checkpointing come
first, then those with more sequences per forward, then those with more memory left.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from hf_moe_ep.config import ParallelConfig
from hf_moe_ep.moe.dispatch.choose import make_dispatcher
from hf_moe_ep.planner.config import find_config
from hf_moe_ep.planner.extrapolate import FEW, layers_to_run, with_layers
from hf_moe_ep.planner.hardware import Hardware
from hf_moe_ep.planner.held import PlanRequest, Unsharded
from hf_moe_ep.planner.options import NODE
from hf_moe_ep.planner.seconds import StepTime, step_time
from hf_moe_ep.planner.step import Batch, StepPlan, plan_step
from hf_moe_ep.upstream.models import text_config
from hf_moe_ep.upstream.process_groups import fake_group

CLOSER_LOOK = 3
FAR = 2
CHUNKS = (2, 4)


@dataclass(frozen=True)
class Asked:
    """The request: a model, GPUs and a batch.

    Attributes:
        shape: the model, as for `plan_memory`.
        gpus: the number of GPUs.
        limit: bytes of memory of one GPU.
        seq: tokens per sequence.
        batch: sequences per optimizer step, summed over all GPUs.
        ep, sp, dp_replicate, cp: the size to try; None tries several sizes.
        etp: the etp_size to try; None tries the sizes with which the experts of a model with few
            experts are split over as many ranks as those of other models.
        options: arguments of `plan_step`: dtype, masters, optimizer, lora_rank, lora_targets,
            offload.
        parallel: other fields of ParallelConfig.
        hardware: the rates from which seconds are planned; None plans memory only.
        on_plan: called with each layout before it is planned.
    """

    shape: Any
    gpus: int
    limit: int
    seq: int
    batch: int
    ep: int | None = None
    sp: int | None = None
    dp_replicate: int | None = None
    options: dict[str, Any] = field(default_factory=dict)
    parallel: dict[str, Any] = field(default_factory=dict)
    hardware: Hardware | None = None
    on_plan: Callable[[Layout], None] = lambda _: None
    cp: int | None = None
    etp: int | None = None

    @property
    def node(self) -> int:
        """The number of ranks per node."""
        return min(self.gpus, NODE if self.hardware is None else self.hardware.node_size)


@dataclass(frozen=True)
class Layout:
    """A parallel layout of a training job.

    Attributes:
        per_forward: sequences per forward of a data rank (the ranks that share a batch).
        accumulated: forwards per optimizer step (gradient accumulation).
        chunks: dispatch_chunks.
        node_size: ranks per node of the hierarchical dispatcher; None is the default dispatcher.
        etp: etp_size.
    """

    ep: int
    sp: int
    dp_replicate: int
    per_forward: int = 1
    accumulated: int = 1
    checkpointing: bool = False
    chunks: int = 1
    node_size: int | None = None
    cp: int = 1
    etp: int = 1

    @property
    def ranks_per_batch(self) -> int:
        """The number of GPUs that share a batch."""
        return self.cp * self.sp

    def sizes(self) -> dict[str, Any]:
        """Return the layout as fields of ParallelConfig."""
        sizes: dict[str, Any] = {
            "ep_size": self.ep,
            "sp_size": self.sp,
            "dp_replicate_size": self.dp_replicate,
            "cp_size": self.cp,
            "etp_size": self.etp,
            "dispatch_chunks": self.chunks,
        }
        if self.node_size is not None:
            sizes |= {"dispatcher": "hierarchical", "node_size": self.node_size}
        return sizes

    def patch_line(self, **more: Any) -> str:
        """Return the line for a script: "patch(model, ep_size=8)"."""
        options = {name: size for name, size in self.sizes().items() if size != 1} | more
        arguments = "".join(f", {name}={value!r}" for name, value in options.items())
        return f"patch(model{arguments})"


@dataclass(frozen=True)
class Planned:
    """A layout that training accepts, and its plan.

    Attributes:
        step: the planned step.
        left: bytes of a GPU that are left at the peak; below 0 if the layout does not fit.
        time: the planned seconds, if hardware was given.
    """

    layout: Layout
    step: StepPlan
    left: int
    time: StepTime | None = None


@dataclass(frozen=True)
class Found:
    """The result of a search.

    Attributes:
        fit: the layouts that fit, best first.
        too_large: the layouts that do not fit, the smallest peak first.
        illegal: the layouts that training refuses, each with the reason.
    """

    fit: list[Planned]
    too_large: list[Planned]
    illegal: dict[Layout, str]


def find_layouts(asked: Asked) -> Found:
    """Search the layouts of a request.

    Raises:
        ValueError: training accepts no layout; the message is the reason of the first refusal.
    """
    result, few = Found([], [], {}), None
    num_experts = _count_experts(asked)
    sps = [1, *_powers_of_two(asked.node)] if asked.sp is None else [asked.sp]
    for sp in sps:
        few = _plan_grids(asked, sp, asked.cp or 1, num_experts, result, few)
        if result.fit:
            break
    if not result.fit and asked.cp is None:
        sp = max((planned.layout.sp for planned in result.too_large), default=1)
        for cp in _powers_of_two(asked.gpus // sp):
            few = _plan_grids(asked, sp, cp, num_experts, result, few)
            if result.fit:
                break
    if not (result.fit or result.too_large):
        raise ValueError(next(iter(result.illegal.values()), "no layout was tried"))
    order: Callable[[Planned], float] = _seconds if asked.hardware else _memory_used
    for planned in sorted(result.fit, key=order)[:CLOSER_LOOK]:
        _look_closer(planned, asked, few, result)
    if asked.hardware:
        with_ep = [p for p in result.fit if p.layout.ep * p.layout.etp > 1]
        for fastest in sorted(with_ep, key=_seconds)[:1]:
            for chunks in CHUNKS:
                _add(_plan(replace(fastest.layout, chunks=chunks), asked, few), result)
    result.fit.sort(key=_seconds if asked.hardware else _order_without_hardware)
    result.too_large.sort(key=_memory_used)
    return result


def _plan_grids(
    asked: Asked, sp: int, cp: int, num_experts: int, result: Found, few: tuple[int, ...] | None
) -> tuple[int, ...] | None:
    """Add the plans of all grids of an sp_size and a cp_size to `result`.

    Returns the numbers of layers that plans run; None if training accepted no grid yet.
    """
    far = set()
    for layout in _grids(asked, sp, cp, num_experts):
        if layout.dp_replicate in far:
            continue
        reason = refusal(layout, asked)
        if reason:
            result.illegal[layout] = reason
            continue
        few = few or layers_to_run(_request(layout, asked))
        planned = _add(_plan(layout, asked, few), result)
        if planned.step.peak > FAR * asked.limit:
            far.add(layout.dp_replicate)
    return few


def _look_closer(grid: Planned, asked: Asked, few: tuple[int, ...] | None, result: Found) -> None:
    """Plan variants of a grid that need more memory and may be faster."""
    # The sequences of a data rank per optimizer step.
    share = grid.layout.per_forward * grid.layout.accumulated
    for checkpointing in (True, False):
        single = grid
        if not checkpointing:
            single = _add(_plan(replace(grid.layout, checkpointing=False), asked, few), result)
        if single.left < 0 or share == 1:
            continue
        whole_share = _add(_plan(_with_sequences(single.layout, share), asked, few), result)
        bytes_per_sequence = (whole_share.step.peak - single.step.peak) / (share - 1)
        sequences = share
        while sequences > 1 and (
            single.step.peak + (sequences - 1) * bytes_per_sequence > asked.limit
        ):
            sequences -= 1
        # Round down to a power of two that divides the share.
        sequences = max(n for n in [1, *_powers_of_two(sequences)] if share % n == 0)
        fits = whole_share.left >= 0
        while not fits and sequences > 1:
            layout = _with_sequences(single.layout, sequences)
            fits = _add(_plan(layout, asked, few), result).left >= 0
            sequences //= 2


def _with_sequences(layout: Layout, sequences: int) -> Layout:
    """Return a copy of a layout with another number of sequences per forward."""
    share = layout.per_forward * layout.accumulated
    return replace(layout, per_forward=sequences, accumulated=share // sequences)


def _add(planned: Planned, result: Found) -> Planned:
    (result.fit if planned.left >= 0 else result.too_large).append(planned)
    return planned


def _memory_used(planned: Planned) -> int:
    return -planned.left


def _seconds(planned: Planned) -> float:
    assert planned.time is not None
    return planned.time.seconds


def _order_without_hardware(planned: Planned) -> tuple[int, ...]:
    return int(planned.layout.checkpointing), -planned.layout.per_forward, -planned.left


def refusal(layout: Layout, asked: Asked) -> str:
    """Return the reason why training would refuse a layout; "" if it would accept the layout."""
    data_ranks = max(asked.gpus // layout.ranks_per_batch, 1)
    if asked.batch % data_ranks:
        context = f"cp_size {layout.cp} / " if layout.cp > 1 else ""
        return (
            f"batch ({asked.batch}) is not a multiple of the data ranks ({asked.gpus} GPUs / "
            f"{context}sp_size {layout.sp} = {data_ranks}); try {data_ranks} or {2 * data_ranks}"
        )
    try:
        request = _request(layout, asked)
        layers = min(text_config(request.config).num_hidden_layers, FEW[-1])
        request = replace(request, config=with_layers(request.config, layers))
        with torch.random.fork_rng(devices=[]):
            unsharded = Unsharded.of(request)
            with fake_group(0, asked.gpus):
                meshes, state = unsharded.shard(), unsharded.state
                make_dispatcher(state.config, meshes, num_experts=state.num_experts)
    except ValueError as error:
        return str(error)
    return ""


def _request(layout: Layout, asked: Asked) -> PlanRequest:
    return PlanRequest(
        find_config(asked.shape),
        ParallelConfig(**layout.sizes(), **asked.parallel),
        asked.gpus,
        **({"dtype": torch.bfloat16} | _DEFAULTS | asked.options),
    )


_DEFAULTS = {"masters": "fp32", "optimizer": "adamw", "lora_rank": None, "lora_targets": "both"}


def received_per_layer(layout: Layout, asked: Asked) -> int | None:
    """Return the bytes of keys and values that a GPU receives in a layer and forward by cp_size.

    If layers differ, it is the largest number. None: the width of keys and values is unknown.
    """
    request = _request(layout, asked)
    layers = min(text_config(request.config).num_hidden_layers, FEW[-1])
    with torch.random.fork_rng(devices=[]):
        unsharded = Unsharded.of(replace(request, config=with_layers(request.config, layers)))
    context = unsharded.state.context
    widths = [] if context is None else [way.width for way in context[1] if way.width is not None]
    if not widths:
        return None
    tokens = asked.seq * layout.per_forward // layout.cp
    return (layout.cp - 1) * tokens * max(widths) * request.dtype.itemsize


def _count_experts(asked: Asked) -> int:
    """Return the number of experts of a layer; 0 if the model cannot be patched."""
    request = _request(Layout(1, 1, 1), replace(asked, parallel={}))
    try:
        with torch.random.fork_rng(devices=[]):
            request = replace(request, config=with_layers(request.config, FEW[-1]))
            return Unsharded.of(request).state.num_experts
    except ValueError:
        return 0


def _split_experts(ep: int, asked: Asked, num_experts: int) -> tuple[int, int]:
    """Return (ep_size, etp_size) that split the experts over `ep` ranks.

    If the model has too few experts for an ep_size of `ep`, several ranks share each expert.
    """
    if asked.ep is not None or asked.etp is not None or not num_experts:
        return ep, asked.etp or 1
    whole = math.gcd(ep, num_experts)
    return whole, ep // whole


def _grids(asked: Asked, sp: int, cp: int, num_experts: int) -> Iterator[Layout]:
    """Yield the grids of an sp_size and a cp_size: one sequence per forward, with checkpointing."""
    node = asked.node
    replicas = [1] if asked.gpus <= node else [1, asked.gpus // node]
    share = max(asked.batch * sp * cp // asked.gpus, 1)
    for ranks in [1, *_powers_of_two(node)] if asked.ep is None else [asked.ep]:
        ep, etp = _split_experts(ranks, asked, num_experts)
        for replicate in replicas if asked.dp_replicate is None else [asked.dp_replicate]:
            for node_size in (None, node) if ep * etp > node else (None,):
                layout = Layout(ep, sp, replicate, 1, share, checkpointing=True, cp=cp, etp=etp)
                yield replace(layout, node_size=node_size)


def _plan(layout: Layout, asked: Asked, few: tuple[int, ...] | None) -> Planned:
    asked.on_plan(layout)
    step = plan_step(
        asked.shape,
        ParallelConfig(**layout.sizes(), **asked.parallel),
        world_size=asked.gpus,
        batch=Batch(asked.seq, layout.per_forward, layout.checkpointing, layout.accumulated > 1),
        few=few,
        **asked.options,
    )
    seconds = None
    if asked.hardware is not None:
        tokens = max(asked.batch * asked.seq // asked.gpus, 1)
        seconds = step_time(step, asked.hardware, micro_batches=layout.accumulated, tokens=tokens)
    return Planned(layout, step, asked.limit - step.peak, seconds)


def _powers_of_two(limit: int) -> list[int]:
    return [2**i for i in range(1, limit.bit_length()) if 2**i <= limit]
