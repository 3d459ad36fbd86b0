"""Find the parallel layouts of a model on N GPUs that training accepts and that fit.

    request = LayoutRequest("Qwen/Qwen3-30B-A3B", gpus=16, limit=80 * 2**30, seq=4096, batch=32)
    result = find_layouts(request)
    result.fit[0].layout.format_patch_line(), result.fit[0].step.peak

A layout consists of a grid (pp_size, ep_size, etp_size, sp_size, cp_size and dp_replicate_size),
the number of sequences per forward of a data rank (gradient accumulation covers its other
sequences), dispatch_chunks, and activation checkpointing or not. The experts are split over a power
of two of ranks: over ep_size ranks or, if this number does not divide num_experts, over ep_size x
etp_size ranks. dp_replicate_size is 1 or the number of nodes. The other sizes are powers of two.
Whether training accepts a grid is decided by its own code, which patches and shards a few layers
over a fake process group. `step.py` plans the memory, and `seconds.py` the seconds if hardware is
given.

Each plan takes seconds to compute, so the search tries few layouts:

    1. It plans every grid with one sequence per forward and with checkpointing, which needs least
       memory. If parameters, gradients and optimizer state alone take more than MAX_OVERRUN times
       the limit, the search skips larger ep_sizes with the same dp_replicate_size, because they
       take as much.
    2. It plans variants of the best NUM_CLOSER_LOOKS grids that fit: without checkpointing, and
       with as many sequences per forward as fit (all, or a power of two). The first number to try
       comes from a straight line between the memory of one sequence and the memory of all.
    3. With hardware, it plans the fastest layout that splits experts again for each of CHUNKS.

sp_size > 1 is tried only if no layout fits without it, or if the request sets it. If no layout fits
with any sp_size, cp_size > 1 is tried with the largest sp_size that training accepts, so that heads
are split inside a node, and the sequence over nodes. If the sizes of the request split the experts
over more ranks than a node has, the grid is tried with the default dispatcher and with the
hierarchical dispatcher.

pp_size is 1, or one of the sizes of the request. Layouts with several stages process all sequences
of a data rank in one forward, one sequence per micro-batch (`stages.py`).

With hardware, the fastest layout comes first. Without hardware, layouts without checkpointing come
first, then layouts with more sequences per forward, then layouts with more memory left.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from hf_moe_ep.config import ParallelConfig
from hf_moe_ep.moe.dispatch.make_dispatcher import make_dispatcher
from hf_moe_ep.pipeline.schedule import compute_bubble
from hf_moe_ep.planner.config import find_config
from hf_moe_ep.planner.extrapolate import (
    DENSE_LAYER_FIELDS,
    FEW_LAYERS,
    choose_layers_to_run,
    keep_layers,
)
from hf_moe_ep.planner.hardware import Hardware
from hf_moe_ep.planner.held import PlanRequest, Unsharded, plan_memory
from hf_moe_ep.planner.options import NODE
from hf_moe_ep.planner.seconds import StepTime, plan_step_time
from hf_moe_ep.planner.stages import (
    Transfers,
    add_micro_batches,
    make_stage_config,
    plan_stages_time,
)
from hf_moe_ep.planner.step import Batch, StepPlan, plan_step
from hf_moe_ep.ranks.mesh import check_stages
from hf_moe_ep.upstream.models import text_config
from hf_moe_ep.upstream.process_groups import fake_group

NUM_CLOSER_LOOKS = 3
MAX_OVERRUN = 2
# The values of dispatch_chunks to try.
CHUNKS = (2, 4)


@dataclass(frozen=True)
class LayoutRequest:
    """The model, the GPUs and the batch for which layouts are searched.

    Attributes:
        model: the model, as for `plan_memory`.
        gpus: the number of GPUs.
        limit: bytes of memory of one GPU.
        seq: tokens per sequence.
        batch: sequences per optimizer step, summed over all GPUs.
        ep, sp, dp_replicate, cp: the size of each axis. For an axis with None, several sizes are
            tried.
        etp: the etp_size. None means 1, or a larger size where the number of ranks that share the
            experts does not divide num_experts.
        options: arguments of `plan_step`: dtype, masters, optimizer, lora_rank, lora_targets,
            offload.
        parallel: other fields of ParallelConfig.
        hardware: the rates from which seconds are planned; without it, only memory is planned.
        on_plan: called with each layout before it is planned.
        pp: the numbers of pipeline stages to try.
        only_loss_is_read: as for `Batch`; True is the Trainer's default.
    """

    model: Any
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
    pp: tuple[int, ...] = (1,)
    only_loss_is_read: bool = True

    @property
    def node(self) -> int:
        """The number of ranks per node."""
        return min(self.gpus, NODE if self.hardware is None else self.hardware.node_size)

    def make_parallel_config(self, layout: Layout) -> ParallelConfig:
        """Return the config of one stage of a layout."""
        return ParallelConfig(**layout.list_stage_sizes(), **self.parallel)

    def make_stage_request(self, pp: int) -> LayoutRequest:
        """Return the request for one of `pp` stages, with its layers and its GPUs.

        Raises:
            ValueError: training refuses this number of stages.
        """
        if pp == 1:
            return self
        check_stages(pp, self.gpus)
        layout = ParallelConfig(pp_size=pp, **self.parallel)
        model = make_stage_config(find_config(self.model), layout)
        return replace(self, model=model, gpus=self.gpus // pp)


@dataclass(frozen=True)
class Layout:
    """A parallel layout of a training job.

    Attributes:
        per_forward: sequences per forward of a data rank (the ranks that share a batch).
        accumulated: forwards per optimizer step (gradient accumulation).
        chunks: dispatch_chunks.
        node_size: ranks per node of the hierarchical dispatcher; None for the default dispatcher.
        etp: etp_size.
        pp: the number of pipeline stages; the other sizes count ranks of one stage.
        micro_batches: pp_microbatches, the number of parts of each forward.
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
    pp: int = 1
    micro_batches: int = 1

    @property
    def ranks_per_batch(self) -> int:
        """The number of GPUs of a stage that share a batch."""
        return self.cp * self.sp

    def sizes(self) -> dict[str, Any]:
        """Return the layout as fields of ParallelConfig."""
        stages = {"pp_size": self.pp, "pp_microbatches": self.micro_batches}
        return (stages if self.pp > 1 else {}) | self.list_stage_sizes()

    def list_stage_sizes(self) -> dict[str, Any]:
        """Return the layout of one stage as fields of ParallelConfig."""
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

    def format_patch_line(self, **more: Any) -> str:
        """Return the line for a script: "patch(model, ep_size=8)"."""
        options = {name: size for name, size in self.sizes().items() if size != 1} | more
        arguments = "".join(f", {name}={value!r}" for name, value in options.items())
        return f"patch(model{arguments})"


