"""Compute the experts of this rank on rows of hidden states.

The weights are the stacked parameters of the stock module, `[L, 2F, H]` and `[L, H, F]` or their
transposes (`moe/layer.py` explains the letters). FSDP2 has already all-gathered the weights of all
experts of this rank. Quantised weights are bytes with scales (`ops/quantised.py`). Routing weights
keep their dtype here: if they are sent to other ranks, `Tokens.join` in `dispatcher.py` casts them.

`grad_scale` multiplies the experts' gradients where they are computed, in `ops/torch_mlp.py` and
`ops/triton_mlp.py`, because FSDP2 adds up these gradients without a division. `grad_scale` is the
reciprocal of the first result of `choose_grad_divisors` (`sharding/options.py`).

`choose_compute` decides once, when the model is patched, how a module is computed. To find the
formula, it runs the module's own gate on numbers, and compares the results with the results of the
known formulas. A known gate with a new name is therefore accepted, and any other gate is refused,
even if it resembles a known gate.
"""

from __future__ import annotations

import importlib.util
import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hf_moe_ep.etp import pad_bias, sum_factor_gradients, view_in_stock_shape
from hf_moe_ep.lora.factors import join
from hf_moe_ep.ops.dtypes import choose_compute_dtype
from hf_moe_ep.ops.expert_mlp import expert_mlp
from hf_moe_ep.ops.formula import ACTIVATIONS, ONLY_IN_TORCH, ExpertFormula, activate
from hf_moe_ep.ops.interface import ExpertWeights, Masters
from hf_moe_ep.ops.quantised import BLOCK_SCALE, NESTED_SCALE, Quantisation, check_sizes
from hf_moe_ep.state import STATE, Compute, MoELayer
from hf_moe_ep.upstream.experts_interface import (
    ExpertsFlags,
    get_experts_flags,
    get_experts_gate,
    hides_transposition,
    list_gate_caps,
    list_gate_constants,
    post_expert_norm,
)

# Tensor cores and 16-byte loads need sizes that are multiples of this number.
ALIGNMENT = 16


def choose_compute(
    module: nn.Module,
    requested: str,
    *,
    recompute: bool,
    model_type: str = "",
    quantisation: Quantisation | None = None,
    etp_size: int = 1,
) -> Compute:
    """Decide how `module` is computed; `requested` is "auto", "torch" or "triton".

    `model_type` is named in errors. `quantisation` is the format of the weights after sharding, and
    `etp_size` the number of ranks over which sharding cuts each expert (`etp.py`).

    Raises:
        ValueError: no known formula reproduces the gate; the weights are quantised already, or
            `quantisation` cannot divide them into blocks; Triton is requested and cannot run.
    """
    _check_weights(module)
    flags = get_experts_flags(module)
    _check_layout(module, flags)
    formula = _find_formula(module, flags, model_type)
    required = requested == "triton"
    if quantisation is not None:
        _check_blocks(module, flags, quantisation)
    reason = (
        "torch was requested"
        if requested == "torch"
        else _why_not_triton(module, flags, formula, required, etp_size)
    )
    if required and reason:
        raise ValueError(
            f"experts_backend='triton' cannot run {type(module).__name__} here: {reason}; "
            f"use experts_backend='auto' or 'torch'"
        )
    return Compute(
        formula,
        transposed=flags.is_transposed,
        backend="torch" if reason else "triton",
        reason=reason,
        required=required,
        recompute=recompute,
        quantisation=quantisation,
        weights_inputs=bool(getattr(module, "weights_inputs", False)),
        turns_factors=hides_transposition(module),
    )


