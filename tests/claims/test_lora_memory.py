"""A step of LoRA on stacked experts allocates and gathers little; impossible calls are refused."""

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

import peft
import pytest
import torch
import torch.distributed as dist
from support.adapters import EXPERTS, with_lora
from support.checks import Check, Found, on_ranks
from support.gathers import record_gathered_units
from support.largest_tensor import LargestTensor
from support.launched import launched, prepared
from support.tiny_models import batch, tiny
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from hf_moe_ep import apply_ep_fsdp2, patch, save_pretrained
from hf_moe_ep.ranks import all_ranks


def _measure_largest_tensor(model: nn.Module) -> int:
    with LargestTensor(model.parameters()) as largest:
        model(**batch(model, 1, 6), use_cache=False).loss.backward()
    return largest.elements


def test_a_step_allocates_no_tensor_as_large_as_the_experts() -> None:
    """Stock PEFT allocates merged weights and their gradients, and a patched model does not."""
    sizes = {"num_experts": 16, "moe_intermediate_size": 64}
    stock = with_lora(tiny(dtype=torch.float32, **sizes), r=2)
    experts = stock.get_base_model().model.layers[0].mlp.experts.get_base_layer()
    smallest = min(experts.gate_up_proj.numel(), experts.down_proj.numel())
    assert _measure_largest_tensor(stock) >= smallest
    model = with_lora(patch(tiny(dtype=torch.float32, **sizes)), r=2)
    assert _measure_largest_tensor(model) < smallest


def backward_gathers_only_units_with_gradients(rank: int, world: int) -> None:
    """Backward gathers each unit with gradients once, and no layer below these units."""
    layers = {name: [f"{name}", f"{name}.mlp.experts"] for name in ("layers.0", "layers.1")}
    for trained in (("layers.0", "layers.1"), ("layers.1",)):
        model = with_lora(tiny(dtype=torch.float32), r=2)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("lora_" in name and any(layer in name for layer in trained))
        apply_ep_fsdp2(model, ep_size=1)
        loss = model(**batch(model, 2, 9)).loss
        with record_gathered_units() as gathered:
            loss.backward()
        # The last layer is gathered until backward.
        want = layers["layers.0"] if "layers.0" in trained else []
        assert sorted(gathered) == sorted(want), f"adapters on {trained}"


def a_step_with_a_frozen_base_makes_no_merged_weight(rank: int, world: int) -> None:
    """PEFT's parametrization, which merges weights, is not used. AdamW's moments are shards."""
    torch.manual_seed(0)
    model = with_lora(tiny(dtype=torch.float32), r=2)
    apply_ep_fsdp2(model, ep_size=world)
    merged: list[bool] = []
    for name, module in model.named_modules():
        if name.endswith("experts.base_layer.base_layer"):
            module.register_forward_hook(lambda m, args, out: merged.append(is_parametrized(m)))
    model(**batch(model, 2, 9)).loss.backward()
    assert merged == [False] * model.config.num_hidden_layers
    trained = [p for p in model.parameters() if p.requires_grad]
    assert all(p.grad is not None for p in trained)
    optimizer = torch.optim.AdamW(trained)
    optimizer.step()
    moments = [state["exp_avg"].to_local().numel() for state in optimizer.state.values()]
    assert sum(moments) == sum(p.to_local().numel() for p in trained)
    num_trained = sum(p.numel() for p in trained)
    assert sum(moments) < 0.6 * num_trained, "each of two ranks has about a half"


