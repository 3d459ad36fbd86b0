"""Compute the head and the cross-entropy chunk by chunk, never the logits of all tokens.

For 8192 tokens a head with a vocabulary of 152k makes logits of 2.3 GiB in bf16. transformers' loss
copies them to fp32 (4.6 GiB), and backward makes gradients of both. In this module only the logits
of one chunk of tokens exist at a time:

    for each chunk    logits of the chunk, their cross-entropy, and its gradients with respect to
                      the chunk's hidden states and to the head's parameters
    at the end        the sum of the losses; backward multiplies the stored gradients

A chunk runs the same operators as stock: the head's own forward, `float()`, and `cross_entropy`.
The gradient of a weight is a sum over chunks. The sum is computed in fp32 and rounded once, because
n roundings to bf16 would make the error about sqrt(n) times larger than stock's.

`torch.nn.functional.linear_cross_entropy` also works in chunks, but it rounds the loss to the dtype
of its input, and in bf16 the error of the weight's gradient is larger
(`benchmarks/results/around-experts-cpu.md`). torch's function takes the weight of a head, but
heads with adapters and quantised heads must be called as modules. torch 2.11 lacks the function.

In fp16 the gradients of a chunk cannot be computed in forward, because small gradients would become
0: GradScaler multiplies the loss by a number that only backward knows. For an fp16 head, backward
computes the chunks a second time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from hf_moe_ep.ops.autograd import refuse_tangents
from hf_moe_ep.ops.dtypes import choose_compute_dtype


@dataclass(frozen=True)
class HeadLoss:
    """The head of one forward, and the labels of all tokens.

    Attributes:
        head: computes logits (t, V) from hidden states (t, H).
        gather: all-gathers the parameters of the head if FSDP2 has resharded them.
        parameters: the trainable parameters of the head.
        labels_T: the label of each token.
        vocab_size: V, as the model passes it to its loss function.
        ignore_index: the label of tokens that are left out.
        divisor: a scalar tensor by which the sum of all losses is divided.
        chunk_size: the number of tokens of a chunk.
        compiled: runs `sum_cross_entropy` compiled, given a name for errors; None if nothing is
            compiled.
    """

    head: Callable[[Tensor], Tensor]
    gather: Callable[[], None]
    parameters: tuple[Tensor, ...]
    labels_T: Tensor
    vocab_size: int
    ignore_index: int
    divisor: Tensor
    chunk_size: int
    compiled: Callable[..., Tensor] | None = None

    def compute(self, hidden_TH: Tensor) -> Tensor:
        """Return the sum of the losses of all tokens, divided by `divisor`."""
        inputs = (hidden_TH, *self.parameters)
        refuse_tangents(inputs, "a fused loss; leave fused_loss out")
        if torch.is_grad_enabled() and any(x.requires_grad for x in inputs):
            return _ChunkedLoss.apply(self, *inputs)
        return self.run_chunks(hidden_TH, (), None)[0]

    def run_chunks(
        self, hidden_TH: Tensor, wanted: Sequence[bool], grad: Tensor | None
    ) -> tuple[Tensor, list[Tensor | None]]:
        """Return the loss, and its gradients multiplied by `grad`. If `grad` is None, compute none.

        `wanted` has one entry for the hidden states and one for each parameter: True if their
        gradient is needed.
        """
        total: Tensor | None = None
        hidden_grads: list[Tensor] = []
        sums: list[Tensor | None] = [None] * len(self.parameters)
        for rows, labels in zip(
            hidden_TH.detach().split(self.chunk_size), self.labels_T.split(self.chunk_size)
        ):
            with torch.set_grad_enabled(grad is not None):
                rows.requires_grad_(grad is not None and wanted[0])
                loss = self._compute_sum(rows, labels)
            total = loss.detach() if total is None else total + loss.detach()
            if grad is not None:
                inputs = [x for x, want in zip((rows, *self.parameters), wanted) if want]
                scale = (grad / self.divisor).to(loss.dtype)
                grads = list(torch.autograd.grad(loss, inputs, scale, allow_unused=True))
                if wanted[0]:
                    hidden_grads.append(grads.pop(0))
                _add_grads(sums, wanted[1:], grads)
            del loss
        assert total is not None
        all_grads: list[Tensor | None] = [torch.cat(hidden_grads) if hidden_grads else None]
        for parameter, summed in zip(self.parameters, sums):
            all_grads.append(None if summed is None else summed.to(parameter.dtype))
        return total / self.divisor, all_grads

    def _compute_sum(self, hidden_TH: Tensor, labels_T: Tensor) -> Tensor:
        """Return the sum of the losses of a chunk."""
        if self.compiled is not None and torch.is_grad_enabled():
            name = "the cross-entropy of a fused loss (fused_loss=False leaves it out)"
            logits_TV = self.head(hidden_TH).view(-1, self.vocab_size)
            return self.compiled(name, logits_TV, labels_T, self.ignore_index)
        # The logits are freed once they are copied to fp32.
        logits_TV = self.head(hidden_TH).float().view(-1, self.vocab_size)
        return sum_cross_entropy(logits_TV, labels_T, self.ignore_index)


def sum_cross_entropy(logits_TV: Tensor, labels_T: Tensor, ignore_index: int) -> Tensor:
    """Return the sum of the tokens' losses, in fp32 as transformers' ForCausalLMLoss computes it.

    Compiled, this function and its backward are few kernels, which read bf16 logits and write bf16
    gradients. Uncompiled operators copy the logits to fp32 first, and write three more tensors of
    their size.
    """
    return functional.cross_entropy(
        logits_TV.float(), labels_T, ignore_index=ignore_index, reduction="sum"
    )


def _add_grads(
    sums: list[Tensor | None], wanted: Sequence[bool], grads: Sequence[Tensor | None]
) -> None:
    """Add the gradients of a chunk to `sums`, which are at least fp32 from the second chunk on."""
    positions = [index for index, want in enumerate(wanted) if want]
    for index, grad in zip(positions, grads, strict=True):
        old = sums[index]
        if grad is None or old is None:
            sums[index] = old if grad is None else grad
        else:
            wide = torch.promote_types(old.dtype, torch.float32)
            sums[index] = old.to(wide).add_(grad)


class _ChunkedLoss(torch.autograd.Function):
    """The loss of a `HeadLoss` as a function of hidden states and parameters."""

    @staticmethod
    def forward(ctx: Any, head: HeadLoss, hidden_TH: Tensor, *parameters: Tensor) -> Tensor:
        ctx.head = head
        ctx.dtype = choose_compute_dtype(hidden_TH)
        if ctx.dtype == torch.float16:
            device = hidden_TH.device.type
            is_cast, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
            ctx.autocast = torch.autocast(device, dtype, enabled=is_cast)
            ctx.random_states = _get_random_states(hidden_TH.device)
            ctx.save_for_backward(hidden_TH)
            return head.run_chunks(hidden_TH, (), None)[0]
        one = torch.ones((), dtype=torch.float32, device=hidden_TH.device)
        loss, grads = head.run_chunks(hidden_TH, ctx.needs_input_grad[1:], one)
        ctx.save_for_backward(*grads)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.dtype != torch.float16:
            return None, *(None if x is None else x * grad for x in ctx.saved_tensors)
        (hidden_TH,) = ctx.saved_tensors
        ctx.head.gather()
        # The dropout of an adapter must drop the same values again.
        with _replay_random_numbers(ctx.random_states, hidden_TH.device), ctx.autocast:
            _, grads = ctx.head.run_chunks(hidden_TH, ctx.needs_input_grad[1:], grad)
        return None, *grads


def _get_random_states(device: torch.device) -> tuple[Tensor, ...]:
    """Return the state of the CPU's random generator and, on a GPU, of the device's generator."""
    on_device = (torch.cuda.get_rng_state(device),) if device.type == "cuda" else ()
    return torch.get_rng_state(), *on_device


@contextmanager
def _replay_random_numbers(states: tuple[Tensor, ...], device: torch.device) -> Iterator[None]:
    """Set the random generators to `states` inside the block, and restore them afterwards."""
    cpu_state, *device_states = states
    with torch.random.fork_rng(devices=[device] if device_states else []):
        torch.set_rng_state(cpu_state)
        for device_state in device_states:
            torch.cuda.set_rng_state(device_state, device)
        yield
