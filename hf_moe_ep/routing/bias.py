"""Balance without a loss: after each optimizer step the bias of a router's choice moves a little.

A router with a correction bias adds it to its scores for the choice alone; weights, and so outputs
and gradients, are those of the scores. After each step, per layer, from the pairs c_e that all
ranks' tokens of that step sent to expert e:

    b_e += rate * sign(mean(c) - c_e)

"Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts" (arXiv 2408.15664, algorithm
1); DeepSeek-V3 (arXiv 2412.19437, section 2.1.2) with a rate of 0.001. Its complement, a weak loss
per sequence, is not here.

    counts     [6, 2, 4, 4]      mean 4
    b moves    -rate, +rate, 0, 0

Counts are integers that every rank has alike, so the signs are exact and all ranks hold the same
bits. Layers without such a bias, or without a token, stay as they are. Accelerate's optimizers,
and so the Trainer's, bring the update along (`integrations/optimizers.py`); an own loop calls
`update_router_bias(model)`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from hf_moe_ep.architectures import Parts
from hf_moe_ep.routing.counts import count_anew, counts_of_all_ranks
from hf_moe_ep.routing.load import check_counts
from hf_moe_ep.state import CorrectionBias, ModelState, patched_state
from hf_moe_ep.upstream.adapters import wraps_for_adapters
from hf_moe_ep.upstream.models import is_correction_bias
from hf_moe_ep.upstream.module_names import stock_name
from hf_moe_ep.upstream.modules import own_buffers

_READER = "bias"


def check(parts: Parts, state: ModelState) -> None:
    """Raise where the config asks for an update that this model's routers cannot have."""
    rate = state.config.bias_update_rate
    if rate is None:
        return
    check_counts(state, f"bias_update_rate={rate}")
    if any(map(wraps_for_adapters, parts.root.modules())):
        raise ValueError(
            f"bias_update_rate={rate}: this model has adapters, which are saved without the model "
            f"around them, so what the biases have learned would be lost; leave it out"
        )
    biases = _find_biases(parts)
    if not biases:
        raise ValueError(
            f"bias_update_rate={rate}: no router of {parts.plan.model_type} has a correction bias, "
            f"a tensor beside its weights that no gradient reaches; leave it out, and balance with "
            f"the model's own load-balancing loss, if it has one (output_router_logits=True, and "
            f"aux_loss_per_layer=True)"
        )
    for experts, found in biases.items():
        _check_bias(experts, found, parts.num_experts, rate)


def attach(parts: Parts, state: ModelState) -> None:
    """Tell every MoE layer of its router's bias, which is kept in fp32 from here on."""
    if state.config.bias_update_rate is None:
        return
    biases = _find_biases(parts)
    for layer, experts in zip(state.moe_layers, parts.experts, strict=True):
        if experts not in biases:
            continue
        ((_, layer.correction),) = biases[experts]
        bias = layer.correction.tensor
        if bias.dtype.itemsize < torch.float32.itemsize:
            # Where a bias is large, a step of the rate would be less than half a unit of bf16.
            bias.data = bias.detach().float()


def restore_dtypes(state: ModelState) -> None:
    """Give every correction bias the dtype that it had before `attach`; its values are rounded."""
    for layer in state.moe_layers:
        if layer.correction is not None:
            bias = layer.correction.tensor
            bias.data = bias.detach().to(layer.correction.stock_dtype)


def update_router_bias(model: nn.Module) -> None:
    """Move the routers' correction biases after a step of an own loop; every rank calls this.

        loss.backward()
        optimizer.step()
        update_router_bias(model)

    `patch(model, bias_update_rate=0.001)` first. What counts are the tokens since the last call, of
    all micro-batches and ranks: one all-reduce of a number per expert and layer, for which the host
    does not wait. Without any token since then nothing moves, so a second call does no harm, and
    under Accelerate and the Trainer, which call it by themselves, none is needed. They drop the
    counts of a step that a gradient scaler skips; a call moves the biases by whatever was counted.

    Raises:
        ValueError: the model is not patched, or without bias_update_rate.
    """
    state = patched_state(model)
    if state.config.bias_update_rate is None:
        raise ValueError(
            "update_router_bias has no rate: this model was patched without bias_update_rate; "
            "write patch(model, bias_update_rate=0.001)"
        )
    update_biases(state)


@torch.no_grad()
def update_biases(state: ModelState, *, skipped: bool = False) -> None:
    """Move the biases by what was counted since the last time.

    Where the optimizer of any rank has `skipped` its step, as it does with fp16 gradients that are
    not finite, the counts are dropped as those gradients are.
    """
    rate = state.config.bias_update_rate
    assert rate is not None
    counts, (num_skipped,) = counts_of_all_ranks(state, _READER, int(skipped))
    count_anew(state, _READER)
    # sign(mean - load), exact: mean = sum / E.
    directions = (counts.sum(1, keepdim=True) - counts.shape[1] * counts).sign()
    directions *= num_skipped == 0
    for layer in state.moe_layers:
        if layer.correction is not None:
            bias = layer.correction.tensor
            direction = directions[layer.index].view_as(bias)
            bias.add_(direction.to(bias.device, bias.dtype), alpha=rate)


# For each experts module the tensors that may be its router's bias, by their names.
Biases = dict[str, list[tuple[str, CorrectionBias]]]


def _find_biases(parts: Parts) -> Biases:
    """Find what corrects the choice beside each experts module: in the block that holds it."""
    biases: Biases = {}
    for name, bias in _correction_biases(parts.root):
        beside = [e for e in parts.experts if name.startswith(f"{e.rpartition('.')[0]}.")]
        if beside:
            # The nearest, where blocks lie within each other.
            biases.setdefault(max(beside, key=len), []).append((name, bias))
    return biases


def _correction_biases(root: nn.Module) -> Iterator[tuple[str, CorrectionBias]]:
    for module_name, module in root.named_modules():
        parameters = (name for name, _ in module.named_parameters(recurse=False))
        for name in [*own_buffers(module), *parameters]:
            bias = getattr(module, name)
            if is_correction_bias(name) and isinstance(bias, Tensor):
                found = CorrectionBias(module, name, bias.dtype)
                yield f"{stock_name(module_name)}.{name}", found


def _check_bias(
    experts: str, found: list[tuple[str, CorrectionBias]], num_experts: int, rate: float
) -> None:
    if len(found) > 1:
        names = ", ".join(name for name, _ in found)
        raise ValueError(
            f"bias_update_rate={rate}: several tensors could correct the choice of {experts}: "
            f"{names}; leave it out"
        )
    ((name, bias),) = found
    if bias.tensor.numel() != num_experts:
        raise ValueError(
            f"bias_update_rate={rate}: {name} has {bias.tensor.numel()} entries and the layer "
            f"{num_experts} experts, so its router chooses something that is no expert and is not "
            f"counted; leave it out"
        )
    if bias.tensor.requires_grad:
        raise ValueError(
            f"bias_update_rate={rate}: {name} is a parameter that an optimizer trains, and two "
            f"would move it; freeze it (requires_grad_(False)) before patch()"
        )
