"""The memory of a whole training step, before there is a GPU to try it on.

    config = ParallelConfig(ep_size=8)
    plan = plan_step("Qwen/Qwen3-30B-A3B", config, world_size=8, seq=4096, batch=1)
    plan.peak, plan.parts

Beside what `memory_plan.py` counts this has activations, logits, gathered units with FSDP2's own
copies, gradients on their way, the rows of a dispatch and the optimizer's transients: the model
is patched and sharded as in training, and its own forward, backward and optimizer step run on
tensors without memory (`fake_step.py`) while every storage is counted (`tensor_memory.py`).

Layers that are all alike are not all run. A step is cut into stretches, which end where a layer
begins or has its gradients. The first and the last layer, and those beside them, have neighbours of
their own; of all others one is like the next, but for what layers before it have left behind. So
each stretch's peak grows by the same for every layer that a model has more, whether it is counted
from the front or from the end, and of those in the middle none has more than both ends of it:

    n layers     forward 0  1 ..  -2  -1  head | backward head  -1  -2 ..  1  0 | optimizer
    each         value(n) = value(4) + (n - 4) * (value(5) - value(4));  the peak is the largest

With `offload` parameters, gradients and optimizer state lie on the host, where FSDP2's
CPUOffloadPolicy keeps them: a unit's shards are copied to the device before they are gathered,
reduced gradients are copied back, and the optimizer steps on the host. Device and host are both
this CPU then, and bytes are told apart by what they were made of.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, is_tensor, nn
from torch.distributed.tensor import DTensor

from hf_moe_ep.architectures import experts_per_token, find_parts
from hf_moe_ep.config import ParallelConfig
from hf_moe_ep.moe.dispatch.choose import make_dispatcher
from hf_moe_ep.routing.load import ExpertLoad
from hf_moe_ep.state import patched_state
from hf_moe_ep.tools.fake_step import Choices, alone_on_fake_tensors, instead
from hf_moe_ep.tools.memory_plan import PlanRequest, Unsharded
from hf_moe_ep.tools.published_models import find_config
from hf_moe_ep.tools.step_work import StepWork, WorkCounter, of_more_layers
from hf_moe_ep.tools.tensor_memory import BEFORE, RESIZED, Lived, TensorMemory, count_tensors
from hf_moe_ep.upstream.adapters import without_adapters
from hf_moe_ep.upstream.autograd_modes import backward_is_running
from hf_moe_ep.upstream.dispatch_modes import NoValue, dtensor_shapes
from hf_moe_ep.upstream.host_copies import host_copies
from hf_moe_ep.upstream.models import add_fused_head, checkpoint_layers, text_config
from hf_moe_ep.upstream.modules import own_buffers
from hf_moe_ep.upstream.process_groups import fake_group

# Numbers of layers that are run where a model has more, all alike.
FEW = (4, 5)
OPTIMIZER = "optimizer"
_GATHERED = "gathered units, FSDP2's copies"
NOT_COUNTED = (
    "what kernels and communication libraries need inside",
    "the CUDA context",
    "what the allocator reserves beyond that",
    "pictures and sound",
)


@dataclass(frozen=True)
class Batch:
    """What a data rank is given: `batch` sequences of `seq` tokens, with labels.

    Attributes:
        checkpointing: backward computes layers again.
        accumulates: gradients of an earlier micro-batch are there already.
        fused_head: the loss is TRL's, whose SFTTrainer never has the logits of all tokens. What
            runs is its path without Triton; its kernels take less.
    """

    seq: int
    batch: int = 1
    checkpointing: bool = False
    accumulates: bool = False
    fused_head: bool = False

    def __post_init__(self) -> None:
        for name in ("seq", "batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} ({getattr(self, name)}) must be 1 or more; try 1")


@dataclass(frozen=True)
class StepPlan:
    """The most memory of one rank in one step; bytes.

    Attributes:
        peaks: by stretch of the step, in their order.
        made_of: what each of them is made of, by kind.
        layers, layers_run: of the model, and those of the models that were run for it.
        work: what the rank computes, moves and sends in the step.
        host_peak: the most memory of the host, where parameters lie there.
    """

    peaks: dict[str, int]
    made_of: dict[str, dict[str, int]]
    layers: int
    layers_run: tuple[int, ...]
    work: StepWork = field(default_factory=StepWork, repr=False)
    host_peak: int = 0

    @property
    def peak(self) -> int:
        return max(self.peaks.values())

    @property
    def where(self) -> str:
        """The stretch of the step with the peak."""
        return max(self.peaks, key=self.peaks.__getitem__)

    @property
    def parts(self) -> dict[str, int]:
        """What the peak is made of."""
        return self.made_of[self.where]

    def as_json(self) -> dict[str, Any]:
        """Turn it into plain data: its memory, without the thousands of operators."""
        found = asdict(replace(self, work=StepWork()))
        del found["work"]
        return found | {"parts": self.parts}


def plan_step(
    shape: Any,
    parallel: ParallelConfig | None = None,
    *,
    world_size: int,
    batch: Batch,
    dtype: torch.dtype = torch.bfloat16,
    masters: str = "fp32",
    optimizer: str = "adamw",
    lora_rank: int | None = None,
    lora_targets: str = "both",
    offload: bool = False,
    load: ExpertLoad | None = None,
    like_gpu: bool = True,
    all_layers: bool = False,
    few: tuple[int, ...] | None = None,
) -> StepPlan:
    """Plan the peak of a training step on one rank; other arguments as for `plan_memory`.

    Args:
        batch: of each data rank.
        optimizer: "adamw" steps as torch does on a GPU by default, on all parameters at once, which
            takes memory for one moment more; "adamw_fused" does not.
        offload: parameters, gradients and optimizer state lie on the host.
        load: how often each expert of each layer is chosen (`expert_load`), of a run of this model;
            the rank that is planned has the experts with most tokens, and all layers are run.
            None: all are chosen as often, and it is rank 0.
        like_gpu: the experts' torch path computes in one block, as on a GPU.
        all_layers: run them all.
        few: what `layers_to_run` says of this model, so that many plans ask once.

    Raises:
        ValueError: as `plan_memory`; a model whose forward asks for values of its activations.
    """
    config = find_config(shape)
    request = PlanRequest(
        config, parallel, world_size, dtype, masters, optimizer, lora_rank, lora_targets, offload
    )
    layers = text_config(config).num_hidden_layers
    if all_layers or load is not None:
        few = (layers,)
    elif few is None:
        few = layers_to_run(request)
    with torch.random.fork_rng(devices=[]):
        counted = [
            _count(replace(request, config=with_layers(config, number)), batch, load, like_gpu)
            for number in few
        ]
    if len(few) == 1:
        (only,) = counted
        return StepPlan(only.peaks(), only.made_of(), layers, few, only.work, only.memory.host_peak)
    stretches = [one.from_ends() for one in counted]
    made_of = [one.made_of() for one in counted]
    peaks, parts = {}, {}
    for name in stretches[0]:
        peaks[name] = _further([one[name][1] for one in stretches], layers)
        of_few = [of[ends[name][0]] for of, ends in zip(made_of, stretches, strict=True)]
        kinds = dict.fromkeys(kind for one in of_few for kind in one)
        parts[name] = {k: _further([one.get(k, 0) for one in of_few], layers) for k in kinds}
    work = of_more_layers([one.work for one in counted], FEW, layers)
    host_peak = _further([one.memory.host_peak for one in counted], layers)
    return StepPlan(peaks, parts, layers, few, work, host_peak)


def layers_to_run(request: PlanRequest) -> tuple[int, ...]:
    """Tell of how many layers models are to be run for a plan of this one, in any layout."""
    layers: int = text_config(request.config).num_hidden_layers
    return FEW if layers > FEW[-1] and _all_alike(request) else (layers,)


def count_step(
    model: nn.Module,
    layers: Sequence[nn.Module],
    optimizer: torch.optim.Optimizer | OwnParts,
    inputs: dict[str, Any],
    work: WorkCounter | None = None,
    *,
    offload: bool = False,
) -> Counted:
    """Count one step of a sharded model, on this rank; a real one is to have made a step before.

    `work` is what counts its work: `make_counter` makes one. `offload`: FSDP2 has a
    CPUOffloadPolicy for this model.
    """
    work = work or make_counter(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    held: dict[str, list[Any]] = {
        "parameters": [*model.parameters()],
        "buffers": [*model.buffers()],
        "optimizer state": [
            x for state in optimizer.state.values() for x in state.values() if is_tensor(x)
        ],
    }
    held["gradients"] = [p.grad for p in trained if p.grad is not None]
    kinds: dict[Lived, str] = {}
    # DTensors find out shapes by whole fake tensors, which are no part of the step.
    with instead(*dtensor_shapes()), count_tensors() as memory:
        for kind in list(held):
            # Let go of: nobody may keep a gradient alive.
            tensors = held.pop(kind)
            memory.watch(tensors, on_host=offload and kind != "buffers")
            kinds |= {life: kind for life in map(memory.storage, tensors) if life is not None}
            del tensors

        def begin(stretch: str) -> None:
            memory.begin(stretch)
            work.begin(stretch)

        copies = _copies(memory, work, kinds) if offload else nullcontext()
        with copies, work, _stretches_of_layers(layers, begin):
            begin("forward, before layers")
            loss = model(**inputs).loss
            begin("backward, head")
            loss.backward()
        grads = [p.grad for p in trained if p.grad is not None]
        kinds |= {life: "gradients" for life in map(memory.storage, grads) if life is not None}
        del grads
        begin(OPTIMIZER)
        with work:
            optimizer.step()
        del loss
        optimizer.zero_grad()
    return Counted(memory, kinds, len(layers), work.counted())


def _copies(
    memory: TensorMemory, work: WorkCounter, kinds: dict[Lived, str]
) -> AbstractContextManager[Any]:
    """Make and count FSDP2's copies between host and device."""

    def copy(x: Tensor, *, to_host: bool) -> Tensor:
        since = work.number
        out = memory.copy(x, to_host=to_host)
        work.take(since)
        work.note_copy(x.nbytes)
        life = memory.storage(out)
        if not to_host and life is not None:
            kinds[life] = _GATHERED
        return out

    work.tell_host_apart(memory.is_on_host)
    return host_copies(copy)


