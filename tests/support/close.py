"""One measure of error for all tests: max|got - want| / max|want|, per tensor.

Relative to the largest element of the whole tensor, not element by element: sums in another order
move small elements of a tensor by as much as large ones. Where `want` is all zero or empty the
error is absolute. DTensors are the caller's to gather.
"""

import torch

# A model in fp64: sums in another order round by 1e-16 each, through its layers and three steps.
FP64_MODEL = 1e-10
# One layer or operator in fp64: no more than some hundred such roundings on the way.
FP64_LAYER = 1e-12
# Where something in a model of fp64 is fp32, which rounds by 6e-8: transformers casts logits for
# its loss, sums the router's aux loss and rotates inside its vision tower so.
FP32_INSIDE = 1e-6


def max_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """max|got - want| / max|want| in fp64; NaN anywhere gives NaN."""
    if got.numel() == 0:
        return 0.0
    scale = want.detach().abs().max().double().item()
    return _difference(got, want).max().item() / (scale or 1.0)


def assert_close(name: str, got: torch.Tensor, want: torch.Tensor, budget: float) -> float:
    """Return max_error(got, want); AssertionError where it is over the budget, or shapes differ."""
    assert got.shape == want.shape, f"{name}: shape {tuple(got.shape)}, want {tuple(want.shape)}"
    error = max_error(got, want)
    if error <= budget:  # False for NaN
        return error
    flat_index = _difference(got, want).argmax()  # argmax takes a NaN for the largest
    worst = tuple(int(i) for i in torch.unravel_index(flat_index, got.shape))
    raise AssertionError(
        f"{name}: error {error:.3e} is over the budget {budget:.3e}; worst at {worst} of "
        f"{tuple(got.shape)}: got {got[worst].item()!r}, want {want[worst].item()!r}"
    )


def _difference(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    return (got.detach().cpu().double() - want.detach().cpu().double()).abs()
