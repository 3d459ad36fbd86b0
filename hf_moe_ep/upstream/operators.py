"""Count FLOPs, bytes and collectives of torch's operators, from their schemas and arguments.

The private names come from torch/_ops.py, torch/utils/flop_counter.py,
torch/distributed/_tools/fake_collectives.py and
torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from hf_moe_ep.upstream.dispatch_modes import get_storage_id
from hf_moe_ep.upstream.graph import list_tensors_in

_ATEN = torch.ops.aten
# Attention on a GPU without a matrix of scores, for values of any width.
efficient_attention = _ATEN._scaled_dot_product_efficient_attention
# Operators without a FLOP formula in torch's registry: in-place products, and attention on a CPU.
# Each is mapped to an operator with a formula, whose arguments have the same shapes and order.
_SAME_FORMULA = {
    "addmm_": _ATEN.addmm,
    "baddbmm_": _ATEN.baddbmm,
    "_scaled_dot_product_flash_attention_for_cpu": _ATEN._scaled_dot_product_flash_attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": (
        _ATEN._scaled_dot_product_flash_attention_backward
    ),
}
# Operators that move no bytes, or a single number: they allocate memory or create a view.
_MOVE_NOTHING = {
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
# Operators that write a new tensor and read only the shape or the dtype of their first tensor.
_READ_NO_VALUES = {"full_like", "new_full", "new_ones", "new_zeros", "ones_like", "zeros_like"}
# Operators that read only a part of their first tensor. The part is as large as the result. All
# other tensors are indices, which are read completely.
_GATHER = {"embedding", "gather", "index", "index_select", "take"}
# Operators that change only a part of their first tensor. The part is as large as the tensor of the
# new values, which is the largest of the other tensors.
_SCATTER = {
    "_index_put_impl_",
    "index_add_",
    "index_copy_",
    "index_fill_",
    "index_put_",
    "scatter_",
    "scatter_add_",
}
# In-place operators that do not read the tensor to which they write.
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
# The operators with which FSDP2 copies into and out of its communication buffers.
_COPIES_OF_FSDP = ("split_with_sizes_copy", "_chunk_cat")
# The kind of each collective, and the index of the argument that `count_payload_bytes` counts.
_COLLECTIVES = {
    "_allgather_base_": ("all_gather", 0),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "allreduce_": ("all_reduce", 0),
    "broadcast_": ("broadcast", 0),
    "alltoall_base_": ("all_to_all", 1),
}


def get_operator_name(operator: Any) -> str:
    """Return the name of an operator without its overload, such as "mm"."""
    return operator.overloadpacket.__name__


def is_made_of_others(operator: Any) -> bool:
    """Return True if an operator only calls other operators, as `matmul` calls `mm`.

    Dispatch modes usually see `mm`. They see `matmul` if an operator of torch.library calls
    `matmul`.
    """
    return operator.namespace == "aten" and operator._can_decompose()


def count_flops(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    """Count the multiplications and additions of a matrix product or of attention.

    The result is 0 for other operators. Scores that a causal mask hides are not counted. This
    assumes that the queries are the last tokens: with q queries and k keys the mask hides q / 2k
    of the scores.
    """
    packet = _SAME_FORMULA.get(get_operator_name(operator), operator.overloadpacket)
    formula = flop_registry.get(packet)
    if formula is None:
        return 0
    if "scaled_dot_product" in get_operator_name(operator):
        args = _repeat_heads(operator, args)
    flops = int(formula(*args, **kwargs, out_val=out))
    if "attention" in get_operator_name(operator) and _is_causal(operator, args, kwargs):
        queries, keys = (x.shape[-2] for x in args[_find_key_index(operator) - 1 :][:2])
        return flops - flops * queries // (2 * keys)
    return flops


def _find_key_index(operator: Any) -> int:
    """Return the index of the keys among the arguments of attention. Queries precede the keys."""
    return 2 if "backward" in get_operator_name(operator) else 1


def _repeat_heads(operator: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Give keys and values as many heads as queries have, as the formulas of torch 2.11 expect."""
    key_index = _find_key_index(operator)
    heads = args[key_index - 1].shape[1]
    repeated = [
        x.new_empty((x.shape[0], heads, *x.shape[2:]), device="meta")
        for x in args[key_index : key_index + 2]
    ]
    return (*args[:key_index], *repeated, *args[key_index + 2 :])