def make_counter(model: nn.Module, *, grouped: bool = False) -> WorkCounter:
    """Make what counts the work of a sharded model; `grouped` as kernels compute experts."""
    experts = find_parts(model).adapted_experts.values()
    trained = any(p.requires_grad for of in experts for one in of for p in one.parameters())
    chunks = patched_state(model).config.dispatch_chunks
    return WorkCounter(chunks=chunks, experts_train=trained, grouped=grouped)


@dataclass(frozen=True)
class Counted:
    """A step that was counted, its work, and what storages are for, where their tensors told."""

    memory: TensorMemory
    kinds: dict[Lived, str]
    layers: int
    work: StepWork

    def peaks(self) -> dict[str, int]:
        """Return the peak of each stretch of the step."""
        return {name: size for name, size in self.memory.peaks.items() if name != BEFORE}

    def from_ends(self) -> dict[str, tuple[str, int]]:
        """Return stretches and their peaks; layers from 1 on by their number from either end.

        What lies between the second and the last but one is left out.
        """
        found: dict[str, tuple[str, int]] = {}
        for name, size in self.peaks().items():
            before, layer, number = name.rpartition("layer ")
            ends = [name]
            if layer:
                at = int(number)
                ends = [f"{before}layer {at}"] * (at < 2 and at < self.layers - 1)
                ends += [f"{before}layer {at - self.layers}"] * (at > 0 and at >= self.layers - 2)
            found |= dict.fromkeys(ends, (name, size))
        return found

    def made_of(self) -> dict[str, dict[str, int]]:
        """Return what there is at the peak of each stretch, by kind."""
        found = self.memory.sums_at_peaks(lambda life: self.kinds.get(life) or _kind(life))
        return {name: parts for name, parts in found.items() if name != BEFORE}


