"""Checkpoints of the hub: every rank reads its shards alone, what is saved has the same bytes."""

import copy
import hashlib
import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, init_empty_weights
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from support.adapters import ATTENTION, EXPERTS
from support.close import assert_close
from support.hub_files import assert_equal, hub_state, read_all, write_hub
from support.launched import launched, prepared
from support.needs import ARCHITECTURES
from support.parity import full_tensor
from support.ranks import run_ranks
from support.tiny_models import QWEN3_VL_MOE, batch, tiny
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, Trainer, TrainingArguments

from hf_moe_ep import apply_ep_fsdp2, from_pretrained, patch, save_pretrained
from hf_moe_ep.checkpoints.hub import gather as hub_gather
from hf_moe_ep.checkpoints.storage import safetensors_file
from hf_moe_ep.lora import factors

LAYOUTS: dict[str, dict[str, Any]] = {
    "ep 1": {},
    "ep 2": {"ep_size": 2},
    "ep 4": {"ep_size": 4},
    "ep 1, dim 1": {"expert_shard_dim": 1},
    "ep 2, dim 1": {"ep_size": 2, "expert_shard_dim": 1},
    "ep 2 outside": {"ep_size": 2, "ep_outside": True},
    "ep 2, HSDP": {"ep_size": 2, "dp_replicate_size": 2},
    "ep 2, sp 2": {"ep_size": 2, "sp_size": 2},
}


class Counted:
    """os.preadv that counts how often every byte of a file is read."""

    def __init__(self) -> None:
        self.read: dict[str, Tensor] = {}
        self._preadv, self._open = safetensors_file.os.preadv, safetensors_file.os.open
        self._times: dict[int, Tensor] = {}

    def open(self, path: Any, flags: int) -> int:
        descriptor = self._open(path, flags)
        times = torch.zeros(Path(path).stat().st_size, dtype=torch.uint8)
        self._times[descriptor] = self.read[Path(path).name] = times
        return descriptor

    def preadv(self, descriptor: int, buffers: Any, offset: int) -> int:
        got = self._preadv(descriptor, buffers, offset)
        self._times[descriptor][offset : offset + got] += 1
        return got


def _round_trip(rank: int, world: int, folder: str, name: str) -> dict[str, Any]:
    reads = {}
    for layout, sizes in LAYOUTS.items():
        counted = Counted()
        with (
            mock.patch.object(safetensors_file.os, "preadv", counted.preadv),
            mock.patch.object(safetensors_file.os, "open", counted.open),
        ):
            model = from_pretrained(f"{folder}/{name}", **sizes)
        reads[layout] = counted.read
        # Norms are gathered whole here, everything else part by part.
        with mock.patch.object(hub_gather, "SMALL", 1000):
            save_pretrained(model, f"{folder}/{name} {layout}", max_shard_size=20_000)
    return reads


@pytest.mark.parametrize(
    "name", ["qwen3_moe", pytest.param("qwen3_vl_moe", marks=pytest.mark.slow)]
)
def test_hub_to_shards_to_hub_keeps_every_byte(name: str, tmp_path: Path) -> None:
    model = tiny(name, dtype=torch.float32)
    want = write_hub(tmp_path / name, model)
    reads = run_ranks(_round_trip, 4, str(tmp_path), name)
    size = sum(tensor.nbytes for tensor in want.values())
    for layout, sizes in LAYOUTS.items():
        folder = tmp_path / f"{name} {layout}"
        assert len(list(folder.glob("*.safetensors"))) > 3
        assert_equal(read_all(folder), want)
        names = set().union(*(rank[layout] for rank in reads))
        times = [sum(r[layout][n] for r in reads if n in r[layout]) for n in names]
        read = torch.cat([t[t > 0] for t in times])
        assert read.unique().tolist() == [sizes.get("dp_replicate_size", 1)], "no byte twice"
        assert len(read) == size, "every byte of every tensor"
        assert_equal(hub_state(type(model).from_pretrained(folder)), want)


