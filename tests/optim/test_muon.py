"""Compare Muon on ranks with torch.optim.Muon on every matrix, and AdamW, in one process."""

import copy
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from support.architectures import steps
from support.checks import Check, Found, on_ranks
from support.close import FP64_MODEL, assert_close
from support.muon_by_matrix import ByMatrix, matrices_of
from support.parity import Batch, full_tensor, uneven_batches, whole_parameters
from support.tiny_models import batch, tiny, vision_batch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor.debug import CommDebugMode

from hf_moe_ep import (
    Muon,
    apply_ep_fsdp2,
    clip_grad_norm_,
    data_parallel_rank,
    data_parallel_size,
    global_token_count,
    patch,
)
from hf_moe_ep.optim import muon
from hf_moe_ep.state import get_computing_device
from hf_moe_ep.upstream.process_groups import fake_group

LR = 1e-2


@dataclass(frozen=True)
class Case:
    """A model, a layout of ranks and options of Muon. `bucket` is the size of a bucket in bytes.

    With `unfreezes`, layer 0 is frozen in the first step, and layer 1 in the last step.
    """

    name: str
    world: int
    model: str = "qwen3_moe"
    sizes: dict[str, Any] = field(default_factory=dict)
    layout: dict[str, Any] = field(default_factory=dict)
    muon: dict[str, Any] = field(default_factory=dict)
    bucket: int = 4096
    unfreezes: bool = False
    slow: bool = False


CASES = [
    Case("ep 2", 2, layout={"ep_size": 2}),
    Case("ep 1, rows of experts", 2, layout={"expert_shard_dim": 1}, slow=True),
    Case("ep 2, rows of experts", 4, layout={"ep_size": 2, "expert_shard_dim": 1}, slow=True),
    Case("ep 4", 4, layout={"ep_size": 4}, slow=True),
    Case("ep 2, unfrozen later", 2, layout={"ep_size": 2}, unfreezes=True, slow=True),
    Case("ep 1, unfrozen later", 2, layout={"expert_shard_dim": 1}, unfreezes=True, slow=True),
    Case(
        "3 experts over ep_fsdp",
        4,
        sizes={"num_experts": 6},
        layout={"ep_size": 2, "expert_shard_dim": 1},
        slow=True,
    ),
    Case(
        "experts of dim 0, padded",
        4,
        sizes={"num_experts": 6},
        layout={"expert_shard_dim": 0},
        slow=True,
    ),
    Case(
        "HSDP", 4, layout={"ep_size": 1, "dp_replicate_size": 2, "expert_shard_dim": 1}, slow=True
    ),
    Case("sp 2", 4, layout={"ep_size": 2, "sp_size": 2}, slow=True),
    Case(
        "tied embeddings", 2, sizes={"tie_word_embeddings": True}, layout={"ep_size": 2}, slow=True
    ),
    Case("one bucket", 2, layout={"ep_size": 1, "expert_shard_dim": 1}, bucket=2**30, slow=True),
    Case(
        "options",
        2,
        layout={"ep_size": 2},
        muon={
            "adjust_lr_fn": "match_rms_adamw",
            "nesterov": False,
            "momentum": 0.8,
            "ns_steps": 3,
            "weight_decay": 0.3,
        },
        slow=True,
    ),
    Case("deepseek_v3", 2, model="deepseek_v3", layout={"ep_size": 2}, slow=True),
    Case("gpt_oss", 2, model="gpt_oss", layout={"ep_size": 2}),
    Case(
        "gpt_oss, dim 1",
        4,
        model="gpt_oss",
        layout={"ep_size": 2, "expert_shard_dim": 1},
        slow=True,
    ),
    Case("ep 2 x etp 2", 4, layout={"ep_size": 2, "etp_size": 2}, slow=True),
    Case("etp 2 x ep_fsdp 2", 4, layout={"etp_size": 2}, slow=True),
    Case("gpt_oss, etp 4", 4, model="gpt_oss", layout={"etp_size": 4}, slow=True),
    Case("qwen3_vl_moe", 2, model="qwen3_vl_moe", layout={"ep_size": 2}, slow=True),
]


def _build(case: Case, seed: int) -> nn.Module:
    if case.model in ("qwen3_moe", "qwen3_vl_moe"):
        return tiny(case.model, seed=seed, **case.sizes)
    return steps.build(case.model, seed=seed, **case.sizes)


