"""Experts that a rank holds whole are not copied by FSDP2, and train as if FSDP2 held them.

Each case runs twice on two ranks with ep_size 2: once as usual, and once with FSDP2 units of one
rank. Losses, gradients and weights after two steps must have the same bits.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from support import parity
from support.adapters import with_lora
from support.checks import Check, Found, on_ranks
from support.close import FP64_MODEL, assert_close
from support.quantised import SIZES
from support.tiny_models import batch, tiny
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from hf_moe_ep import apply_ep_fsdp2
from hf_moe_ep.sharding import expert_units, shard
from hf_moe_ep.upstream.operators import count_moved_bytes

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
STEPS, MICRO_BATCHES = 2, 2


def _freeze_gate_up(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.endswith("gate_up_proj"))


@dataclass(frozen=True)
class Case:
    name: str
    dtype: torch.dtype = torch.bfloat16
    config: dict[str, Any] = field(default_factory=dict)
    policy: MixedPrecisionPolicy | None = None
    wrap: Callable[[nn.Module], nn.Module] | None = None
    prepare: Callable[[nn.Module], None] | None = None
    autocast: bool = False
    no_sync: bool = False


CASES = [
    Case("bf16, fp32 masters, no sync", no_sync=True),
    Case(
        "chunks, checkpoint",
        config={"dispatch_chunks": 2},
        prepare=partial(parity.checkpointing, use_reentrant=False),
    ),
    Case("LoRA on the experts", wrap=partial(with_lora, seed=0)),
    Case("only down_proj is trained", prepare=_freeze_gate_up),
]
MORE_CASES = [
    Case("fp32", torch.float32),
    Case("fp16", torch.float16),
    Case("autocast of masters", torch.float32, policy=BF16, autocast=True),
    Case(
        "reentrant checkpoint, dim 1",
        config={"expert_shard_dim": 1},
        prepare=partial(parity.checkpointing, use_reentrant=True),
    ),
    Case("fp8", config={"experts_dtype": "fp8"}, wrap=partial(with_lora, seed=0)),
    Case("adapters on attention", wrap=partial(with_lora, seed=0, parameters=())),
]


@contextmanager
def _make_units_of_one_rank() -> Iterator[None]:
    """Make FSDP2 units of experts whose ep_fsdp group has one rank."""
    with pytest.MonkeyPatch.context() as patches:
        for module in (expert_units, shard):
            patches.setattr(module, "can_stay_whole", lambda *_: False)
        yield


def _find_experts(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if type(module).__name__.endswith("MoeExperts")]


def _train(case: Case, rank: int) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return the model, and all losses, gradients and weights of the run."""
    sizes = SIZES.get(case.config.get("experts_dtype", ""), {})  # whole blocks of quantised values
    model: Any = tiny(dtype=case.dtype, **sizes)
    if case.wrap is not None:
        model = case.wrap(model)
    if case.prepare is not None:
        case.prepare(model)
    apply_ep_fsdp2(model, ep_size=2, mp_policy=case.policy, **case.config)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.SGD(parameters.values(), lr=0.1)
    results = {}
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(MICRO_BATCHES):
            if case.no_sync:
                model.set_requires_gradient_sync(micro == MICRO_BATCHES - 1)
            inputs = batch(model, 2, 9, seed=10 * step + 3 * micro + rank, pad=3)
            with torch.autocast("cpu", torch.bfloat16) if case.autocast else nullcontext():
                loss = model(**inputs).loss
            loss.backward()
            results[f"loss {step} {micro}"] = loss.detach()
        for name, parameter in parameters.items():
            results[f"{step}: gradient of {name}"] = parameter.grad.full_tensor()
        optimizer.step()
    for name, parameter in parameters.items():
        results[name] = parameter.full_tensor()
    return model, results


def _trains_with_the_same_bits(case: Case, rank: int, world: int) -> None:
    with _make_units_of_one_rank():
        stock, want = _train(case, rank)
    model, got = _train(case, rank)
    names = {name for experts in _find_experts(model) for name, _ in experts.named_parameters()}
    assert names >= {"gate_up_proj", "down_proj"}
    assert not any(isinstance(experts, FSDPModule) for experts in _find_experts(model))
    layouts = [
        {n: (p.shape, p.device_mesh, p.placements, p.dtype) for n, p in m.named_parameters()}
        for m in (model, stock)
    ]
    assert layouts[0] == layouts[1]
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert torch.equal(got[name], value), f"{name}: {(got[name] - value).abs().max()}"


class _Copies(TorchDispatchMode):
    """Counts the operators that read or write tensors of the size of a rank's expert matrices.

    The products of experts are not counted, because they read the matrices of single experts.
    """

    def __init__(self, matrices: list[Tensor]) -> None:
        super().__init__()
        self.sizes, self.names = {matrix.numel() for matrix in matrices}, Counter[str]()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.namespace in ("aten", "fsdp") and count_moved_bytes(func, args, kwargs or {}, out):
            leaves = torch.utils._pytree.tree_leaves((args, kwargs, out))
            if any(isinstance(x, Tensor) and x.numel() in self.sizes for x in leaves):
                self.names[str(func.overloadpacket)] += 1
        return out


