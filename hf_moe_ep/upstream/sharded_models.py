"""Read and change the private state of FSDP2, DDP and transformers on a distributed model.

The private names come from torch/distributed/fsdp/_fully_shard/, torch/distributed/tensor/_api.py,
torch/nn/parallel/distributed.py and transformers/distributed/fsdp.py.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.parallel import DistributedDataParallel
from transformers import modeling_utils

from hf_moe_ep.upstream.autograd_modes import backward_is_running
from hf_moe_ep.upstream.graph import list_tensors_in
from hf_moe_ep.upstream.models import find_cached_tensors
from hf_moe_ep.upstream.modules import list_forward_hooks, remove_hooks
from hf_moe_ep.upstream.replaced import replaced


def get_stock_class(kind: type) -> type:
    """Return the class that FSDP2 replaced by `kind`, or `kind` if it is not a class of FSDP2."""
    return next(base for base in kind.__mro__ if not issubclass(base, FSDPModule))


def keep_class_names(model: nn.Module) -> None:
    """Make sharded models report their stock class names.

    FSDP2 changes class names, but the Trainer decides by the class name whether label smoothing
    shifts the labels (trainer.py, compute_loss).
    """
    for module in model.modules():
        if isinstance(module, FSDPModule) and hasattr(module, "generate"):
            name = get_stock_class(type(module)).__name__
            setattr(module, "_get_name", functools.partial(str, name))  # noqa: B010  mypy


def keep_recorded_outputs(model: nn.Module) -> None:
    """Let sharded models return hidden states, attentions and router logits.

    transformers has a table of the outputs that the models of a class can record
    (utils/output_capturing.py), which lacks the classes that FSDP2 creates.
    """
    registry: dict[str, Any] = getattr(modeling_utils, "_CAN_RECORD_REGISTRY", {})
    for module in model.modules():
        stock = str(get_stock_class(type(module)))
        if isinstance(module, FSDPModule) and stock in registry:
            # The registry's own __setitem__ takes a model instead of a key.
            dict.__setitem__(registry, str(type(module)), registry[stock])


def is_distributed_by_transformers(model: nn.Module) -> bool:
    """Return True if transformers sharded the model while it loaded the weights.

    This is the case after `from_pretrained(distributed_config=...)` and
    `from_pretrained(tp_plan=...)`.
    """
    return (
        getattr(model, "is_distributed_loading_by_transformers", False) is True
        or (getattr(model, "_tp_size", None) or 1) > 1
    )


def list_devices_of_parts(model: nn.Module) -> list[str]:
    """List the devices over which `from_pretrained(device_map=...)` has spread parts of a model.

    The list is empty if the whole model is on one device, except for ["disk"]. Accelerate's hooks
    move inputs between the devices, and read parts from the disk before these parts run
    (accelerate/big_modeling.py).
    """
    placed = getattr(model, "hf_device_map", None) or {}
    devices = sorted({str(device) for device in placed.values()})
    return devices if len(devices) > 1 or devices == ["disk"] else []


def inside_ddp_forward() -> bool:
    """Return True inside a forward of DDP (torch/nn/parallel/distributed.py)."""
    return DistributedDataParallel._active_ddp_module is not None


def is_refused_by_dtensor(error: Exception) -> bool:
    """Return True if DTensor raised `error` about an operator or operands that it does not support.

    The messages come from torch/distributed/tensor/_dispatch.py and _sharding_prop.py.
    """
    messages = (
        "got mixed torch.Tensor and DTensor",
        "in-place operations that require placement changes",
        "does not have a sharding strategy registered",
    )
    return any(message in str(error) for message in messages)


def _begin_with_most_shards(
    stock: Callable[..., None], operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Call DTensor's handler `stock` with the gradient that has the most shards in front."""
    gradients, *rest = args
    first = max(gradients, key=_count_shards)
    others = [gradient for gradient in gradients if gradient is not first]
    stock(operator, ([first, *others], *rest), kwargs)


def _count_shards(tensor: Tensor) -> int:
    if not isinstance(tensor, DTensor):
        return 0
    axes = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
    return math.prod(size for size, placement in axes if not isinstance(placement, Replicate))


