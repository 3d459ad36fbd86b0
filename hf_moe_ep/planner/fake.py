"""Run one rank of a sharded model alone, on fake tensors: shapes and dtypes without memory.

The model is sharded over torch's fake process group, whose collectives send nothing. The model's
own forward, backward and optimizer step run. Two results depend on values, which fake tensors do
not have:

    the router's choice      Drawn expert ids (`choices.py`) replace the result of topk, or the ids
                             that the experts receive. If checkpointing recomputes a layer, the
                             layer gets the same ids again. Integer tensors are real unless they
                             are computed from fake tensors, so dispatch and experts compute with
                             real ids and counts.
    counts of other ranks    All other ranks are assumed to have the same counts as this rank. An
                             all-gather of integers returns copies of this rank's tensor. An
                             all-to-all of integers returns copies of the part that this rank sends
                             to itself.

Therefore this rank receives from each other rank as many rows as it sends to itself.

Two shortcuts keep a plan fast. First, the torch path computes the experts in blocks. The experts of
a block run one after the other, and each frees its memory. In a plan only three of them run: the
two experts with the most pairs, and the expert with the fewest pairs. The work of the other experts
is interpolated linearly. Second, if FSDP2 splits a tensor into MIN_EQUAL_CHUNKS or more equal
chunks, one per rank, the first chunk is used for all ranks, because a thousand views would take
longer than the layer.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial, partialmethod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from hf_moe_ep.ops import quantised, torch_mlp
from hf_moe_ep.planner.choices import Choices
from hf_moe_ep.planner.work import Operator, WorkCounter
from hf_moe_ep.ranks import collectives
from hf_moe_ep.sequence import context_calls, same_batch
from hf_moe_ep.state import iterate_experts_modules
from hf_moe_ep.upstream.autograd_modes import backward_is_running
from hf_moe_ep.upstream.dispatch_modes import (
    OperatorMode,
    call_on_real_tensors,
    find_dtensor_shapes_method,
    is_fake,
    make_fake_mode,
)
from hf_moe_ep.upstream.graph import list_tensors_in
from hf_moe_ep.upstream.operators import efficient_attention
from hf_moe_ep.upstream.replaced import replaced

MIN_EQUAL_CHUNKS = 32
_TOPK = torch.ops.aten.topk.default
_CAT, _CAT_OUT = torch.ops.aten.cat.default, torch.ops.aten.cat.out
_INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class DrawnChoicesMode(OperatorMode):
    """A mode above the fake-tensor mode that draws expert ids and keeps integer tensors real."""

    def __init__(self, choices: Choices) -> None:
        super().__init__()
        self._choices = choices
        # The MoE layers whose forward has run. In backward, checkpointing recomputes the last layer
        # of this list, and `_choose` removes this layer from the list.
        self._chosen: list[int] = []
        self._drawn: dict[tuple[int, int], Tensor] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        kwargs = kwargs or {}
        if func in (_CAT, _CAT_OUT) and _are_same_chunk(args[0]):
            return _join_copies(args[0], *args[1:], **kwargs)
        inputs = list_tensors_in((args, kwargs))
        if any(is_fake(tensor) or tensor.is_meta for tensor in inputs):
            out = func(*args, **kwargs)
            if func is _TOPK and self._is_router_choice(*args):
                values, ids = out
                return values, self._choose(ids.shape)
            return out
        if inputs or _makes_integers(func, args, kwargs):
            return call_on_real_tensors(func, *args, **kwargs)
        return func(*args, **kwargs)

    def _is_router_choice(self, scores: Tensor, k: int, *_: Any) -> bool:
        return scores.shape[-1] == self._choices.share_LE.shape[1] and k == self._choices.top_k

    def _choose(self, shape: torch.Size) -> Tensor:
        """Return drawn ids for the next layer, or in backward for the recomputed layer."""
        if backward_is_running():
            number = self._chosen.pop()
        else:
            number = len(self._chosen)
            self._chosen.append(number)
        layer = number % len(self._choices.share_LE)
        key = (layer, shape.numel() // self._choices.top_k)
        if key not in self._drawn:
            self._drawn[key] = call_on_real_tensors(self._choices.draw, *key)
        drawn = self._drawn[key]
        # Each layer gets a copy, which is freed when the layer no longer needs it.
        return call_on_real_tensors(lambda: drawn.clone().view(shape))


def draw_missing_ids(model: nn.Module, choices: Choices) -> None:
    """Pass drawn ids to each experts module if the ids of its router have no values.

    `DrawnChoicesMode` draws the ids of routers that call topk on the scores of all experts. It does
    not draw them for PhiMoE and ZAYA, which choose in another way, nor for LongCat-Flash, whose
    scores have more columns than experts.
    """

    def draw(index: int, experts: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        x_TH, ids_TK, *rest = args
        if not is_fake(ids_TK):
            return None
        return (x_TH, call_on_real_tensors(choices.draw, index, len(ids_TK)), *rest)

    for _, module, layer in iterate_experts_modules(model):
        module.register_forward_pre_hook(partial(draw, layer.index))


def _makes_integers(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return True if an operator without tensor arguments makes integers."""
    dtype = kwargs.get("dtype")
    if dtype is not None:
        return dtype in _INTEGERS
    name = func.overloadpacket.__name__
    numbers = {"arange": args, "full": args[1:], "scalar_tensor": args}.get(name, ())
    return name == "randint" or (bool(numbers) and not any(isinstance(n, float) for n in numbers))


