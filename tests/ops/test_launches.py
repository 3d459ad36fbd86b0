"""Triton builds a kernel once for all routings, and launches it on the device of its tensors.

These tests need no GPU: `launches.py` records the launches.
"""

import random
import threading

import pytest
import torch
from launches import Launches
from torch import Tensor
from torch._subclasses import FakeTensorMode

from hf_moe_ep.ops import devices, triton_mlp
from hf_moe_ep.ops.formula import ExpertFormula
from hf_moe_ep.ops.interface import ExpertGrads, ExpertWeights
from hf_moe_ep.ops.kernels import blocks
from hf_moe_ep.ops.permute import add_rows

EXPERTS, HIDDEN, FFN, TOP_K = 4, 256, 128, 2


@pytest.fixture(autouse=True)
def _use_blocks_of_an_h100(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "generation", lambda device: "sm_90")


def _make_experts(device: str, rank: int = 0, *, bias: bool = True) -> ExpertWeights:
    def make_stack(*shape: int) -> Tensor:
        return torch.empty(EXPERTS, *shape, dtype=torch.bfloat16, device=device)

    experts = [
        make_stack(2 * FFN, HIDDEN),
        make_stack(2 * FFN),
        make_stack(HIDDEN, FFN),
        make_stack(HIDDEN),
    ]
    if not bias:
        experts[1] = experts[3] = None
    if rank:
        experts += [make_stack(rank, HIDDEN), make_stack(2 * FFN, rank)]
        experts += [make_stack(rank, FFN), make_stack(HIDDEN, rank)]
    return ExpertWeights(*experts)


def _run_step(
    rows: int, pairs: int, experts: ExpertWeights, device: str, *, postpone: bool = False
) -> None:
    """Run forward and backward of `rows` rows, with `pairs` pairs on experts of this rank."""
    rows_RH = torch.empty(rows, HIDDEN, dtype=torch.bfloat16, device=device)
    weights_RK = torch.empty(rows, TOP_K, device=device)
    ids_RK = torch.empty(rows, TOP_K, dtype=torch.int64, device=device)
    counts_L = [pairs - 3 * (pairs // 4), *[pairs // 4] * 3]
    formula = ExpertFormula()
    routing = triton_mlp.route(ids_RK, counts_L, experts, rows_RH)
    out_RH, pre_AG = triton_mlp.forward(rows_RH, weights_RK, experts, routing, formula, True)
    _, finish = triton_mlp.backward(
        out_RH,
        rows_RH,
        weights_RK,
        experts,
        routing,
        pre_AG,
        formula,
        grad_scale=0.5,
        need={"rows", "weights", *experts.named_tensors()},
        postpone=postpone,
    )
    if finish is not None:
        finish(ExpertGrads())


@pytest.mark.parametrize("rank", [0, 16])
def test_no_kernel_is_built_again_for_another_routing(rank: int) -> None:
    """Counts change in every layer, and a build takes a second while the other ranks wait."""
    experts = _make_experts("meta", rank)
    draw = random.Random(0)
    counts = [(rows, draw.randint(513, 2 * rows)) for rows in draw.sample(range(300, 900), 20)]
    counts += [(512, 1024), (512, 513)]  # one number of pairs is divisible by 16, the other is not
    with Launches() as launches:
        _run_step(*counts[0], experts, "meta")
        first = {name: set(variants) for name, variants in launches.variants.items()}
        for rows, pairs in counts[1:]:
            _run_step(rows, pairs, experts, "meta")
    assert len(first) == 12  # every kernel
    assert launches.variants == first


def test_no_kernel_is_built_again_for_one_row_or_pair() -> None:
    experts = _make_experts("meta")
    with Launches() as launches:
        _run_step(7, 11, experts, "meta")
        first = {name: set(variants) for name, variants in launches.variants.items()}
        for rows, pairs in ((1, 1), (1, 2), (2, 1), (16, 32)):
            _run_step(rows, pairs, experts, "meta")
    assert launches.variants == first


class _Current:
    """Replaces torch.cuda.device_of, and records the current device."""

    index = 0

    def __init__(self, tensor: Tensor) -> None:
        self._index = tensor.get_device()

    def __enter__(self) -> None:
        self._before, _Current.index = _Current.index, self._index

    def __exit__(self, *_: object) -> None:
        _Current.index = self._before


@pytest.mark.parametrize("postpone", [False, True])
def test_every_kernel_is_launched_on_the_device_of_its_tensors(
    postpone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton launches on the current device, cuda:0, although a model may be on cuda:1."""
    monkeypatch.setattr(torch.cuda, "device_of", _Current)
    launched: list[tuple[str, int]] = []
    with FakeTensorMode(), Launches(lambda name: launched.append((name, _Current.index))):
        _run_step(40, 60, _make_experts("cuda:1", rank=16), "cuda:1", postpone=postpone)
        rows_NH = torch.empty(9, HIDDEN, device="cuda:1")
        row_TJ = torch.empty(5, 2, dtype=torch.int64, device="cuda:1")
        assert len({name for name, _ in launched}) == 12  # every kernel
        add_rows(rows_NH, row_TJ.new_empty(9), row_TJ)
    assert launched[-1][0] == "combine_kernel"
    assert [launch for launch in launched if launch[1] != 1] == []


def test_every_thread_makes_the_context_of_the_device_current(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without a current context, as in autograd's threads, CUDA cannot make TMA descriptors."""
    real_zeros, threads = torch.zeros, []

    def zeros(*size: object, **kwargs: object) -> Tensor:
        if size == ((),):
            threads.append(threading.get_ident())
        return real_zeros(*size, **kwargs)

    def step_twice() -> None:
        with FakeTensorMode(), Launches(lambda name: None):
            for _ in range(2):
                _run_step(4, 6, _make_experts("cuda:7"), "cuda:7")

    monkeypatch.setattr(torch.cuda, "device_of", _Current)
    monkeypatch.setattr(devices.torch, "zeros", zeros)
    step_twice()
    other = threading.Thread(target=step_twice)
    other.start()
    other.join()
    assert len(threads) == len(set(threads)) == 2