def _meta(name: str, **options: Any) -> PreTrainedModel:
    with init_empty_weights(include_buffers=False):
        model = tiny(name, **options)
    model.tie_weights()
    return model


def _same_model(rank: int, world: int, folder: str, name: str) -> None:
    """Loaded lean, the model trains as one that stock loads; text with tied weights too."""
    cases: dict[str, dict[str, Any]] = {"plain": {}}
    if name == "qwen3_moe":
        cases["tied"] = {"tie_word_embeddings": True}
    for case, options in cases.items():
        stock = tiny(name, **options)
        if rank == 0:
            write_hub(Path(folder, case), stock)
        dist.barrier()
        want = apply_ep_fsdp2(copy.deepcopy(stock), ep_size=2)
        lean = from_pretrained(Path(folder, case), ep_size=2, experts_implementation="eager")
        assert not lean.training and lean.train().generation_config is not None
        by_hand = apply_ep_fsdp2(_meta(name, **options), weights=f"{folder}/{case}", ep_size=2)
        inputs = batch(stock, 2, 9, seed=rank)
        inputs["input_ids"].clamp_(max=89)  # no picture: those tokens begin at 90
        losses: list[Tensor] = []
        grads: list[dict[str, Tensor]] = []
        for model in (want, lean, by_hand):
            loss = model(**inputs).loss
            loss.backward()
            losses.append(loss.detach())
            trained = ((n, p.grad) for n, p in model.named_parameters())
            grads.append({n: grad.to_local() for n, grad in trained if grad is not None})
        for loss, grad in zip(losses[1:], grads[1:], strict=True):
            assert torch.equal(loss, losses[0]) and grad.keys() == grads[0].keys()
            assert all(torch.equal(grad[n], grads[0][n]) for n in grad)
        assert next(want.parameters()).dtype == next(lean.parameters()).dtype == torch.float64


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_lean_model_trains_like_one_that_stock_loaded(name: str, tmp_path: Path) -> None:
    run_ranks(_same_model, 2, str(tmp_path), name)


def _masters(rank: int, world: int, folder: str) -> None:
    """A bf16 checkpoint: fp32 masters, saved in bf16 again, or as the masters they are."""
    model = from_pretrained(f"{folder}/hub", ep_size=2)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    save_pretrained(model, f"{folder}/again")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 1e-5)  # less than bf16 can show
    save_pretrained(model, f"{folder}/masters", dtype=torch.float32)


def test_low_precision_is_saved_as_it_came_and_masters_on_demand(tmp_path: Path) -> None:
    want = write_hub(tmp_path / "hub", tiny(dtype=torch.bfloat16))
    run_ranks(_masters, 2, str(tmp_path))
    assert_equal(read_all(tmp_path / "again"), want)
    changed = {key: tensor.float() * (1 + 1e-5) for key, tensor in want.items()}
    assert_equal(read_all(tmp_path / "masters"), changed)
    for folder, dtype in (("again", "bfloat16"), ("masters", "float32")):
        assert json.loads((tmp_path / folder / "config.json").read_text())["dtype"] == dtype


# Twice the expert width equal to the hidden size: gate_up_proj fits both ways.
SQUARE = {"text_config": QWEN3_VL_MOE["text_config"] | {"moe_intermediate_size": 16}}


def _layouts_of_others(rank: int, world: int, folder: str) -> list[dict[str, Tensor]]:
    states = []
    for case in ("v5", "square v5", "square hub", "fused"):
        model = from_pretrained(f"{folder}/{case}", ep_size=2)
        save_pretrained(model, f"{folder}/{case} again")
        states.append({n: full_tensor(p) for n, p in model.named_parameters()})
    return states


