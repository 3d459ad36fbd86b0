"""Orthogonalise many matrices together, by the Newton-Schulz iteration of torch.optim.Muon.

torch's function (torch/optim/_muon.py) takes one matrix. A rank with 16 experts has 48 matrices of
two shapes in each layer, so here all matrices of one shape are computed as a batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

# The coefficients of the quintic polynomial, and the smallest norm by which a matrix is divided.
# torch.optim.Muon has the same numbers, from https://kellerjordan.github.io/posts/muon/.
_A, _B, _C = 3.4445, -4.7750, 2.0315
_EPS = 1e-7


def choose_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which gradients of `dtype` are orthogonalised.

    The result is bf16, as in torch.optim.Muon. Only fp64 stays fp64, so that tests can compare
    numbers.
    """
    return torch.float64 if dtype == torch.float64 else torch.bfloat16


def orthogonalise(x_NAB: Tensor, steps: int, halfway: Callable[[], None] | None = None) -> Tensor:
    """Move all singular values of each matrix close to 1, by `steps` steps of Newton-Schulz.

    Args:
        x_NAB: N matrices [A, B], in the dtype of `choose_dtype`.
        steps: the number of steps.
        halfway: is called after half of the steps.

    Returns:
        A new tensor of the shape and dtype of `x_NAB`. As in torch.optim.Muon, the singular values
        end between about 0.5 and 1.5.
    """
    is_tall = x_NAB.shape[1] > x_NAB.shape[2]
    x = x_NAB.mT if is_tall else x_NAB
    del x_NAB  # each tensor is freed as soon as the next one exists
    x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=_EPS)
    for step in range(steps):
        if step == steps // 2 and halfway is not None:
            halfway()
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=_B, alpha=_C)
        del gram
        x = torch.baddbmm(x, polynomial, x, beta=_A)
        del polynomial
    return x.mT if is_tall else x


def count_flops(rows: int, columns: int, steps: int) -> int:
    """Return the number of floating-point operations of `orthogonalise` for one matrix."""
    short, long = sorted((rows, columns))
    return steps * 2 * short * short * (2 * long + short)


def adjust_lr(lr: float, adjust_lr_fn: str | None, rows: int, columns: int) -> float:
    """Adjust the learning rate to the shape of a matrix [rows = out, columns = in].

    The rules are the rules of torch.optim.Muon (which has the last one since torch 2.15):

    None or "original"      lr * sqrt(max(1, rows / columns))
    "match_rms_adamw"       lr * 0.2 * sqrt(max(rows, columns)). The update has the same root
                            mean square as an update of AdamW, so learning rates for AdamW can
                            be used (https://arxiv.org/abs/2502.16982, section 2.2)
    "spectral_unclamped"    lr * sqrt(rows / columns). The spectral norm of the update is about this
                            number (https://jeremybernste.in/writing/deriving-muon)
    """
    if adjust_lr_fn == "spectral_unclamped":
        return lr * math.sqrt(rows / columns)
    if adjust_lr_fn == "match_rms_adamw":
        return lr * 0.2 * math.sqrt(max(rows, columns))
    return lr * math.sqrt(max(1, rows / columns))