def make_optimizer(
    name: str, parameters: Iterable[nn.Parameter], *, on_host: bool = False
) -> torch.optim.Optimizer:
    """Make one of `OPTIMIZERS` as torch makes it for a GPU, for what is to be trained.

    `on_host`: for parameters that lie there; torch steps one after the other then.
    """
    trained = [p for p in parameters if p.requires_grad]
    if name == "sgd":
        return torch.optim.SGD(trained, lr=1e-4, momentum=0.9, foreach=not on_host)
    if name == "none":
        return torch.optim.SGD(trained, lr=1e-4, foreach=not on_host)
    fused = name == "adamw_fused"
    return torch.optim.AdamW(trained, lr=1e-4, foreach=not (fused or on_host), fused=fused)


class OwnParts:
    """An optimizer of a rank's own parts of DTensors, each a tensor by itself.

    It takes the memory that one of the DTensors does: theirs step part by part. How to carry out
    an operator of many DTensors takes torch longer to find than the rest of a step on fake ones.
    """

    def __init__(
        self, name: str, parameters: Iterable[nn.Parameter], *, on_host: bool = False
    ) -> None:
        self._whole = [p for p in parameters if p.requires_grad]
        self._parts = [nn.Parameter(_own_part(p.detach())) for p in self._whole]
        self._inner = make_optimizer(name, self._parts, on_host=on_host)
        self.state = self._inner.state

    def step(self) -> None:
        """Step with the gradients of the DTensors."""
        for whole, parameter in zip(self._whole, self._parts, strict=True):
            parameter.grad = None if whole.grad is None else _own_part(whole.grad)
        self._inner.step()

    def zero_grad(self) -> None:
        """Let go of all gradients."""
        for parameter in (*self._whole, *self._parts):
            parameter.grad = None

    def give_grads(self) -> None:
        """Give zeros for gradients."""
        for parameter in self._whole:
            parameter.grad = torch.zeros_like(parameter)


