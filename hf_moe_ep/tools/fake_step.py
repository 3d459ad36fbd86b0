"""One training step of a rank on tensors without memory, every other rank doing the same.

A model that is sharded over torch's fake process group runs its own forward, backward and optimizer
step. Two things of it depend on values, which fake tensors have not:

    the router's choice   K different experts of E for each token, drawn from one seed, as often as
                          a measured load says or all as often, then the same in every layer; whole
                          numbers have memory here and are computed as always, so dispatch and
                          experts see true ids and true counts
    counts of others      every rank tells what this one tells

So a rank receives what it would send to one like itself: D times the rows that it sends there.
On a GPU the torch path computes all pairs of a layer as one block, on a CPU some at a time. Of a
block's experts, which come one after the other and let go of what they took, the two with the
most pairs are run, and before them the one with fewest: work of all others lies on the line between
it and the largest. What is cut into MANY equal parts, as FSDP2 cuts what it has gathered from so
many ranks, is the first of them many times: a thousand views take longer than the layer.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from hf_moe_ep.ops import quantised, torch_mlp
from hf_moe_ep.ranks import collectives
from hf_moe_ep.routing.load import ExpertLoad
from hf_moe_ep.tools.step_work import Operator, WorkCounter
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
_WHOLE = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


@dataclass(frozen=True)
class Choices:
    """How often experts are chosen.

    Attributes:
        top_k: experts of a token.
        share_LE: by MoE layer the part of all tokens that choose an expert; each row adds up to
            `top_k`. One row is for every layer.
    """

    top_k: int
    share_LE: Tensor

    @classmethod
    def evenly(cls, num_experts: int, top_k: int) -> Choices:
        """All experts as often."""
        return cls(top_k, torch.full((1, num_experts), top_k / num_experts, dtype=torch.float64))

    @classmethod
    def of_load(cls, load: ExpertLoad, top_k: int, layers: int) -> Choices:
        """As often as they were; nobody can be chosen twice by a token.

        Raises:
            ValueError: it is of another number of layers, or a layer had no tokens.
        """
        counts_LE = load.counts.double()
        if len(counts_LE) != layers or not bool((counts_LE.sum(1) > 0).all()):
            raise ValueError(
                f"load is of {len(counts_LE)} MoE layers, of which "
                f"{int((counts_LE.sum(1) > 0).sum())} had tokens, and the model has {layers}; "
                f"read expert_load(model) behind a step of this very model"
            )
        return cls(top_k, (counts_LE / counts_LE.sum(1, keepdim=True) * top_k).clamp(max=1.0))

    def busiest(self, ep_size: int) -> int:
        """Find the ep rank with most rows in some layer; the first one where all are alike."""
        rows_LD = self.share_LE.view(len(self.share_LE), ep_size, -1).sum(2)
        return int((rows_LD - 1e-9 * torch.arange(ep_size)).amax(0).argmax())

    def draw(self, layer: int, tokens: int) -> Tensor:
        """Draw ids_TK: K points, one apart, on a line of experts that is shuffled for each token.

        On that line an expert is as long as its share, so it is met as often (Madow 1949).
        """
        share_E = self.share_LE[layer % len(self.share_LE)]
        generator = torch.Generator().manual_seed(tokens)
        order_TE = torch.rand(tokens, len(share_E), generator=generator).argsort(1)
        end_TE = share_E[order_TE].cumsum(1)
        # Rounding may leave the line a little shorter than K.
        first_T1 = torch.rand(tokens, 1, generator=generator, dtype=torch.float64) * (1 - 1e-6)
        points_TK = (first_T1 + torch.arange(self.top_k)) * (end_TE[:, -1:] / self.top_k)
        return order_TE.gather(1, torch.searchsorted(end_TE, points_TK, right=True))


class ChoicesAreReal(OperatorMode):
    """A mode over that of fake tensors: the router's choice, and what follows from it, is real."""

    def __init__(self, choices: Choices) -> None:
        super().__init__()
        self._choices = choices
        # Layers of the forward that runs; backward takes those of a checkpoint off again.
        self._chosen: list[int] = []
        self._drawn: dict[tuple[int, int], Tensor] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        kwargs = kwargs or {}
        if func in (_CAT, _CAT_OUT) and _is_one_many_times(args[0]):
            return _joined(args[0], *args[1:], **kwargs)
        given = tensors_in((args, kwargs))
        if any(is_fake(tensor) or tensor.is_meta for tensor in given):
            out = func(*args, **kwargs)
            if func is _TOPK and self._is_choice(*args):
                values, ids = out
                return values, self._choose(ids.shape)
            return out
        if given or _makes_whole_numbers(func, args, kwargs):
            return on_real_tensors(func, *args, **kwargs)
        return func(*args, **kwargs)

    def _is_choice(self, scores: Tensor, k: int, *_: Any) -> bool:
        return scores.shape[-1] == self._choices.share_LE.shape[1] and k == self._choices.top_k

    def _choose(self, shape: torch.Size) -> Tensor:
        """Choose for the next layer; the last one is computed again first."""
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
        # Each router's are its own, for as long as somebody has them.
        return on_real_tensors(lambda: drawn.clone().view(shape))


