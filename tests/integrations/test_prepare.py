"""Test `accelerator.prepare` with sharded, patched and stock models, and which calls it refuses."""

import importlib.util
from types import MethodType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from support.architectures.steps import build
from support.checks import Check, Found, on_ranks
from support.close import assert_close
from support.launched import FP32_BUDGET, launched, prepared
from support.parity import full_tensor
from support.tiny_models import batch, tiny
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

from hf_moe_ep import apply_ep_fsdp2, global_token_count, patch
from hf_moe_ep.integrations.prepare import check_launch

WORLD = 2


def a_stock_model_prepared_after_ours_has_a_unit_per_layer(rank: int, world: int) -> None:
    """If only the root were an FSDP2 unit, each forward would all-gather the whole model."""
    with launched():
        ours = apply_ep_fsdp2(tiny(dtype=torch.float32), ep_size=2)
        accelerator = Accelerator(cpu=True)
        accelerator.prepare(ours, torch.optim.SGD(ours.parameters()))
        stock = tiny(dtype=torch.float32)
        accelerator.prepare(stock, torch.optim.SGD(stock.parameters()))
        layers = {f"model.layers.{i}" for i in range(len(stock.model.layers))}
        assert _list_unit_names(stock) >= layers, _list_unit_names(stock)


def accelerates_activation_checkpointing_is_refused_after_sharding(rank: int, world: int) -> None:
    """The launch config, all ranks' plugins, or only rank 1's plugin requests checkpointing."""
    with launched():
        ours = apply_ep_fsdp2(tiny(dtype=torch.float32), ep_size=2)
    optimizer = torch.optim.SGD(ours.parameters())
    remedies = r"gradient_checkpointing_enable\(\), or let Accelerate shard.*patch\(model\)"
    with launched(FSDP_ACTIVATION_CHECKPOINTING="true"):
        accelerator = Accelerator(cpu=True)
        with pytest.raises(ValueError, match=f"fsdp_activation_checkpointing .*{remedies}"):
            accelerator.prepare(ours, optimizer)
    for asks in (True, rank == 1):
        with launched():
            plugin = FullyShardedDataParallelPlugin(fsdp_version=2, activation_checkpointing=asks)
            accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
            with pytest.raises(ValueError, match=remedies):
                accelerator.prepare(ours, optimizer)
    with launched(FSDP_ACTIVATION_CHECKPOINTING="true"):
        model = patch(tiny(dtype=torch.float32), ep_size=2)
        accelerator = Accelerator(cpu=True)
        accelerator.prepare_model(model, evaluation_mode=True)  # shards it for an evaluation
        with pytest.raises(ValueError, match=remedies):
            accelerator.prepare(model, torch.optim.SGD(model.parameters()))


def classes_of_layers_that_a_model_lacks_are_left_out(rank: int, world: int) -> None:
    """`_no_split_modules` of Qwen3.5's text model names vision blocks. Jamba has two classes.

    Stage 0 has layers of one of Jamba's classes only. Accelerate checkpoints those that exist;
    Accelerate 1.13 checkpoints their submodules instead.
    """
    for checkpoints in (False, True):
        with launched(FSDP_ACTIVATION_CHECKPOINTING=str(checkpoints)):
            model = build("qwen3_5_moe_text").float()
            accelerator, model, _ = prepared(model, make_optimizer=torch.optim.SGD, ep_size=2)
            plugin = accelerator.state.fsdp_plugin
            assert plugin.auto_wrap_policy is transformer_auto_wrap_policy
            assert plugin.transformer_cls_names_to_wrap is None
            accelerator.prepare(model, torch.optim.SGD(model.parameters()))  # a second training
        layers = model.model.layers
        assert [_has_checkpoint(layer) for layer in layers] == [checkpoints] * len(layers)
    with launched(FSDP_ACTIVATION_CHECKPOINTING="true"):
        model = build("jamba").float()
        pp_layers = (1, len(model.model.layers) - 1)
        _, model, _ = prepared(model, make_optimizer=torch.optim.SGD, pp_layers=pp_layers)
    assert sum(map(_has_checkpoint, model.model.layers)) == pp_layers[rank]


def _has_checkpoint(layer: nn.Module) -> bool:
    return any(isinstance(module, CheckpointWrapper) for module in layer.modules())


def a_launch_without_fsdp_is_refused_after_sharding(rank: int, world: int) -> None:
    """Accelerate would pass shards to DDP, which raises an error about operators of DTensor."""
    ours = apply_ep_fsdp2(tiny(dtype=torch.float32), ep_size=2)
    with launched(ACCELERATE_USE_FSDP="false"):
        accelerator = Accelerator(cpu=True)
        with pytest.raises(ValueError, match=r"asks for MULTI_CPU, .*`distributed_type: FSDP`"):
            accelerator.prepare(ours, torch.optim.SGD(ours.parameters()))