def share_infinities() -> None:
    """Make all ranks agree on the steps that a gradient scaler skips.

    The scaler skips a step if a flag says that a gradient is not finite. DTensor reduces this flag
    only over the mesh axes on which the first gradient is sharded
    (torch/distributed/tensor/_dispatch.py, found_inf_reduce_handler). If the first gradient is
    replicated, ranks could decide differently. The order of the gradients does not matter to the
    operator, so our handler moves the gradient with the most shards to the front.
    """
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    operator = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default
    stock = handlers[operator]
    if getattr(stock, "func", None) is not _begin_with_most_shards:
        handlers[operator] = functools.partial(_begin_with_most_shards, stock)


def count_writes(tensor: Tensor) -> tuple[int, ...]:
    """Return how often a tensor, and its shard on this rank, were written in place.

    Autograd counts in-place operators (torch/_tensor.py). An operator on a DTensor increases only
    the number of the DTensor. An operator on the shard, or on a view of the shard, increases only
    the number of the shard. Writes through `.data` are not counted.
    """
    if isinstance(tensor, DTensor):
        return tensor._version, tensor.to_local()._version
    return tensor._version, tensor._version


def begin_with_root(root: FSDPModule) -> None:
    """Initialise FSDP2 from its root, before a unit inside the root is called on its own.

    FSDP2 takes the first unit that runs as the root. Without this call the inner unit would become
    a second root, and all other units would lack the state that a root shares with its units
    (torch/distributed/fsdp/_fully_shard/_fsdp_state.py). If FSDP2 is initialised already, this
    function does nothing.
    """
    root._get_fsdp_state()._lazy_init()


# torch.compile would trace this hook through FSDP2's weak dictionary of all states, which may lose
# entries during the tracing.
@torch.compiler.disable
def forget_finished_backward(unit: nn.Module, args: tuple[Any, ...]) -> None:
    """Reset the state of an FSDP2 unit whose backward has ended (a pre-forward hook of the unit).

    Reentrant checkpointing needs this for two forwards before one backward. The hook acts only if a
    forward runs during a backward, which means that the forward is a recompute. FSDP2 leaves the
    state of a nested unit at PRE_BACKWARD until the whole backward ends. After one of the forwards,
    the other forward is recomputed. FSDP2 then concludes from this state that the unit is prepared
    for backward, registers no hooks and never reduces the gradients of the unit
    (torch/distributed/fsdp/_fully_shard/_fsdp_state.py). In torch 2.13 this happens to stock
    experts too, and to whole layers where transformers checkpoints their `__call__` (before 5.23).
    """
    if not backward_is_running():
        return
    assert isinstance(unit, FSDPModule)
    state = unit._get_fsdp_state()
    group = state._fsdp_param_group
    if group is not None and group._training_state == TrainingState.POST_BACKWARD:
        state._training_state = TrainingState.IDLE


def fully_shard_tied(modules: Sequence[nn.Module], /, **kwargs: Any) -> FSDPModule:
    """Make one module, or several modules with the same parameters, an FSDP2 unit.

    FSDP2 itself gathers a unit of several modules before the forward of the first module, and
    reshards the unit after the forward of the last module. This function makes FSDP2 gather such a
    unit before each module's forward, and reshard it after each module's forward. It returns the
    first module.
    """
    first, *others = modules
    if not others:
        return fully_shard(first, **kwargs)
    with ExitStack() as stack:
        for module in modules:
            stack.enter_context(without_forward_hooks(module))
        fully_shard([*modules], **kwargs)
    assert isinstance(first, FSDPModule)
    state = first._get_fsdp_state()
    for module in modules:
        module.register_forward_pre_hook(state._pre_forward, prepend=True, with_kwargs=True)
        module.register_forward_hook(state._post_forward)
    return first


@torch.compiler.disable
def gather_for_cache(
    unit: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
) -> None:
    """Gather a unit in backward when the gradient of a cached key or value arrives.

    This is a forward hook of the unit. FSDP2's own hooks gather the unit only when the gradient of
    an output arrives.
    """
    assert isinstance(unit, FSDPModule)
    for tensor in find_cached_tensors(unit, kwargs):
        if tensor.requires_grad:
            tensor.register_hook(unit._get_fsdp_state()._pre_backward)


