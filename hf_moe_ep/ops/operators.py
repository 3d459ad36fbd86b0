"""Register the expert MLP as two operators of torch.library, and connect them for autograd.

torch.compile and activation checkpointing see only `hf_moe_ep::expert_mlp` and its backward. They
do not trace into these operators. `Settings` holds the arguments that are not tensors.
`run_forward`, `save_for_backward` and `run_backward` are the parts of the autograd formula.
`expert_mlp.py` calls them without the operators if nothing has to see an operator.

    expert_mlp(rows, weights, *experts, expert_ids, counts, *settings) -> out, *kept
    expert_mlp_backward(grad, saved[], needs[], *settings) -> grads[]

    experts    one argument per name of WEIGHT_NAMES, None for a tensor that does not exist
    settings   the four lists of `Settings.arguments`
    kept       saved for backward: pre_AG (empty unless `keep_pre`) and the five tensors of Routing
    saved      rows, weights, *experts, *kept
    needs      for rows, weights and each tensor of experts: True if its gradient is needed
    grads      the needed gradients, in the order of `needs`
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_moe_ep.ops import torch_mlp
from hf_moe_ep.ops.autograd import make_tensor_without_values
from hf_moe_ep.ops.formula import ExpertFormula
from hf_moe_ep.ops.interface import (
    WEIGHT_NAMES,
    ExpertGrads,
    ExpertWeights,
    Routing,
    allocate_grad,
)

# Inputs that can have a gradient, in the order of the forward operator's arguments.
INPUT_NAMES = ("rows", "weights", *WEIGHT_NAMES)


class Settings(NamedTuple):
    """The settings of a call, which the operators take as four lists of one type each.

    torch.library needs about 5 microseconds per argument and call, so 4 lists are faster than 15
    arguments.

    Attributes:
        gated, interleaved, activation, alpha, limit, up_offset, gate_cap, up_cap: the fields of
            ExpertFormula.
        up_scale, down_scale: scales of the adapters.
        quantised: format of the matrices (`quantised.py`), or "" if they are not quantised.
        grad_scale: multiplies the gradients of the experts' own tensors.
        keep_pre: True if the pre-activations are kept for backward.
        skip_output: True if only the tensors that backward needs are computed, not the output.
        trained: names (of INPUT_NAMES) of the inputs that require a gradient.
        backend: "torch", "triton", or "auto", which means triton if the kernels can be built.
    """

    gated: bool
    interleaved: bool
    keep_pre: bool
    skip_output: bool
    alpha: float
    limit: float
    up_offset: float
    gate_cap: float
    up_cap: float
    up_scale: float
    down_scale: float
    grad_scale: float
    activation: str
    quantised: str
    backend: str
    trained: Sequence[str]

    def arguments(self) -> tuple[Any, ...]:
        """Return the lists flags, numbers, words and trained of the operators' schemas."""
        return self[:4], self[4:12], self[12:15], self.trained

    @staticmethod
    def from_arguments(arguments: Sequence[Sequence[Any]]) -> Settings:
        """Build the settings from the values that `arguments` returned."""
        flags, numbers, words, trained = arguments
        values: list[Any] = [*flags, *numbers, *words, tuple(trained)]
        return Settings(*values)

    @property
    def formula(self) -> ExpertFormula:
        gate = (self.gated, self.interleaved, self.activation)
        return _make_formula(
            *gate, self.alpha, self.limit, self.up_offset, self.gate_cap, self.up_cap
        )

    def experts(self, tensors: Sequence[Tensor | None]) -> ExpertWeights:
        """Build ExpertWeights from these settings and tensors in the order of WEIGHT_NAMES."""
        named: dict[str, Any] = dict(zip(WEIGHT_NAMES, tensors, strict=True))
        return ExpertWeights(
            **named,
            up_scale=self.up_scale,
            down_scale=self.down_scale,
            quantised=self.quantised,
        )


@functools.cache
def _make_formula(*parameters: Any) -> ExpertFormula:
    """Return the formula with these parameters. All layers and steps need the same few formulas."""
    return ExpertFormula(*parameters)