@dataclass(frozen=True)
class PlannedLayout:
    """A layout that training accepts, and its plan.

    Attributes:
        step: the planned step.
        left: bytes of a GPU that are left at the peak; below 0 if the layout does not fit.
        time: the planned seconds, if hardware was given.
        sent: the most bytes that a rank sends to ranks of other pipeline stages in a step.
    """

    layout: Layout
    step: StepPlan
    left: int
    time: StepTime | None = None
    sent: int = 0

    @property
    def bubble(self) -> float:
        """The fraction of a step in which a stage waits for other stages."""
        return compute_bubble(self.layout.pp, self.layout.micro_batches)


@dataclass(frozen=True)
class SearchResult:
    """The result of a search.

    Attributes:
        fit: the layouts that fit, best first.
        too_large: the layouts that do not fit, the smallest peak first.
        illegal: the layouts that training refuses, each with the reason.
    """

    fit: list[PlannedLayout]
    too_large: list[PlannedLayout]
    illegal: dict[Layout, str]


def find_layouts(request: LayoutRequest) -> SearchResult:
    """Search the layouts of a request.

    Raises:
        ValueError: training accepts no layout; the message is the reason of the first refusal.
    """
    result = SearchResult([], [], {})
    searches: dict[int, _Search] = {}
    for pp in request.pp:
        try:
            searches[pp] = _Search(request.make_stage_request(pp), pp, result)
        except ValueError as error:  # training refuses this number of stages
            layout = Layout(request.ep or 1, request.sp or 1, request.dp_replicate or 1, pp=pp)
            result.illegal[layout] = str(error)
    for search in searches.values():
        search.plan_grids()
    if not (result.fit or result.too_large):
        raise ValueError(next(iter(result.illegal.values()), "no layout was tried"))
    order: Callable[[PlannedLayout], float] = _get_seconds if request.hardware else _get_memory_used
    for planned in sorted(result.fit, key=order)[:NUM_CLOSER_LOOKS]:
        searches[planned.layout.pp].plan_variants(planned)
    if request.hardware:
        with_ep = [p for p in result.fit if p.layout.ep * p.layout.etp > 1]
        for fastest in sorted(with_ep, key=_get_seconds)[:1]:
            for chunks in CHUNKS:
                searches[fastest.layout.pp].add(replace(fastest.layout, chunks=chunks))
    result.fit.sort(key=_get_seconds if request.hardware else _get_order_without_hardware)
    result.too_large.sort(key=_get_memory_used)
    return result