def run_experts(
    experts: Any,
    compute: Compute,
    rows_RH: Tensor,
    expert_ids_RK: Tensor,
    weights_RK: Tensor,
    *,
    counts_L: list[int] | None,
    grad_scale: float,
    weights: ExpertWeights | None = None,
    skip_output: bool = False,
) -> Tensor:
    """Compute the weighted sum of each row's experts on this rank, in the dtype of `rows_RH`.

    `hf_moe_ep.ops.expert_mlp` explains the arguments. `weights` is the result of
    `collect_weights`, if the caller has already called that function. With `skip_output` the values
    of the result may be NaN.
    """
    compute_RH = rows_RH.to(choose_compute_dtype(rows_RH))
    weights = weights or collect_weights(experts, compute, rows_RH)

    def compute_weighted_sum(
        rows: Tensor, ids: Tensor, weights_of_pairs: Tensor, *, skip_output: bool = False
    ) -> Tensor:
        return expert_mlp(
            rows,
            ids,
            weights_of_pairs,
            weights,
            compute.formula,
            counts_L=counts_L,
            grad_scale=grad_scale,
            recompute=compute.recompute,
            skip_output=skip_output,
            backend=_choose_backend(compute, rows),
        )

    norm = post_expert_norm(experts)
    if norm is None and not compute.weights_inputs:
        out_RH = compute_weighted_sum(
            compute_RH, expert_ids_RK, weights_RK, skip_output=skip_output
        )
        return out_RH.to(rows_RH.dtype)
    # Routing weights multiply the inputs of experts, or a norm follows each expert. Each pair of
    # row and expert therefore becomes a row of its own, which the experts compute with weight 1.
    num_rows, top_k = expert_ids_RK.shape
    pairs = compute_RH.repeat_interleave(top_k, 0)
    ids = expert_ids_RK.reshape(-1, 1)
    ones = torch.ones_like(ids, dtype=weights_RK.dtype)
    if norm is None:
        pairs = (pairs * weights_RK.reshape(-1, 1)).to(compute_RH.dtype)
        out = compute_weighted_sum(pairs, ids, ones)
        return out.view(num_rows, top_k, -1).sum(1).to(rows_RH.dtype)
    # The gradients of the norm's parameters are not scaled here, because FSDP2 shards these
    # parameters with the decoder layer and averages their gradients.
    y_RKH = norm(compute_weighted_sum(pairs, ids, ones))
    weights_RK = weights_RK.masked_fill(expert_ids_RK >= weights.up.shape[0], 0)
    out_RH = (y_RKH.view(num_rows, top_k, -1) * weights_RK.unsqueeze(-1)).sum(1)
    return out_RH.to(rows_RH.dtype)


def collect_weights(
    experts: Any, compute: Compute, like: Tensor, first_expert: int = 0
) -> ExpertWeights:
    """Collect the weights of this rank's experts for rows with the dtype of `like`.

    `first_expert` is the number of this rank's first expert. The number selects this rank's experts
    in adapters that are not sharded.
    """
    dtype = choose_compute_dtype(like)
    quantised = compute.quantisation is not None
    layer: MoELayer | None = getattr(experts, STATE, None)
    whole_dtype = None if layer is None else layer.weights_dtype
    # FSDP2 casts none of the tensors of a module with quantised weights, so biases are cast here.
    must_cast = quantised or torch.is_autocast_enabled(like.device.type)
    meshes = None if layer is None else layer.model.meshes

    def get_local(name: str, num_dims: int = 3) -> Tensor | None:
        parameter = getattr(experts, name, None)
        tensor = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        if tensor is None or tensor.ndim == num_dims:
            return tensor
        # Gate and up are two dims (2, F) of the tensor (`etp.py`).
        has_transposed_matrices = compute.transposed and not quantised and num_dims == 3
        return view_in_stock_shape(tensor, 2 if has_transposed_matrices else 1)

    def cast(tensor: Tensor | None) -> Tensor | None:
        target = dtype if must_cast else whole_dtype
        return tensor if tensor is None or target is None else tensor.to(target)

    up_name, down_name = compute.parameters
    up, down = get_local(up_name), get_local(down_name)
    options: dict[str, Any] = {}
    if compute.quantisation is not None:
        options["quantised"] = compute.quantisation.kind
        for name, parameter in (("up", up_name), ("down", down_name)):
            options[f"{name}_block_scale"] = get_local(parameter + BLOCK_SCALE)
            options[f"{name}_nested_scale"] = get_local(parameter + NESTED_SCALE)
    elif whole_dtype is None:
        up, down = cast(up), cast(down)
    assert up is not None and down is not None
    if compute.transposed and not quantised:
        up, down = up.transpose(1, 2), down.transpose(1, 2)
    matrix_dtype = (dtype if must_cast else whole_dtype) or up.dtype
    if not quantised and any(matrix.dtype != matrix_dtype for matrix in (up, down)):
        options["masters"] = Masters(matrix_dtype)
    if layer is not None:
        local_experts = slice(first_expert, first_expert + len(up))
        factor_dtype = dtype if quantised else matrix_dtype
        options |= _collect_factors(layer, compute, local_experts, factor_dtype)
    up_bias, down_bias = cast(get_local(f"{up_name}_bias", 2)), cast(get_local("down_proj_bias", 2))
    if meshes is not None and meshes.etp_size > 1 and down_bias is not None:
        down_bias = pad_bias(down_bias, like.shape[1], meshes)
    return ExpertWeights(up, up_bias, down, down_bias, **options)


