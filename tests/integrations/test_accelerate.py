"""Test that Accelerate prepares, clips and saves a patched model on 2 ranks as stock does.

hf_moe_ep replaces `fsdp2_prepare_model` (accelerate/utils/fsdp_utils.py). The checks named "duty"
show that the replacement does everything that the stock function does.
"""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import accelerate.utils.fsdp_utils
import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import (
    DistributedType,
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
)
from support.checks import Check, Found, on_ranks
from support.close import assert_close
from support.launched import FP32_BUDGET, launched, prepared
from support.parity import full_tensor
from support.tiny_models import batch, tiny
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import Trainer

from hf_moe_ep import apply_ep_fsdp2, clip_grad_norm_, describe, global_token_count, patch
from hf_moe_ep.integrations.optimizers import clip_grad_norm_of_trainer, get_grad_norm
from hf_moe_ep.integrations.prepare import check_parallelism, enable_fsdp_on_cpu
from hf_moe_ep.state import find_state

WORLD = 2


VARIANTS: dict[str, dict[str, str]] = {
    "defaults": {},
    "activation checkpointing": {"FSDP_ACTIVATION_CHECKPOINTING": "true"},
    "cpu offload": {"FSDP_OFFLOAD_PARAMS": "true"},
    "no resharding": {"FSDP_RESHARD_AFTER_FORWARD": "false"},
}


def _train_as_stock(name: str, rank: int, world: int) -> None:
    with launched(**VARIANTS[name]):
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        _train_and_compare(name, accelerator, rank, world)


def _train_as_stock_after_patch(rank: int, world: int) -> None:
    with launched():
        patch(tiny())  # from then on the constructor of Accelerator declares FSDP
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        assert accelerator.distributed_type == DistributedType.FSDP
        _train_and_compare("patched first", accelerator, rank, world)


def _train_and_compare(name: str, accelerator: Accelerator, rank: int, world: int) -> None:
    stock = tiny(dtype=torch.float32)
    stock_optimizer = torch.optim.SGD(stock.parameters(), lr=0.1)
    accelerator, model, optimizer = prepared(
        # AdamW is not used: its first steps are signs of gradients, which rounding flips near zero.
        tiny(dtype=torch.float32, seed=rank),
        accelerator,
        torch.optim.SGD,
        ep_size=2,
    )
    assert "ep 2" in describe(model)
    for step in range(3):
        micro = [
            [batch(stock, 2, 7 + r, seed=50 * step + 10 * i + r) for i in range(2)]
            for r in range(world)
        ]
        num_tokens = global_token_count(model, [b["labels"] for b in micro[rank]])
        for inputs in micro[rank]:
            with accelerator.accumulate(model):
                loss = model(**inputs, num_items_in_batch=num_tokens).loss
                # Accelerate divides by the 2 accumulation steps, but the token count covers both.
                accelerator.backward(loss * world * 2)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
        for inputs in [b for batches in micro for b in batches]:
            stock(**inputs, num_items_in_batch=num_tokens).loss.backward()
        expected = torch.nn.utils.clip_grad_norm_(stock.parameters(), 0.5)
        assert_close(f"{name} norm", torch.as_tensor(norm), expected, FP32_BUDGET)
        stock_optimizer.step()
        stock_optimizer.zero_grad()
    state = accelerator.get_state_dict(model)
    if rank == 0:
        assert state.keys() == stock.state_dict().keys()
        for key, value in stock.state_dict().items():
            assert_close(f"{name} {key}", state[key], value, FP32_BUDGET)


def _check_fp32_upcast(rank: int) -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    _, model, optimizer = prepared(tiny(dtype=torch.bfloat16), accelerator, ep_size=2)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert {p.dtype for g in optimizer.param_groups for p in g["params"]} == {torch.float32}
    assert "compute bfloat16; gradients reduced bfloat16" in describe(model)
    loss = model(**batch(model, 2, 6)).loss
    assert loss.dtype == torch.float32, "an output_dtype of the root unit would round the loss"


def _check_optimizer_parameters(rank: int) -> None:
    """The optimizer gets the sharded parameters.

    Their data pointers cannot identify them: tied weights share one, and empty shards all have 0.
    """
    sizes = {"num_experts": 2, "num_experts_per_tok": 1, "tie_word_embeddings": True}
    model = tiny(dtype=torch.float32, **sizes)
    _, model, optimizer = prepared(model, ep_size=1, expert_shard_dim=0)
    optimized = [p for group in optimizer.param_groups for p in group["params"]]
    assert {id(p) for p in optimized} == {id(p) for p in model.parameters()}
    assert len(optimized) == len(list(model.parameters()))
    assert model.lm_head.weight is model.model.embed_tokens.weight


