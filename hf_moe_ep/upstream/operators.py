"""What operators of torch compute, read, write and send; read off their schemas and arguments.

torch/_ops.py, torch/utils/flop_counter.py, torch/distributed/_tools/fake_collectives.py and
torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from hf_moe_ep.upstream.dispatch_modes import storage_id, tensors_in

_ATEN = torch.ops.aten
# Attention of a CPU and products in place, which the registry lacks: shapes in the same order.
_LIKE = {
    "addmm_": _ATEN.addmm,
    "baddbmm_": _ATEN.baddbmm,
    "_scaled_dot_product_flash_attention_for_cpu": _ATEN._scaled_dot_product_flash_attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": (
        _ATEN._scaled_dot_product_flash_attention_backward
    ),
}
# They ask for memory, or look at it in another way.
_NOTHING = {
    "_local_scalar_dense",
    "_unsafe_view",
    "empty",
    "empty_like",
    "empty_strided",
    "lift_fresh",
    "new_empty",
    "new_empty_strided",
    "resize_",
}
# Of their first tensor they read as much as they write; of another, numbers of rows.
_PICK = {"embedding", "gather", "index", "index_select", "take"}
# Of their first tensor they read and write as much as they are given.
_ADD_TO_PLACES = {
    "_index_put_impl_",
    "index_add_",
    "index_copy_",
    "index_fill_",
    "index_put_",
    "scatter_",
    "scatter_add_",
}
# They do not read what they write.
_OVERWRITE = {
    "_foreach_copy_",
    "_foreach_zero_",
    "copy_",
    "fill_",
    "normal_",
    "random_",
    "uniform_",
    "zero_",
}
_COLLECTIVES = {
    "_allgather_base_": ("all_gather", 0),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "allreduce_": ("all_reduce", 0),
    "broadcast_": ("broadcast", 0),
    "alltoall_base_": ("all_to_all", 1),
}


def operator_name(operator: Any) -> str:
    """Return an operator's name without overload, as "mm"."""
    name: str = operator.overloadpacket.__name__
    return name


def is_made_of_others(operator: Any) -> bool:
    """Tell whether an operator is nothing but others, which torch shows only where it is asked to.

    Inside an operator of torch.library it shows `matmul` instead of `mm`.
    """
    made: bool = operator.namespace == "aten" and operator._can_decompose()
    return made


def count_flops(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    """Count the multiplications and additions of a product or of attention; 0 for all others.

    Attention that is causal computes half of its square.
    """
    packet = _LIKE.get(operator_name(operator), operator.overloadpacket)
    formula = flop_registry.get(packet)
    if formula is None:
        return 0
    if "scaled_dot_product" in operator_name(operator):
        args = _with_all_heads(operator, args)
    flops = int(formula(*args, **kwargs, out_val=out))
    return (
        flops // 2
        if "attention" in operator_name(operator) and _is_causal(operator, args, kwargs)
        else flops
    )


def _with_all_heads(operator: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Give keys and values as many heads as queries have: formulas of torch 2.11 want that."""
    place = 1 if "backward" in operator_name(operator) else 0
    heads = args[place].shape[1]
    repeated = [
        x.new_empty((x.shape[0], heads, *x.shape[2:]), device="meta")
        for x in args[place + 1 : place + 3]
    ]
    return (*args[: place + 1], *repeated, *args[place + 3 :])


def moved_bytes(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    """Count bytes read and written; 0 for what only asks for memory or looks at it anew."""
    name = operator_name(operator)
    given = {id(x) for x in tensors_in((args, kwargs))}
    made = [x for x in tensors_in(out) if id(x) not in given]
    changes = _changed(operator, args, kwargs)
    if (
        operator.namespace == "prim"
        or name in _NOTHING
        or (not changes and _looks_at(made, args, kwargs))
    ):
        return 0
    if name == "all_gather_copy_in":
        return 2 * _size(tensors_in(args[0]))
    read = tensors_in((args, {key: value for key, value in kwargs.items() if key != "out"}))
    written = _size(made) + _size(changes)
    if name in _PICK:
        return 2 * written + _size(read[1:])
    if name in _ADD_TO_PLACES:
        others = read[1:]
        return 2 * max((_size([x]) for x in others), default=0) + _size(others)
    if name in _OVERWRITE:
        return written + _size(read) - _size(changes)
    return written + _size(read)


def collective_of(operator: Any) -> str | None:
    """Tell which collective an operator is, or None.

    Raises:
        NotImplementedError: it is one that no code of ours or of FSDP2 calls.
    """
    if operator.namespace not in ("c10d", "_c10d_functional"):
        return None
    name = operator_name(operator)
    if name in ("barrier", "monitored_barrier_", "wait_tensor"):
        return None
    if operator.namespace != "c10d" or name not in _COLLECTIVES:
        raise NotImplementedError(f"the work of {operator} is not counted")
    kind, _ = _COLLECTIVES[name]
    return kind


def payload_of(operator: Any, args: tuple[Any, ...]) -> int:
    """Count the bytes of a collective's whole tensor: gathered, to be scattered, reduced, sent."""
    _, place = _COLLECTIVES[operator_name(operator)]
    return sum(x.numel() * x.element_size() for x in tensors_in(args[place]))


def group_of(operator: Any, args: tuple[Any, ...]) -> dist.ProcessGroup:
    """Return the process group that a collective runs over."""
    boxed = args[1 if operator_name(operator) in ("allreduce_", "broadcast_") else 2]
    group: dist.ProcessGroup = dist.ProcessGroup.unbox(boxed)
    return group


def work_of(out: Any) -> Any:
    """Return what a collective's end can be waited for with."""
    return out if not isinstance(out, tuple | list) else out[-1]


def _is_causal(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    for place, argument in enumerate(operator._schema.arguments):
        if argument.name == "is_causal":
            given = args[place] if place < len(args) else kwargs.get("is_causal", False)
            return bool(given)
    return False


def _changed(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Collect the tensors that an operator writes to, of those it is given."""
    changed = []
    for place, argument in enumerate(operator._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[place] if place < len(args) else kwargs.get(argument.name)
            changed += tensors_in(given)
    return changed


def _looks_at(made: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Tell whether all that was made shares memory with what was given."""
    there = {storage_id(x.untyped_storage()) for x in tensors_in((args, kwargs))}
    return bool(made) and all(storage_id(x.untyped_storage()) in there for x in made)


def _size(tensors: list[Tensor]) -> int:
    """Count the bytes of tensors; one that is expanded is as large as what it repeats."""
    total = 0
    for x in tensors:
        number = 1
        for size, stride in zip(x.shape, x.stride(), strict=True):
            number *= size if stride or not size else 1
        total += number * x.element_size()
    return total
