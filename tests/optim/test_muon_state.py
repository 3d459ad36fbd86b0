"""Test Muon's state in checkpoints, with moved experts and Accelerate, and what Muon refuses."""

import gc
import re
import weakref
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.adapters import with_lora
from support.architectures import tiny as tiny_of
from support.checks import Check, Found, on_ranks
from support.close import FP64_MODEL, assert_close
from support.launched import launched
from support.needs import SINCE_5_23
from support.parity import full_tensor, whole_parameters
from support.ranks import run_ranks
from support.tiny_models import batch, tiny
from torch import Tensor, nn

from hf_moe_ep import (
    ExpertLoad,
    Muon,
    apply_ep_fsdp2,
    balance_experts,
    data_parallel_rank,
    data_parallel_size,
    expert_load,
    load_checkpoint,
    patch,
    save_checkpoint,
)
from hf_moe_ep.ranks.boxes import get_local_tensor
from hf_moe_ep.upstream.accelerate_and_trainer import distinct_data_ptrs
from hf_moe_ep.upstream.process_groups import fake_group

LR = 1e-2


def _train(model: nn.Module, optimizer: Any, steps: range) -> None:
    """Train on global batches that are the same with every layout."""
    rank, size = data_parallel_rank(model), data_parallel_size(model)
    for step in steps:
        inputs = batch(model, dist.get_world_size(), 9, seed=step)
        tokens = inputs["labels"][:, 1:].ne(-100).sum()
        mine = {name: value.chunk(size)[rank] for name, value in inputs.items()}
        (model(**mine, num_items_in_batch=tokens).loss * size).backward()
        optimizer.step()
        optimizer.zero_grad()


def _build_sharded(seed: int = 0, **layout: Any) -> tuple[nn.Module, Muon]:
    model = tiny(seed=seed)
    apply_ep_fsdp2(model, **layout)
    return model, Muon(model, LR)


def a_run_resumes_at_another_layout(rank: int, world: int, folder: str) -> None:
    model, optimizer = _build_sharded(ep_size=4)
    _train(model, optimizer, range(2))
    save_checkpoint(Path(folder) / "step-2", model, optimizer)
    _train(model, optimizer, range(2, 4))
    want = whole_parameters(model)
    other, other_optimizer = _build_sharded(seed=1, ep_size=2, expert_shard_dim=1)
    load_checkpoint(folder, other, other_optimizer)
    _train(other, other_optimizer, range(2, 4))
    for name, got in whole_parameters(other).items():
        assert_close(name, got, want[name], FP64_MODEL)
    adamw = torch.optim.AdamW(other.parameters(), lr=LR)
    with pytest.raises(ValueError, match="was saved with Muon, this optimizer is AdamW"):
        load_checkpoint(folder, other, adamw)


def a_run_resumes_with_stages_and_again_without(rank: int, world: int, folder: str) -> None:
    """A run with ep 4 continues with two stages and ep 2, and then with ep 4 again."""
    model, optimizer = _build_sharded(ep_size=4)
    _train(model, optimizer, range(2))
    save_checkpoint(Path(folder) / "step-2", model, optimizer)
    _train(model, optimizer, range(2, 4))
    in_stages, other_optimizer = _build_sharded(seed=1, pp_size=2, ep_size=2)
    load_checkpoint(Path(folder) / "step-2", in_stages, other_optimizer)
    _train(in_stages, other_optimizer, range(2, 4))
    _compare_with_whole_model(in_stages, model)
    save_checkpoint(Path(folder) / "step-4", in_stages, other_optimizer)
    again, last_optimizer = _build_sharded(seed=2, ep_size=4)
    load_checkpoint(Path(folder) / "step-4", again, last_optimizer)
    for run in ((again, last_optimizer), (model, optimizer)):
        _train(*run, range(4, 6))
    _compare_with_whole_model(again, model)


