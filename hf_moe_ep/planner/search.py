"""Find the parallel layouts of a model on N GPUs that training accepts and that fit.

    found = find_layouts(Asked("Qwen/Qwen3-30B-A3B", gpus=16, limit=80 * 2**30, seq=4096, batch=32))
    found.fit[0].layout.patch_line(), found.fit[0].step.peak

A layout is an ep_size, sp_size and dp_replicate_size, the sequences per forward of a data rank (the
rest of its share is accumulated), dispatch_chunks, and whether layers are checkpointed. Sizes are
powers of two and divisors of the number of GPUs. The code of training itself decides whether it
accepts them: a few layers are patched and sharded over a fake process group. Memory is that of
`step.py`; seconds, if hardware is given, those of `seconds.py`.

Each plan takes seconds, so the search is short:

    1. every grid of sizes at its smallest: one sequence per forward, with checkpointing. If that
       takes FAR times the limit, no other ep_size with as many replicas is tried.
    2. the best CLOSER_LOOK grids that fit: without checkpointing, and with as many sequences per
       forward as fit: all, or the power of two below the straight line between one and all.
    3. with hardware: the fastest layout with ep_size > 1 again, with CHUNKS parts.

sp_size > 1 is tried only if nothing fits without it, or if it is asked for. An ep_size larger than
a node is tried with each dispatcher that crosses nodes.

Without hardware the order is: no checkpointing first, then more sequences per forward, then more
memory left.
"""

from __future__ import annotations

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
from hf_moe_ep.planner.seconds import StepTime, step_time
from hf_moe_ep.planner.step import Batch, StepPlan, plan_step
from hf_moe_ep.upstream.models import text_config
from hf_moe_ep.upstream.process_groups import fake_group

# GPUs of a node: ep and sp stay inside a node, a replica is one or several nodes.
NODE = 8
CLOSER_LOOK = 3
FAR = 2
CHUNKS = (2, 4)