def _check_ignored_modules(rank: int) -> None:
    _, model, _ = prepared(tiny(dtype=torch.float32, seed=rank), ep_size=2)
    assert not isinstance(model.model.norm.weight, DTensor)
    assert torch.equal(model.model.norm.weight, tiny(dtype=torch.float32).model.norm.weight)
    assert isinstance(model.lm_head.weight, DTensor)


def _check_ignored_experts(rank: int) -> None:
    """Each rank would have all experts, and would compute with the first ones."""
    match = r"gate_up_proj of \w+ is not split .* take the experts out of ignored_modules"
    with pytest.raises(ValueError, match=match):
        prepared(tiny(dtype=torch.float32), ep_size=2)


def _check_4bit(rank: int) -> None:
    """Packed 4-bit weights are not sharded or changed, and no parameter is cast to fp32."""

    class Params4bit(nn.Parameter):
        pass

    model = tiny(dtype=torch.bfloat16)
    packed = Params4bit(torch.arange(6, dtype=torch.uint8), requires_grad=False)
    model.model.layers[0].self_attn.q_proj.register_parameter("packed", packed)
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    trainable = [p for p in model.parameters() if p.requires_grad]
    patch(model, ep_size=2)
    model, _ = accelerator.prepare(model, torch.optim.AdamW(trainable))
    prepared_packed = model.model.layers[0].self_attn.q_proj.packed
    assert type(prepared_packed) is Params4bit
    assert torch.equal(prepared_packed, torch.arange(6, dtype=torch.uint8))
    assert model.lm_head.weight.dtype == torch.bfloat16


def _check_ram_efficient(rank: int, on_meta: bool) -> None:
    """Only rank 0 has weights. The other ranks have NaN, or a model on the meta device."""
    truth = tiny(dtype=torch.float32)
    model = tiny(dtype=torch.float32)
    with torch.no_grad():
        for tensor in [] if rank == 0 else [*model.parameters(), *model.buffers()]:
            tensor.fill_(float("nan"))
    if on_meta and rank > 0:
        model = model.to("meta")
    _, model, _ = prepared(model, ep_size=2)
    for name, parameter in model.named_parameters():
        assert torch.equal(full_tensor(parameter), truth.get_parameter(name)), name
    for name, buffer in model.named_buffers():  # also inv_freq, which is not persistent
        assert torch.equal(buffer, truth.get_buffer(name)), name


def _check_unpatched(rank: int) -> None:
    """Accelerate's original function shards an unpatched model."""
    accelerator = Accelerator(cpu=True)
    patch(tiny(dtype=torch.float32))
    stock = tiny(dtype=torch.float32)
    enable_fsdp_on_cpu(accelerator.state, None)
    model, _ = accelerator.prepare(stock, torch.optim.AdamW(stock.parameters()))
    experts = model.model.layers[0].mlp.experts
    assert experts.gate_up_proj.device_mesh.size() == WORLD
    assert not hasattr(experts, "_hf_moe_ep")