def _chunk(x: Tensor, chunks: int, dim: int = 0) -> Sequence[Tensor]:
    """Replacement of torch.chunk for fake tensors; the module docstring says why it is needed."""
    length, left = divmod(x.shape[dim], chunks)
    if chunks < MIN_EQUAL_CHUNKS or left or not length or torch.is_grad_enabled() or not is_fake(x):
        return _stock_chunk(x, chunks, dim)
    return [x.narrow(dim, 0, length)] * chunks


_stock_chunk = torch.chunk


def _are_same_chunk(tensors: Sequence[Tensor]) -> bool:
    return (
        len(tensors) >= MIN_EQUAL_CHUNKS
        and is_fake(tensors[0])
        and all(x is tensors[0] for x in tensors)
    )


def _join_copies(parts: Sequence[Tensor], dim: int = 0, *, out: Tensor | None = None) -> Tensor:
    """Allocate the result of torch.cat for copies of one tensor."""
    if out is not None:
        return out
    shape = list(parts[0].shape)
    shape[dim] *= len(parts)
    return parts[0].new_empty(shape)


@contextmanager
def alone_on_fake_tensors(choices: Choices, *, like_gpu: bool, work: WorkCounter) -> Iterator[None]:
    """Inside the block, run this rank without other ranks, on tensors without memory.

    Args:
        choices: how often each expert is chosen.
        like_gpu: compute all pairs of a layer in one block, as the torch path does on a GPU, and
            attention without a matrix of scores.
        work: the counter that also counts the work of the experts that do not run.
    """
    split = partialmethod(select_three_experts, work=work)
    gather = partial(_gather_copies, vars(collectives)["_all_gather"])
    swap = partial(_swap_copies, dist.all_to_all_single)
    with ExitStack() as stack:
        stack.enter_context(replaced(collectives, "_all_gather", gather))
        stack.enter_context(replaced(dist, "all_to_all_single", swap))
        stack.enter_context(replaced(torch_mlp.Block, "split", split))
        stack.enter_context(replaced(*find_dtensor_shapes_method()))
        stack.enter_context(replaced(torch, "chunk", _chunk))
        stack.enter_context(replaced(context_calls, "causal_lower_right", _CausalStandIn))
        checksum = partial(_compute_checksum, vars(same_batch)["_compute_checksum"])
        stack.enter_context(replaced(same_batch, "_compute_checksum", checksum))
        if like_gpu:
            stack.enter_context(replaced(torch_mlp, "_BLOCK", sys.maxsize))
        attend = partial(_attend, functional.scaled_dot_product_attention, like_gpu)
        stack.enter_context(replaced(functional, "scaled_dot_product_attention", attend))
        with make_fake_mode(), DrawnChoicesMode(choices):
            # The stock function caches its result for the process, so it must not see fake tensors.
            codes = torch.empty(256)
            stack.enter_context(replaced(quantised, "_make_nested_codes", lambda _: codes))
            yield