def _own_part(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def _count(request: PlanRequest, batch: Batch, load: ExpertLoad | None, like_gpu: bool) -> Counted:
    """Count a step of one rank on fake tensors."""
    found = Unsharded.of(request)
    config, state = text_config(request.config), found.state
    top_k = experts_per_token(found.model, state.plan, config)
    choices = Choices.evenly(state.num_experts, top_k)
    if load is not None:
        choices = Choices.of_load(load, top_k, len(state.moe_layers))
    rank = choices.busiest(state.config.ep_size or 1)
    if state.config.ep_outside:
        rank *= request.world_size // (state.config.dp_replicate_size or 1)
        rank //= state.config.ep_size or 1
    head = add_fused_head(without_adapters(found.model)) if batch.fused_head else {}
    with fake_group(rank, request.world_size):
        meshes = found.shard()
        state.dispatcher = make_dispatcher(state.config, meshes, num_experts=state.num_experts)
        work = make_counter(found.model, grouped=like_gpu)
        with alone_on_fake_tensors(choices, like_gpu=like_gpu, work=work):
            _materialise(found.model)
            found.model.train()
            if batch.checkpointing:
                checkpoint_layers(found.model)
            trained = found.model.parameters()
            optimizer = OwnParts(request.optimizer, trained, on_host=request.offload)
            # As in its first step.
            optimizer.give_grads()
            optimizer.step()
            optimizer.zero_grad()
            if batch.accumulates:
                optimizer.give_grads()
            ids = torch.randint(config.vocab_size, (batch.batch, batch.seq))
            inputs = {"input_ids": ids, "labels": ids, "use_cache": False, **head}
            try:
                layers = found.units.layers
                return count_step(
                    found.model, layers, optimizer, inputs, work, offload=request.offload
                )
            except NoValue as error:
                raise ValueError(
                    f"a forward of {config.model_type} asks for the value of an activation "
                    f"({error}), and a plan has shapes alone; measure it on a small machine"
                ) from error


def _materialise(model: nn.Module) -> None:
    """Give parameters on meta a place on the device; buffers keep their values."""
    values = [(module, dict(own_buffers(module))) for module in model.modules()]
    model.to_empty(device="cpu")
    for module, buffers in values:
        own_buffers(module).update(buffers)


@contextmanager
def _stretches_of_layers(
    layers: Sequence[nn.Module], begin: Callable[[str], None]
) -> Iterator[None]:
    """Begin a stretch where a layer's forward begins, and where its gradients arrive."""
    handles = []

    def enter(number: int) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            # A checkpoint that computes the layer again is part of the backward.
            if not backward_is_running():
                begin(f"forward, layer {number}")

        return hook

    def leave(number: int) -> Callable[..., None]:
        def arrived(_: Tensor) -> None:
            begin(f"backward, layer {number}")

        def hook(module: nn.Module, args: Any, output: Any) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            if backward_is_running():
                return
            if hidden.requires_grad:
                hidden.register_hook(arrived)
            if number == len(layers) - 1:
                begin("forward, head")

        return hook

    for number, layer in enumerate(layers):
        handles.append(layer.register_forward_pre_hook(enter(number)))
        handles.append(layer.register_forward_hook(leave(number)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _further(of_few: list[int], layers: int) -> int:
    """Go on in a straight line from what FEW layers have."""
    (first, second), (at_first, at_second) = FEW, of_few
    return at_first + (layers - first) * (at_second - at_first) // (second - first)


def _kind(life: Lived) -> str:
    if life.made_by == RESIZED or (len(life.shape) == 1 and "aten.empty" in life.made_by):
        return _GATHERED
    return "activations, logits, transients"


def with_layers(config: Any, layers: int) -> Any:
    """Copy a config, for so many layers."""
    short = copy.deepcopy(config)
    text = text_config(short)
    before = text.num_hidden_layers
    for name, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == before:
            setattr(text, name, value[:layers])
    text.num_hidden_layers = layers
    return short


def _all_alike(request: PlanRequest) -> bool:
    """Tell whether all layers have the same modules, sizes and settings."""
    found = Unsharded.of(request)
    return len({_described(layer) for layer in found.units.layers}) == 1


def _described(layer: nn.Module) -> str:
    settings = [
        (
            path,
            type(module).__name__,
            {n: tuple(p.shape) for n, p in module.named_parameters(recurse=False)},
            {
                name: value
                for name, value in sorted(vars(module).items())
                if isinstance(value, bool | int | float | str) and "idx" not in name
            },
        )
        for path, module in layer.named_modules()
    ]
    return str(settings)
