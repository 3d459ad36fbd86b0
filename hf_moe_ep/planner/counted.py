"""Run one training step of a sharded model, and count the memory and work of each of its parts.

    counted = count_step(model, layers, optimizer, {"input_ids": ids, "labels": ids})
    counted.peaks()["backward, layer 3"], counted.work.flops()

The model may be real, on any device, or fake (`step.py`). The parts of a step are called phases.
A phase begins when a layer's forward begins, or when the gradient of a layer's output arrives:

    forward, before layers | forward, layer 0 .. | forward, head
    backward, head | backward, layer n-1 .. | optimizer

With `offload`, FSDP2 keeps parameters, gradients and optimizer state on the host (CPUOffloadPolicy)
and copies shards to the device before it gathers them. All fake tensors are on the CPU, so
`TensorMemory` records which of them stand for tensors on the host: a tensor computed from a host
tensor is on the host too, unless it is a copy to the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, is_tensor, nn

from hf_moe_ep.planner.count import BEFORE, RESIZED, StorageRecord, TensorMemory, count_tensors
from hf_moe_ep.planner.fused import Fusion
from hf_moe_ep.planner.work import StepWork, WorkCounter
from hf_moe_ep.ranks.boxes import get_local_tensor
from hf_moe_ep.sharding.stages import find_parts_of_stage
from hf_moe_ep.state import patched_state
from hf_moe_ep.upstream.autograd_modes import backward_is_running
from hf_moe_ep.upstream.dispatch_modes import find_dtensor_shapes_method
from hf_moe_ep.upstream.host_copies import intercept_host_copies
from hf_moe_ep.upstream.replaced import replaced

OPTIMIZER = "optimizer"
# The kinds of memory that a rank holds for each parameter.
HELD = ("parameters", "gradients", "optimizer state")
_GATHERED = "gathered units, FSDP2's copies"
TRANSIENT = "activations, logits, transients"


@dataclass(frozen=True)
class CountedStep:
    """The memory and the work of one step.

    Attributes:
        kinds: the known kinds of storages, such as "parameters" or "gradients".
    """

    memory: TensorMemory
    kinds: dict[StorageRecord, str]
    work: StepWork

    def peaks(self) -> dict[str, int]:
        """Return the peak of each phase of the step, in bytes."""
        return {name: size for name, size in self.memory.peaks.items() if name != BEFORE}

    def made_of(self) -> dict[str, dict[str, int]]:
        """Return the bytes of each kind at the peak of each phase."""
        sums = self.memory.sum_at_peaks(self._kind_of)
        return {name: parts for name, parts in sums.items() if name != BEFORE}

    def _kind_of(self, record: StorageRecord) -> str:
        kind = self.kinds.get(record)
        if kind is not None:
            return kind
        is_flat_buffer = len(record.shape) == 1 and "aten.empty" in record.made_by
        return _GATHERED if record.made_by == RESIZED or is_flat_buffer else TRANSIENT


def count_step(
    model: nn.Module,
    layers: Sequence[nn.Module],
    optimizer: torch.optim.Optimizer | LocalOptimizer,
    inputs: dict[str, Any],
    work: WorkCounter | None = None,
    *,
    offload: bool = False,
) -> CountedStep:
    """Run and count one step on this rank.

    Args:
        model: a sharded model. Train a real model for one step before this call, because an
            optimizer allocates its state in its first step.
        work: the `WorkCounter` to use; by default, a new one from `make_counter`.
        offload: True if the model was sharded with a CPUOffloadPolicy.
    """
    work = work or make_counter(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    kinds: dict[StorageRecord, str] = {}
    # DTensor computes output shapes on full-size fake tensors, which are not part of the step.
    with replaced(*find_dtensor_shapes_method()), count_tensors() as memory:
        _watch_held(memory, kinds, model, optimizer, offload=offload)

        def begin(phase: str) -> None:
            memory.begin(phase)
            work.begin(phase)

        copies = _count_copies(memory, work, kinds) if offload else nullcontext()
        with copies, work, _begin_at_layers(layers, begin):
            begin("forward, before layers")
            loss = model(**inputs).loss
            begin("backward, head")
            loss.backward()
        _note_kind(memory, kinds, "gradients", (p.grad for p in trained if p.grad is not None))
        begin(OPTIMIZER)
        with work:
            optimizer.step()
        del loss
        optimizer.zero_grad()
    return CountedStep(memory, kinds, work.counted())


def _watch_held(
    memory: TensorMemory,
    kinds: dict[StorageRecord, str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | LocalOptimizer,
    *,
    offload: bool,
) -> None:
    """Count the tensors that exist before the step, and record their kinds."""
    states = optimizer.state.values()
    # These are functions that return iterators, because a list would keep gradients alive.
    held: dict[str, Callable[[], Iterator[Tensor]]] = {
        "parameters": lambda: iter(model.parameters()),
        "buffers": lambda: iter(model.buffers()),
        "optimizer state": lambda: (x for state in states for x in state.values() if is_tensor(x)),
        "gradients": lambda: (p.grad for p in model.parameters() if p.grad is not None),
    }
    for kind, tensors in held.items():
        memory.watch(tensors(), on_host=offload and kind != "buffers")
        _note_kind(memory, kinds, kind, tensors())


def _note_kind(
    memory: TensorMemory, kinds: dict[StorageRecord, str], kind: str, tensors: Iterable[Tensor]
) -> None:
    kinds |= {record: kind for record in map(memory.find_record, tensors) if record is not None}


def _count_copies(
    memory: TensorMemory, work: WorkCounter, kinds: dict[StorageRecord, str]
) -> AbstractContextManager[Any]:
    """Replace FSDP2's copies between host and device by copies that are counted."""

    def copy(x: Tensor, to_host: bool) -> Tensor:
        out: Tensor = work.run_uncounted(memory.copy, x, to_host=to_host)
        work.note_copy(x.nbytes)
        record = memory.find_record(out)
        if not to_host and record is not None:
            kinds[record] = _GATHERED
        return out

    work.set_host_test(memory.is_on_host)
    return intercept_host_copies(copy)