@torch.compiler.disable
def gather_unit(unit: nn.Module, *_: Any) -> None:
    """Gather a unit now. This is a pre-forward hook of another module."""
    assert isinstance(unit, FSDPModule)
    unit.unshard()


@torch.compiler.disable
def gather_in_backward(
    unit: nn.Module, module: nn.Module, args: tuple[Any, ...], output: Any
) -> None:
    """Gather a unit in backward when the gradient of an output of `module` arrives.

    This is a forward hook of `module`.
    """
    assert isinstance(unit, FSDPModule)
    for tensor in list_tensors_in(output):
        if tensor.requires_grad:
            tensor.register_hook(unit._get_fsdp_state()._pre_backward)


def reshard_unit(unit: FSDPModule) -> None:
    """Reshard a unit, whatever its state.

    `FSDPModule.reshard` does nothing if an error has ended a forward of the unit.
    """
    group = unit._get_fsdp_state()._fsdp_param_group
    if group is not None:
        group._to_sharded()


def gather_in_dtypes_of_shards(model: nn.Module) -> None:
    """Let FSDP2 gather each parameter of a model in the dtype that its shards have now.

    FSDP2 itself keeps the dtypes of the first all-gather: it allocates the gathered tensors once
    (torch/distributed/fsdp/_fully_shard/_fsdp_param.py). All units must be sharded.
    """
    for unit in model.modules():
        group = unit._get_fsdp_state()._fsdp_param_group if isinstance(unit, FSDPModule) else None
        if group is None:
            continue
        for parameter in group.fsdp_params:
            parameter.all_gather_outputs = []
            # This attribute does not exist before the first all-gather.
            vars(parameter).pop("_unsharded_param", None)
        group._init_mp_dtypes()


def forward_has_begun(unit: FSDPModule) -> bool:
    """Return True if a forward of at least one unit of the model runs, or an error has ended it."""
    return unit._get_fsdp_state()._state_ctx.iter_forward_root is not None


def forward_of_root_has_begun(root: FSDPModule) -> bool:
    """Return True if a forward of the root runs, and False if a unit inside it was called."""
    state = root._get_fsdp_state()
    return state._state_ctx.iter_forward_root is state


def backward_has_begun(unit: FSDPModule) -> bool:
    """Return True if a backward through the unit's model runs, or an error has ended it."""
    return unit._get_fsdp_state()._state_ctx.post_backward_final_callback_queued


def end_failed_forward(root: FSDPModule) -> None:
    """Reset all units of a model to the state between two steps, after a forward raised an error.

    Gradients of earlier micro-batches that are not reduced yet are kept. FSDP2's own function,
    `FSDPModule.reset_iter_state` (torch 2.13), deletes some of these gradients.
    """
    state = root._get_fsdp_state()
    for unit_state in state._state_ctx.all_states:
        unit_state._modules_to_run_forward.clear()
        unit_state._training_state = TrainingState.IDLE
        group = unit_state._fsdp_param_group
        if group is not None:
            group.finalize_backward()  # waits for a prefetched all-gather, and forgets it
            group._training_state = TrainingState.IDLE
            group._to_sharded()
            _forget_last_all_gather(state._comm_ctx, group)
    state._state_ctx.iter_forward_root = None


def _forget_last_all_gather(comm: Any, group: Any) -> None:
    """Wait until the memory of the last all-gather may be used again, and free this memory."""
    release = getattr(comm, "release_all_gather_state_for_comm_reuse", None)  # since torch 2.15
    if release is not None:
        release()
    elif comm.all_gather_state is not None:
        group._wait_all_gather_streams_on_event(comm.all_gather_state.event)
        comm.all_gather_state = None


def install_shards(unit: FSDPModule) -> bool:
    """Give the modules of a gathered unit their sharded parameters.

    The gathered parameters stay in memory, so backward uses them without another all-gather.
    Returns False if the unit is already sharded.
    """
    group = unit._get_fsdp_state()._fsdp_param_group
    if group is None or not group.is_unsharded:
        return False
    for parameter in group.fsdp_params:
        parameter._setattr_on_modules(parameter.sharded_param)
    return True