def calls_that_cannot_work_on_a_sharded_model_are_refused(rank: int, world: int) -> None:
    model: Any = with_lora(tiny(dtype=torch.float32), r=2)
    apply_ep_fsdp2(model, ep_size=world)
    with pytest.raises(ValueError, match=r"over 2 ranks; attach adapters before.*ref_model="):
        model.add_adapter("late", peft.LoraConfig(r=2, target_parameters=list(EXPERTS)))
    for call in (model.merge_and_unload, model.merge_adapter, model.unload):
        with pytest.raises(ValueError, match="sharded over 2 ranks; save the adapter"):
            call()
    with pytest.raises(ValueError, match="sharded over 2 ranks; load out/adapter before"):
        model.load_adapter("out/adapter", "default")
    model(**batch(model, 2, 9)).loss.backward()  # the refused calls have not changed the model
    plain = apply_ep_fsdp2(tiny(dtype=torch.float32), ep_size=world)
    prompt = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    prompted: Any = peft.get_peft_model(tiny(dtype=torch.float32), prompt)
    apply_ep_fsdp2(prompted, ep_size=world)
    for attach in (
        partial(with_lora, plain),
        partial(peft.get_peft_model, plain, prompt),
        partial(prompted.add_adapter, "second", prompt),
    ):
        with pytest.raises(ValueError, match="sharded over 2 ranks; attach adapters before"):
            attach()


def trained_parameters_of_two_dtypes_are_an_error(rank: int, world: int) -> None:
    """PEFT creates fp32 factors, and copies modules_to_save in the model's dtype."""
    for modules_to_save in (["post_attention_layernorm"], None):
        model = with_lora(tiny(dtype=torch.bfloat16), modules_to_save=modules_to_save)
        with launched():
            if modules_to_save is None:
                prepared(model, ep_size=world)
                continue
            with pytest.raises(ValueError, match=r"torch.bfloat16 and torch.float32.*needs one"):
                prepared(model, ep_size=world)


@pytest.mark.parametrize(
    "options",
    [{"lora_dropout": 0.1}, {"use_dora": True}, {"bias": "lora_only", "lora_bias": True}],
)
@pytest.mark.parametrize("prepare", [lambda model: model, patch])
def test_options_that_peft_refuses_raise_its_error(
    prepare: Callable, options: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match="ParamWrapper does not work with"):
        with_lora(prepare(tiny()), modules=(), **options)


def test_quantised_experts_are_refused() -> None:
    model = tiny(dtype=torch.float32)
    experts = model.model.layers[1].mlp.experts
    packed = experts.down_proj.detach().to(torch.int8)
    experts.down_proj = nn.Parameter(packed, requires_grad=False)
    with pytest.raises(ValueError, match=r"down_proj of \w+ is quantised \(Parameter, torch.int8"):
        patch(model)


def unquantised_experts_of_a_quantised_model_must_be_frozen(rank: int, world: int) -> None:
    """bitsandbytes quantises linear layers, but no experts, so these could be trained."""
    model = tiny(dtype=torch.bfloat16)
    model.is_quantized = True
    with pytest.raises(ValueError, match="4 weights of its experts are not quantized"):
        apply_ep_fsdp2(model, ep_size=world)
    apply_ep_fsdp2(with_lora(model), ep_size=world)


def saving_on_one_rank_raises_instead_of_hanging(rank: int, world: int, folder: str) -> None:
    """Without a check, the first collective would wait for the process group's timeout."""
    model = apply_ep_fsdp2(with_lora(tiny(dtype=torch.float32), r=2), ep_size=world)
    with mock.patch.object(all_ranks, "PATIENCE", timedelta(seconds=2)):
        if rank == 0:
            for save in (model.save_pretrained, partial(save_pretrained, model)):
                with pytest.raises(RuntimeError, match=r"called on only 1 of 2 ranks.*every rank"):
                    save(folder)
    dist.barrier()
    for _ in range(2):  # the failed saves do not affect later saves
        save_pretrained(model, folder)


ON_TWO_RANKS = [
    backward_gathers_only_units_with_gradients,
    a_step_with_a_frozen_base_makes_no_merged_weight,
    calls_that_cannot_work_on_a_sharded_model_are_refused,
    trained_parameters_of_two_dtypes_are_an_error,
    unquantised_experts_of_a_quantised_model_must_be_frozen,
]


@pytest.mark.parametrize(
    "claim",
    [
        *on_ranks(2, *ON_TWO_RANKS),
        *on_ranks(2, saving_on_one_rank_raises_instead_of_hanging, slow=True),
    ],
)
def test_on_two_ranks(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)
