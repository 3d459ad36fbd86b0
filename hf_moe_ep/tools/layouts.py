"""Which layouts of a model on N GPUs are legal, and which of them fit.

    found = find_layouts(Asked("Qwen3-30B-shape", gpus=16, limit=80 * 2**30, seq=4096, batch=32))
    found.fit[0].layout.patch_line(), found.fit[0].step.peak

A layout is an ep_size, sp_size and dp_replicate_size, sequences per forward of a data rank (the
rest of its share is accumulated), and whether backward computes layers again. Sizes that are tried
are powers of two and divisors of the number of GPUs; what is legal among them is decided by the
code that patches and shards in training, on a few layers over a fake process group, and what it
says is kept. Memory is that of `step_plan.py`.

A grid of sizes is first planned at its smallest: one sequence at a time, layers computed again.
Where that does not fit, nothing of that grid does. Of those with most memory left, CLOSER_LOOK, all
of the data rank's share at a time is planned too, and layers computed once. Sequence parallelism
is tried where nothing fits without it, or where an sp_size is asked for.

How fast a layout is its memory does not say. Those that fit are in this order: layers computed once
before twice, more sequences at a time before fewer, then by the memory that is left.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from hf_moe_ep.config import ParallelConfig
from hf_moe_ep.tools.memory_plan import PlanRequest, Unsharded
from hf_moe_ep.tools.published_models import find_config
from hf_moe_ep.tools.step_plan import (
    FEW,
    Batch,
    StepPlan,
    layers_to_run,
    plan_step,
    with_layers,
)
from hf_moe_ep.upstream.models import text_config
from hf_moe_ep.upstream.process_groups import fake_group

# Ranks of a machine: ep and sp stay inside it, replicas are whole machines.
NODE = 8
CLOSER_LOOK = 3


@dataclass(frozen=True)
class Asked:
    """What is to be trained, and on what.

    Attributes:
        shape: as for `plan_memory`.
        gpus: all of them, one process each.
        limit: bytes of one GPU.
        seq, batch: tokens of a sequence; sequences of one optimizer step, over all GPUs.
        ep, sp, dp_replicate: sizes to try; None: those that may make sense.
        options: of `plan_memory`: dtype, masters, optimizer, lora_rank, lora_targets.
        parallel: other fields of ParallelConfig.
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


@dataclass(frozen=True)
class Layout:
    """One way to lay a training out."""

    ep: int
    sp: int
    dp_replicate: int
    per_forward: int = 1
    accumulated: int = 1
    checkpointing: bool = False

    def sizes(self) -> dict[str, Any]:
        """Return the fields of ParallelConfig."""
        return {"ep_size": self.ep, "sp_size": self.sp, "dp_replicate_size": self.dp_replicate}

    def patch_line(self, **more: Any) -> str:
        """Return what to write in a script."""
        given = {name: size for name, size in self.sizes().items() if size > 1} | more
        words = "".join(f", {name}={value!r}" for name, value in given.items())
        return f"patch(model{words})"


@dataclass(frozen=True)
class Planned:
    """A legal layout, its step, and the bytes that it leaves of a GPU."""

    layout: Layout
    step: StepPlan
    left: int


@dataclass(frozen=True)
class Found:
    """Those that fit, best first; those that do not, closest first; what is not legal, and why."""

    fit: list[Planned]
    too_large: list[Planned]
    illegal: dict[Layout, str]


def find_layouts(asked: Asked) -> Found:
    """Try the layouts of a request.

    Raises:
        ValueError: none of them is legal, with what the first one is refused for.
    """
    found, few = Found([], [], {}), None
    for sp in [1, *_powers(min(asked.gpus, NODE))] if asked.sp is None else [asked.sp]:
        for smallest in _grids(asked, sp):
            reason = refusal(smallest, asked)
            if reason:
                found.illegal[smallest] = reason
                continue
            few = few or layers_to_run(_request(smallest, asked))
            planned = _plan(smallest, asked, few)
            (found.fit if planned.left >= 0 else found.too_large).append(planned)
        if found.fit:
            break
    if not (found.fit or found.too_large):
        raise ValueError(next(iter(found.illegal.values()), "no layout was tried"))
    for grid in sorted(found.fit, key=lambda one: -one.left)[:CLOSER_LOOK]:
        for layout in _larger(grid.layout):
            planned = _plan(layout, asked, few)
            (found.fit if planned.left >= 0 else found.too_large).append(planned)
    found.fit.sort(key=lambda one: (one.layout.checkpointing, -one.layout.per_forward, -one.left))
    found.too_large.sort(key=lambda one: -one.left)
    return found


def refusal(layout: Layout, asked: Asked) -> str:
    """Say why training would refuse a layout; empty where it would not."""
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
                found.shard()
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
    """Yield the grids of an sp_size, at one sequence at a time and layers computed again."""
    node = min(asked.gpus, NODE)
    replicas = [1] if asked.gpus <= NODE else [1, asked.gpus // NODE]
    share = max(asked.batch * sp // asked.gpus, 1)
    for ep in [1, *_powers(node)] if asked.ep is None else [asked.ep]:
        for replicate in replicas if asked.dp_replicate is None else [asked.dp_replicate]:
            yield Layout(ep, sp, replicate, 1, share, checkpointing=True)


def _larger(smallest: Layout) -> Iterator[Layout]:
    """Yield what takes more memory than `smallest` on the same grid, and may be faster."""
    share = smallest.per_forward * smallest.accumulated
    for per_forward in dict.fromkeys((1, share)):
        for checkpointing in (True, False):
            layout = replace(
                smallest,
                per_forward=per_forward,
                accumulated=share // per_forward,
                checkpointing=checkpointing,
            )
            if layout != smallest:
                yield layout


def _plan(layout: Layout, asked: Asked, few: tuple[int, ...] | None) -> Planned:
    step = plan_step(
        asked.shape,
        ParallelConfig(**layout.sizes(), **asked.parallel),
        world_size=asked.gpus,
        batch=Batch(asked.seq, layout.per_forward, layout.checkpointing, layout.accumulated > 1),
        few=few,
        **asked.options,
    )
    return Planned(layout, step, asked.limit - step.peak)


def _powers(limit: int) -> list[int]:
    return [2**i for i in range(1, limit.bit_length()) if 2**i <= limit]