def _makes_whole_numbers(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Tell whether a call without tensors makes one of whole numbers."""
    dtype = kwargs.get("dtype")
    if dtype is not None:
        return dtype in _WHOLE
    name = func.overloadpacket.__name__
    numbers = {"arange": args, "full": args[1:], "scalar_tensor": args}.get(name, ())
    return name == "randint" or (bool(numbers) and not any(isinstance(n, float) for n in numbers))


def _chunk(x: Tensor, chunks: int, dim: int = 0) -> Sequence[Tensor]:
    """Cut as torch.chunk does; see the module."""
    length, left = divmod(x.shape[dim], chunks)
    if chunks < MANY or left or not length or torch.is_grad_enabled() or not is_fake(x):
        return _stock_chunk(x, chunks, dim)
    return [x.narrow(dim, 0, length)] * chunks


_stock_chunk = torch.chunk


def _is_one_many_times(tensors: Sequence[Tensor]) -> bool:
    return len(tensors) >= MANY and is_fake(tensors[0]) and all(x is tensors[0] for x in tensors)


def _joined(parts: Sequence[Tensor], dim: int = 0, *, out: Tensor | None = None) -> Tensor:
    """Join parts that are one and the same, for the memory that this takes."""
    if out is not None:
        return out
    shape = list(parts[0].shape)
    shape[dim] *= len(parts)
    return parts[0].new_empty(shape)


@contextmanager
def alone_on_fake_tensors(
    choices: Choices, *, like_gpu: bool, work: WorkCounter | None = None
) -> Iterator[None]:
    """Let this rank run on fake tensors, inside the block; see the module.

    `work` is told what the experts do that are not run.
    """
    work = work or WorkCounter()

    def split(block: torch_mlp.Block, *tensors: Tensor) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
        return split_in_three(block, *tensors, work=work)

    # Of the fake group: it fills what it is given with what this rank tells.
    gather = vars(collectives)["_all_gather"]
    with ExitStack() as swapped:
        swapped.enter_context(instead(collectives, "_all_gather", partial(_gather_own, gather)))
        swapped.enter_context(instead(torch_mlp.Block, "split", split))
        swapped.enter_context(instead(*dtensor_shapes()))
        swapped.enter_context(instead(torch, "chunk", _chunk))
        if like_gpu:
            swapped.enter_context(instead(torch_mlp, "_BLOCK", sys.maxsize))
        with fake_tensors(), ChoicesAreReal(choices):
            # Else the table of numbers, which is kept for the process, would be a fake one.
            codes = torch.empty(256)
            swapped.enter_context(instead(quantised, "_nested_codes", lambda _: codes))
            yield


@contextmanager
def instead(owner: ModuleType | type, name: str, value: Any) -> Iterator[None]:
    """Put another value in the place of one, inside the block."""
    stock = vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, stock)


def split_in_three(
    block: torch_mlp.Block, *tensors: Tensor, work: WorkCounter
) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
    """Yield three experts of a block, as `Block.split` yields all: least pairs, then the most."""
    order = sorted(range(len(block.sizes)), key=lambda index: -block.sizes[index])
    largest = sorted(order[:2])
    ran: dict[int, list[Operator]] = {}
    for index in largest if len(order) < 3 else (order[-1], *largest):
        start, since = sum(block.sizes[:index]), work.number
        part = slice(start, start + block.sizes[index])
        yield block.experts[index], tuple(tensor[part] for tensor in tensors)
        ran[block.sizes[index]] = work.take(since)
    if ran:
        work.stand_for(ran, block.sizes)


def _gather_own(gather: Any, out: Tensor, mine: Tensor, **given: Any) -> Any:
    done = gather(out, mine, **given)
    out.view(-1, mine.numel()).copy_(mine.view(1, -1))
    return done
