"""Test that stock PEFT loads adapter files of a sharded model, and that we load PEFT's files."""

from pathlib import Path
from typing import Any
from unittest import mock

import peft
import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file
from support.adapters import EXPERTS, with_lora
from support.close import assert_close
from support.launched import launched, prepared
from support.needs import needs_add_adapter
from support.parity import full_tensor
from support.ranks import run_ranks
from support.tiny_models import batch, tiny
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from hf_moe_ep import apply_ep_fsdp2, patch, save_pretrained
from hf_moe_ep.checkpoints.hub.gather import gather_state_dict
from hf_moe_ep.lora import factors

BUDGET = 1e-5  # fp32


def _train(model: nn.Module, steps: int = 3) -> None:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for step in range(steps):
        model(**batch(model, 2, 9, seed=step)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def _compute_logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(**batch(model, 2, 9, seed=7)).logits


def _check_saved(model: nn.Module, save: Any, folder: str) -> None:
    """Save a sharded model. From the files stock PEFT must compute its logits, merged or not."""
    logits = _compute_logits(model)
    save(model, folder)
    assert max(path.stat().st_size for path in Path(folder).iterdir()) < 500_000, "not the base"
    opened = peft.PeftModel.from_pretrained(tiny(dtype=torch.float32), folder)
    state = peft.get_peft_model_state_dict(opened)
    assert any("experts.base_layer.lora_B" in key for key in state)
    assert_close("logits in stock PEFT", _compute_logits(opened), logits, BUDGET)
    assert_close("logits when merged", _compute_logits(opened.merge_and_unload()), logits, BUDGET)


def _train_at_ep_4(rank: int, world: int, folder: str) -> None:
    model = with_lora(tiny(dtype=torch.float32), seed=0)
    apply_ep_fsdp2(model, ep_size=world)
    before = _compute_logits(model)
    _train(model)
    assert (_compute_logits(model) - before).abs().max() > 0.01, "training has no effect"
    _check_saved(model, save_pretrained, folder)
    # model.save_pretrained is PEFT's own method, called on every rank.
    _check_saved(model, lambda model, to: model.save_pretrained(to), f"{folder}_of_peft")


def test_an_adapter_trained_at_ep_4_opens_in_stock_peft(tmp_path: Path) -> None:
    run_ranks(_train_at_ep_4, 4, str(tmp_path / "adapter"))


def _open_at_ep_2(rank: int, world: int, folder: str, logits: Tensor) -> None:
    model = peft.PeftModel.from_pretrained(
        tiny(dtype=torch.float32), f"{folder}/stock", is_trainable=True
    )
    apply_ep_fsdp2(model, ep_size=2)
    assert_close("logits at ep 2", _compute_logits(model), logits, BUDGET)
    save_pretrained(model, f"{folder}/again")
    _train(model, steps=1)
    # A step is about 1e-2.
    assert (_compute_logits(model) - logits).abs().max() > 1e-3, "training has no effect"


def test_an_adapter_trained_by_stock_peft_opens_at_ep_2(tmp_path: Path) -> None:
    stock = with_lora(tiny(dtype=torch.float32), seed=0)
    _train(stock)
    stock.save_pretrained(tmp_path / "stock")
    run_ranks(_open_at_ep_2, 4, str(tmp_path), _compute_logits(stock))
    weights, copy = (tmp_path / f / "adapter_model.safetensors" for f in ("stock", "again"))
    assert copy.read_bytes() == weights.read_bytes()
    configs = [peft.LoraConfig.from_pretrained(tmp_path / f).to_dict() for f in ("stock", "again")]
    for config in configs:  # PEFT saves a set, whose order differs between processes
        config["target_parameters"].sort()
    assert configs[0] == configs[1]


def test_another_order_of_lora_b_changes_the_logits() -> None:
    """lora_B's columns are (r, E). unsloth-zoo read (E, r), of the same shape, until PR 1269."""
    stock = with_lora(tiny(), seed=0)
    model = with_lora(patch(tiny()), seed=0)
    logits = _compute_logits(stock)
    assert_close("logits", _compute_logits(model), logits, 1e-10)

    def stack_expert_slowest(packed: Tensor, num_experts: int) -> Tensor:
        return packed.unflatten(1, (num_experts, -1)).permute(1, 0, 2)

    with mock.patch.object(factors, "stack_b", stack_expert_slowest), pytest.raises(AssertionError):
        assert_close("logits", _compute_logits(model), logits, 1e-3)  # the difference is large


def _compare_initial_factors(rank: int, world: int) -> None:
    """All ranks get the initial factors of rank 0, although each rank has drawn other values."""

    def attach(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        config = peft.LoraConfig(r=4, target_parameters=list(EXPERTS), target_modules=["q_proj"])
        return peft.get_peft_model(tiny(dtype=torch.float32), config)

    model, stock = attach(seed=rank), attach(seed=0)
    apply_ep_fsdp2(model, ep_size=2)
    gathered = {name: full_tensor(p) for name, p in model.named_parameters() if "lora_" in name}
    for name, tensor in factors.pack_factors(model, gathered).items():
        assert torch.equal(tensor, stock.get_parameter(name)), name
    local = sum(p.to_local().numel() for p in model.parameters() if p.requires_grad)
    assert local < 0.3 * sum(tensor.numel() for tensor in gathered.values()), "a quarter per rank"


def test_initial_factors_equal_rank_0s() -> None:
    run_ranks(_compare_initial_factors, 4)


def _train_on_bf16(rank: int, world: int, folder: str) -> None:
    """PEFT casts adapters of a bf16 base to fp32. Shards and files are fp32; products are bf16.

    The trained copy of the head has fp32 shards, but is saved in the dtype of the base.
    """
    model = with_lora(tiny(dtype=torch.bfloat16), seed=rank, modules_to_save=["lm_head"])
    dtypes = {p.dtype for n, p in model.named_parameters() if "lora_" in n and "proj" in n}
    assert torch.float32 in dtypes
    apply_ep_fsdp2(model, ep_size=2)
    adapters = {n: p for n, p in model.named_parameters() if p.requires_grad}
    assert {p.dtype for p in adapters.values()} == {torch.float32}
    assert {p.dtype for p in model.parameters() if not p.requires_grad} == {torch.bfloat16}
    before = _compute_logits(model)
    _train(model)
    after = _compute_logits(model)
    assert (after - before).abs().max() > 0.01
    save_pretrained(model, folder)
    for key, tensor in load_file(f"{folder}/adapter_model.safetensors").items():
        assert tensor.dtype == (torch.float32 if "lora_" in key else torch.bfloat16), key
    opened = peft.PeftModel.from_pretrained(tiny(dtype=torch.bfloat16), folder)
    gathered = {name: full_tensor(p) for name, p in adapters.items()}
    for name, tensor in factors.pack_factors(model, gathered).items():
        dtype = torch.bfloat16 if "lm_head" in name else torch.float32
        assert torch.equal(opened.get_parameter(name), tensor.to(dtype)), name
    # The mean is compared, because rounding may route a token to another expert.
    error = (_compute_logits(opened) - after).abs().mean() / after.abs().mean()
    assert error < 0.05, f"logits in stock PEFT: mean error {error}"


@pytest.mark.slow
def test_fp32_adapters_on_a_bf16_base_equal_peft(tmp_path: Path) -> None:
    run_ranks(_train_on_bf16, 2, str(tmp_path / "adapter"))


def _save_with_accelerate(rank: int, world: int, folder: str) -> None:
    """Both types of state dict work. PEFT saves the gathered state dict as in its scripts."""
    for kind in ("SHARDED_STATE_DICT", "FULL_STATE_DICT"):
        state, adapter = f"{folder}/{kind}", f"{folder}/{kind}-adapter"
        with launched(FSDP_STATE_DICT_TYPE=kind):
            model = with_lora(tiny(dtype=torch.float32), seed=rank)
            accelerator, model, _ = prepared(model, ep_size=2)
            _train(model)
            accelerator.save_state(state)
            logits = _compute_logits(model)
            _train(model, steps=1)
            assert (_compute_logits(model) - logits).abs().max() > 0.01, kind
            accelerator.load_state(state)
            assert torch.equal(_compute_logits(model), logits), kind
            # Every rank calls this, as in PEFT's examples for FSDP.
            accelerator.unwrap_model(model).save_pretrained(
                adapter,
                is_main_process=accelerator.is_main_process,
                state_dict=accelerator.get_state_dict(model),
            )
            accelerator.wait_for_everyone()
            opened = peft.PeftModel.from_pretrained(tiny(dtype=torch.float32), adapter)
            assert_close(f"{kind}: logits in stock PEFT", _compute_logits(opened), logits, BUDGET)


@pytest.mark.slow
def test_states_and_adapters_saved_by_accelerate_can_be_loaded(tmp_path: Path) -> None:
    run_ranks(_save_with_accelerate, 2, str(tmp_path))


def _add_by_transformers(rank: int, world: int, folder: str) -> None:
    """`model.add_adapter` creates no PeftModel. The files are the same as PEFT's.

    The method `save_pretrained` of the model writes the same bytes as the function.
    """
    model = tiny(dtype=torch.float32)
    torch.manual_seed(rank)
    model.add_adapter(
        peft.LoraConfig(r=4, target_parameters=list(EXPERTS), init_lora_weights=False)
    )
    apply_ep_fsdp2(model, ep_size=2)
    logits = _compute_logits(model)
    gathered = gather_state_dict(model)
    assert all("lora_" in name for name in gathered) and len(gathered) == (0 if rank else 2 * 4)
    save_pretrained(model, folder)
    opened = peft.PeftModel.from_pretrained(tiny(dtype=torch.float32), folder)
    assert_close("logits in stock PEFT", _compute_logits(opened), logits, BUDGET)
    model.save_pretrained(f"{folder}_of_method", is_main_process=rank == 0)
    weights = [Path(f, "adapter_model.safetensors") for f in (folder, f"{folder}_of_method")]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def _read_keys(folder: str) -> set[str]:
    with safe_open(f"{folder}/adapter_model.safetensors", "pt") as file:
        return set(file.keys())


def _save_embeddings(rank: int, world: int, folder: str) -> None:
    """PEFT also saves embeddings with new tokens, which are larger than in the base on disk."""
    if rank == 0:
        tiny(dtype=torch.float32).save_pretrained(f"{folder}/base")
    dist.barrier()
    for name, options in (("resized", {}), ("asked for", {"save_embedding_layers": True})):
        model = AutoModelForCausalLM.from_pretrained(f"{folder}/base")
        if name == "resized":
            model.resize_token_embeddings(101)
        model = with_lora(model)
        if rank == 0:
            model.save_pretrained(f"{folder}/stock {name}", **options)
        apply_ep_fsdp2(model, ep_size=2)
        save_pretrained(model, f"{folder}/{name}", **options)
        keys = _read_keys(f"{folder}/stock {name}")
        assert any("embed_tokens" in key for key in keys)
        assert _read_keys(f"{folder}/{name}") == keys, name


def _save_with_checkpoint_wrappers(rank: int, world: int, folder: str) -> None:
    """Activation checkpointing renames modules, and PEFT finds modules_to_save by name."""
    with launched(FSDP_ACTIVATION_CHECKPOINTING="true"):
        model = with_lora(tiny(dtype=torch.float32), modules_to_save=["post_attention_layernorm"])
        if rank == 0:
            model.save_pretrained(f"{folder}/stock")
        accelerator, model, _ = prepared(model, ep_size=2)
        assert any("_checkpoint_wrapped_module" in name for name, _ in model.named_modules())
        _train(model)
        logits = _compute_logits(model)
        save_pretrained(model, f"{folder}/ours")
        gathered = accelerator.get_state_dict(model)
        if rank == 0:
            accelerator.unwrap_model(model).save_pretrained(f"{folder}/given", state_dict=gathered)
        accelerator.wait_for_everyone()
    for name in ("ours", "given"):
        assert _read_keys(f"{folder}/{name}") == _read_keys(f"{folder}/stock"), name
        opened = peft.PeftModel.from_pretrained(tiny(dtype=torch.float32), f"{folder}/{name}")
        assert_close(f"{name}: logits in stock PEFT", _compute_logits(opened), logits, BUDGET)


def test_modules_to_save_work_with_accelerates_activation_checkpointing(tmp_path: Path) -> None:
    run_ranks(_save_with_checkpoint_wrappers, 2, str(tmp_path))


@pytest.mark.slow
def test_embeddings_are_saved_where_peft_saves_them(tmp_path: Path) -> None:
    run_ranks(_save_embeddings, 2, str(tmp_path))


@needs_add_adapter
def test_an_adapter_added_by_transformers_opens_in_peft(tmp_path: Path) -> None:
    run_ranks(_add_by_transformers, 2, str(tmp_path / "adapter"))
