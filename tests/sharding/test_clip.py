"""clip_grad_norm_ equals torch's function on gathered gradients; ranks count their tokens."""

import itertools
import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.checks import Check, Found, on_ranks
from support.close import FP32_INSIDE, FP64_LAYER, assert_close
from support.tiny_models import batch, tiny
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

from hf_moe_ep import apply_ep_fsdp2, clip_grad_norm_, global_token_count, patch
from hf_moe_ep.state import find_state

INF = float("inf")
NORMS = (1.0, 2.0, 3.0, INF, 2)
TWO = {"num_experts": 2, "num_experts_per_tok": 1}

# name: (layout, sizes of the model). "empty shards" splits 2 experts in dim 0 over 4 ranks, so two
# ranks have empty shards.
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "ep 4": ({"ep_size": 4}, {}),
    "ep 2, dim 0": ({"ep_size": 2, "expert_shard_dim": 0}, {}),
    "empty shards": ({"ep_size": 1, "expert_shard_dim": 0}, TWO),
    "HSDP": ({"ep_size": 2, "dp_replicate_size": 2}, {}),
    "HSDP, ep_outside": (
        {"ep_size": 1, "dp_replicate_size": 2, "ep_outside": True, "expert_shard_dim": 0},
        {},
    ),
}
# The layouts for which every supported torch can make one process group of ep_fsdp x ep.
ONE_GROUP = ("ep 4", "ep 2, dim 0", "HSDP")