def make_counter(model: nn.Module, fusion: Fusion | None = None) -> WorkCounter:
    """Make a `WorkCounter` with the settings of a sharded model."""
    state = patched_state(model)
    layers = find_parts_of_stage(model, state).adapted_experts.values()
    parameters = (p for modules in layers for module in modules for p in module.parameters())
    chunks = state.config.dispatch_chunks
    if isinstance(chunks, str):  # "auto" is planned as one chunk
        chunks = 1
    experts_train = any(p.requires_grad for p in parameters)
    return WorkCounter(chunks=chunks, experts_train=experts_train, fusion=fusion)


@contextmanager
def _begin_at_layers(layers: Sequence[nn.Module], begin: Callable[[str], None]) -> Iterator[None]:
    """Begin a phase at each layer's forward, and when the gradient of its output arrives."""
    handles = []

    def before_forward(number: int, *_: Any) -> None:
        # With activation checkpointing, a layer's forward runs again in backward.
        if not backward_is_running():
            begin(f"forward, layer {number}")

    def after_forward(number: int, module: nn.Module, args: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        if backward_is_running():
            return
        if hidden.requires_grad:
            hidden.register_hook(lambda _: begin(f"backward, layer {number}"))
        if number == len(layers) - 1:
            begin("forward, head")

    for number, layer in enumerate(layers):
        handles.append(layer.register_forward_pre_hook(partial(before_forward, number)))
        handles.append(layer.register_forward_hook(partial(after_forward, number)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def make_optimizer(
    name: str, parameters: Iterable[nn.Parameter], *, on_host: bool = False
) -> torch.optim.Optimizer:
    """Make the optimizer `name` of `options.OPTIMIZERS` for the trainable parameters.

    The optimizer updates all parameters together (foreach), which is torch's default on a GPU. With
    `on_host` the parameters are on the host, where torch updates one parameter after the other.
    """
    trained = [p for p in parameters if p.requires_grad]
    if name == "sgd":
        return torch.optim.SGD(trained, lr=1e-4, momentum=0.9, foreach=not on_host)
    if name == "none":
        return torch.optim.SGD(trained, lr=1e-4, foreach=not on_host)
    fused = name == "adamw_fused"
    return torch.optim.AdamW(trained, lr=1e-4, foreach=not (fused or on_host), fused=fused)


class LocalOptimizer:
    """An optimizer over the local shards of DTensor parameters, each shard a plain tensor.

    It takes as much memory as an optimizer of the DTensors, and is much faster on fake tensors.
    DTensor's dispatch of one operator on many tensors takes longer than the rest of the step.
    """

    def __init__(
        self, name: str, parameters: Iterable[nn.Parameter], *, on_host: bool = False
    ) -> None:
        self._parameters = [p for p in parameters if p.requires_grad]
        self._shards = [nn.Parameter(get_local_tensor(p.detach())) for p in self._parameters]
        self._inner = make_optimizer(name, self._shards, on_host=on_host)
        self.state = self._inner.state

    def step(self) -> None:
        """Update the parameters with the local shards of their gradients."""
        for parameter, shard in zip(self._parameters, self._shards, strict=True):
            shard.grad = None if parameter.grad is None else get_local_tensor(parameter.grad)
        self._inner.step()

    def zero_grad(self) -> None:
        """Free all gradients."""
        for parameter in (*self._parameters, *self._shards):
            parameter.grad = None

    def set_zero_grads(self) -> None:
        """Give every parameter a gradient of zeros."""
        for parameter in self._parameters:
            parameter.grad = torch.zeros_like(parameter)
