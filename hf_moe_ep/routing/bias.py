"""`update_router_bias`: balance the experts' load by correction biases of routers, not by a loss.

Some routers add a correction bias to their scores, but only to choose experts; the routing weights,
and so outputs and gradients, depend on the scores alone. After each optimizer step the bias b_e of
expert e is updated from c_e, the number of tokens of all ranks that chose expert e in this step:

    b_e += rate * sign(mean(c) - c_e)

    counts        [6, 2, 4, 4]      mean 4
    b changes by  -rate, +rate, 0, 0

This is algorithm 1 of "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts" (arXiv
2408.15664). DeepSeek-V3 (arXiv 2412.19437, section 2.1.2) uses a rate of 0.001. DeepSeek-V3's
additional weak loss per sequence is not implemented.

Counts are integers and equal on all ranks, so the signs are exact, and the biases of all ranks stay
equal bit by bit. A layer without a correction bias, or without tokens, is not changed. The
optimizers of Accelerate, and therefore of the Trainer, make the update
(`integrations/optimizers.py`); your own loop calls `update_router_bias(model)`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from hf_moe_ep.architectures import Parts
from hf_moe_ep.routing.counts import reset_counts, sum_counts
from hf_moe_ep.routing.load import check_tokens_are_counted
from hf_moe_ep.state import CorrectionBias, ModelState, patched_state
from hf_moe_ep.upstream.adapters import wraps_for_adapters
from hf_moe_ep.upstream.models import is_correction_bias
from hf_moe_ep.upstream.module_names import get_stock_name
from hf_moe_ep.upstream.modules import get_own_buffers, keep_dtypes

_READER = "bias"


def check(parts: Parts, state: ModelState) -> None:
    """Raise ValueError if the config requests updates and a router has no usable bias."""
    rate = state.config.bias_update_rate
    if rate is None:
        return
    check_tokens_are_counted(state, f"bias_update_rate={rate}")
    if any(map(wraps_for_adapters, parts.root.modules())):
        refuse_adapters(state)
    biases = _find_biases(parts)
    if not biases:
        raise ValueError(
            f"bias_update_rate={rate}: no router of {parts.plan.model_type} has a correction bias, "
            f"a tensor that gets no gradient; leave bias_update_rate out, and balance with the "
            f"model's own load-balancing loss, if it has one (output_router_logits=True, and "
            f"aux_loss_per_layer=True)"
        )
    for experts, candidates in biases.items():
        _check_bias(experts, candidates, parts.num_experts, rate)


def refuse_adapters(state: ModelState) -> None:
    """Raise ValueError if a model that gets adapters would have its biases updated."""
    rate = state.config.bias_update_rate
    if rate is not None:
        raise ValueError(
            f"bias_update_rate={rate}: this model has adapters, which are saved without the "
            f"model's own tensors, so the updated biases would be lost; leave bias_update_rate out"
        )


def attach(parts: Parts, state: ModelState) -> None:
    """Store the correction bias of every router in its MoE layer, and convert it to fp32.

    The bias stays in fp32 if the model is cast later, for example by `bf16_full_eval`.
    """
    if state.config.bias_update_rate is None:
        return
    biases = _find_biases(parts)
    for layer, experts in zip(state.moe_layers, parts.experts, strict=True):
        if experts not in biases:
            continue
        ((_, layer.correction),) = biases[experts]
        bias = layer.correction.tensor
        if bias.dtype.itemsize < torch.float32.itemsize:
            # If a bf16 bias is much larger than the rate, the sum is rounded to the old bias.
            bias.data = bias.detach().float()
        keep_dtypes(layer.correction.owner, state.replace, [layer.correction.name])


def restore_dtypes(state: ModelState) -> None:
    """Convert every correction bias back to the dtype that it had before `attach`."""
    for layer in state.moe_layers:
        if layer.correction is not None:
            bias = layer.correction.tensor
            bias.data = bias.detach().to(layer.correction.stock_dtype)


def update_router_bias(model: nn.Module) -> None:
    """Update the routers' correction biases after a step of your own loop; every rank calls this.

        loss.backward()
        optimizer.step()
        update_router_bias(model)

    Patch the model with `patch(model, bias_update_rate=0.001)`. The update uses the tokens of all
    micro-batches and ranks since the last call. A call costs one all-reduce of one number per
    expert and layer, without a host sync. Without new tokens no bias changes, so a second call does
    no harm. Under Accelerate and the Trainer no call is needed: their optimizers make the update,
    and drop the counts of a step that a gradient scaler skips. This function never drops counts.

    This function does not check that every rank calls it, because the check would need a host sync.
    If only some ranks call it, for example inside `if is_main_process:`, they wait for the other
    ranks in the all-reduce until the process group's timeout, or receive the numbers of another
    collective.

    Raises:
        ValueError: the model is not patched, or was patched without bias_update_rate.
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
    """Update the biases from the counts since the last update.

    `skipped` is True if this rank's optimizer skipped its step, because fp16 gradients were not
    finite. If at least one rank skipped its step, the counts are dropped like the gradients.
    """
    rate = state.config.bias_update_rate
    assert rate is not None
    counts, (num_skipped,) = sum_counts(state, _READER, int(skipped))
    reset_counts(state, _READER)
    # This is sign(mean - count), computed as sign(sum - E * count) to be exact.
    directions = (counts.sum(1, keepdim=True) - counts.shape[1] * counts).sign()
    directions *= num_skipped == 0
    for layer in state.moe_layers:
        if layer.correction is not None:
            bias = layer.correction.tensor
            direction = directions[layer.index].view_as(bias)
            bias.add_(direction.to(bias.device, bias.dtype), alpha=rate)