def a_model_with_empty_shards_is_prepared(rank: int, world: int) -> None:
    """The gate of the shared experts has one row, so one rank has an empty shard of the gate.

    Accelerate finds an optimizer's parameters by their addresses. All empty shards have address 0.
    """
    losses = []
    for shard_first in (True, False):
        with launched():
            accelerator = Accelerator(cpu=True)
            model = build("qwen2_moe").float()
            if shard_first:
                apply_ep_fsdp2(model, ep_size=2)
            else:
                patch(model, ep_size=2)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
            prepared_model, prepared_optimizer = accelerator.prepare(model, optimizer)
            groups = prepared_optimizer.param_groups
            trained = {id(p) for group in groups for p in group["params"]}
            assert trained == {id(p) for p in prepared_model.parameters()}
            for parameter in prepared_model.parameters():
                assert "data_ptr" not in vars(parameter.to_local())
            for _ in range(2):
                loss = prepared_model(**batch(model, 2, 9, seed=rank)).loss
                accelerator.backward(loss)
                prepared_optimizer.step()
                prepared_optimizer.zero_grad()
                losses.append(loss.item())
    assert losses[:2] == losses[2:]


def reshard_after_forward_of_patch_is_used(rank: int, world: int) -> None:
    with launched():
        _, model, _ = prepared(tiny(dtype=torch.float32), ep_size=2, reshard_after_forward=False)
    inputs = batch(model, 2, 7, seed=rank)
    gather = _fsdp_param_group.foreach_all_gather
    with mock.patch.object(_fsdp_param_group, "foreach_all_gather", wraps=gather) as gathers:
        model(**inputs).loss.backward()
    units = [m for m in model.modules() if isinstance(m, FSDPModule)]
    assert gathers.call_count <= len(units), "backward has gathered units again"


def gradient_checkpointing_of_a_sharded_model_equals_stock(rank: int, world: int) -> None:
    """The error that refuses Accelerate's own checkpointing recommends this method."""
    with launched():
        ours = apply_ep_fsdp2(tiny(dtype=torch.float32, seed=rank), ep_size=2)
        ours.train().gradient_checkpointing_enable()
        accelerator = Accelerator(cpu=True)
        ours, _ = accelerator.prepare(ours, torch.optim.SGD(ours.parameters()))
        runs: list[nn.Module] = []
        ours.model.layers[0].mlp.register_forward_pre_hook(lambda mlp, _: runs.append(mlp))
        stock = tiny(dtype=torch.float32)
        ranks = [batch(stock, 2, 9, seed=r) for r in range(world)]
        num_tokens = global_token_count(ours, ranks[rank]["labels"])
        loss = ours(**ranks[rank], num_items_in_batch=num_tokens).loss
        accelerator.backward(loss * world)
        assert len(runs) == 2
        for inputs in ranks:
            stock(**inputs, num_items_in_batch=num_tokens).loss.backward()
        for name, parameter in ours.named_parameters():
            expected = stock.get_parameter(name).grad
            assert_close(name, full_tensor(parameter.grad), expected, FP32_BUDGET)


def the_chunked_loss_of_older_trl_is_refused_if_it_would_be_wrong(rank: int, world: int) -> None:
    """From TRL 1.0 to 1.14, SFTTrainer uses this loss by default. TRL 1.15 has a fused head."""
    cases: list[tuple[bool, int, str]] = [
        (True, 1, r"chunked loss .* aux loss .*loss_type='nll'.*trl>=1.15"),
        (False, 2, r"chunked loss .* slices of sp_size=2; install trl>=1.15"),
        (False, 1, ""),
    ]
    for aux, sp, message in cases:
        model = patch(tiny(dtype=torch.float32), ep_size=1, sp_size=sp)
        model.config.output_router_logits = aux
        _replace_forward_by_chunked_loss(model)
        with launched():
            accelerator = Accelerator(cpu=True)
            optimizer = torch.optim.SGD(model.parameters())
            if not message:
                accelerator.prepare(model, optimizer)
                continue
            with pytest.raises(ValueError, match=message):
                accelerator.prepare(model, optimizer)


def _replace_forward_by_chunked_loss(model: nn.Module) -> None:
    """Replace the forward as older TRL does, or, if there is no older TRL, by an empty function.

    Both functions have the same name.
    """
    has_trl = importlib.util.find_spec("trl") is not None
    trainers = pytest.importorskip("trl.trainer.sft_trainer") if has_trl else None
    if (replace := getattr(trainers, "_patch_chunked_ce_lm_head", None)) is not None:
        replace(model, 64)
        return

    def _chunked_ce_forward(self: nn.Module, **kwargs: Any) -> None: ...

    model.forward = MethodType(_chunked_ce_forward, model)


def _list_unit_names(model: nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if isinstance(module, FSDPModule)}


ON_TWO_RANKS = [
    a_stock_model_prepared_after_ours_has_a_unit_per_layer,
    accelerates_activation_checkpointing_is_refused_after_sharding,
    classes_of_layers_that_a_model_lacks_are_left_out,
    a_launch_without_fsdp_is_refused_after_sharding,
    a_model_with_empty_shards_is_prepared,
    reshard_after_forward_of_patch_is_used,
    gradient_checkpointing_of_a_sharded_model_equals_stock,
    the_chunked_loss_of_older_trl_is_refused_if_it_would_be_wrong,
]


@pytest.mark.parametrize("kind", [DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM])
def test_launches_that_would_not_shard_experts_are_refused(kind: DistributedType) -> None:
    """The Accelerator is a fake, because these launches need other packages, or GPUs."""
    accelerator: Any = SimpleNamespace(distributed_type=kind)
    with pytest.raises(ValueError, match=rf"asks for {kind.value}, .*`distributed_type: FSDP`"):
        check_launch(accelerator)


@pytest.mark.parametrize("claim", on_ranks(WORLD, *ON_TWO_RANKS))
def test_on_two_ranks(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)
