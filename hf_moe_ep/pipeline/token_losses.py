"""Train a model with pipeline stages if TRL computes the loss from log-probabilities of labels.

TRL's SFTTrainer calls a model with `fused_lm_head=True` and computes the loss from its outputs:

    loss = -sum(log_probs) / N + coefficient * aux_loss / accumulation

A pipeline has computed all gradients when the forward returns, but the trainer computes its loss
afterwards. The pipeline therefore computes the gradients of another loss, which the forward knows.
Every token has the same weight in both losses, so the gradients differ only by a factor:

    known = -sum(log_probs) / K + coefficient * aux_loss

`backward()` gets the gradients of `log_probs` and of `aux_loss`, and multiplies the computed
gradients by one number. K must have the same ratio to the coefficient as in the trainer's loss
(`ModelState.loss_divisor`); without an aux loss any K is right. Other losses are refused: their
gradients differ from token to token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hf_moe_ep.pipeline.gradients import ROUNDING, StepGradients
from hf_moe_ep.ranks.neighbours import broadcast_tensor
from hf_moe_ep.upstream.models import make_fused_output

# The outputs with one number or flag per token.
_PER_TOKEN = (
    "log_probs",
    "entropy",
    "log_sum_sq_probs",
    "mean_logits",
    "is_top1",
    "label_mask",
)
_FLAGS = ("is_top1", "label_mask")


def add_known_loss(output: Any, divisor: Tensor | float, coefficient: float, share: float) -> Any:
    """Return an output of the fused head with the loss of a micro-batch.

    Args:
        share: the share of the batch's rows that the micro-batch has.
    """
    loss = -output["log_probs"].sum() / divisor
    if output.get("aux_loss") is not None:
        loss = loss + coefficient * share * output["aux_loss"]
    return replace(output, loss=loss)


def detach_values(output: Any) -> Any:
    """Return an output without its graph."""
    names = ("loss", "aux_loss", *_PER_TOKEN)
    return replace(output, **{n: x.detach() for n in names if (x := output.get(n)) is not None})


def join_outputs(
    outputs: list[Any], source: int, group: dist.ProcessGroup, device: torch.device
) -> dict[str, Tensor]:
    """Return the per-token outputs of all micro-batches on every rank of `group`.

    Args:
        outputs: the outputs of all micro-batches on the rank `source`; unused on other ranks.
    """
    is_source = dist.get_rank() == source
    exist = torch.zeros(len(_PER_TOKEN), device=device)
    if is_source:
        exist += torch.tensor([outputs[0].get(n) is not None for n in _PER_TOKEN], device=device)
    joined = {}
    dist.broadcast(exist, source, group=group)
    for name, exists in zip(_PER_TOKEN, exist.tolist(), strict=True):
        if exists:
            own = torch.cat([output[name] for output in outputs]) if is_source else None
            if own is not None and name in _FLAGS:
                own = own.to(torch.uint8)
            values = broadcast_tensor(own, source, group, device)
            joined[name] = values.bool() if name in _FLAGS else values
    return joined


def make_output(
    joined: dict[str, Tensor],
    aux_loss: Tensor | None,
    gradients: StepGradients | None,
    divisor: Tensor | float,
    coefficient: float,
) -> Any:
    """Return the output of a batch, whose backward adds `gradients` to the parameters."""
    values = dict(joined)
    if aux_loss is not None:
        values["aux_loss"] = aux_loss
    if gradients is not None:
        outputs = {n: x for n, x in values.items() if n in ("log_probs", "entropy", "aux_loss")}
        mask = joined["label_mask"]
        scale_of: Callable[..., Tensor] = partial(
            _find_scale, tuple(outputs), mask, divisor, coefficient
        )
        values |= gradients.connect(outputs, scale_of)
    return make_fused_output(**values)


def _find_scale(
    names: tuple[str, ...],
    mask: Tensor,
    divisor: Tensor | float,
    coefficient: float,
    *grads: Tensor | None,
) -> Tensor:
    """Return the caller's loss divided by the known loss, derived from the caller's gradients.

    Raises:
        ValueError: the loss of the caller is not a multiple of the known loss.
    """
    by_name = dict(zip(names, grads, strict=True))
    if by_name.get("entropy") is not None:
        raise _make_refusal("uses the entropy")
    grad = by_name["log_probs"]
    if grad is not None and mask.any():
        grad = grad[mask]
    # The trainer sums over all positions, so a batch without labels has the same weights.
    token_weights = torch.zeros(0) if grad is None else -grad.flatten()
    token_weights = token_weights.double()
    has_aux_loss = "aux_loss" in names and coefficient != 0
    aux_loss_grad = by_name.get("aux_loss")
    if not has_aux_loss and aux_loss_grad is not None and aux_loss_grad.ne(0).any():
        raise _make_refusal("adds an aux loss that the model's config leaves out")
    scale = token_weights.mean() * divisor if len(token_weights) else torch.zeros(()).double()
    if has_aux_loss:
        aux_loss_scale = torch.zeros(()) if aux_loss_grad is None else aux_loss_grad / coefficient
        aux_loss_scale = aux_loss_scale.to(scale.device, torch.float64)
        if not len(token_weights):
            return aux_loss_scale
        if (scale - aux_loss_scale).abs() > ROUNDING * scale.abs():
            raise _make_refusal("weighs tokens and the router's aux loss in another way")
    if len(token_weights):
        spread = (token_weights - token_weights[0]).abs().max()
        if spread > ROUNDING * token_weights[0].abs():
            raise _make_refusal("gives tokens different weights")
    return scale


def _make_refusal(what: str) -> ValueError:
    return ValueError(
        f"pp_size > 1 computes gradients during the forward, for the mean loss of all tokens, but "
        f"the loss of this backward {what} (as loss_type='dft', DPO and GRPO do); train with "
        f"SFTTrainer's default loss_type='nll' and router_aux_loss_coef=0, or leave pp_size at 1"
    )