def count_moved_bytes(
    operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
) -> int:
    """Count the bytes that an operator reads and writes. Allocations and views count as 0."""
    name = get_operator_name(operator)
    argument_ids = {id(x) for x in list_tensors_in((args, kwargs))}
    results = [x for x in list_tensors_in(out) if id(x) not in argument_ids]
    changed = _list_changed_arguments(operator, args, kwargs)
    if (
        operator.namespace == "prim"
        or name in _MOVE_NOTHING
        or (not changed and _are_views(results, args, kwargs))
    ):
        return 0
    if name == "all_gather_copy_in":
        return 2 * _count_bytes(list_tensors_in(args[0]))
    read = list_tensors_in((args, {key: value for key, value in kwargs.items() if key != "out"}))
    written = _count_bytes(results) + _count_bytes(changed)
    if name in _READ_NO_VALUES:
        return written
    if name in _GATHER:
        return 2 * written + _count_bytes(read[1:])
    if name in _SCATTER:
        other_tensors = read[1:]
        changed_bytes = max((_count_bytes([x]) for x in other_tensors), default=0)
        return 2 * changed_bytes + _count_bytes(other_tensors)
    if name in _OVERWRITE:
        return written + _count_bytes(read) - _count_bytes(changed)
    return written + _count_bytes(read)


def is_of_fsdp(operator: Any) -> bool:
    """Return True if only FSDP2 (and optimizers) call an operator, not the forward of a layer."""
    name = get_operator_name(operator)
    return operator.namespace == "fsdp" or name.startswith("_foreach") or name in _COPIES_OF_FSDP


def find_collective(operator: Any) -> str | None:
    """Return the kind of a collective, such as "all_gather", or None for other operators.

    Raises:
        NotImplementedError: neither this package nor FSDP2 calls this collective.
    """
    if operator.namespace not in ("c10d", "_c10d_functional"):
        return None
    name = get_operator_name(operator)
    # The transfers between pipeline stages are planned by `planner/stages.py`.
    if name in ("barrier", "monitored_barrier_", "wait_tensor", "send", "recv_"):
        return None
    if operator.namespace != "c10d" or name not in _COLLECTIVES:
        raise NotImplementedError(
            f"the bytes of the collective {operator} cannot be counted, only those of "
            f"{', '.join(_COLLECTIVES)}"
        )
    kind, _ = _COLLECTIVES[name]
    return kind


def count_payload_bytes(operator: Any, args: tuple[Any, ...]) -> int:
    """Count the bytes of a collective's input, or of the result if it is an all-gather."""
    _, argument = _COLLECTIVES[get_operator_name(operator)]
    return sum(x.numel() * x.element_size() for x in list_tensors_in(args[argument]))


def get_group_of_collective(operator: Any, args: tuple[Any, ...]) -> dist.ProcessGroup:
    """Return the process group of a collective."""
    boxed = args[1 if get_operator_name(operator) in ("allreduce_", "broadcast_") else 2]
    return dist.ProcessGroup.unbox(boxed)


def get_work(out: Any) -> Any:
    """Return the `Work` object in the result of a collective."""
    return out[-1] if isinstance(out, tuple | list) else out


def _is_causal(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    for index, argument in enumerate(operator._schema.arguments):
        if argument.name == "is_causal":
            value = args[index] if index < len(args) else kwargs.get("is_causal", False)
            return bool(value)
    return False


def _list_changed_arguments(
    operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[Tensor]:
    """List the arguments that an operator changes in place."""
    changed = []
    for index, argument in enumerate(operator._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            changed += list_tensors_in(value)
    return changed


def _are_views(results: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return True if there are results, and all results share memory with arguments."""
    storages = {get_storage_id(x.untyped_storage()) for x in list_tensors_in((args, kwargs))}
    return bool(results) and all(get_storage_id(x.untyped_storage()) in storages for x in results)


def _count_bytes(tensors: list[Tensor]) -> int:
    """Count the bytes of tensors. The repeated elements of an expanded tensor are counted once."""
    total = 0
    for x in tensors:
        num_elements = 1
        for size, stride in zip(x.shape, x.stride(), strict=True):
            num_elements *= size if stride or not size else 1
        total += num_elements * x.element_size()
    return total