def install_gathered(unit: FSDPModule) -> None:
    """Give the modules of a gathered unit their gathered parameters, after `install_shards`."""
    group = unit._get_fsdp_state()._fsdp_param_group
    if group is not None and group.is_unsharded:
        for parameter in group.fsdp_params:
            parameter.to_unsharded()


def end_failed_backward(root: FSDPModule) -> None:
    """Reset all units of a model to the state between two steps, after a backward raised an error.

    All gradients that FSDP2 has not reduced are deleted, also gradients of earlier micro-batches.
    """
    state = root._get_fsdp_state()
    context = state._state_ctx
    for unit_state in context.all_states:
        group = unit_state._fsdp_param_group
        for parameter in () if group is None else group.fsdp_params:
            if "unsharded_accumulated_grad" in vars(parameter):  # since torch 2.15 a property
                parameter.unsharded_accumulated_grad = None
            # This attribute does not exist before the first all-gather.
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None
        if group is not None:
            group._partial_reduce_output = None
    # FSDP2's final callback waits for reductions that are running. The gradients were deleted
    # above, so the callback starts no new reduction.
    is_last, context.is_last_backward = context.is_last_backward, True
    state._root_post_backward_final_callback()
    context.is_last_backward = is_last
    end_failed_forward(root)


@contextmanager
def bytes_as_parameters() -> Iterator[None]:
    """Inside the block, make `fully_shard` accept parameters with the dtype uint8.

    torch 2.11 creates each sharded parameter with requires_grad=True before it copies the value of
    requires_grad, but an integer tensor cannot require a gradient. torch 2.13 does not need this
    function (torch/distributed/fsdp/_fully_shard/_fsdp_param.py).
    """
    stock = vars(_fsdp_param)["nn"]
    replacement = ModuleType(stock.__name__)
    vars(replacement).update(vars(stock), Parameter=_make_parameter)
    with replaced(_fsdp_param, "nn", replacement):
        yield


def _make_parameter(data: Tensor, requires_grad: bool = True) -> nn.Parameter:
    return nn.Parameter(data, requires_grad and data.is_floating_point())


@contextmanager
def without_forward_hooks(module: nn.Module) -> Iterator[None]:
    """At the end of the block, remove the forward hooks that were registered on `module` inside it.

    FSDP2 all-gathers a unit without hooks only if `unshard` is called, and reduces the unit's
    gradients at the end of the backward (torch/distributed/fsdp/_fully_shard/_fsdp_state.py).
    """
    old_hooks = {id(hook) for hook in list_forward_hooks(module)}
    yield
    remove_hooks(module, lambda hook: id(hook) not in old_hooks)


def is_gathered(unit: FSDPModule) -> bool:
    """Return True if the parameters of a unit, not counting nested units, are all-gathered."""
    assert isinstance(unit, nn.Module)
    modules: list[nn.Module] = [unit]
    while modules:
        module = modules.pop()
        if any(isinstance(p, DTensor) for p in module.parameters(recurse=False)):
            return False
        modules += [child for child in module.children() if not isinstance(child, FSDPModule)]
    return True


def allocate_for_group(
    group: dist.ProcessGroup, size: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return uninitialised memory [size] that the backend of a group has allocated and registered.

    Raises:
        RuntimeError: the backend cannot allocate memory on this device.
    """
    backend = group._get_backend(device)
    if not backend.supports_tensor_alloc(device):
        raise RuntimeError(
            f"nccl_ub: the backend {backend.name()!r} of this group cannot allocate memory on "
            f"{device}; leave nccl_ub out"
        )
    return backend.allocate_tensor(size, dtype=dtype, device=device)


def holds_unreduced_grads(unit: FSDPModule) -> bool:
    """Return True if a unit has gradients of earlier micro-batches that are not reduced yet.

    FSDP2 keeps such gradients unsharded and in the reduce dtype. With replicas (HSDP) they may be
    reduce-scattered already, but not all-reduced (_fsdp_param.py, _fsdp_param_group.py).
    """
    group = unit._get_fsdp_state()._fsdp_param_group
    if group is None:
        return False
    return group._partial_reduce_output is not None or any(
        parameter.unsharded_accumulated_grad is not None
        # This attribute does not exist before the first all-gather.
        or getattr(getattr(parameter, "_unsharded_param", None), "grad", None) is not None
        for parameter in group.fsdp_params
    )