def _gather(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _take_local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _collect_grads(model: nn.Module) -> dict[str, Tensor]:
    grads = {name: p.grad for name, p in model.named_parameters()}
    assert all(grad is not None for grad in grads.values())
    return grads  # type: ignore[return-value]


def _build_with_gradients(layout: dict[str, Any], sizes: dict[str, Any], rank: int) -> nn.Module:
    """Return a sharded model with gradients of different orders of magnitude."""
    model = tiny(**sizes)
    apply_ep_fsdp2(model, **layout)
    model(**batch(model, 2, 7 + rank, seed=rank)).loss.backward()
    for index, grad in enumerate(_collect_grads(model).values()):
        _take_local(grad).mul_(10.0 ** (index % 3 - 1))
    return model


def _check_clip(name: str, model: nn.Module, rank: int) -> None:
    grads = _collect_grads(model)
    before = {key: _take_local(grad).clone() for key, grad in grads.items()}
    gathered = {key: _gather(grad).clone() for key, grad in grads.items()}
    if name == "empty shards":
        empty = [key for key, grad in before.items() if "experts" in key and not grad.numel()]
        assert len(empty) == (4 if rank >= 2 else 0), empty  # gate_up and down of 2 layers
    for norm_type in NORMS if name == "HSDP" else (2.0, INF):
        want = torch.nn.utils.get_total_norm(gathered.values(), float(norm_type))
        for max_norm in (0.5 * want.item(), 0.0, 2.0 * want.item(), INF):
            where = f"{name}, p={norm_type}, max_norm={max_norm:.3g}"
            got = clip_grad_norm_(model, max_norm, norm_type, error_if_nonfinite=True)
            assert not isinstance(got, DTensor) and got.dtype == torch.float64
            assert_close(where, got, want, FP64_LAYER)
            factor = min(1.0, max_norm / (want.item() + 1e-6))  # torch's own epsilon
            for key, grad in grads.items():
                assert_close(f"{where}: {key}", _gather(grad), factor * gathered[key], FP64_LAYER)
                if factor == 1.0:
                    assert torch.equal(_take_local(grad), before[key]), f"{where}: {key}"
                _take_local(grad).copy_(before[key])
            everyone = [torch.empty_like(got) for _ in range(dist.get_world_size())]
            dist.all_gather(everyone, got)
            assert all(torch.equal(other, got) for other in everyone), f"{where}: {everyone}"


def _check_nonfinite(name: str, model: nn.Module, rank: int) -> list[str]:
    """Put nan or inf in one shard (with HSDP in both of its replicas). Every rank must raise."""
    problems = []
    grads = _collect_grads(model)
    shards = 2 if name.startswith("HSDP") else 4
    dense, experts = "model.embed_tokens.weight", "model.layers.1.mlp.experts.down_proj"
    table = itertools.product((dense, experts), range(shards), (math.nan, INF), (2.0, INF))
    for key, bad_shard, value, norm_type in table:
        before = {other: _take_local(grad).clone() for other, grad in grads.items()}
        assert before[key].numel()
        if rank % shards == bad_shard:
            _take_local(grads[key]).view(-1)[0] = value
        raised = torch.zeros(4)
        try:
            clip_grad_norm_(model, 1.0, norm_type, error_if_nonfinite=True)
        except RuntimeError as error:
            raised[rank] = "the gradient norm" in str(error) and "is" in str(error)
        dist.all_reduce(raised)
        if raised.tolist() != [1.0] * 4:
            where = f"{name}: {key} has {value} in shard {bad_shard}, p={norm_type}"
            problems.append(f"{where}: raised on ranks {raised.nonzero().flatten().tolist()}")
        for other, grad in grads.items():
            _take_local(grad).copy_(before[other])
    return problems


def labels_are_counted_over_all_ranks(rank: int, world: int) -> None:
    model = nn.Identity()
    ignored = torch.full((2, 5), -100)
    labels = torch.arange(10).view(2, 5) + rank  # 4 targets a row
    labels[0, 3] = -100
    labels[1, 0] = -100  # changes nothing: the first label of a row is never a target
    only_first_label = torch.tensor([[7, -100, -100]])
    labels_of_rank = {0: labels, 1: ignored, 2: only_first_label, 3: labels[:, :1]}[rank]
    count = global_token_count(model, labels_of_rank)
    assert count.dtype == torch.int64 and count.shape == () and count.item() == 7
    micro_batches = {0: [labels, ignored], 1: [labels], 2: [only_first_label] * 5, 3: [labels] * 2}[
        rank
    ]
    assert global_token_count(model, micro_batches).item() == 4 * 7
    assert global_token_count(model, iter(micro_batches)).item() == 4 * 7
    assert global_token_count(model, ignored).item() == 0


def norm_and_clipping_equal_torch(layout: str, rank: int, world: int) -> None:
    _check_clip(layout, _build_with_gradients(*LAYOUTS[layout], rank), rank)


def a_nonfinite_element_raises_on_every_rank(layout: str, rank: int, world: int) -> None:
    problems = _check_nonfinite(layout, _build_with_gradients(*LAYOUTS[layout], rank), rank)
    assert not problems, "\n".join(problems)


def two_all_reduces_are_enough(layout: str, rank: int, world: int) -> None:
    """One all-reduce sums the dense gradients, and one the experts' gradients over all axes."""
    model = _build_with_gradients(*LAYOUTS[layout], rank)
    for norm_type in (2.0, INF):
        with CommDebugMode() as collectives:
            clip_grad_norm_(model, 1.0, norm_type)
        assert collectives.get_total_counts() == 2, f"{norm_type}: {collectives.get_comm_counts()}"


def without_a_common_group_one_all_reduce_per_axis(rank: int, world: int) -> None:
    """torch up to 2.11 cannot make the common group of some layouts."""
    model = _build_with_gradients(*LAYOUTS["HSDP"], rank)
    state = find_state(model)
    assert state is not None and state.meshes is not None and state.meshes.experts is not None
    want = clip_grad_norm_(model, INF)
    state.meshes = replace(state.meshes, experts=None)
    with CommDebugMode() as collectives:
        got = clip_grad_norm_(model, INF)
    assert collectives.get_total_counts() == 3, collectives.get_comm_counts()
    assert_close("norm", got, want, 1e-12)


ON_FOUR_RANKS = {
    **{f"norm and clip: {name}": partial(norm_and_clipping_equal_torch, name) for name in LAYOUTS},
    **{
        f"bad element: {name}": partial(a_nonfinite_element_raises_on_every_rank, name)
        for name in ("ep 2, dim 0", "HSDP")
    },
    **{f"all-reduces: {name}": partial(two_all_reduces_are_enough, name) for name in ONE_GROUP},
    "axes in turn": without_a_common_group_one_all_reduce_per_axis,
    "token count": labels_are_counted_over_all_ranks,
}
FAST = ("norm and clip: ep 2, dim 0", "bad element: HSDP", "token count")


@pytest.mark.parametrize(
    "claim",
    [
        *on_ranks(4, {name: ON_FOUR_RANKS[name] for name in FAST}),
        *on_ranks(4, {n: job for n, job in ON_FOUR_RANKS.items() if n not in FAST}, slow=True),
    ],
)
def test_on_four_ranks(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)


def _build_in_one_process(dtype: torch.dtype = torch.float64) -> nn.Module:
    model = patch(tiny(dtype=dtype))
    model(**batch(model, 2, 9)).loss.backward()
    return model


@pytest.mark.parametrize("norm_type", [*NORMS, "inf"])
def test_one_process_equals_torch(norm_type: float | str) -> None:
    for max_norm in (1e-3, 1e3):  # far below and above the norm
        ours, theirs = _build_in_one_process(), _build_in_one_process()
        got = clip_grad_norm_(ours, max_norm, norm_type)
        want = torch.nn.utils.clip_grad_norm_(theirs.parameters(), max_norm, norm_type)
        assert_close("norm", got, want, FP64_LAYER)
        for (name, grad), want_grad in zip(
            _collect_grads(ours).items(), _collect_grads(theirs).values()
        ):
            assert_close(name, grad, want_grad, FP64_LAYER)


def test_the_norm_of_bf16_gradients_is_computed_in_fp32() -> None:
    model = _build_in_one_process(torch.bfloat16)
    truth = torch.nn.utils.get_total_norm([g.double() for g in _collect_grads(model).values()])
    got = clip_grad_norm_(model, 0.125)
    assert got.dtype == torch.float32
    assert_close("norm", got, truth, FP32_INSIDE)  # the norm is summed in fp32
    # The factor is fp32, and each product is rounded to bf16 once.
    before = _collect_grads(_build_in_one_process(torch.bfloat16))
    for name, grad in _collect_grads(model).items():
        assert torch.equal(grad, (before[name].float() * (0.125 / (got + 1e-6))).bfloat16()), name


@pytest.mark.parametrize("order", [(torch.float32, torch.float64), (torch.float64, torch.float32)])
def test_gradients_of_different_dtypes(order: tuple[torch.dtype, torch.dtype]) -> None:
    model = nn.ParameterList([nn.Parameter(torch.zeros(2, dtype=dtype)) for dtype in order])
    for parameter, value in zip(model, (3.0, 4.0)):
        parameter.grad = torch.tensor([value, 0.0], dtype=parameter.dtype)
    assert clip_grad_norm_(model, 1e9).item() == 5.0


def test_parameters_without_gradients_count_as_zero() -> None:
    model = nn.Linear(3, 2)
    assert clip_grad_norm_(model, 1.0).item() == 0.0
    assert clip_grad_norm_(nn.Identity(), 1.0, error_if_nonfinite=True).item() == 0.0
    model.bias.grad = torch.tensor([3.0, 4.0])
    assert clip_grad_norm_(model, 10.0).item() == 5.0 and model.weight.grad is None


def test_nonfinite_without_the_flag_behaves_like_torch() -> None:
    for value in (math.nan, INF):
        ours, theirs = nn.Linear(3, 2), nn.Linear(3, 2)
        for model in (ours, theirs):
            model.weight.grad = torch.ones(2, 3)
            model.bias.grad = torch.tensor([1.0, value])
        got = clip_grad_norm_(ours, 1.0)
        want = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        assert torch.equal(got, want) or (got.isnan() and want.isnan())
        for name in ("weight", "bias"):
            grad, want_grad = getattr(ours, name).grad, getattr(theirs, name).grad
            assert torch.equal(grad.nan_to_num(7), want_grad.nan_to_num(7)), name
    with pytest.raises(RuntimeError, match=r"gradient norm \(p=2\.0\) is inf.*clipped to 1\.5"):
        clip_grad_norm_(_build_with_inf(), 1.5, error_if_nonfinite=True)


def _build_with_inf() -> nn.Module:
    model = nn.Linear(3, 2)
    model.bias.grad = torch.tensor([1.0, INF])
    return model


@pytest.mark.parametrize("norm_type", [0, -1.0, -INF, math.nan, "l2"])
def test_a_norm_type_has_to_be_positive(norm_type: float | str) -> None:
    with pytest.raises(ValueError, match="norm_type"):
        clip_grad_norm_(_build_with_inf(), 1.0, norm_type)


def test_parameters_instead_of_the_model_are_refused() -> None:
    """torch.nn.utils.clip_grad_norm_ takes parameters, so users may pass them here as well."""
    model = _build_with_inf()
    for wrong in (model.parameters(), list(model.parameters()), model.weight):
        with pytest.raises(ValueError, match="model"):
            clip_grad_norm_(wrong, 1.0)  # type: ignore[arg-type]


def test_an_empty_list_of_labels_is_refused() -> None:
    with pytest.raises(ValueError, match="labels is empty"):
        global_token_count(nn.Identity(), [])