def test_layouts_that_others_write_are_read(tmp_path: Path) -> None:
    """Transformers 5 saves Qwen3-VL-MoE in its memory layout."""
    models = [
        tiny("qwen3_vl_moe", dtype=torch.float32),
        tiny("qwen3_vl_moe", dtype=torch.float32, **SQUARE),
        tiny("qwen3_vl_moe", dtype=torch.float32, **SQUARE),
        tiny(dtype=torch.float32),
    ]
    models[0].save_pretrained(tmp_path / "v5")
    models[1].save_pretrained(tmp_path / "square v5")
    write_hub(tmp_path / "square hub", models[2])
    models[3].save_pretrained(tmp_path / "fused", save_original_format=False)
    shape = "model.language_model.layers.0.mlp.experts.gate_up_proj"
    assert load_file(tmp_path / "v5" / "model.safetensors")[shape].shape == (8, 48, 32)
    fused = load_file(tmp_path / "fused" / "model.safetensors")
    assert "model.layers.0.mlp.experts.gate_up_proj" in fused
    states = run_ranks(_layouts_of_others, 2, str(tmp_path))[0]
    for model, state, case in zip(
        models, states, ("v5", "square v5", "square hub", "fused"), strict=True
    ):
        for name, parameter in model.named_parameters():
            assert torch.equal(state[name], parameter), f"{case}: {name}"
        assert_equal(read_all(tmp_path / f"{case} again"), hub_state(model))


def _with_adapters(rank: int, world: int, folder: str) -> None:
    """LoRA on a lean base: factors as PEFT draws them, of rank 0; copies are read as the base."""
    base = tiny(dtype=torch.float32)
    if rank == 0:
        write_hub(Path(folder), base)
    dist.barrier()
    for drawn in (True, False):
        torch.manual_seed(rank)
        config = LoraConfig(
            r=4,
            target_parameters=list(EXPERTS),
            target_modules=list(ATTENTION),
            modules_to_save=["post_attention_layernorm", "lm_head"],
            init_lora_weights=drawn,
        )
        lean = from_pretrained(folder, ep_size=2, peft_config=config)
        found = {n: full_tensor(p) for n, p in lean.named_parameters() if "lora_" in n}
        for name, factor in found.items():
            assert factor.isfinite().all() and (factor.std() > 0) == (
                "lora_A" in name or not drawn
            ), name
        everyone = [None] * world
        dist.all_gather_object(everyone, found)
        assert all(torch.equal(everyone[1][n], factor) for n, factor in everyone[0].items())
        model = get_peft_model(copy.deepcopy(base), config)
        packed = factors.pack_factors(lean, found)
        assert packed.keys() == {n for n, _ in model.named_parameters() if "lora_" in n}
        model.load_state_dict(packed, strict=False)
        inputs = batch(base, 2, 9, seed=rank)
        assert_close("logits", lean.eval()(**inputs).logits, model.eval()(**inputs).logits, 1e-5)
        trained = {n for n, p in lean.named_parameters() if p.requires_grad}
        assert trained == {n for n, p in model.named_parameters() if p.requires_grad}


def test_adapters_on_a_lean_model(tmp_path: Path) -> None:
    run_ranks(_with_adapters, 2, str(tmp_path / "hub"))


def _steps(accelerator: Any, model: Any, optimizer: Any, rank: int) -> list[float]:
    numbers = []
    for step in range(3):
        loss = model(**batch(model, 2, 9, seed=10 * step + rank)).loss
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        numbers += [loss.item(), float(norm)]
    return numbers


def _lean_under_accelerate(rank: int, world: int, folder: str) -> None:
    """accelerator.prepare takes a model that is sharded already; clip, AdamW, states as ever."""
    base = tiny(dtype=torch.float32)
    if rank == 0:
        write_hub(Path(folder, "base"), base)
    dist.barrier()
    with launched():
        accelerator = Accelerator(cpu=True)
        lean = from_pretrained(f"{folder}/base", ep_size=2).train()
        optimizer = torch.optim.AdamW(lean.parameters(), lr=0.1)
        lean, optimizer = accelerator.prepare(lean, optimizer)
        got = _steps(accelerator, lean, optimizer, rank)
        accelerator.save_state(f"{folder}/state")
        kept = {n: full_tensor(p) for n, p in lean.named_parameters()}
        _steps(accelerator, lean, optimizer, rank)
        accelerator.load_state(f"{folder}/state")
        for name, parameter in lean.named_parameters():
            assert torch.equal(full_tensor(parameter), kept[name]), name
    with launched():
        assert got == _steps(*prepared(copy.deepcopy(base), ep_size=2), rank)
    with launched():
        accelerator = Accelerator(cpu=True)
        small = tiny(dtype=torch.float32, num_experts=2, moe_intermediate_size=9)
        apply_ep_fsdp2(small)
        with pytest.raises(ValueError, match=r"has an empty shard on this rank"):
            accelerator.prepare(small, torch.optim.AdamW(small.parameters()))