def _collect_factors(
    layer: MoELayer, compute: Compute, local_experts: slice, dtype: torch.dtype
) -> dict[str, Any]:
    """Collect the factors and scales of the active adapters, as fields of `ExpertWeights`."""
    meshes = layer.model.meshes
    factors: dict[str, Any] = {}
    for name, parameter in zip(("up", "down"), compute.parameters, strict=True):
        adapters = layer.adapters.get(parameter)
        if not adapters:
            continue
        a, b, scale = join(adapters, local_experts)
        if compute.turns_factors:
            a, b = b.transpose(1, 2).contiguous(), a.transpose(1, 2).contiguous()
        if meshes is not None and meshes.etp_size > 1:
            # Every rank of an etp group has the whole factor with the dim H.
            if name == "up":
                a = sum_factor_gradients(a, meshes)
            else:
                b = sum_factor_gradients(b, meshes)
        factors |= {f"{name}_a": a.to(dtype), f"{name}_b": b.to(dtype), f"{name}_scale": scale}
    return factors


def _find_formula(module: nn.Module, flags: ExpertsFlags, model_type: str) -> ExpertFormula:
    """Return the formula that gives the same results as the module's own gate."""
    _, limits = list_gate_constants(module)
    edge = 2 * max(limits, default=10.0)
    # A stride of 197, which has no common divisor with 512, shuffles the values; a random order
    # would advance the user's random generator. The device is the CPU even if the model is patched
    # under torch.device("meta").
    values = torch.linspace(-edge, edge, 512, dtype=torch.float64, device="cpu")
    pre_AG = values[torch.arange(512, device="cpu") * 197 % 512].view(32, 16)
    try:
        gate_out_AF = get_experts_gate(module)(pre_AG)
    except AttributeError as error:
        raise ValueError(
            f"the gate of {type(module).__name__} does not run: {error}; transformers' experts "
            f"interface needs its activation as act_fn, or a method _apply_gate"
        ) from error
    for formula in _list_formulas(module, flags):
        out_AF = activate(pre_AG, formula)
        same_shape = out_AF.shape == gate_out_AF.shape
        # The tolerance allows for gates that always compute in fp32.
        if same_shape and torch.allclose(out_AF, gate_out_AF.double(), 1e-5, 1e-5):
            return formula
    model_text = f" of {model_type}" if model_type else ""
    raise ValueError(
        f"the gate of {type(module).__name__}{model_text} is none of {', '.join(ACTIVATIONS)} "
        f"(plain, clamped, or with soft caps); experts_backend='eager' runs the model's own code "
        f"with ep_size=1"
    )


def _list_formulas(module: nn.Module, flags: ExpertsFlags) -> Iterator[ExpertFormula]:
    """Yield every formula that fits the flags of a module and the constants of its gate."""
    gated, interleaved = flags.has_gate, not flags.is_concatenated
    alphas, limits = list_gate_constants(module)
    activations = [("swish", alpha) for alpha in sorted({1.0, *alphas})]
    activations += [(name, 1.0) for name in ACTIVATIONS if name != "swish"]
    limits_and_offsets = itertools.product([math.inf, *sorted(limits)], (0.0, 1.0))
    for (name, alpha), (limit, offset) in itertools.product(activations, limits_and_offsets):
        yield ExpertFormula(gated, interleaved, name, alpha, limit, offset)
    caps = sorted(list_gate_caps(module)) if gated else []
    for gate_cap, up_cap in itertools.product([*caps, math.inf], repeat=2):
        yield ExpertFormula(gated, interleaved, gate_cap=gate_cap, up_cap=up_cap)