def groups_of_stages_keep_their_options(rank: int, world: int, folder: str) -> None:
    """The group of the embedding is empty on stage 1, and the group of the head on stage 0."""

    def start(seed: int) -> tuple[nn.Module, Muon]:
        model = apply_ep_fsdp2(tiny(seed=seed), pp_size=2)
        named = list(model.named_parameters())
        embedding, head = (
            [p for name, p in named if part in name] for part in ("embed_tokens", "lm_head")
        )
        rest = [p for name, p in named if "embed_tokens" not in name and "lm_head" not in name]
        groups = [
            {"params": embedding, "lr": 1e-3},
            {"params": head, "lr": 1e-4},
            {"params": rest},
        ]
        return model, Muon(model, LR, param_groups=groups)

    def read_lr_by_name(model: nn.Module, optimizer: Muon) -> dict[str, float]:
        names = {p: name for name, p in model.named_parameters()}
        return {names[p]: g["lr"] for g in optimizer.param_groups for p in g["params"]}

    model, optimizer = start(0)
    want = read_lr_by_name(model, optimizer)
    assert set(want.values()) == {LR, 1e-3 if rank == 0 else 1e-4}
    _train(model, optimizer, range(1))
    save_checkpoint(Path(folder) / "step-1", model, optimizer)
    resumed, other_optimizer = start(1)
    load_checkpoint(folder, resumed, other_optimizer)
    assert read_lr_by_name(resumed, other_optimizer) == want
    for run in ((model, optimizer), (resumed, other_optimizer)):
        _train(*run, range(1, 2))
    for name, parameter in whole_parameters(resumed).items():
        assert torch.equal(parameter, whole_parameters(model)[name]), name


def a_frozen_stage_has_the_groups_of_other_stages(rank: int, world: int, folder: str) -> None:
    def start(**layout: Any) -> tuple[nn.Module, Muon]:
        model = tiny()
        model.model.embed_tokens.requires_grad_(False)
        model.model.layers[0].requires_grad_(False)
        apply_ep_fsdp2(model, **layout)
        return model, Muon(model, LR)

    model, optimizer = start(pp_size=2)
    assert [group["use_muon"] for group in optimizer.param_groups] == [True, False]
    assert any(group["params"] for group in optimizer.param_groups) == (rank == 1)
    _train(model, optimizer, range(1))
    save_checkpoint(Path(folder) / "step-1", model, optimizer)
    resumed, other_optimizer = start(ep_size=2)
    load_checkpoint(folder, resumed, other_optimizer)
    for run in ((model, optimizer), (resumed, other_optimizer)):
        _train(*run, range(1, 2))
    _compare_with_whole_model(model, resumed)


def _compare_with_whole_model(model: nn.Module, whole: nn.Module) -> None:
    """Compare the parameters of this rank's stage with a model that has no stages."""
    want = whole_parameters(whole)
    for name, got in whole_parameters(model).items():
        assert_close(name, got, want[name], FP64_MODEL)


def a_gradient_scaler_unscales_gradients_and_skips_a_step(rank: int, world: int) -> None:
    """A scale that is a power of two changes no bit. All ranks skip a step with an infinity."""
    (model, optimizer), (twin, other_optimizer) = (_build_sharded(ep_size=2) for _ in range(2))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    _train(twin, other_optimizer, range(2))
    for step in range(3):
        inputs = batch(model, world, 9, seed=step)
        tokens = inputs["labels"][:, 1:].ne(-100).sum()
        mine = {name: value.chunk(world)[rank] for name, value in inputs.items()}
        scaler.scale(model(**mine, num_items_in_batch=tokens).loss * world).backward()
        if step == 2 and rank == 0:
            grad = model.model.layers[0].mlp.experts.down_proj.grad
            get_local_tensor(grad)[0, 0, 0] = torch.inf
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert scaler.get_scale() == 2.0**9
    for name, got in whole_parameters(model).items():
        assert torch.equal(got, whole_parameters(twin)[name]), name


