"""The self-check passes on right kernels and refuses wrong ones; here in Triton's interpreter."""

from typing import Any

import pytest
import torch

from hf_moe_ep.ops import self_check, triton_mlp
from hf_moe_ep.ops.layout import ExpertsLayout
from hf_moe_ep.ops.self_check import check_once
from hf_moe_ep.ops.weights import ExpertWeights

KIND = (torch.device("cpu"), torch.float32, ExpertsLayout(), True, False, 2, 32, 16, 8)


@pytest.fixture(autouse=True)
def _forget() -> None:
    check_once.cache_clear()


def test_right_kernels_pass() -> None:
    check_once(*KIND)


@pytest.mark.parametrize("kernel", ["up", "grouped_mm", "dgated", "outer", "combine"])
def test_one_wrong_element_of_any_kernel_is_refused(
    kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = getattr(triton_mlp, kernel)

    def wrong(*args: Any, **kwargs: Any) -> Any:
        out = right(*args, **kwargs)
        first = out[0] if isinstance(out, tuple) else out
        first.view(-1)[3] += 10
        return out

    monkeypatch.setattr(triton_mlp, kernel, wrong)
    with pytest.raises(
        RuntimeError, match=r"compute wrong numbers on cpu.*experts_backend='torch'"
    ):
        check_once(*KIND)


def test_it_runs_once_per_kind_of_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """One check for equal dtype, layout, bucket and alignment; another for a ragged size."""
    kinds: list[tuple[Any, ...]] = []
    monkeypatch.setattr(triton_mlp, "interpreted", lambda: False)
    monkeypatch.setattr(self_check, "check_once", lambda *kind: kinds.append(kind))

    def call(hidden: int, pairs: int) -> None:
        up_LGH, down_LHF = torch.empty(4, 64, hidden), torch.empty(4, hidden, 32)
        experts = ExpertWeights(up_LGH, None, down_LHF, None)
        self_check.self_check(2, pairs, experts, ExpertsLayout())

    for hidden, pairs in ((512, 4000), (2048, 5000), (2064, 5000), (2048, 100)):
        call(hidden, pairs)
    assert kinds[0] == kinds[1] and len(set(kinds)) == 3