def _check_weights(module: nn.Module) -> None:
    """Raise ValueError for weights that are quantised already: FSDP2 cannot shard them."""
    for name, weight in module.named_parameters(recurse=False):
        kind = type(weight)
        packed = not weight.is_floating_point() or weight.element_size() < 2
        if kind not in (nn.Parameter, DTensor) or packed:
            raise ValueError(
                f"{name} of {type(module).__name__} is quantised ({kind.__name__}, {weight.dtype}) "
                f"and no library shards such stacked weights under FSDP2; load the experts in bf16 "
                f"and leave them frozen under LoRA"
            )


def _check_layout(module: nn.Module, flags: ExpertsFlags) -> None:
    """Raise ValueError if names or shapes of stacked weights contradict the interface's flags."""
    kind = type(module).__name__
    up_name = "gate_up_proj" if flags.has_gate else "up_proj"
    weights = {name: p for name, p in module.named_parameters(recurse=False) if p.dim() > 1}
    missing = [name for name in (up_name, "down_proj") if name not in weights]
    if missing:
        raise ValueError(
            f"{kind} has no {' and no '.join(missing)} but {', '.join(weights) or 'no weights'}; "
            f"with has_gate={flags.has_gate} transformers' experts interface "
            f"(use_experts_implementation) needs {up_name} and down_proj: rename the weights"
        )
    up, down = weights[up_name].shape, weights["down_proj"].shape
    dim_in, dim_out = (1, 2) if flags.is_transposed else (2, 1)
    if (up[dim_in], up[dim_out]) != (down[dim_out], down[dim_in] * (1 + flags.has_gate)):
        order = "in, out" if flags.is_transposed else "out, in"
        raise ValueError(
            f"{up_name} {[*up]} and down_proj {[*down]} of {kind} do not fit together as "
            f"[experts, {order}]; if they are transposed, declare that in transformers: "
            f"use_experts_implementation(is_transposed={not flags.is_transposed})"
        )


def _check_blocks(module: nn.Module, flags: ExpertsFlags, quantisation: Quantisation) -> None:
    for name in ("gate_up_proj" if flags.has_gate else "up_proj", "down_proj"):
        rows, columns = getattr(module, name).shape[1:]
        shape_OI = (columns, rows) if flags.is_transposed else (rows, columns)
        check_sizes(f"{name} of {type(module).__name__}", shape_OI, quantisation)


def _why_not_triton(
    module: nn.Module, flags: ExpertsFlags, formula: ExpertFormula, required: bool, etp_size: int
) -> str:
    """Return the reason why the Triton kernels cannot compute this module, or "" if they can."""
    if flags.has_post_expert_norm:
        return "a norm follows each expert"
    if formula.capped:
        return "its gate has soft caps"
    if formula.activation in ONLY_IN_TORCH:
        return "its gate is clamped after the activation"
    down = module.down_proj
    assert isinstance(down, Tensor)
    _, hidden, ffn = down.transpose(1, 2).shape if flags.is_transposed else down.shape
    ffn //= etp_size
    if hidden % ALIGNMENT or ffn % ALIGNMENT:
        return f"sizes {hidden} and {ffn} are not both multiples of {ALIGNMENT}"
    return explain_missing_kernels(interpreted_too=required)


def explain_missing_kernels(*, interpreted_too: bool = False) -> str:
    """Return the reason why no Triton kernel can run on this machine, or "" if kernels can run.

    If `interpreted_too`, it is enough that Triton's interpreter can run kernels.
    """
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if interpreted_too:
        # This import is needed only to ask for the interpreter.
        from hf_moe_ep.ops import triton_mlp

        if triton_mlp.interpreted():
            return ""
    if not torch.cuda.is_available():
        return "no CUDA GPU"
    capability = torch.cuda.get_device_capability()
    return "" if capability >= (8, 0) else f"compute capability {capability} is below (8, 0)"


def _choose_backend(compute: Compute, rows_RH: Tensor) -> str:
    """Return the backend of these rows, an argument of `expert_mlp`.

    It is "torch" if the kernels do not support the device or dtype of the rows. Otherwise it is
    "triton" if the user requires the kernels, and "auto" if not.
    """
    if compute.backend == "torch":
        return "torch"
    from hf_moe_ep.ops import triton_mlp

    if triton_mlp.covers(rows_RH):
        return "triton" if compute.required else "auto"
    if compute.required:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in triton_mlp.DTYPES)
        raise ValueError(
            f"experts_backend='triton' computes {names} on CUDA, not {rows_RH.dtype} on "
            f"{rows_RH.device}; use experts_backend='auto'"
        )
    return "torch"