def _make_batches(case: Case, model: nn.Module, rank: int, world: int, step: int) -> list[Batch]:
    if case.model == "qwen3_vl_moe":
        return [vision_batch(model, [[4, (4, 4), 3 + rank], [5 + step, (2, 4), 2]], seed=step)]
    return uneven_batches(model, rank, world, step)


def _compare_with_single_matrices(case: Case, rank: int, world: int) -> None:
    model, reference = _build(case, rank), _build(case, 0)
    kind = "gpt_oss" if case.model == "gpt_oss" else "halves"
    stock = ByMatrix(reference, LR, kind=kind, **case.muon)
    if case.unfreezes:
        for each_model in (model, reference):
            each_model.model.layers[0].requires_grad_(False)
    apply_ep_fsdp2(model, **case.layout)
    optimizer = Muon(model, LR, **case.muon)
    optimizer._bucket_bytes = case.bucket
    data_rank, data_world = data_parallel_rank(model), data_parallel_size(model)
    for step in range(3):
        by_rank = [
            _make_batches(case, reference, other, data_world, step) for other in range(data_world)
        ]
        tokens = global_token_count(model, [b["labels"] for b in by_rank[data_rank]])
        optimizer.zero_grad()
        stock.zero_grad()
        for micro in by_rank[data_rank]:
            (model(**micro, num_items_in_batch=tokens).loss * data_world).backward()
        for batches in by_rank:
            for micro in batches:
                reference(**micro, num_items_in_batch=tokens).loss.backward()
        clip_grad_norm_(model, 0.5)
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        with CommDebugMode() as collectives:
            optimizer.step()
        if step > 0 and not case.unfreezes:  # ranks compare their matrices in the first step
            kinds = {str(kind) for kind in collectives.get_comm_counts()}
            assert kinds and all("alltoall" in kind for kind in kinds), kinds
        stock.step()
        if case.unfreezes:
            _unfreeze_and_freeze_layers(step, model, reference)
            if step == 0:
                optimizer.add_param_group({"params": model.model.layers[0].parameters()})
    want = dict(reference.named_parameters())
    for name, parameter in whole_parameters(model).items():
        assert_close(f"{case.name}: {name}", parameter, want[name], FP64_MODEL)


def _unfreeze_and_freeze_layers(step: int, *models: nn.Module) -> None:
    for model in models:
        layers = model.model.layers
        if step == 0:
            layers[0].requires_grad_(True)
        if step == 1:
            layers[1].requires_grad_(False)