def non_finite_gradients_change_only_their_matrix(rank: int, world: int) -> None:
    """As in torch.optim.Muon, an infinity turns its matrix into NaN, and no other matrix."""
    model, optimizer = _build_sharded(expert_shard_dim=1)
    twin, other_optimizer = _build_sharded(expert_shard_dim=1)
    for trained in (model, twin):
        inputs = batch(model, world, 9, seed=0)
        mine = {name: value.chunk(world)[rank] for name, value in inputs.items()}
        trained(**mine).loss.backward()
    layer = model.model.layers[0]
    if rank == 0:
        for parameter in (layer.self_attn.q_proj.weight, layer.mlp.experts.gate_up_proj):
            get_local_tensor(parameter.grad).view(-1)[0] = torch.inf
    optimizer.step()
    other_optimizer.step()
    wanted = whole_parameters(twin)
    for name, got in whole_parameters(model).items():
        expected = wanted[name].clone()
        if name.endswith("layers.0.self_attn.q_proj.weight"):
            expected[:] = torch.nan
        if name.endswith("layers.0.mlp.experts.gate_up_proj"):
            expected[0, : expected.shape[1] // 2] = torch.nan  # the gate of expert 0
        assert torch.equal(got.isnan(), expected.isnan()), name
        assert torch.equal(got.nan_to_num(), expected.nan_to_num()), name


def a_checkpoint_of_adamw_is_refused(rank: int, world: int, folder: str) -> None:
    model, optimizer = _build_sharded(ep_size=2)
    adamw = torch.optim.AdamW(model.parameters(), lr=LR)
    _train(model, adamw, range(1))
    save_checkpoint(Path(folder) / "step-1", model, adamw)
    with pytest.raises(ValueError, match="was saved with AdamW, this optimizer is Muon"):
        load_checkpoint(folder, model, optimizer)


def moved_experts_take_their_momentum_along(rank: int, world: int, folder: str) -> None:
    """Training goes on, and so does a run that resumes from a checkpoint of balanced experts."""
    (model, optimizer), (twin, other_optimizer) = (_build_sharded(ep_size=2) for _ in range(2))
    for run in ((model, optimizer), (twin, other_optimizer)):
        _train(*run, range(2))
    before = expert_load(model)
    load = ExpertLoad(before.counts.flip(1) ** 2 + torch.arange(8), *_list_other_fields(before))
    balance_experts(model, optimizer, load)
    assert any(layer.slots_E is not None for layer in model._hf_moe_ep.moe_layers)
    save_checkpoint(Path(folder) / "step-2", model, optimizer)
    resumed, last_optimizer = _build_sharded(seed=1, ep_size=2)
    load_checkpoint(folder, resumed, last_optimizer)
    for run in ((model, optimizer), (twin, other_optimizer), (resumed, last_optimizer)):
        _train(*run, range(2, 4))
    wanted = whole_parameters(twin)
    for trained in (model, resumed):
        layers = trained._hf_moe_ep.moe_layers
        for name, got in whole_parameters(trained).items():
            if "experts" in name and (slots := layers[int(name.split(".")[2])].slots_E) is not None:
                got = got[slots]
            assert_close(name, got, wanted[name], FP64_MODEL)


def _list_other_fields(load: ExpertLoad) -> list[Any]:
    names = [name for name in load.__dataclass_fields__ if name != "counts"]
    return [getattr(load, name) for name in names]


def accelerate_shards_a_model_that_already_has_an_optimizer(rank: int, world: int) -> None:
    from accelerate import Accelerator

    with launched():
        accelerator = Accelerator(cpu=True)
        model = tiny()
        patch(model, ep_size=2)
        optimizer = Muon(model, LR)
        unsharded = [weakref.ref(parameter) for parameter in model.parameters()]
        model, optimizer = accelerator.prepare(model, optimizer)
        gc.collect()
        assert not any(parameter() is not None for parameter in unsharded)
        twin, other_optimizer = _build_sharded(ep_size=2)
        _train(model, optimizer, range(2))
        _train(twin, other_optimizer, range(2))
        wanted = whole_parameters(twin)
        for name, got in whole_parameters(model).items():
            assert torch.equal(got, wanted[name]), name


def an_optimizer_from_before_sharding_is_refused(rank: int, world: int) -> None:
    model = tiny()
    patch(model, ep_size=2)
    optimizer = Muon(model, LR)
    old = [p for group in optimizer.param_groups for p in group["params"]]
    apply_ep_fsdp2(model, ep_size=2)
    for parameter in old:
        parameter.grad = torch.ones_like(parameter)
    with pytest.raises(ValueError, match=r"does not belong to its model any more; create Muon aft"):
        optimizer.step()


def adapter_factors_can_be_given_to_muon(rank: int, world: int) -> None:
    """Each expert's factors are matrices, although PEFT packs the factors of all experts."""

    def make_groups(model: nn.Module) -> list[dict[str, Any]]:
        return [{"params": [p for p in model.parameters() if p.requires_grad], "use_muon": True}]

    model, alone = (with_lora(tiny(), r=3, seed=0) for _ in range(2))
    apply_ep_fsdp2(model, ep_size=2)
    patch(alone)
    default = Muon(model, LR)
    assert [g["use_muon"] for g in default.param_groups] == [False]
    optimizer = Muon(model, LR, param_groups=make_groups(model))
    optimizer_alone = Muon(alone, LR, param_groups=make_groups(alone))
    for step in range(2):
        inputs = batch(model, world, 9, seed=step)
        tokens = inputs["labels"][:, 1:].ne(-100).sum()
        mine = {name: value[rank : rank + 1] for name, value in inputs.items()}
        (model(**mine, num_items_in_batch=tokens).loss * world).backward()
        alone(**inputs, num_items_in_batch=tokens).loss.backward()
        for each_optimizer in (optimizer, optimizer_alone):
            each_optimizer.step()
            each_optimizer.zero_grad()
    wanted = dict(alone.named_parameters())
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            got = full_tensor(parameter.detach())
            assert_close(name, _pack_as_peft(name, got), wanted[name].detach(), FP64_MODEL)


def factors_that_etp_splits_in_two_are_refused(rank: int, world: int) -> None:
    """lora_B of gate and up is one matrix per expert, and a rank has two ranges of its rows."""
    from accelerate import Accelerator

    def make_groups(model: nn.Module, *, is_cut: bool) -> list[dict[str, Any]]:
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        factors = [p for name, p in named if ("base_layer.lora_B" in name) == is_cut]
        return [{"params": factors, "use_muon": True}]

    message = r"etp_size=2 gives a rank two ranges of the rows .*set 'use_muon': False for it"
    model = apply_ep_fsdp2(with_lora(tiny(), modules=()), etp_size=2)
    with pytest.raises(ValueError, match=message):
        Muon(model, LR, param_groups=make_groups(model, is_cut=True))
    _train(model, Muon(model, LR, param_groups=make_groups(model, is_cut=False)), range(1))
    with launched():
        accelerator = Accelerator(cpu=True)
        later = patch(with_lora(tiny(), modules=()), etp_size=2)
        optimizer = Muon(later, LR, param_groups=make_groups(later, is_cut=True))
        prepared, optimizer = accelerator.prepare(later, optimizer)
        with pytest.raises(ValueError, match=message):
            _train(prepared, optimizer, range(1))


def change_gradients_on_one_rank(missing: str, rank: int, world: int) -> None:
    """Gradients are missing on rank 1. Without an error, rank 0 would wait for rank 1."""
    model, optimizer = _build_sharded(ep_size=2)
    _train(model, optimizer, range(1))
    optimizer.zero_grad()
    optimizer.step()  # no rank has a gradient
    _train(model, optimizer, range(1, 2))
    inputs = batch(model, 1, 9, seed=rank)
    model(**inputs).loss.backward()
    for name, parameter in model.named_parameters() if rank == 1 else ():
        if missing in name:
            parameter.grad = None
    with mock.patch("hf_moe_ep.ranks.all_ranks.PATIENCE", timedelta(seconds=1)):
        optimizer.step()


def _pack_as_peft(name: str, factor: Tensor) -> Tensor:
    if factor.ndim == 2:
        return factor
    return factor.flatten(0, 1) if "lora_A" in name else factor.permute(1, 2, 0).flatten(1, 2)


@pytest.mark.parametrize(
    "claim",
    [
        *on_ranks(
            2,
            moved_experts_take_their_momentum_along,
            an_optimizer_from_before_sharding_is_refused,
            adapter_factors_can_be_given_to_muon,
            factors_that_etp_splits_in_two_are_refused,
            groups_of_stages_keep_their_options,
            a_frozen_stage_has_the_groups_of_other_stages,
        ),
        *on_ranks(
            2,
            accelerate_shards_a_model_that_already_has_an_optimizer,
            a_checkpoint_of_adamw_is_refused,
            a_gradient_scaler_unscales_gradients_and_skips_a_step,
            non_finite_gradients_change_only_their_matrix,
            slow=True,
        ),
        *on_ranks(
            4,
            a_run_resumes_at_another_layout,
            a_run_resumes_with_stages_and_again_without,
            slow=True,
        ),
    ],
)
def test_on_ranks(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)


def _check_refusal(model: nn.Module, message: str, **options: Any) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Muon(model, **({"lr": LR} | options))


def test_a_checkpoint_with_torchs_muon_is_saved_with_a_warning_and_not_loaded(
    tmp_path: Path,
) -> None:
    model = patch(tiny())
    stock = torch.optim.Muon([p for p in model.parameters() if p.ndim == 2], lr=LR)
    with pytest.warns(UserWarning, match=r"will refuse this optimizer: .* use hf_moe_ep.Muon"):
        save_checkpoint(tmp_path / "step-1", model, stock)
    with pytest.raises(ValueError, match=r"torch.optim.Muon is refused .* use hf_moe_ep.Muon"):
        load_checkpoint(tmp_path / "step-1", model, stock)
    load_checkpoint(tmp_path / "step-1", model, None)  # the weights can be loaded


def test_invalid_options_are_refused() -> None:
    model = tiny()
    _check_refusal(model, "this model is not patched")
    patch(model)
    refused = partial(_check_refusal, model)
    refused("lr must be a number >= 0, got -1", lr=-1)
    refused("momentum must be a number >= 0, got -0.5", momentum=-0.5)
    refused("ns_steps must be 1 .. 99, got 0", ns_steps=0)
    refused("adjust_lr_fn must be one of None, 'original', 'match_rms_adamw', ", adjust_lr_fn="rms")
    refused("betas must be numbers in [0, 1)", adamw_betas=(0.9, 1.0))
    norm = model.model.norm.weight
    refused(
        "a parameter (32,), which is neither", param_groups=[{"params": norm, "use_muon": True}]
    )
    refused("has the options", param_groups=[{"params": norm, "mommentum": 0.9}])
    with pytest.raises(ValueError, match=r"takes the patched model.*got list"):
        Muon(list(model.parameters()), LR)  # type: ignore[arg-type]


@pytest.mark.skipif(not SINCE_5_23, reason="Inkling of this transformers cannot be patched")
def test_a_parameter_that_no_rule_covers_is_named() -> None:
    model = tiny_of("inkling_text")
    patch(model)
    _check_refusal(model, "model.layers.1.mlp.shared_experts.gate_proj (2, 24, 40)")
    shared = [p for name, p in model.named_parameters() if "shared_experts" in name]
    ids = {id(p) for p in shared}
    rest = [p for p in model.parameters() if id(p) not in ids]
    groups = [{"params": shared, "use_muon": False, "lr": 1e-4}, {"params": rest}]
    optimizer = Muon(model, LR, param_groups=groups)
    assert [group["use_muon"] for group in optimizer.param_groups] == [False, True, False]
    assert [group["lr"] for group in optimizer.param_groups] == [1e-4, LR, LR]


def test_heads_are_trained_as_single_matrices() -> None:
    """A projection to 4 heads of 8 rows is trained as 4 matrices."""
    model, other = tiny(), tiny()
    patch(model)
    patch(other)
    optimizer = Muon(model, LR, split_heads=True)
    whole = Muon(other, LR)
    for each_model in (model, other):
        each_model(**batch(each_model, 2, 9)).loss.backward()
    optimizer.step()
    whole.step()
    changed = {
        name.rpartition(".weight")[0].rpartition(".")[2]
        for (name, a), b in zip(model.named_parameters(), other.parameters(), strict=True)
        if not torch.allclose(a, b, rtol=0, atol=1e-12)
    }
    assert changed == {"q_proj", "k_proj", "v_proj"}
    head = torch.optim.Muon([nn.Parameter(torch.zeros(8, 32))], lr=LR)
    (copy,) = head.param_groups[0]["params"]
    start = tiny().model.layers[0].self_attn.k_proj.weight.detach()[8:16]
    copy.data = start.clone().double()
    grad = other.model.layers[0].self_attn.k_proj.weight.grad
    assert grad is not None
    copy.grad = grad[8:16].clone()
    from support.muon_by_matrix import newton_schulz_in_fp64

    with newton_schulz_in_fp64():
        head.step()
    got = model.model.layers[0].self_attn.k_proj.weight.detach()[8:16]
    assert_close("head 1 of k_proj", got, copy.detach(), FP64_MODEL)


@pytest.mark.slow
@pytest.mark.parametrize("missing", ["layers.0.self_attn.q_proj", ""])
def test_ranks_raise_an_error_if_one_rank_lacks_gradients(missing: str) -> None:
    outcomes = run_ranks(partial(change_gradients_on_one_rank, missing), 2, expect_errors=True)
    assert [outcome[0] for outcome in outcomes] == ["error", "error"]
    assert outcomes[1][1] == "RuntimeError"
    assert "on this rank other matrices have gradients than in the step before" in outcomes[1][2]


def test_unsharded_parameters_are_freed_while_accelerate_shards_a_model() -> None:
    """`accelerator.prepare` empties the optimizer's groups first. Afterwards nothing may refer to
    an unsharded parameter, or each GPU has the memory of the whole model until it ends or longer.
    """
    with fake_group(0, 2):
        model = patch(tiny(), ep_size=2)
        optimizer = Muon(model, LR)
        unsharded = [weakref.ref(parameter) for parameter in model.parameters()]
        with distinct_data_ptrs([model]):
            for group in optimizer.param_groups:
                group["params"] = []
            apply_ep_fsdp2(model, ep_size=2)
            gc.collect()
            assert [reference() for reference in unsharded] == [None] * len(unsharded)


def test_steps_that_were_loaded_on_the_host_move_to_their_parameters() -> None:
    """torch does not move "step" of a loaded state. The meta device stands for a GPU."""
    model = patch(tiny())
    norm = nn.Parameter(torch.ones(32, device="meta"))
    model.model.norm.weight = norm
    optimizer = Muon(model, LR, param_groups=[{"params": [norm], "use_muon": False}])
    state = {"step": torch.tensor(3.0), "exp_avg": torch.zeros(32), "exp_avg_sq": torch.zeros(32)}
    optimizer.load_state_dict(optimizer.state_dict() | {"state": {0: state}})
    norm.grad = torch.ones_like(norm)
    with mock.patch("hf_moe_ep.optim.muon.adamw") as adamw:
        optimizer.step()
    _, _, exp_avgs, exp_avg_sqs, _, steps = adamw.call_args.args
    assert {tensor.device.type for tensor in (*exp_avgs, *exp_avg_sqs, *steps)} == {"meta"}
