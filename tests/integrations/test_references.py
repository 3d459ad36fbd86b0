"""Test that a reference is frozen and sharded layer by layer, or that an error names the reason.

These tests replace TRL's `prepare_fsdp` by a function that raises an error.
`claims/test_preferences.py` trains with TRL.
"""

import importlib
import importlib.util
import sys
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from support.adapters import with_lora
from support.checks import Check, Found, on_ranks
from support.close import FP32_INSIDE, assert_close
from support.gathers import record_gathered_parts
from support.launched import launched, prepared
from support.parity import full_tensor
from support.quantised import SIZES
from support.tiny_models import batch, tiny
from torch import nn
from torch.distributed.distributed_c10d import _world
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeForSequenceClassification

from hf_moe_ep import apply_ep_fsdp2, patch
from hf_moe_ep.integrations import references
from hf_moe_ep.integrations.install import AXOLOTL, FRAMEWORK_METHODS, TRL, create_accelerator
from hf_moe_ep.integrations.references import shard_own_reference
from hf_moe_ep.state import find_state, patched_state
from hf_moe_ep.upstream.wrap import Feature, Wrap, call_when_imported, find_owner, wrap_process

WORLD = 2
LAYERS = 4
FP32 = {"dtype": torch.float32}


def call_trl(model: nn.Module, accelerator: Accelerator) -> nn.Module:
    raise LookupError(f"a {type(model).__name__} was left to TRL")


def create_accelerator_for(policy: nn.Module, mixed_precision: str = "no") -> Accelerator:
    """Create the Accelerator of a Trainer that trains `policy`, before it prepares any model."""
    accelerator = Accelerator(cpu=True, mixed_precision=mixed_precision)
    trainer: Any = types.SimpleNamespace(model=policy, accelerator=accelerator)
    state = find_state(policy)
    if state is not None:
        references.remember_policy(trainer, state)
    return accelerator


def create_reference(model: nn.Module, accelerator: Accelerator) -> nn.Module:
    return references.shard_reference(call_trl, model, accelerator)


def check_reference(reference: nn.Module, seed: int) -> None:
    """Check that the reference is frozen and sharded, and computes the logits of stock.

    Its forward may gather only two neighbouring units at a time: a layer, and the next layer or the
    head.
    """
    parameters = list(reference.parameters())
    assert parameters and not any(parameter.requires_grad for parameter in parameters)
    assert all(isinstance(parameter, DTensor) for parameter in parameters)
    assert not reference.training
    stock = tiny(seed=seed, num_hidden_layers=LAYERS, **FP32).eval()
    inputs = batch(stock, 2, 9, seed=dist.get_rank())
    for _ in range(2):
        with torch.no_grad(), record_gathered_parts(reference) as gathered_in:
            actual = reference(**inputs).logits
        assert_close("logits", actual, stock(**inputs).logits, FP32_INSIDE)
        order = ["embedding", *range(LAYERS), "head"]
        assert len(gathered_in) == LAYERS
        for layer, gathered in gathered_in.items():
            index = order.index(layer)
            assert layer in gathered, (layer, gathered)
            assert gathered <= set(order[index : index + 2]), (layer, gathered)
        assert all(isinstance(parameter, DTensor) for parameter in reference.parameters())


def a_patched_reference_is_sharded_when_trl_prepares_it(rank: int, world: int) -> None:
    with launched():
        accelerator = create_accelerator_for(
            patch(tiny(num_hidden_layers=LAYERS, **FP32), ep_size=2)
        )
        reference = patch(tiny(seed=3, num_hidden_layers=LAYERS, **FP32), ep_size=2)
        check_reference(create_reference(reference, accelerator), seed=3)


def a_stock_reference_is_sharded_like_the_policy(rank: int, world: int) -> None:
    with launched():
        policy = patch(tiny(num_hidden_layers=LAYERS, **FP32), ep_size=2)
        accelerator = create_accelerator_for(policy)
        # All ranks get the weights of rank 0, as for the policy.
        reference = tiny(seed=3 + rank, num_hidden_layers=LAYERS, **FP32)
        with mock.patch.object(references._logger, "info") as info:
            check_reference(create_reference(reference, accelerator), seed=3)
        lines = [call.args[0] % call.args[1:] for call in info.call_args_list]
        assert [line for line in lines if "reference" in line] == [
            "the reference Qwen3MoeForCausalLM is frozen, and sharded layer by layer (ep_size 2)"
        ] * (rank == 0)
        prepared(policy, accelerator, ep_size=2)
        reference_parameters = dict(reference.named_parameters())
        for name, parameter in policy.named_parameters():
            assert parameter.placements == reference_parameters[name].placements, name
            assert parameter.device_mesh == reference_parameters[name].device_mesh, name