def test_a_lean_model_under_accelerate(tmp_path: Path) -> None:
    run_ranks(_lean_under_accelerate, 4, str(tmp_path))


def _lean_under_the_trainer(rank: int, world: int, folder: str) -> list[list[Any]]:
    base = tiny(dtype=torch.float32)
    if rank == 0:
        write_hub(Path(folder, "base"), base)
    dist.barrier()
    ids = torch.randint(0, 97, (32, 9), generator=torch.Generator().manual_seed(0))
    logs = []
    for kind in ("lean", "stock"):
        with launched():
            args = TrainingArguments(
                output_dir=f"{folder}/out",
                use_cpu=True,
                max_steps=4,
                per_device_train_batch_size=2,
                logging_steps=1,
                report_to=[],
                save_strategy="no",
            )
            if kind == "lean":
                model = from_pretrained(f"{folder}/base", ep_size=2).train()
            else:
                model = patch(copy.deepcopy(base), ep_size=2)
            data = [{"input_ids": row, "labels": row} for row in ids]
            trainer = Trainer(model=model, args=args, train_dataset=data)
            trainer.train()
            trainer.save_model(f"{folder}/{kind}")
            history = trainer.state.log_history
            logs.append([(log["loss"], log["grad_norm"]) for log in history if "loss" in log])
    return logs


@pytest.mark.slow
def test_a_lean_model_under_the_trainer(tmp_path: Path) -> None:
    for lean, stock in run_ranks(_lean_under_the_trainer, 2, str(tmp_path)):
        assert lean == stock and len(lean) == 4
    assert_equal(read_all(tmp_path / "lean"), read_all(tmp_path / "stock"))


def _given_state_dict(rank: int, world: int, folder: str) -> None:
    """The way of Accelerate's examples: gather, then the model's own save_pretrained."""
    model = tiny("qwen3_vl_moe", dtype=torch.float32)
    with launched():
        accelerator, model, _ = prepared(model, ep_size=2)
        accelerator.unwrap_model(model).save_pretrained(
            folder,
            is_main_process=accelerator.is_main_process,
            save_function=accelerator.save,
            state_dict=accelerator.get_state_dict(model),
        )
        accelerator.wait_for_everyone()


def test_a_gathered_state_dict_is_saved_in_hub_layout(tmp_path: Path) -> None:
    run_ranks(_given_state_dict, 2, str(tmp_path))
    assert_equal(read_all(tmp_path), hub_state(tiny("qwen3_vl_moe", dtype=torch.float32)))


def test_one_process_saves_a_patched_model_over_an_older_save(tmp_path: Path) -> None:
    """Stock's single file would hide the new index, so the save removes it and older shards."""
    model = tiny(dtype=torch.float32)
    model.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").is_file()
    with torch.no_grad():
        model.lm_head.weight.add_(1)
    patch(model)
    for _ in range(2):
        save_pretrained(model, tmp_path, max_shard_size="50KB")
        assert_equal(read_all(tmp_path), hub_state(model))
        index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
        files = {path.name for path in tmp_path.glob("*.safetensors")}
        assert files == set(index["weight_map"].values()) and len(files) > 3
        for name, digest in index["metadata"]["hf_moe_ep_sha256"].items():
            assert hashlib.sha256((tmp_path / name).read_bytes()).hexdigest() == digest
    assert_equal(hub_state(AutoModelForCausalLM.from_pretrained(tmp_path)), hub_state(model))