@dataclass
class _Search:
    """The search of layouts with one number of stages.

    Attributes:
        request: the request for one stage.
        layers_run: the numbers of layers to run for each plan; None until a layout is accepted.
    """

    request: LayoutRequest
    pp: int
    result: SearchResult
    layers_run: tuple[int, ...] | None = None

    def plan_grids(self) -> None:
        """Plan the grids of each sp_size, then of each cp_size, until a grid fits."""
        request, num_experts = self.request, _count_experts(self.request)
        sp_sizes = [1, *_list_powers_of_two(request.node)] if request.sp is None else [request.sp]
        for sp in sp_sizes:
            grids = _iterate_grids(request, sp, request.cp or 1, num_experts, self.pp)
            if any(grid.left >= 0 for grid in self._plan_accepted(grids)):
                return
        if request.cp is not None:
            return
        for sp in reversed(sp_sizes):
            planned: list[PlannedLayout] = []
            for cp in _list_powers_of_two(request.gpus // sp):
                grids = _iterate_grids(request, sp, cp, num_experts, self.pp)
                planned += self._plan_accepted(grids)
                if any(grid.left >= 0 for grid in planned):
                    return
            if planned:  # training accepts this sp_size, and a smaller one needs more memory
                return

    def _plan_accepted(self, grids: Iterable[Layout]) -> list[PlannedLayout]:
        """Plan the grids that training accepts, and skip replicas that need far too much memory."""
        planned: list[PlannedLayout] = []
        too_large = set()
        for layout in grids:
            if layout.dp_replicate in too_large:
                continue
            reason = explain_refusal(layout, self.request)
            if reason:
                self.result.illegal[layout] = reason
                continue
            self.layers_run = self.layers_run or choose_layers_to_run(
                _plan_request(layout, self.request)
            )
            planned.append(self.add(layout))
            if planned[-1].step.held > MAX_OVERRUN * self.request.limit:
                too_large.add(layout.dp_replicate)
        return planned

    def plan_variants(self, grid: PlannedLayout) -> None:
        """Plan variants of a grid that need more memory and may be faster."""
        if self.pp > 1:
            self.add(replace(grid.layout, checkpointing=False))
            return
        # The sequences of a data rank per optimizer step.
        share = grid.layout.per_forward * grid.layout.accumulated
        for checkpointing in (True, False):
            single = grid
            if not checkpointing:
                single = self.add(replace(grid.layout, checkpointing=False))
            if single.left < 0 or share == 1:
                continue
            whole_share = self.add(_change_sequences(single.layout, share))
            bytes_per_sequence = (whole_share.step.peak - single.step.peak) / (share - 1)
            sequences = share
            while sequences > 1 and (
                single.step.peak + (sequences - 1) * bytes_per_sequence > self.request.limit
            ):
                sequences -= 1
            # Round down to a power of two that divides the share of the rank.
            sequences = max(n for n in [1, *_list_powers_of_two(sequences)] if share % n == 0)
            fits = whole_share.left >= 0
            while not fits and sequences > 1:
                layout = _change_sequences(single.layout, sequences)
                fits = self.add(layout).left >= 0
                sequences //= 2

    def add(self, layout: Layout) -> PlannedLayout:
        """Plan a layout and add it to the result."""
        planned = _plan(layout, self.request, self.layers_run)
        result = self.result
        (result.fit if planned.left >= 0 else result.too_large).append(planned)
        return planned


def _change_sequences(layout: Layout, sequences: int) -> Layout:
    """Return a copy of a layout with another number of sequences per forward."""
    share = layout.per_forward * layout.accumulated
    return replace(layout, per_forward=sequences, accumulated=share // sequences)


def _get_memory_used(planned: PlannedLayout) -> int:
    return -planned.left


def _get_seconds(planned: PlannedLayout) -> float:
    assert planned.time is not None
    return planned.time.seconds


def _get_order_without_hardware(planned: PlannedLayout) -> tuple[int, ...]:
    return int(planned.layout.checkpointing), -planned.layout.per_forward, -planned.left


def explain_refusal(layout: Layout, request: LayoutRequest) -> str:
    """Return the reason why training would refuse a layout, or "" if it would accept the layout.

    With several stages, `request` is the request for one stage.
    """
    data_ranks = max(request.gpus // layout.ranks_per_batch, 1)
    if request.batch % data_ranks:
        context = f"cp_size {layout.cp} / " if layout.cp > 1 else ""
        return (
            f"batch ({request.batch}) is not a multiple of the data ranks ({request.gpus} GPUs / "
            f"{context}sp_size {layout.sp} = {data_ranks}); try {data_ranks} or {2 * data_ranks}"
        )
    try:
        plan_request = _keep_few_layers(_plan_request(layout, request))
        with torch.random.fork_rng(devices=[]):
            unsharded = Unsharded.of(plan_request)
            with fake_group(0, request.gpus):
                meshes, state = unsharded.shard(), unsharded.state
                make_dispatcher(state.config, meshes, num_experts=state.num_experts)
    except ValueError as error:
        return str(error)
    return ""


def _plan_request(layout: Layout, request: LayoutRequest) -> PlanRequest:
    parallel = request.make_parallel_config(layout)
    return PlanRequest(find_config(request.model), parallel, request.gpus, **request.options)


def _keep_few_layers(request: PlanRequest) -> PlanRequest:
    """Shorten the model of a request to a few layers, which are enough to check its sizes.

    The few layers include the first MoE layer. Some models have many dense layers before it.
    """
    text = text_config(request.config)
    num_dense = max(getattr(text, name, None) or 0 for name in DENSE_LAYER_FIELDS)
    layers = min(text.num_hidden_layers, max(FEW_LAYERS[-1], num_dense + 1))
    return replace(request, config=keep_layers(request.config, layers))


def count_received_bytes(layout: Layout, request: LayoutRequest) -> int | None:
    """Count the bytes of keys and values that a GPU receives from other cp ranks.

    The result counts one forward of the layer that receives most. The result is None if the width
    of keys and values is unknown.
    """
    plan_request = _keep_few_layers(_plan_request(layout, request))
    with torch.random.fork_rng(devices=[]):
        unsharded = Unsharded.of(plan_request)
    context = unsharded.state.context
    # Latents are gathered before the all-to-all that exchanges heads for tokens, so a rank gathers
    # only the tokens of its own slice. Keys and values are gathered after this all-to-all.
    widths = [
        exchange.width // layout.sp if exchange.gathers_latents else exchange.width
        for exchange in (() if context is None else context[1])
        if exchange.width is not None
    ]
    if not widths:
        return None
    tokens = request.seq * layout.per_forward // layout.cp
    return (layout.cp - 1) * tokens * max(widths) * plan_request.dtype.itemsize


def count_fixed_buffer_bytes(layout: Layout, request: LayoutRequest) -> int:
    """Count the bytes that a GPU holds in the fixed buffers of `fsdp_double_buffer`."""
    stage = request.make_stage_request(layout.pp)
    options = {name: value for name, value in stage.options.items() if name != "offload"}
    parallel = stage.make_parallel_config(layout)
    return plan_memory(stage.model, parallel, world_size=stage.gpus, **options).buffers


def _count_experts(request: LayoutRequest) -> int:
    """Return the number of experts of a layer; 0 if the model cannot be patched."""
    plan_request = _plan_request(Layout(1, 1, 1), replace(request, parallel={}))
    try:
        with torch.random.fork_rng(devices=[]):
            return Unsharded.of(_keep_few_layers(plan_request)).state.num_experts
    except ValueError:
        return 0


def _split_experts(ep: int, request: LayoutRequest, num_experts: int) -> tuple[int, int]:
    """Return the (ep_size, etp_size) that split the experts over `ep` ranks.

    If `ep` does not divide the number of experts, etp_size ranks share each expert.
    """
    if request.ep is not None or request.etp is not None or not num_experts:
        return ep, request.etp or 1
    whole = math.gcd(ep, num_experts)
    return whole, ep // whole


def _iterate_grids(
    request: LayoutRequest, sp: int, cp: int, num_experts: int, pp: int
) -> Iterator[Layout]:
    """Yield the grids with an sp_size and a cp_size as layouts with checkpointing.

    Each layout has one sequence per forward or, with several stages, one per micro-batch.
    """
    node = request.node
    replicas = sorted({1, request.gpus // node})
    share = max(request.batch * sp * cp // request.gpus, 1)
    for ranks in [1, *_list_powers_of_two(node)] if request.ep is None else [request.ep]:
        ep, etp = _split_experts(ranks, request, num_experts)
        for replicate in replicas if request.dp_replicate is None else [request.dp_replicate]:
            for node_size in (None, node) if ep * etp > node else (None,):
                layout = Layout(ep, sp, replicate, 1, share, checkpointing=True, cp=cp, etp=etp)
                layout = replace(layout, node_size=node_size)
                if pp > 1:
                    layout = replace(layout, per_forward=share, accumulated=1)
                    layout = replace(layout, pp=pp, micro_batches=share)
                yield layout


def _plan(
    layout: Layout, request: LayoutRequest, layers_run: tuple[int, ...] | None
) -> PlannedLayout:
    request.on_plan(layout)
    rows = layout.per_forward // layout.micro_batches
    accumulates = layout.accumulated * layout.micro_batches > 1
    batch = Batch(
        request.seq,
        rows,
        layout.checkpointing,
        accumulates,
        only_loss_is_read=request.only_loss_is_read,
    )
    step = plan_step(
        request.model,
        request.make_parallel_config(layout),
        world_size=request.gpus,
        batch=batch,
        layers_run=layers_run,
        **request.options,
    )
    tokens = max(request.batch * request.seq // (request.gpus * layout.pp), 1)
    if layout.pp > 1:
        return _plan_stages(layout, request, step, tokens)
    seconds = None
    if request.hardware is not None:
        seconds = plan_step_time(
            step, request.hardware, micro_batches=layout.accumulated, tokens=tokens
        )
    return PlannedLayout(layout, step, request.limit - step.peak, seconds)


def _plan_stages(
    layout: Layout, request: LayoutRequest, step: StepPlan, tokens: int
) -> PlannedLayout:
    """Plan a layout with several stages from `step`, the plan of one micro-batch on one stage."""
    step = add_micro_batches(
        step,
        find_config(request.model),
        pp_size=layout.pp,
        micro_batches=layout.micro_batches,
        trains_embedding=not request.options.get("lora_rank"),
    )
    rows = layout.per_forward // layout.micro_batches
    hidden = text_config(find_config(request.model)).hidden_size
    dtype: torch.dtype = request.options.get("dtype", torch.bfloat16)
    nbytes = rows * (request.seq // layout.ranks_per_batch) * hidden * dtype.itemsize
    transfers = Transfers(layout.pp, layout.micro_batches, request.gpus, nbytes)
    seconds = None
    if request.hardware is not None:
        seconds = plan_stages_time(step, request.hardware, transfers, tokens=tokens)
    return PlannedLayout(layout, step, request.limit - step.peak, seconds, transfers.sent)


def _list_powers_of_two(limit: int) -> list[int]:
    return [2**i for i in range(1, limit.bit_length()) if 2**i <= limit]