def a_reference_has_no_fp32_masters(rank: int, world: int) -> None:
    """A frozen model keeps the dtype in which it was loaded; the policy has fp32 masters."""
    with launched(ACCELERATE_MIXED_PRECISION="bf16"):
        accelerator = create_accelerator_for(patch(tiny(dtype=torch.bfloat16), ep_size=2), "bf16")
        reference = create_reference(tiny(dtype=torch.bfloat16), accelerator)
        assert {parameter.dtype for parameter in reference.parameters()} == {torch.bfloat16}


def a_patched_reference_of_a_stock_policy_is_sharded(rank: int, world: int) -> None:
    with launched():
        accelerator = create_accelerator_for(tiny(**FP32))
        reference = patch(tiny(seed=3, num_hidden_layers=LAYERS, **FP32), ep_size=2)
        check_reference(create_reference(reference, accelerator), seed=3)


def a_teacher_is_sharded_although_accelerate_would_not_shard_it(rank: int, world: int) -> None:
    with launched():
        accelerator = create_accelerator_for(patch(tiny(**FP32), ep_size=2))
        teacher = patch(tiny(seed=3, num_hidden_layers=LAYERS, **FP32), ep_size=2)
        check_reference(accelerator.prepare_model(teacher.eval(), evaluation_mode=True), seed=3)


def models_that_are_not_language_models_are_sharded_by_trl(rank: int, world: int) -> None:
    """If the policy is a stock model, TRL shards every stock reference."""
    with launched():
        accelerator = create_accelerator_for(patch(tiny(**FP32), ep_size=2))
        rewards = Qwen3MoeForSequenceClassification(tiny(**FP32).config)
        with pytest.raises(LookupError, match="Qwen3MoeForSequenceClassification was left"):
            create_reference(rewards, accelerator)
    with launched():
        with pytest.raises(LookupError, match="Qwen3MoeForCausalLM was left"):
            create_reference(tiny(**FP32), create_accelerator_for(tiny(**FP32)))


def a_patched_reward_model_need_not_be_like_the_policy(rank: int, world: int) -> None:
    """TRL's SDPOTrainer shards reward models in the same way as reference models."""
    sizes = {"num_experts": 4, "pad_token_id": 0, **FP32}
    stock = tiny("qwen3_moe, rewards", seed=3, **sizes).eval()
    with launched():
        accelerator = create_accelerator_for(patch(tiny(**FP32), ep_size=2))
        rewards = patch(tiny("qwen3_moe, rewards", seed=3, **sizes), ep_size=2)
        rewards = create_reference(rewards, accelerator)
        assert all(isinstance(p, DTensor) and not p.requires_grad for p in rewards.parameters())
        inputs = batch(stock, 2, 9, seed=rank)
        del inputs["labels"]
        with torch.no_grad():
            assert_close("scores", rewards(**inputs).logits, stock(**inputs).logits, FP32_INSIDE)


def references_unlike_the_policy_are_refused_by_name(rank: int, world: int) -> None:
    """Every rank raises the error, also if only rank 1 has such a reference."""
    llama = LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=40, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    with launched():
        accelerator = create_accelerator_for(patch(tiny(**FP32), ep_size=2))
        for everywhere in (True, False):
            unlike = everywhere or rank == 1
            with pytest.raises(ValueError, match="architecture 'llama' and the policy of"):
                create_reference(LlamaForCausalLM(llama) if unlike else tiny(**FP32), accelerator)
            with pytest.raises(ValueError, match="of 4 experts and the policy has 2 of 8"):
                create_reference(
                    tiny(**FP32, num_experts=4) if unlike else tiny(**FP32), accelerator
                )
            with pytest.raises(ValueError, match=r"patched with sp_size=2, but .* has sp_size=1"):
                sp_size = 2 if unlike else 1
                create_reference(patch(tiny(**FP32), ep_size=2, sp_size=sp_size), accelerator)
        with pytest.raises(ValueError, match="ranks disagree about the reference model"):
            create_reference(patch(tiny(**FP32)) if rank else tiny(**FP32), accelerator)


