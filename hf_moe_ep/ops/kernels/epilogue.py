"""Add the adapter's product and compute the formula of `formula.py`, after a kernel's main loop.

This file has no kernel. `gate_up.py` and `dgated.py` call these functions, and `grouped_mm.py`
calls `add_low_rank`. Sums and activations are fp32. The parameters in capitals are compile-time
constants: an unclamped formula is compiled without a clamp, and kernels for experts without an
adapter have no second product.
"""

from __future__ import annotations

import triton
import triton.language as tl

INV_SQRT_2 = tl.constexpr(0.7071067811865476)
INV_SQRT_2PI = tl.constexpr(0.3989422804014327)
SQRT_2_OVER_PI = tl.constexpr(0.7978845608028654)
GELU_CUBIC = tl.constexpr(0.044715)


@triton.jit
def add_low_rank(
    sums, low, position, factor, o_n, limit_n, stride_p, stride_n,
    RANK: tl.constexpr, BLOCK_P: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return sums + low[position] @ factor, computed in the registers of `sums`.

    A rank below BLOCK_P is padded with zeros, because tensor cores need at least 16 elements.
    """
    o_p = tl.arange(0, BLOCK_P)
    p_low = low + position.to(tl.int64)[:, None] * RANK + o_p[None, :]  # [M, P]
    p_factor = factor + o_p[:, None] * stride_p + o_n[None, :] * stride_n  # [P, N]
    for first in range(0, RANK, BLOCK_P):
        m_p = first + o_p < RANK
        b_low = tl.load(p_low + first, mask=m_p[None, :], other=0.0)  # [M, P]
        m_factor = m_p[:, None] & (o_n < limit_n)[None, :]
        b_factor = tl.load(p_factor + first * stride_p, mask=m_factor, other=0.0)  # [P, N]
        sums = tl.dot(b_low, b_factor, sums, input_precision=PRECISION)
    return sums


@triton.jit
def activate(
    gate,
    up,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    UP_OFFSET: tl.constexpr,
):
    """Return act = f(min(gate, LIMIT)) * (clamp(up) + UP_OFFSET).

    Without GATED, act is only f(min(gate, LIMIT)).
    """
    gate, up = clamp(gate, up, GATED, LIMIT)
    f, _ = _compute_f_and_slope(gate, ACTIVATION, ALPHA)
    if GATED:
        f = f * (up + UP_OFFSET)
    return f


@triton.jit
def activate_backward(
    grad,
    gate,
    up,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    UP_OFFSET: tl.constexpr,
):
    """Return act and the gradients of gate and up. `grad` is the gradient of act."""
    raw_gate = gate
    raw_up = up
    gate, up = clamp(gate, up, GATED, LIMIT)
    f, slope = _compute_f_and_slope(gate, ACTIVATION, ALPHA)
    act = f
    grad_gate = grad * slope
    grad_up = grad
    if GATED:
        act = f * (up + UP_OFFSET)
        grad_gate = grad_gate * (up + UP_OFFSET)
        grad_up = grad * f
    if LIMIT is not None:
        grad_gate = tl.where(raw_gate > LIMIT, 0.0, grad_gate)
        if GATED:
            grad_up = tl.where(tl.abs(raw_up) > LIMIT, 0.0, grad_up)
    return act, grad_gate, grad_up


@triton.jit
def clamp(gate, up, GATED: tl.constexpr, LIMIT: tl.constexpr):
    if LIMIT is not None:
        gate = tl.minimum(gate, LIMIT)
        if GATED:
            up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
    return gate, up


@triton.jit
def _compute_f_and_slope(x, ACTIVATION: tl.constexpr, ALPHA: tl.constexpr):
    """Return f(x) and f'(x)."""
    if ACTIVATION == "swish":
        sigmoid = 1.0 / (1.0 + tl.exp(-ALPHA * x))
        f = x * sigmoid
        slope = sigmoid * (1.0 + ALPHA * x * (1.0 - sigmoid))
    elif ACTIVATION == "gelu":
        cdf = 0.5 * (1.0 + tl.erf(x * INV_SQRT_2))
        f = x * cdf
        slope = cdf + x * tl.exp(-0.5 * x * x) * INV_SQRT_2PI
    elif ACTIVATION == "gelu_tanh":
        # tanh(y) = 2 sigmoid(2 y) - 1
        inner = SQRT_2_OVER_PI * (x + GELU_CUBIC * x * x * x)
        sigmoid = 1.0 / (1.0 + tl.exp(-2.0 * inner))
        f = x * sigmoid
        inner_slope = SQRT_2_OVER_PI * (1.0 + 3.0 * GELU_CUBIC * x * x)
        slope = sigmoid + x * 2.0 * sigmoid * (1.0 - sigmoid) * inner_slope
    else:
        tl.static_assert(ACTIVATION == "relu2")
        positive = tl.maximum(x, 0.0)
        f = positive * positive
        slope = 2.0 * positive
    return f, slope


@triton.jit
def split_in_halves(block, ROWS: tl.constexpr, HALF: tl.constexpr):
    """Return the left and the right half of a block's columns.

    The gate's formula over a whole block needs more registers than a thread has. If the formula is
    computed for one half after the other, no register is spilled.
    """
    return tl.split(tl.permute(tl.reshape(block, (ROWS, 2, HALF)), (0, 2, 1)))