RAM_EFFICIENT = {"FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}
# name: (check, environment variables of the launch)
DUTIES: dict[str, tuple[Callable[[int], None], dict[str, str]]] = {
    "fp32 upcast": (_check_fp32_upcast, {}),
    "optimizer swap": (_check_optimizer_parameters, {}),
    "ignored modules": (_check_ignored_modules, {"FSDP_IGNORED_MODULES": "model.norm"}),
    "ignored experts": (
        _check_ignored_experts,
        {"FSDP_IGNORED_MODULES": r"model\.layers\.0\.mlp\.experts"},
    ),
    "4-bit": (_check_4bit, {}),
    "ram efficient": (partial(_check_ram_efficient, on_meta=False), RAM_EFFICIENT),
    "ram efficient, on meta": (partial(_check_ram_efficient, on_meta=True), RAM_EFFICIENT),
    "unpatched": (_check_unpatched, {}),
}


def _check_clip_of_given_parameters(rank: int, world: int) -> None:
    """Only the given parameters of layer 0, on both meshes, are clipped."""
    stock = tiny(dtype=torch.float32)
    with launched():
        accelerator, model, _ = prepared(tiny(dtype=torch.float32), ep_size=2)
        batches = [batch(stock, 2, 7, seed=r) for r in range(world)]
        tokens = global_token_count(model, [batches[rank]["labels"]])
        accelerator.backward(model(**batches[rank], num_items_in_batch=tokens).loss * world)
        for inputs in batches:
            stock(**inputs, num_items_in_batch=tokens).loss.backward()
        parameters = dict(model.named_parameters())
        clipped = [name for name in parameters if "layers.0" in name]
        for norm_type in (2, float("inf"), "inf"):
            actual = accelerator.clip_grad_norm_(
                (parameters[name] for name in clipped), 1e-2, norm_type
            )
            expected = torch.nn.utils.clip_grad_norm_(
                [stock.get_parameter(name) for name in clipped], 1e-2, norm_type
            )
            assert_close(f"norm {norm_type}", torch.as_tensor(actual), expected, FP32_BUDGET)
        for name, parameter in parameters.items():
            assert parameter.grad is not None
            expected = stock.get_parameter(name).grad
            assert_close(name, full_tensor(parameter.grad), expected, FP32_BUDGET)


def _check_replacement_of_every_name(rank: int, world: int) -> None:
    """The replacement is in every module with `fsdp2_prepare_model`, and shards only once."""
    with launched():
        accelerator, model = Accelerator(cpu=True), patch(tiny(dtype=torch.float32), ep_size=2)
        prepared_model = accelerate.utils.fsdp_utils.fsdp2_prepare_model(accelerator, model)
        assert prepared_model is model
        experts = model.model.layers[0].mlp.experts.gate_up_proj
        assert experts.device_mesh.mesh_dim_names == ("ep_fsdp", "ep")
        before = dict(model.named_parameters())
        for module in (accelerate.utils, accelerate.accelerator):
            assert module.fsdp2_prepare_model(accelerator, model) is model
        after = dict(model.named_parameters())
        assert all(after[name] is parameter for name, parameter in before.items())
        stock = tiny(dtype=torch.float32)
        inputs = batch(stock, 2, 7, seed=rank)
        assert_close("loss", model(**inputs).loss, stock(**inputs).loss, FP32_BUDGET)


def _run_check(name: str, rank: int, world: int) -> None:
    check, settings = DUTIES[name]
    with launched(**settings):
        check(rank)


def _check_save_and_load(kind: str, rank: int, world: int, folder: str) -> None:
    with launched(FSDP_STATE_DICT_TYPE=kind):
        accelerator, model, optimizer = prepared(tiny(dtype=torch.float32), ep_size=2)
        micro = batch(model, 2, 7, seed=rank)

        def step() -> None:
            accelerator.backward(model(**micro).loss)
            optimizer.step()
            optimizer.zero_grad()

        step()
        accelerator.save_state(f"{folder}/state")
        step()
        expected = {name: full_tensor(p).clone() for name, p in model.named_parameters()}
        with torch.no_grad():
            model(**micro)  # without backward, the last layer stays gathered
        accelerator.load_state(f"{folder}/state")
        step()
        for name, parameter in model.named_parameters():
            assert torch.equal(full_tensor(parameter), expected[name]), f"{kind}: {name}"


def _check_refused_launches(rank: int, world: int) -> None:
    use_gpu = launched(ACCELERATE_USE_CPU="false")  # `make test-swift` sets it to true
    with use_gpu, pytest.raises(ValueError, match=r"2 processes .* sees 1.*cpu=True"):
        prepared(tiny(), Accelerator(), ep_size=2)
    with launched(FSDP_VERSION="1"), pytest.raises(ValueError, match=r"version 1.*fsdp_version: 2"):
        prepared(tiny(), Accelerator(cpu=True), ep_size=2)
    with (
        launched(),
        pytest.raises(ValueError, match=r"ep_size \(4\) must divide .* = 2\); try 1, 2"),
    ):
        prepared(tiny(), ep_size=4)


def test_a_parallelism_config_that_contradicts_patch_is_refused() -> None:
    state = find_state(patch(tiny(), dp_replicate_size=2))
    assert state is not None
    with pytest.raises(ValueError, match=r"tp_size=2.*set it to 1"):
        check_parallelism(ParallelismConfig(tp_size=2, dp_shard_size=2), state)
    with pytest.raises(ValueError, match=r"dp_replicate_size=4 .* dp_replicate_size=2"):
        check_parallelism(ParallelismConfig(dp_replicate_size=4, dp_shard_size=2), state)
    check_parallelism(ParallelismConfig(dp_replicate_size=2, dp_shard_size=2), state)
    check_parallelism(None, state)


def _check_given_plugin_is_used(rank: int, world: int) -> None:
    with launched():
        patch(tiny())
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, reshard_after_forward=False)
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
        assert accelerator.state.fsdp_plugin is plugin