def mixing_into_the_reference_gathers_no_parameter(rank: int, world: int) -> None:
    """A reference that is sharded differently from the policy is refused by name."""
    with launched():
        policy = patch(tiny(**FP32), ep_size=2)
        accelerator = create_accelerator_for(policy)
        reference = create_reference(tiny(seed=3, **FP32), accelerator)
        at_ep_1 = create_reference(patch(tiny(seed=4, **FP32), ep_size=1), accelerator)
        prepared(policy, accelerator, ep_size=2)
        with record_gathered_parts(reference) as gathered_in:
            references.mix_shards(call_trl, policy, reference, 0.25)
        assert not gathered_in
        policy_values = tiny(**FP32).state_dict()
        reference_values = tiny(seed=3, **FP32).state_dict()
        for name, parameter in reference.named_parameters():
            expected = reference_values[name].mul(0.75).add(policy_values[name], alpha=0.25)
            assert torch.equal(full_tensor(parameter.detach()), expected), name
        with pytest.raises(ValueError, match=r"sync_ref_model=True mixes shards.*same sizes"):
            references.mix_shards(call_trl, policy, at_ep_1, 0.25)


def process_groups_are_shared(rank: int, world: int) -> None:
    """A policy, its references and a teacher with the same layout use the same process groups."""
    with launched():
        policy = patch(tiny(**FP32), ep_size=2)
        accelerator = create_accelerator_for(policy)
        reference = create_reference(tiny(seed=3, **FP32), accelerator)
        prepared(policy, accelerator, ep_size=2)
        second = create_reference(patch(tiny(seed=4, **FP32), ep_size=2), accelerator)
        teacher = accelerator.prepare_model(patch(tiny(**FP32), ep_size=2), evaluation_mode=True)
        meshes = {id(patched_state(model).meshes) for model in (policy, reference, second, teacher)}
        assert len(meshes) == 1
        at_ep_1 = patch(tiny(seed=4, **FP32), ep_size=1)
        create_reference(at_ep_1, accelerator)
        assert id(patched_state(at_ep_1).meshes) not in meshes
    with launched():
        policy = patch(tiny(**FP32), ep_size=2)
        accelerator = create_accelerator_for(policy)
        at_ep_1 = create_reference(patch(tiny(seed=4, **FP32), ep_size=1), accelerator)
        prepared(policy, accelerator, ep_size=2)
        policy_meshes = patched_state(policy).meshes
        reference_meshes = patched_state(at_ep_1).meshes
        assert policy_meshes is not None and reference_meshes is not None
        assert (policy_meshes.ep_size, reference_meshes.ep_size) == (2, 1)


def models_of_one_accelerator_add_no_groups(rank: int, world: int) -> None:
    """Examples are the folds of a cross validation, and the trials of a search, each of which
    creates an Accelerator."""
    with launched():
        accelerator, first, _ = prepared(tiny(**FP32), ep_size=2)
        first_meshes, groups = patched_state(first).meshes, len(_world.pg_map)
        del first
        _, second, _ = prepared(tiny(**FP32), accelerator, ep_size=2)
        assert patched_state(second).meshes is first_meshes
        trainer: Any = SimpleNamespace(accelerator=accelerator, args=SimpleNamespace(fsdp=False))
        trainer.model = None

        def create(self: Any) -> None:
            self.accelerator = Accelerator(cpu=True)

        create_accelerator(create, trainer)
        assert trainer.accelerator is not accelerator
        _, third, _ = prepared(tiny(**FP32), trainer.accelerator, ep_size=2)
        assert patched_state(third).meshes is first_meshes and len(_world.pg_map) == groups


CHECKS = (
    a_patched_reference_is_sharded_when_trl_prepares_it,
    a_stock_reference_is_sharded_like_the_policy,
    a_reference_has_no_fp32_masters,
    a_patched_reference_of_a_stock_policy_is_sharded,
    a_teacher_is_sharded_although_accelerate_would_not_shard_it,
    models_that_are_not_language_models_are_sharded_by_trl,
    a_patched_reward_model_need_not_be_like_the_policy,
    references_unlike_the_policy_are_refused_by_name,
    mixing_into_the_reference_gathers_no_parameter,
    process_groups_are_shared,
    models_of_one_accelerator_add_no_groups,
)


@pytest.mark.parametrize("claim", on_ranks(WORLD, *CHECKS))
def test_on_two_ranks(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)


