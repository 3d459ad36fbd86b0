"""`max_error` and `assert_close` are right for tensors that are small enough to check by hand."""

import pytest
import torch
from support.close import assert_close, max_error

WANT = torch.tensor([[1.0, -4.0, 0.0], [2.0, 0.5, 3.0]], dtype=torch.float64)


def test_error_is_relative_to_the_largest_element() -> None:
    got = WANT.clone()
    got[1, 0] += 1e-3  # 1e-3 / max|want| = 1e-3 / 4
    assert max_error(got, WANT) == pytest.approx(2.5e-4, rel=1e-9)
    assert_close("w", got, WANT, 2.6e-4)
    with pytest.raises(AssertionError, match=r"2\.500e-04 .* 2\.400e-04; worst at \(1, 0\)"):
        assert_close("w", got, WANT, 2.4e-4)


def test_nan_infinity_and_another_shape_fail() -> None:
    for bad in (float("nan"), float("inf")):
        got = WANT.clone()
        got[0, 2] = bad
        with pytest.raises(AssertionError, match=r"worst at \(0, 2\)"):
            assert_close("w", got, WANT, 1e9)
        with pytest.raises(AssertionError, match=r"worst at \(0, 2\)"):
            assert_close("w", got, got, 1e9)
    with pytest.raises(AssertionError, match=r"w: shape \(3, 2\), want \(2, 3\)"):
        assert_close("w", WANT.T, WANT, 1.0)


def test_the_error_is_absolute_if_want_is_zero_or_empty() -> None:
    zero = torch.zeros(2, 3)
    assert max_error(zero + 0.25, zero) == 0.25
    assert max_error(zero[:0], zero[:0]) == 0.0
    assert_close("empty", zero[:0], zero[:0], 0.0)
    with pytest.raises(AssertionError, match=r"scalar: error 5\.000e-01"):
        assert_close("scalar", torch.tensor(3.0), torch.tensor(2.0), 0.1)