# {name of an experts module: candidates (name, bias) for the correction bias of its router}
Biases = dict[str, list[tuple[str, CorrectionBias]]]


def _find_biases(parts: Parts) -> Biases:
    """Find the candidates for correction biases in the MoE block of each experts module.

    A MoE block contains a router and experts.
    """
    biases: Biases = {}
    for name, bias in _list_correction_biases(parts.root):
        same_block = [e for e in parts.experts if name.startswith(f"{e.rpartition('.')[0]}.")]
        if same_block:
            # Blocks can be nested. The experts with the longest name are in the innermost block.
            biases.setdefault(max(same_block, key=len), []).append((name, bias))
    return biases


def _list_correction_biases(root: nn.Module) -> Iterator[tuple[str, CorrectionBias]]:
    """Yield (name, bias) of every parameter and buffer that is named like a correction bias."""
    for module_name, module in root.named_modules():
        parameters = (name for name, _ in module.named_parameters(recurse=False))
        for name in [*get_own_buffers(module), *parameters]:
            bias = getattr(module, name)
            if is_correction_bias(name) and isinstance(bias, Tensor):
                correction_bias = CorrectionBias(module, name, bias.dtype)
                yield f"{get_stock_name(module_name)}.{name}", correction_bias


def _check_bias(
    experts: str, candidates: list[tuple[str, CorrectionBias]], num_experts: int, rate: float
) -> None:
    if len(candidates) > 1:
        names = ", ".join(name for name, _ in candidates)
        raise ValueError(
            f"bias_update_rate={rate}: several tensors could be the correction bias of {experts}: "
            f"{names}; leave bias_update_rate out"
        )
    ((name, bias),) = candidates
    if bias.tensor.numel() != num_experts:
        raise ValueError(
            f"bias_update_rate={rate}: {name} has {bias.tensor.numel()} entries, but the layer has "
            f"{num_experts} experts: the router also chooses entries that are not experts, and "
            f"nothing counts these choices; leave bias_update_rate out"
        )
    if bias.tensor.requires_grad:
        raise ValueError(
            f"bias_update_rate={rate}: {name} is a trained parameter, which the optimizer changes "
            f"as well; freeze it (requires_grad_(False)) before patch()"
        )