_SETTINGS = "bool[] flags, float[] numbers, str[] words, str[] trained"
_EXPERTS = [f"Tensor{'' if name in ('up', 'down') else '?'} {name}" for name in WEIGHT_NAMES]
_FORWARD_SCHEMA = (
    f"(Tensor rows, Tensor weights, {', '.join(_EXPERTS)}, Tensor expert_ids, int[]? counts, "
    f"{_SETTINGS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_BACKWARD_SCHEMA = f"(Tensor grad, Tensor?[] saved, bool[] needs, {_SETTINGS}) -> Tensor[]"


def _import_triton_mlp() -> Any:
    # The module is imported on demand, because not every machine has Triton.
    from hf_moe_ep.ops import triton_mlp

    return triton_mlp


def _choose_implementation(
    settings: Settings,
    rows_RH: Tensor,
    weights_RK: Tensor,
    num_pairs: int,
    experts: ExpertWeights,
    need: tuple[str, ...] | None = None,
    *,
    in_chunks: bool = False,
) -> Any:
    """Return the module that computes the forward and, for trained inputs, the backward.

    The kernels are checked for the trained inputs of `settings`, and for the inputs in `need`. If
    `in_chunks`, they are also checked for gradients of experts that are sums over chunks of rows.

    Raises:
        RuntimeError: the backend is "triton" and the kernels cannot run here.
    """
    if settings.backend == "torch":
        return torch_mlp
    # The modules are imported on demand, because not every machine has Triton.
    from hf_moe_ep.ops import self_check, triton_mlp

    call = (rows_RH, weights_RK, num_pairs, experts, settings.formula)
    trained = tuple(settings.trained)
    checks = [(trained, False)]
    if need is not None and need != trained:
        checks.append((need, False))
    if in_chunks:
        checks.append((need or trained, True))
    for names, wide in checks:
        reason = self_check.self_check(*call, keep_pre=settings.keep_pre, trained=names, wide=wide)
        if reason and settings.backend == "triton":
            raise RuntimeError(
                f"experts_backend='triton' cannot run here: {reason}; use "
                f"experts_backend='auto' or 'torch'"
            )
        if reason:
            self_check.warn_once(weights_RK.device, reason)
            return torch_mlp
    return triton_mlp


def _match_triton_routing(routing: Routing, num_experts: int, rows_RH: Tensor) -> Routing:
    """Give a routing of the torch path the shapes and the device of a routing of the kernels.

    With the backend "auto", torch.compile expects the kernels' shapes. The operator's fake
    implementation always returns these shapes, because it cannot know if the kernels can run.
    """
    num_pairs = routing.pair_A.numel()
    _, _, tiles, rows = _import_triton_mlp().compute_routing_shapes(num_pairs, num_experts, rows_RH)
    offsets = routing.offsets.to(rows_RH.device)
    unused = offsets.new_full(tiles, -1), offsets.new_zeros(rows)
    return replace(routing, offsets=offsets, tiles=unused[0], row_A=unused[1])


def _split_inputs(
    inputs: Sequence[Any],
) -> tuple[Sequence[Any], Tensor, list[int] | None, Settings]:
    """Return tensors (of INPUT_NAMES), expert ids, counts and settings of the forward operator."""
    expert_ids, counts, *rest = inputs[len(INPUT_NAMES) :]
    counts_L = None if counts is None else list(counts)
    return inputs[: len(INPUT_NAMES)], expert_ids, counts_L, Settings.from_arguments(rest)


def _forward(*inputs: Any) -> tuple[Tensor, ...]:
    outputs, _ = run_forward(*_split_inputs(inputs))
    return outputs


def run_forward(
    tensors: Sequence[Any], expert_ids: Tensor, counts_L: list[int] | None, settings: Settings
) -> tuple[tuple[Tensor, ...], Any]:
    """Return the outputs of the operator, and the module that has computed them.

    `tensors` has one entry per name of INPUT_NAMES.
    """
    rows, weights, *expert_tensors = tensors
    experts = settings.experts(expert_tensors)
    num_pairs = expert_ids.numel() if counts_L is None else sum(counts_L)
    implementation = _choose_implementation(settings, rows, weights, num_pairs, experts)
    routing = implementation.route(expert_ids, counts_L, experts, rows)
    out_RH, pre_AG = implementation.forward(
        rows,
        weights,
        experts,
        routing,
        settings.formula,
        settings.keep_pre,
        skip_output=settings.skip_output,
    )
    if not settings.keep_pre:
        pre_AG = rows.new_empty(0)
    if settings.backend == "auto" and implementation is torch_mlp:
        routing = _match_triton_routing(routing, experts.up.shape[0], rows)
    routing_tensors = (
        routing.pair_A,
        routing.position_RK,
        routing.offsets,
        routing.tiles,
        routing.row_A,
    )
    return (out_RH, pre_AG, *routing_tensors), implementation


_forward_op = torch.library.custom_op(
    "hf_moe_ep::expert_mlp", _forward, mutates_args=(), schema=_FORWARD_SCHEMA
)


@_forward_op.register_fake
def _(*inputs: Any) -> tuple[Tensor, ...]:
    (rows, _, up, *_), expert_ids, counts_L, settings = _split_inputs(inputs)
    num_pairs = expert_ids.numel() if counts_L is None else sum(counts_L)
    pre_shape = (num_pairs, up.shape[1]) if settings.keep_pre else (0,)
    position = expert_ids.new_empty(expert_ids.shape, dtype=torch.int32)
    implementation = torch_mlp if settings.backend == "torch" else _import_triton_mlp()
    shapes = implementation.compute_routing_shapes(num_pairs, up.shape[0], rows)
    device = "cpu" if settings.backend == "torch" else rows.device
    devices = (rows.device, device, device, device)
    pair, offsets, tiles, row = (
        torch.empty(shape, dtype=torch.int32, device=device)
        for shape, device in zip(shapes, devices, strict=True)
    )
    out = rows.new_empty(rows.shape)
    if settings.skip_output:
        out = make_tensor_without_values(rows)
    return out, rows.new_empty(pre_shape), pair, position, offsets, tiles, row


def _backward(
    grad: Tensor, saved: Sequence[Tensor | None], needs: Sequence[bool], *settings: Any
) -> list[Tensor]:
    """Return the needed gradients in the order of INPUT_NAMES."""
    grads, _ = run_backward(grad, saved, needs, Settings.from_arguments(settings))
    return [grads[name] for name, need in zip(INPUT_NAMES, needs, strict=True) if need]


_backward_op = torch.library.custom_op(
    "hf_moe_ep::expert_mlp_backward", _backward, mutates_args=(), schema=_BACKWARD_SCHEMA
)


@_backward_op.register_fake
def _(
    grad: Tensor, saved: Sequence[Tensor | None], needs: Sequence[bool], *settings: Any
) -> list[Tensor]:
    needed = [tensor for tensor, need in zip(saved, needs, strict=False) if need]
    return [allocate_grad(tensor) for tensor in needed if tensor is not None]


def run_backward(
    grad_RH: Tensor,
    saved: Sequence[Tensor | None],
    needs: Sequence[bool],
    settings: Settings,
    *,
    postpone: bool = False,
    in_chunks: bool = False,
    implementation: Any = None,
) -> tuple[dict[str, Tensor], Callable[[ExpertGrads], None] | None]:
    """Choose the implementation, call its `backward` with the saved tensors, return its result.

    `in_chunks` is True if the gradients of the experts are sums over several chunks of rows.
    `implementation` is the module that has computed the forward, if it is known. It has been
    checked for the gradients of all trained inputs, so it is not checked again for just these.
    """
    rows_RH, weights_RK, *tensors = saved[: len(INPUT_NAMES)]
    pre_AG, *routing_tensors = saved[len(INPUT_NAMES) :]
    assert rows_RH is not None and weights_RK is not None
    routing = Routing(*(tensor for tensor in routing_tensors if tensor is not None))
    experts = settings.experts(tensors)
    need = tuple(name for name, needed in zip(INPUT_NAMES, needs, strict=True) if needed)
    if implementation is None or in_chunks or need != settings.trained:
        num_pairs = routing.pair_A.numel()
        implementation = _choose_implementation(
            settings, rows_RH, weights_RK, num_pairs, experts, need, in_chunks=in_chunks
        )
    grads, finish = implementation.backward(
        grad_RH,
        rows_RH,
        weights_RK,
        experts,
        routing,
        pre_AG if settings.keep_pre else None,
        settings.formula,
        grad_scale=settings.grad_scale,
        need=set(need),
        postpone=postpone,
    )
    return grads, finish


def save_for_backward(
    ctx: Any, tensors: Sequence[Any], output: Sequence[Tensor], settings: Settings
) -> None:
    """Save the forward's inputs and outputs that backward needs in `ctx`."""
    _, *kept = output
    ctx.save_for_backward(*tensors, *kept)
    ctx.mark_non_differentiable(*kept)
    ctx.set_materialize_grads(False)
    ctx.settings = settings


def _setup_context(ctx: Any, inputs: Sequence[Any], output: Sequence[Tensor]) -> None:
    tensors, _, _, settings = _split_inputs(inputs)
    save_for_backward(ctx, tensors, output, settings)


def _autograd_backward(ctx: Any, grad_RH: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    """Return one entry per argument of the forward operator: the needed gradient, or None."""
    no_grads = (None,) * len(ctx.needs_input_grad)
    if grad_RH is None:
        return no_grads
    needs = list(ctx.needs_input_grad[: len(INPUT_NAMES)])
    backward = torch.ops.hf_moe_ep.expert_mlp_backward
    grads = iter(backward(grad_RH, ctx.saved_tensors, needs, *ctx.settings.arguments()))
    return *(next(grads) if need else None for need in needs), *no_grads[len(needs) :]


_forward_op.register_autograd(_autograd_backward, setup_context=_setup_context)

# The Python function that each operator runs. The planner calls it to count the operator's steps.
STEPS_INSIDE: dict[Any, Callable[..., Any]] = {
    torch.ops.hf_moe_ep.expert_mlp.default: _forward,
    torch.ops.hf_moe_ep.expert_mlp_backward.default: _backward,
}
