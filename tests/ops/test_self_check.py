"""The self-check passes on right kernels and refuses wrong ones; here in Triton's interpreter."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from hf_moe_ep.ops import self_check, triton_mlp
from hf_moe_ep.ops.formula import ExpertFormula
from hf_moe_ep.ops.interface import ExpertWeights
from hf_moe_ep.ops.self_check import check_once

KIND = (torch.device("cpu"), torch.float32, ExpertFormula(), True, False, 2, 32, 16, 8)
ADAPTED = (*KIND, (2, 3))


@pytest.fixture(autouse=True)
def _forget() -> None:
    check_once.cache_clear()


@pytest.mark.parametrize("kind", [KIND, ADAPTED], ids=["base", "adapters"])
def test_right_kernels_pass(kind: tuple[Any, ...]) -> None:
    check_once(*kind)


@pytest.mark.parametrize("kernel", ["up", "grouped_mm", "thin_mm", "dgated", "outer", "combine"])
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
        check_once(*(ADAPTED if kernel == "thin_mm" else KIND))


def test_it_runs_once_per_kind_of_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """One check for equal dtype, formula, bucket, alignment and ranks; another for odd sizes."""
    kinds: list[tuple[Any, ...]] = []
    monkeypatch.setattr(triton_mlp, "interpreted", lambda: False)
    monkeypatch.setattr(self_check, "check_once", lambda *kind: kinds.append(kind))

    def call(hidden: int, pairs: int, rank: int | None = None) -> None:
        up_LGH, down_LHF = torch.empty(4, 64, hidden), torch.empty(4, hidden, 32)
        experts = ExpertWeights(up_LGH, None, down_LHF, None)
        if rank:
            a_LPF, b_LHP = torch.empty(4, rank, 32), torch.empty(4, hidden, rank)
            experts = replace(experts, down_a=a_LPF, down_b=b_LHP)
        self_check.self_check(2, pairs, experts, ExpertFormula())

    for hidden, pairs in ((512, 4000), (2048, 5000), (2064, 5000), (2048, 100)):
        call(hidden, pairs)
    assert kinds[0] == kinds[1] and len(set(kinds)) == 3
    for rank in (8, 8, 16):
        call(2048, 5000, rank)
    assert kinds[4] == kinds[5] and len(set(kinds)) == 5