@pytest.mark.parametrize(
    "claim",
    [
        Check(
            case.name, case.world, partial(_compare_with_single_matrices, case), slow=case.slow
        ).as_parameter()
        for case in CASES
    ],
)
def test_three_steps_equal_training_of_single_matrices(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_one_process_equals_training_of_single_matrices(name: str) -> None:
    """An infinity in a gradient turns the whole matrix of one expert into NaN, and no other."""
    case = Case(name, 1, model=name)
    model, reference = _build(case, 0), _build(case, 0)
    patch(model)
    optimizer = Muon(model, LR)
    stock = ByMatrix(reference, LR, kind="gpt_oss" if name == "gpt_oss" else "halves")
    for step in range(3):
        for micro in _make_batches(case, reference, 0, 1, step):
            model(**micro).loss.backward()
            reference(**micro).loss.backward()
        for each_optimizer in (optimizer, stock):
            each_optimizer.step()
            each_optimizer.zero_grad()
    want = dict(reference.named_parameters())
    for key, parameter in model.named_parameters():
        assert_close(key, parameter.detach(), want[key], FP64_MODEL)
    for each_model, each_optimizer in ((model, optimizer), (reference, stock)):
        each_model(**_make_batches(case, reference, 0, 1, 3)[0]).loss.backward()
        each_model.model.layers[0].mlp.experts.down_proj.grad[1, 0, 0] = torch.inf
        each_optimizer.step()
    for key, parameter in model.named_parameters():
        assert torch.equal(parameter.isnan(), want[key].isnan()), key
    nan = model.model.layers[0].mlp.experts.down_proj.isnan().flatten(1)
    assert nan.all(1).tolist() == nan.any(1).tolist() == [row == 1 for row in range(len(nan))]


def _check_rounding(got: dict[str, Tensor], stock: nn.Module, truth: nn.Module) -> None:
    """Our error against fp64 is at most 1.2 times torch's in all matrices, and twice in each."""
    true_values, ours, torchs = dict(truth.named_parameters()), [], []
    for name, parameter in stock.named_parameters():
        if matrices_of(name, parameter, "halves"):
            true_value = true_values[name].detach()
            ours.append((got[name].double() - true_value).norm())
            torchs.append((parameter.detach().double() - true_value).norm())
            assert 0 < ours[-1] <= 2 * torchs[-1], (name, ours[-1], torchs[-1])
    error, torchs_error = torch.stack(ours).norm(), torch.stack(torchs).norm()
    print(f"{len(ours)} parameters: error {error:.3e}, torch's {torchs_error:.3e}")
    assert error <= 1.2 * torchs_error


def test_bf16_parameters_are_rounded_as_by_torch() -> None:
    """The learning rate makes errors of Newton-Schulz larger than those of stored parameters."""
    model, reference = tiny(dtype=torch.bfloat16), tiny(dtype=torch.bfloat16)
    truth = copy.deepcopy(reference).double()
    models = (patch(model), reference, truth)
    optimizers = (Muon(model, 0.5), ByMatrix(reference, 0.5), ByMatrix(truth, 0.5))
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        for same in zip(*(each_model.parameters() for each_model in models), strict=True):
            grad = torch.randn(same[0].shape, generator=generator).bfloat16()
            for parameter in same:
                parameter.grad = grad.to(parameter.dtype)
        for each_optimizer in optimizers:
            each_optimizer.step()
    got = {name: parameter.detach() for name, parameter in model.named_parameters()}
    _check_rounding(got, reference, truth)


def _round_as_torch(dtype: torch.dtype, options: dict[str, Any], rank: int, world: int) -> None:
    model, reference = tiny(seed=rank, dtype=dtype), tiny(dtype=dtype).float()
    truth = copy.deepcopy(reference).double()
    apply_ep_fsdp2(model, expert_shard_dim=1, **options)
    optimizers = (Muon(model, 0.5), ByMatrix(reference, 0.5), ByMatrix(truth, 0.5))
    optimizers[0]._bucket_bytes = 4096
    for step in range(2):
        model(**batch(model, 2, 9, seed=10 * step + rank)).loss.backward()
        for name, parameter in model.named_parameters():
            assert parameter.dtype == parameter.grad.dtype == torch.float32
            for each_model in (reference, truth):
                same = each_model.get_parameter(name)
                same.grad = full_tensor(parameter.grad).to(same.dtype)
        for each_optimizer in optimizers:
            each_optimizer.step()
        optimizers[0].zero_grad()
    _check_rounding(whole_parameters(model), reference, truth)


_POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@pytest.mark.parametrize(
    "claim",
    on_ranks(
        2,
        {
            "mixed precision": partial(_round_as_torch, torch.float32, {"mp_policy": _POLICY}),
            "a bf16 model": partial(_round_as_torch, torch.bfloat16, {}),
        },
        slow=True,
    ),
)
def test_half_precision_on_ranks_is_rounded_as_by_torch(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)


def _record_step(
    monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...], bucket_bytes: int
) -> tuple[str, Counter[tuple[int, ...]]]:
    """Run a step on rank 0 of 2, where the other rank does not exist.

    Returns:
        The calls in their order, "[" and "]" at the beginning and the end of Newton-Schulz, and the
        shapes of the tensors that are orthogonalised.
    """
    calls: list[str] = []
    shapes: Counter[tuple[int, ...]] = Counter()
    orthogonalise = muon.orthogonalise

    def start(*args: Any, where: str, **options: Any) -> Any:
        transfer = f"send{where.split()[1]}"
        if transfer in calls:
            transfer = f"result{where.split()[1]}"
        calls.append(transfer)
        return SimpleNamespace(wait=lambda: calls.append(f"wait_{transfer}"))

    def compute(x: Tensor, *args: Any) -> Tensor:
        shapes[tuple(x.shape)] += 1
        calls.append("[")
        result = orthogonalise(x, *args)
        calls.append("]")
        return result

    monkeypatch.setattr(muon, "start_all_to_all", start)
    monkeypatch.setattr(muon, "orthogonalise", compute)
    with (
        fake_group(0, 2),
        mock.patch.object(muon, "check_alike"),
        mock.patch.object(muon, "_check_others_assign"),
    ):
        model = apply_ep_fsdp2(tiny(num_hidden_layers=4), ep_size=2)
        trained = [p for name, p in model.named_parameters() if any(n in name for n in names)]
        optimizer = Muon(model, LR, param_groups=[{"params": trained, "use_muon": True}])
        optimizer._bucket_bytes = bucket_bytes
        for parameter in trained:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    return " ".join(calls).replace("[ ]", "[]"), shapes