def _build_layer(wrap: Callable[[nn.Module], nn.Module] | None = None) -> tuple[Any, list[Tensor]]:
    """Return a sharded model of one layer, and its two matrices on this rank."""
    model: Any = tiny(dtype=torch.bfloat16, num_hidden_layers=1)
    model = apply_ep_fsdp2(model if wrap is None else wrap(model), ep_size=2)
    (experts,) = _find_experts(model)
    return model, [experts.gate_up_proj.to_local(), experts.down_proj.to_local()]


def frozen_masters_are_saved_and_not_their_copies(rank: int, world: int) -> None:
    """Experts that are frozen after sharding have masters, too."""
    model, matrices = _build_layer()
    for experts in _find_experts(model):
        experts.requires_grad_(False)
    saved: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        saved.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        loss = model(**batch(model, 1, 5, seed=rank)).loss
    kept = [x for x in saved if x.shape in {matrix.shape for matrix in matrices}]
    assert {x.dtype for x in kept} == {torch.float32}, "a copy in bf16 was kept"
    loss.backward()
    assert all(experts.gate_up_proj.grad is None for experts in _find_experts(model))


def masters_are_cast_and_not_copied(rank: int, world: int) -> None:
    """No copy in bf16 is kept from forward to backward."""
    model, matrices = _build_layer()
    inputs = batch(model, 1, 5, seed=rank)
    model(**inputs).loss.backward()
    model.zero_grad()
    saved: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        saved.append(x)
        return x

    with _Copies(matrices) as forward, torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        loss = model(**inputs).loss
    assert forward.names == {"aten._to_copy": 2}, forward.names
    kept = [x for x in saved if x.shape in {matrix.shape for matrix in matrices}]
    assert {x.dtype for x in kept} == {torch.float32}, "a copy in bf16 was kept"
    addresses = {matrix.data_ptr() for matrix in matrices}
    assert {x.data_ptr() for x in kept} == addresses, "masters were copied"
    with _Copies(matrices) as backward:
        loss.backward()
    casts = backward.names.pop("aten._to_copy")
    assert casts == 4, "two matrices and their two gradients"
    assert not backward.names.keys() & COPIES, backward.names
    with _make_units_of_one_rank():
        model, matrices = _build_layer()
    with _Copies(matrices) as stock:
        model(**inputs).loss.backward()
    assert stock.names.keys() & COPIES, "FSDP2 copies, and this test sees it"


COPIES = {"aten.copy_", "aten.div", "aten.add", "aten.add_", "aten.clone"}


def frozen_experts_are_not_touched(rank: int, world: int) -> None:
    model, matrices = _build_layer(with_lora)
    assert matrices[0].dtype == torch.bfloat16
    inputs = batch(model, 1, 5, seed=rank)
    with _Copies(matrices) as copies:
        model(**inputs).loss.backward()
    assert not copies.names, copies.names


def experts_that_fsdp2_must_move_are_units(rank: int, world: int) -> None:
    """With CPU offload, or with more than one rank in ep_fsdp, experts are FSDP2 units."""
    for ep_size, options in (
        (2, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
        (1, {}),
    ):
        model = apply_ep_fsdp2(tiny(), ep_size=ep_size, **options)
        assert all(isinstance(experts, FSDPModule) for experts in _find_experts(model))
    model = apply_ep_fsdp2(tiny(), ep_size=2)
    assert not any(isinstance(experts, FSDPModule) for experts in _find_experts(model))
    assert all(isinstance(p, DTensor) for e in _find_experts(model) for p in e.parameters())


def layers_share_experts_only_if_these_stay_whole(rank: int, world: int) -> None:
    """FSDP2 units would train two copies. Experts outside of FSDP2 get both layers' gradients."""
    for ep_size, options in (
        (2, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
        (1, {}),
    ):
        with pytest.raises(
            ValueError, match=r"layers\.0\..* and .*layers\.1\..* are one parameter"
        ):
            apply_ep_fsdp2(_share_experts(tiny()), ep_size=ep_size, **options)
    model, stock = (_share_experts(tiny()) for _ in range(2))
    apply_ep_fsdp2(model, ep_size=2)
    model(**batch(model, 2, 7)).loss.backward()
    stock(**batch(model, 2, 7)).loss.backward()
    for experts, stock_experts in zip(_find_experts(model), _find_experts(stock), strict=True):
        got, want = experts.gate_up_proj.grad.full_tensor(), stock_experts.gate_up_proj.grad
        assert_close("gradient", got, want, FP64_MODEL)


def _share_experts(model: Any) -> Any:
    first, second = (layer.mlp.experts for layer in model.model.layers[:2])
    second.gate_up_proj, second.down_proj = first.gate_up_proj, first.down_proj
    return model


@pytest.mark.parametrize(
    "claim",
    on_ranks(
        2,
        {case.name: partial(_trains_with_the_same_bits, case) for case in CASES},
        masters_are_cast_and_not_copied,
        frozen_masters_are_saved_and_not_their_copies,
        frozen_experts_are_not_touched,
        experts_that_fsdp2_must_move_are_units,
        layers_share_experts_only_if_these_stay_whole,
    )
    + on_ranks(
        2,
        {case.name: partial(_trains_with_the_same_bits, case) for case in MORE_CASES},
        slow=True,
    ),
)
def test_on_two_ranks(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)