@dataclass(frozen=True)
class Asked:
    """The request: a model, GPUs and a batch.

    Attributes:
        shape: the model, as for `plan_memory`.
        gpus: the number of GPUs.
        limit: bytes of one GPU.
        seq, batch: tokens per sequence; sequences per optimizer step, summed over all GPUs.
        ep, sp, dp_replicate: the size to try; None: several sizes.
        options: arguments of `plan_step`: dtype, masters, optimizer, lora_rank, lora_targets,
            offload.
        parallel: other fields of ParallelConfig.
        hardware: rates, to plan seconds; None plans memory only.
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

    @property
    def node(self) -> int:
        """Ranks of a node."""
        return min(self.gpus, NODE if self.hardware is None else self.hardware.node_size)


@dataclass(frozen=True)
class Layout:
    """A parallel layout of a training job."""

    ep: int
    sp: int
    dp_replicate: int
    per_forward: int = 1
    accumulated: int = 1
    checkpointing: bool = False
    chunks: int = 1
    node_size: int | None = None

    def sizes(self) -> dict[str, Any]:
        """Return the layout as fields of ParallelConfig."""
        sizes: dict[str, Any] = {
            "ep_size": self.ep,
            "sp_size": self.sp,
            "dp_replicate_size": self.dp_replicate,
            "dispatch_chunks": self.chunks,
        }
        if self.node_size is not None:
            sizes |= {"dispatcher": "hierarchical", "node_size": self.node_size}
        return sizes

    def patch_line(self, **more: Any) -> str:
        """Return the line for a script: "patch(model, ep_size=8)"."""
        given = {name: size for name, size in self.sizes().items() if size != 1} | more
        words = "".join(f", {name}={value!r}" for name, value in given.items())
        return f"patch(model{words})"


@dataclass(frozen=True)
class Planned:
    """A layout that training accepts: its step, the bytes left of a GPU, and its seconds."""

    layout: Layout
    step: StepPlan
    left: int
    time: StepTime | None = None


@dataclass(frozen=True)
class Found:
    """Layouts that fit (best first), that do not fit (closest first), and refused ones with why."""

    fit: list[Planned]
    too_large: list[Planned]
    illegal: dict[Layout, str]


def find_layouts(asked: Asked) -> Found:
    """Search the layouts of a request.

    Raises:
        ValueError: training accepts no layout; the message is that of the first one.
    """
    found, few = Found([], [], {}), None
    for sp in [1, *_powers(asked.node)] if asked.sp is None else [asked.sp]:
        far = set()
        for smallest in _grids(asked, sp):
            if smallest.dp_replicate in far:
                continue
            reason = refusal(smallest, asked)
            if reason:
                found.illegal[smallest] = reason
                continue
            few = few or layers_to_run(_request(smallest, asked))
            planned = _add(_plan(smallest, asked, few), found)
            if planned.step.peak > FAR * asked.limit:
                far.add(smallest.dp_replicate)
        if found.fit:
            break
    if not (found.fit or found.too_large):
        raise ValueError(next(iter(found.illegal.values()), "no layout was tried"))
    for grid in sorted(found.fit, key=_fastest if asked.hardware else _most_left)[:CLOSER_LOOK]:
        _look_closer(grid, asked, few, found)
    if asked.hardware:
        fastest = [one.layout for one in sorted(found.fit, key=_fastest) if one.layout.ep > 1]
        for layout in fastest[:1]:
            for chunks in CHUNKS:
                _add(_plan(replace(layout, chunks=chunks), asked, few), found)
    found.fit.sort(key=_fastest if asked.hardware else _in_order)
    found.too_large.sort(key=_most_left)
    return found


def _look_closer(grid: Planned, asked: Asked, few: tuple[int, ...] | None, found: Found) -> None:
    """Plan layouts of a grid that need more memory than its smallest and may be faster."""
    share = grid.layout.per_forward * grid.layout.accumulated
    for checkpointing in (True, False):
        one = grid
        if not checkpointing:
            one = _add(_plan(replace(grid.layout, checkpointing=False), asked, few), found)
        if one.left < 0 or share == 1:
            continue
        most = _add(_plan(_at_a_time(one.layout, share), asked, few), found)
        each = (most.step.peak - one.step.peak) / (share - 1)
        sequences = share
        while sequences > 1 and one.step.peak + (sequences - 1) * each > asked.limit:
            sequences -= 1
        # The largest power of two that divides the share and is not above the line.
        sequences = max(n for n in [1, *_powers(sequences)] if share % n == 0)
        fits = most.left >= 0
        while not fits and sequences > 1:
            fits = _add(_plan(_at_a_time(one.layout, sequences), asked, few), found).left >= 0
            sequences //= 2


def _at_a_time(layout: Layout, sequences: int) -> Layout:
    share = layout.per_forward * layout.accumulated
    return replace(layout, per_forward=sequences, accumulated=share // sequences)


def _add(planned: Planned, found: Found) -> Planned:
    (found.fit if planned.left >= 0 else found.too_large).append(planned)
    return planned


def _most_left(one: Planned) -> int:
    return -one.left


def _fastest(one: Planned) -> float:
    assert one.time is not None
    return one.time.seconds


def _in_order(one: Planned) -> tuple[int, ...]:
    return int(one.layout.checkpointing), -one.layout.per_forward, -one.left


def refusal(layout: Layout, asked: Asked) -> str:
    """Return why training would refuse a layout; empty if it would accept it."""
    data_ranks = max(asked.gpus // layout.sp, 1)
    if asked.batch % data_ranks:
        return (
            f"batch ({asked.batch}) is not a multiple of the data ranks ({asked.gpus} GPUs / "
            f"sp_size {layout.sp} = {data_ranks}); try {data_ranks} or {2 * data_ranks}"
        )
    try:
        request = _request(layout, asked)
        layers = min(text_config(request.config).num_hidden_layers, FEW[-1])
        request = replace(request, config=with_layers(request.config, layers))
        with torch.random.fork_rng(devices=[]):
            found = Unsharded.of(request)
            with fake_group(0, asked.gpus):
                meshes, state = found.shard(), found.state
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


def _grids(asked: Asked, sp: int) -> Iterator[Layout]:
    """Yield the grids of an sp_size: one sequence per forward, with checkpointing."""
    node = asked.node
    replicas = [1] if asked.gpus <= node else [1, asked.gpus // node]
    share = max(asked.batch * sp // asked.gpus, 1)
    for ep in [1, *_powers(node)] if asked.ep is None else [asked.ep]:
        for replicate in replicas if asked.dp_replicate is None else [asked.dp_replicate]:
            for node_size in (None, node) if ep > node else (None,):
                yield Layout(ep, sp, replicate, 1, share, checkpointing=True, node_size=node_size)


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


def _powers(limit: int) -> list[int]:
    return [2**i for i in range(1, limit.bit_length()) if 2**i <= limit]