# The number of matrices in a bucket, and the calls of a step.
CALLS = {
    1: "send0 [] [] [] [] wait_send0 "
    "[ send1 ] wait_send1 result0 "
    "[ wait_result0 send2 ] wait_send2 result1 "
    "[ wait_result1 send3 ] wait_send3 result2 "
    "[ wait_result2 ] result3 wait_result3",
    2: "send0 [] [] [] [] wait_send0 "
    "[] send1 [] wait_send1 result0 "
    "[] wait_result0 [] result1 wait_result1",
}


@pytest.mark.parametrize("in_a_bucket", CALLS)
def test_transfers_overlap_the_neighbouring_bucket(
    monkeypatch: pytest.MonkeyPatch, in_a_bucket: int
) -> None:
    """A rank has the down projections of 4 experts, and owns 4 of 8 matrices [32, 32] in fp64."""
    names = ("q_proj", "o_proj", "layers.0.mlp.experts.down_proj")
    calls, shapes = _record_step(monkeypatch, names, in_a_bucket * 32 * 32 * 8)
    assert calls == CALLS[in_a_bucket]
    assert shapes == {(1, 32, 24): 4, (1, 32, 32): 4}


def test_matrices_of_one_shape_are_orthogonalised_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank has 4 experts of each of 4 layers, and owns 4 projections of each of two shapes."""
    names = ("_proj",)
    _, shapes = _record_step(monkeypatch, names, muon.BUCKET_BYTES)
    assert shapes == {(4, 24, 32): 8, (4, 32, 24): 4, (4, 32, 32): 1, (4, 16, 32): 1}


def test_an_unsharded_model_is_orthogonalised_on_its_own_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without sharding there is no mesh with a device, and the parameters may be on a GPU."""
    model = patch(tiny())
    assert get_computing_device(copy.deepcopy(model).to("meta")).type == "meta"
    optimizer = Muon(model, lr=0.1)
    model(**batch(model, 2, 6)).loss.backward()
    devices = set()
    compute_block = muon._compute_block

    def record(*args: Any) -> Any:
        devices.add(args[-1])
        return compute_block(*args[:-1], torch.device("cpu"))

    monkeypatch.setattr(muon, "get_computing_device", lambda _: "the device")
    monkeypatch.setattr(muon, "_compute_block", record)
    optimizer.step()
    assert devices == {"the device"}


def test_parameters_that_are_unfrozen_later_are_trained() -> None:
    """It does not matter if parameters are given to Muon before or after they are unfrozen.

    A parameter that is frozen after backward has a gradient, and is trained once more, as in torch.
    """
    model, given_frozen, reference = tiny(), tiny(), tiny()
    stock = ByMatrix(reference, LR)
    for each_model in (model, given_frozen, reference):
        each_model.model.layers[0].requires_grad_(False)
    optimizer = Muon(patch(model), LR)
    everything = [{"params": patch(given_frozen).parameters()}]
    other_optimizer = Muon(given_frozen, LR, param_groups=everything)
    pairs = (model, optimizer), (given_frozen, other_optimizer), (reference, stock)
    for step in range(3):
        inputs = uneven_batches(reference, 0, 1, step)[0]
        for each_model, _ in pairs:
            each_model(**inputs).loss.backward()
            _unfreeze_and_freeze_layers(step, each_model)
        for _, each_optimizer in pairs:
            each_optimizer.step()
            each_optimizer.zero_grad()
        if step == 0:
            optimizer.add_param_group({"params": model.model.layers[0].parameters()})
    experts = model.model.layers[0].mlp.experts.down_proj
    assert optimizer.state[experts].keys() == {"momentum_buffer"}
    want = dict(reference.named_parameters())
    for each_model in (model, given_frozen):
        for name, parameter in each_model.named_parameters():
            assert_close(name, parameter.detach(), want[name].detach(), FP64_MODEL)


def test_frozen_experts_can_be_given_to_muon() -> None:
    model = patch(tiny())
    experts = model.model.layers[0].mlp.experts
    experts.requires_grad_(False)
    group = {"params": [experts.down_proj], "use_muon": True}
    assert Muon(model, LR, param_groups=[group]).param_groups[0]["use_muon"]
