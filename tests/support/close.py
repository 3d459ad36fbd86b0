"""The measure of error of all tests is max|got - want| / max|want|, per tensor.

The error is relative to the largest element of the whole tensor, and not to each element, because
sums in another order change small elements of a tensor by as much as large ones. If `want` is all
zero or empty, the error is absolute. The caller gathers DTensors.
"""

import torch

# For a model in fp64: sums in another order have rounding errors of 1e-16, which grow through the
# layers and three steps.
FP64_MODEL = 1e-10
# For one layer or operator in fp64, with at most a few hundred such rounding errors.
FP64_LAYER = 1e-12
# For an fp64 model that computes a part in fp32, which rounds by 6e-8. In transformers these are
# the logits of the loss, the router's aux loss and the rotary embedding of the vision tower.
FP32_INSIDE = 1e-6
# In exact arithmetic some gradients are 0: that of a bias of attention's keys, and that of a bias
# in front of a norm over the batch. Their rounding errors in fp64 are smaller than this number.
ROUNDING_ERROR = 1e-14


def max_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Return max|got - want| / max|want| in fp64. Any NaN makes the error NaN."""
    if got.numel() == 0:
        return 0.0
    scale = want.detach().abs().max().double().item()
    return _difference(got, want).max().item() / (scale or 1.0)


def assert_close(name: str, got: torch.Tensor, want: torch.Tensor, budget: float) -> float:
    """Return max_error(got, want), and raise AssertionError if it exceeds the budget.

    Different shapes are an error as well.
    """
    assert got.shape == want.shape, f"{name}: shape {tuple(got.shape)}, want {tuple(want.shape)}"
    error = max_error(got, want)
    if error <= budget:  # False for NaN
        return error
    flat_index = _difference(got, want).argmax()  # for argmax, a NaN is the largest value
    worst = tuple(int(i) for i in torch.unravel_index(flat_index, got.shape))
    raise AssertionError(
        f"{name}: error {error:.3e} is over the budget {budget:.3e}; worst at {worst} of "
        f"{tuple(got.shape)}: got {got[worst].item()!r}, want {want[worst].item()!r}"
    )


def _difference(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    return (got.detach().cpu().double() - want.detach().cpu().double()).abs()