def test_a_stock_reference_is_not_quantised_like_the_policy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes = SIZES["nf4"]
    policy = patch(with_lora(tiny(**sizes)), experts_dtype="nf4", experts_double_quant=True)
    accelerator: Any = SimpleNamespace(is_fsdp2=True)
    trainer: Any = SimpleNamespace(accelerator=accelerator)
    references.remember_policy(trainer, patched_state(policy))
    monkeypatch.setattr(references, "_shard_frozen", lambda *_: None)
    config = patched_state(create_reference(tiny(**sizes), accelerator)).config
    assert config.experts_dtype is None and not config.experts_double_quant


def test_a_sharded_reference_is_hashed_by_its_weights() -> None:
    """TRL's own `hash_module` fails, because numpy cannot read DTensors.

    Experts in nf4 cannot be exported, so they have no hash.
    """
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        models = [apply_ep_fsdp2(tiny(dtype=torch.bfloat16, seed=seed)) for seed in (0, 0, 1)]
        first, same, other = (references.hash_weights(lambda _: "TRL", model) for model in models)
        sizes = {"hidden_size": 64, "moe_intermediate_size": 64}
        frozen = tiny(dtype=torch.bfloat16, **sizes).requires_grad_(False)
        quantised = apply_ep_fsdp2(frozen, experts_dtype="nf4")
        with pytest.raises(ValueError, match=r"leave precompute_ref_log_probs out"):
            references.hash_weights(lambda _: "TRL", quantised)
    finally:
        dist.destroy_process_group()
    assert first == same != other


@pytest.mark.slow
@pytest.mark.parametrize("wrap", (*TRL, *FRAMEWORK_METHODS, *AXOLOTL), ids=lambda wrap: wrap.target)
def test_a_target_of_a_framework_resolves(wrap: Wrap) -> None:
    versions = {"trl": "1.16", "swift": "4.6", "axolotl": "0.19"}
    pytest.importorskip(wrap.package, minversion=versions[wrap.package])
    owner, name = find_owner(wrap)
    assert callable(getattr(owner, name)) and wrap.why


FEATURE = Feature("seeing it")


def _twice(original: Any, number: int) -> Any:
    return 2 * original(number)


def test_a_function_is_replaced_in_modules_that_imported_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Static methods are replaced, too. Each function that does not exist gives one warning."""
    source = types.ModuleType("somewhere_imported")
    exec("def f(n):\n    return n\nclass A:\n    g = staticmethod(lambda n: n)", vars(source))
    user = types.ModuleType("somewhere_importing")
    vars(user)["f"] = vars(source)["f"]
    rows = [
        Wrap(f"somewhere_imported:{path}", _twice, FEATURE)
        for path in ("f", "A.g", "A.missing", "missing")
    ]
    monkeypatch.setitem(sys.modules, "somewhere_imported", source)
    monkeypatch.setitem(sys.modules, "somewhere_importing", user)
    assert vars(user)["f"](3) == 3
    with pytest.warns(UserWarning, match="missing is not in .*: seeing it ") as warned:
        for _ in range(2):
            wrap_process(rows)
    assert len(warned) == 2
    assert vars(source)["f"](3) == vars(user)["f"](3) == 6
    assert vars(source)["A"]().g(3) == vars(source)["A"].g(3) == 6


def test_a_function_is_called_when_a_module_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the module is imported already, the function is called at once, but not by find_spec."""
    (tmp_path / "imported_later.py").write_text("x = 1")
    monkeypatch.syspath_prepend(tmp_path)
    calls: list[int] = []
    call_when_imported("imported_later", lambda: calls.append(sys.modules["imported_later"].x))
    assert importlib.util.find_spec("imported_later") is not None and calls == []
    importlib.import_module("imported_later")
    assert calls == [1]
    importlib.reload(sys.modules["imported_later"])
    assert calls == [1]
    call_when_imported("imported_later", lambda: calls.append(2))
    assert calls == [1, 2]


@pytest.mark.parametrize("passes_model", [True, False])
def test_arguments_of_compute_ref_log_probs_are_passed_on(passes_model: bool) -> None:
    """TRL 1 passes (model, inputs) to compute_ref_log_probs, TRL 0.29 and ms-swift the inputs."""
    trainer = SimpleNamespace(model=nn.Linear(1, 1))
    arguments = (trainer.model, {"input_ids": 1}) if passes_model else ({"input_ids": 1},)
    calls: list[Any] = []
    shard_own_reference(lambda *args: calls.append(args), trainer, *arguments)
    assert calls == [(trainer, *arguments)]
