"""Compare Muon on ranks with torch.optim.Muon on every matrix, and AdamW, in one process."""

import copy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from support.architectures import steps
from support.checks import Check, Found
from support.close import FP64_MODEL, assert_close
from support.muon_by_matrix import ByMatrix
from support.parity import Batch, uneven_batches, whole_parameters
from support.tiny_models import batch, tiny, vision_batch
from torch import nn

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
        optimizer.step()
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