class _CausalStandIn:
    """Replaces torch's CausalBias, which is not a fake tensor. `_attend` reads it as is_causal."""

    def __init__(self, queries: int, keys: int) -> None:
        pass


def _attend(
    attend: Callable[..., Tensor],
    like_gpu: bool,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | _CausalStandIn | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Replacement of torch's `scaled_dot_product_attention`; `attend` is torch's own function.

    On a GPU, attention with a CausalBias needs no memory for a mask. With `is_causal`, only the
    scores that a causal kernel computes are counted (`count_flops`). If values are narrower than
    keys, as in latent attention, a CPU computes the matrix of all scores, while a GPU has an
    operator that needs no such matrix.
    """
    if isinstance(attn_mask, _CausalStandIn):
        attn_mask, is_causal = None, True
    options: dict[str, Any] = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale}
    if not like_gpu or value.shape[-1] == query.shape[-1]:
        options |= {"attn_mask": attn_mask, "enable_gqa": enable_gqa}
        return attend(query, key, value, **options)
    if attn_mask is not None:
        shape = (*query.shape[:-1], key.shape[-2])
        attn_mask = torch.empty_like(attn_mask, dtype=query.dtype).expand(shape)
    repeats = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(repeats, 1) if repeats > 1 else x for x in (key, value))
    out, *_ = efficient_attention(query, key, value, attn_mask, compute_log_sumexp=True, **options)
    return out


def select_three_experts(
    block: torch_mlp.Block, *tensors: Tensor, work: WorkCounter
) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
    """Yield three experts of a block instead of all, and count the work of the others.

    The expert with the fewest pairs comes first, then the two experts with the most pairs, in the
    order of their numbers. If experts 0 to 3 have 5, 9, 2 and 7 pairs, experts 2, 1 and 3 run.
    """
    order = sorted(range(len(block.sizes)), key=lambda index: -block.sizes[index])
    largest = sorted(order[:2])
    operators: dict[int, list[Operator]] = {}
    for index in largest if len(order) < 3 else (order[-1], *largest):
        start = sum(block.sizes[:index])
        rows = slice(start, start + block.sizes[index])
        with work.take_operators() as taken:
            yield block.experts[index], tuple(tensor[rows] for tensor in tensors)
        operators[block.sizes[index]] = taken
    if operators:
        work.add_for_sizes(operators, block.sizes)


def _compute_checksum(compute: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Compute the checksum of a part of the batch. Fake embeddings have no values and get 0."""
    if is_fake(x):
        return call_on_real_tensors(torch.zeros, (), dtype=torch.int64)
    return compute(x)


def _gather_copies(gather: Any, out: Tensor, x: Tensor, **options: Any) -> Any:
    """Run the all-gather in the fake group, then fill `out` with copies of this rank's tensor."""
    handle = gather(out, x, **options)
    if x.numel():
        out.view(-1, x.numel()).copy_(x.view(1, -1))
    return handle


def _swap_copies(swap: Any, out: Tensor, x: Tensor, *splits: Any, **options: Any) -> Any:
    """Run the all-to-all in the fake group.

    If `x` has integers, fill `out` with copies of the part that this rank sends to itself.
    """
    handle = swap(out, x, *splits, **options)
    if x.dtype in _INTEGERS:
        out.copy_(x[dist.get_rank(options["group"])].expand_as(out))
    return handle