def _check_trainer_unscales(clips: bool, rank: int, world: int) -> None:
    """The Trainer logs the norm of unscaled gradients on two meshes, with and without clipping.

    Since transformers 5.24 the Trainer itself computes such a norm of scaled gradients.
    """
    inputs = batch(tiny(), 2, 7, seed=rank)
    with launched():
        accelerator, model, _ = prepared(
            tiny(dtype=torch.float32), make_optimizer=torch.optim.SGD, ep_size=2
        )
        accelerator.state._mixed_precision, accelerator.native_amp = "fp16", True
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        trainer = Trainer.__new__(Trainer)
        trainer.model, trainer.accelerator, trainer._mixed_mesh_grads = model, accelerator, None
        trainer.args = SimpleNamespace(max_grad_norm=0.1, fp16=True)
        accelerator.scaler.scale(model(**inputs).loss).backward()
        if clips:
            norm = clip_grad_norm_of_trainer(Trainer._clip_grad_norm, trainer, model)
        else:
            norm = get_grad_norm(Trainer._get_grad_norm, trainer, model)
        twin = apply_ep_fsdp2(tiny(dtype=torch.float32), ep_size=2)
        twin(**inputs).loss.backward()
        want = clip_grad_norm_(twin, 0.1 if clips else float("inf"))
        assert want > 0.1  # so that clipping changes the gradients
        assert_close("norm", torch.as_tensor(norm), want, FP32_BUDGET)
        for (name, ours), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
            assert_close(name, full_tensor(ours.grad), full_tensor(theirs.grad), FP32_BUDGET)


def _check_nan_gradients(rank: int, world: int) -> None:
    """While ms-swift trains, a norm that is NaN drops all gradients, on two meshes as well."""

    stock = Accelerator.clip_grad_norm_

    def swifts(self: Accelerator, *args: Any) -> Any:
        return stock(self, *args)

    swifts.__module__ = "swift.trainers.mixin"
    inputs = batch(tiny(), 2, 7, seed=rank)
    with launched():
        accelerator, model, _ = prepared(
            tiny(dtype=torch.float32), make_optimizer=torch.optim.SGD, ep_size=2
        )
        trainer = Trainer.__new__(Trainer)
        trainer.model, trainer.accelerator, trainer._mixed_mesh_grads = model, accelerator, None
        trainer.args = SimpleNamespace(max_grad_norm=0.1, fp16=False)
        for is_nan, is_swift in ((True, False), (False, True), (True, True)):
            model.zero_grad()
            model(**inputs).loss.backward()
            if is_nan and rank == 1:
                next(model.parameters()).grad.to_local().fill_(float("nan"))
            with pytest.MonkeyPatch.context() as monkeypatch:
                if is_swift:
                    monkeypatch.setattr(Accelerator, "clip_grad_norm_", swifts)
                norm = get_grad_norm(Trainer._get_grad_norm, trainer, model)
            assert torch.as_tensor(norm).isnan().item() == is_nan
            kept = {parameter.grad is not None for parameter in model.parameters()}
            assert kept == {not (is_nan and is_swift)}


SLOW_ON_TWO_RANKS = {
    f"trains as stock: {name}": partial(_train_as_stock, name)
    for name in VARIANTS
    if name != "defaults"
}
ON_TWO_RANKS = {
    "trains as stock: defaults": partial(_train_as_stock, "defaults"),
    "trains as stock: patched first": _train_as_stock_after_patch,
    "the Trainer unscales before it clips": partial(_check_trainer_unscales, True),
    "the Trainer logs the norm of unscaled gradients": partial(_check_trainer_unscales, False),
    "ms-swift drops gradients that are NaN": _check_nan_gradients,
    "clips only the given parameters": _check_clip_of_given_parameters,
    "prepares once by every name": _check_replacement_of_every_name,
    **{f"duty: {name}": partial(_run_check, name) for name in DUTIES},
    **{
        f"saves and loads: {kind}": partial(_check_save_and_load, kind)
        for kind in ("SHARDED_STATE_DICT", "FULL_STATE_DICT")
    },
    "refused launches": _check_refused_launches,
    "a given plugin is kept": _check_given_plugin_is_used,
}


@pytest.mark.parametrize(
    "claim",
    [*on_ranks(WORLD, ON_TWO_RANKS), *on_ranks(WORLD, SLOW_ON_TWO_RANKS, slow=True)],
)
def test_on_two_ranks(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)
