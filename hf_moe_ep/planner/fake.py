"""Run one rank of a sharded model alone, on fake tensors: shapes and dtypes without memory.

The model is sharded over torch's fake process group, which runs no communication. Its own forward,
backward and optimizer step run. Two things depend on values, which fake tensors do not have:

    the router's choice      replaced by drawn expert ids (`choices.py`), the same whenever a layer
                             is computed. Integer tensors are real here, so that dispatch and
                             experts work on real ids and counts.
    counts of other ranks    every other rank is taken to be like this one: an all-gather of
                             integers returns copies of this rank's own tensor.

So a rank receives as many rows as it would send to a copy of itself.

Two shortcuts keep a plan fast. Experts of a block run one after the other and free their memory, so
only three of them run: those with the most pairs (two of them) and the one with the fewest. The
work of the others lies on the straight line between the fewest and the most. And where FSDP2 cuts a
tensor into MANY equal chunks, one per rank, the first chunk stands for all, because a thousand
views would take longer than the layer.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from hf_moe_ep.ops import quantised, torch_mlp
from hf_moe_ep.planner.choices import Choices
from hf_moe_ep.planner.work import Operator, WorkCounter
from hf_moe_ep.ranks import collectives
from hf_moe_ep.upstream.autograd_modes import backward_is_running
from hf_moe_ep.upstream.dispatch_modes import (
    OperatorMode,
    dtensor_shapes,
    fake_tensors,
    is_fake,
    on_real_tensors,
    tensors_in,
)

MANY = 32
_TOPK = torch.ops.aten.topk.default
_CAT, _CAT_OUT = torch.ops.aten.cat.default, torch.ops.aten.cat.out
_INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class DrawnChoicesMode(OperatorMode):
    """A mode above that of fake tensors: it draws the router's choice, and integers are real."""

    def __init__(self, choices: Choices) -> None:
        super().__init__()
        self._choices = choices
        # MoE layers whose forward has run. A checkpoint computes the last one again in backward,
        # which removes it.
        self._chosen: list[int] = []
        self._drawn: dict[tuple[int, int], Tensor] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        kwargs = kwargs or {}
        if func in (_CAT, _CAT_OUT) and _are_one_chunk(args[0]):
            return _join_copies(args[0], *args[1:], **kwargs)
        given = tensors_in((args, kwargs))
        if any(is_fake(tensor) or tensor.is_meta for tensor in given):
            out = func(*args, **kwargs)
            if func is _TOPK and self._is_choice(*args):
                values, ids = out
                return values, self._choose(ids.shape)
            return out
        if given or _makes_integers(func, args, kwargs):
            return on_real_tensors(func, *args, **kwargs)
        return func(*args, **kwargs)

    def _is_choice(self, scores: Tensor, k: int, *_: Any) -> bool:
        return scores.shape[-1] == self._choices.share_LE.shape[1] and k == self._choices.top_k

    def _choose(self, shape: torch.Size) -> Tensor:
        """Return drawn ids for the next layer, or in backward for the layer computed again."""
        if backward_is_running():
            number = self._chosen.pop()
        else:
            number = len(self._chosen)
            self._chosen.append(number)
        layer = number % len(self._choices.share_LE)
        key = (layer, shape.numel() // self._choices.top_k)
        if key not in self._drawn:
            self._drawn[key] = on_real_tensors(self._choices.draw, *key)
        drawn = self._drawn[key]
        # A copy, because a router's ids are freed when the layer no longer needs them.
        return on_real_tensors(lambda: drawn.clone().view(shape))


def _makes_integers(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return True for a factory call (without tensor arguments) that makes integers."""
    dtype = kwargs.get("dtype")
    if dtype is not None:
        return dtype in _INTEGERS
    name = func.overloadpacket.__name__
    numbers = {"arange": args, "full": args[1:], "scalar_tensor": args}.get(name, ())
    return name == "randint" or (bool(numbers) and not any(isinstance(n, float) for n in numbers))


def _chunk(x: Tensor, chunks: int, dim: int = 0) -> Sequence[Tensor]:
    """Replacement of torch.chunk for fake tensors; the module docstring says why it is needed."""
    length, left = divmod(x.shape[dim], chunks)
    if chunks < MANY or left or not length or torch.is_grad_enabled() or not is_fake(x):
        return _stock_chunk(x, chunks, dim)
    return [x.narrow(dim, 0, length)] * chunks


_stock_chunk = torch.chunk


def _are_one_chunk(tensors: Sequence[Tensor]) -> bool:
    return len(tensors) >= MANY and is_fake(tensors[0]) and all(x is tensors[0] for x in tensors)


def _join_copies(parts: Sequence[Tensor], dim: int = 0, *, out: Tensor | None = None) -> Tensor:
    """Allocate the result of torch.cat for parts that are the same tensor."""
    if out is not None:
        return out
    shape = list(parts[0].shape)
    shape[dim] *= len(parts)
    return parts[0].new_empty(shape)


@contextmanager
def alone_on_fake_tensors(
    choices: Choices, *, like_gpu: bool, work: WorkCounter | None = None
) -> Iterator[None]:
    """Inside the block, run this rank without others and without memory.

    Args:
        like_gpu: compute all pairs of a layer in one block, as the torch path does on a GPU.
        work: counts the work of the experts that do not run.
    """
    work = work or WorkCounter()

    def split(block: torch_mlp.Block, *tensors: Tensor) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
        return split_in_three(block, *tensors, work=work)

    gather = vars(collectives)["_all_gather"]
    with ExitStack() as swapped:
        swapped.enter_context(instead(collectives, "_all_gather", partial(_gather_own, gather)))
        swapped.enter_context(instead(torch_mlp.Block, "split", split))
        swapped.enter_context(instead(*dtensor_shapes()))
        swapped.enter_context(instead(torch, "chunk", _chunk))
        if like_gpu:
            swapped.enter_context(instead(torch_mlp, "_BLOCK", sys.maxsize))
        with fake_tensors(), DrawnChoicesMode(choices):
            # This table is cached for the process, so it must not be made of fake tensors.
            codes = torch.empty(256)
            swapped.enter_context(instead(quantised, "_nested_codes", lambda _: codes))
            yield


@contextmanager
def instead(owner: ModuleType | type, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute inside the block."""
    stock = vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, stock)


def split_in_three(
    block: torch_mlp.Block, *tensors: Tensor, work: WorkCounter
) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
    """Yield three experts of a block instead of all: the one with the fewest pairs comes first.

    With 5, 9, 2 and 7 pairs of experts 0 .. 3, experts 2, 1 and 3 run (1 and 3 in their order).
    """
    order = sorted(range(len(block.sizes)), key=lambda index: -block.sizes[index])
    largest = sorted(order[:2])
    ran: dict[int, list[Operator]] = {}
    for index in largest if len(order) < 3 else (order[-1], *largest):
        start, since = sum(block.sizes[:index]), work.number
        part = slice(start, start + block.sizes[index])
        yield block.experts[index], tuple(tensor[part] for tensor in tensors)
        ran[block.sizes[index]] = work.take(since)
    if ran:
        work.add_for_sizes(ran, block.sizes)


def _gather_own(gather: Any, out: Tensor, mine: Tensor, **given: Any) -> Any:
    """All-gather in the fake group, then fill the result with copies of this rank's tensor."""
    done = gather(out, mine, **given)
    out.view(-1, mine.numel()).copy_(mine.view(1, -1))
    return done
