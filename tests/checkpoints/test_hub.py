"""A rank reads only its shards of a hub checkpoint, and a saved model has the same bytes."""

import copy
import errno
import hashlib
import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, init_empty_weights
from peft import LoraConfig, get_peft_model, peft_model
from safetensors.torch import load_file
from support.adapters import ATTENTION, EXPERTS, with_lora
from support.close import assert_close
from support.hub_files import assert_equal, hub_state, read_all, write_hub
from support.launched import launched, prepared
from support.needs import ARCHITECTURES, SINCE_5_23
from support.parity import full_tensor
from support.ranks import run_ranks
from support.tiny_models import QWEN3_VL_MOE, batch, tiny
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
    Qwen3MoeForCausalLM,
    Trainer,
    TrainingArguments,
)

from hf_moe_ep import apply_ep_fsdp2, from_pretrained, patch, save_checkpoint, save_pretrained
from hf_moe_ep.checkpoints.convert import convert
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


class CountedReads:
    """Replaces os.open and os.preadv, and counts how often each byte of a file is read."""

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
        num_bytes = self._preadv(descriptor, buffers, offset)
        self._times[descriptor][offset : offset + num_bytes] += 1
        return num_bytes


def _load_and_save_in_all_layouts(rank: int, world: int, folder: str, name: str) -> dict[str, Any]:
    reads = {}
    for layout, sizes in LAYOUTS.items():
        counted = CountedReads()
        with (
            mock.patch.object(safetensors_file.os, "preadv", counted.preadv),
            mock.patch.object(safetensors_file.os, "open", counted.open),
        ):
            model = from_pretrained(f"{folder}/{name}", **sizes)
        reads[layout] = counted.read
        # With this limit norms are gathered whole, and all other tensors slab by slab.
        with mock.patch.object(hub_gather, "SMALL", 1000):
            save_pretrained(model, f"{folder}/{name} {layout}", max_shard_size=20_000)
    return reads


@pytest.mark.parametrize(
    "name", ["qwen3_moe", pytest.param("qwen3_vl_moe", marks=pytest.mark.slow)]
)
def test_hub_to_shards_to_hub_keeps_every_byte(name: str, tmp_path: Path) -> None:
    model = tiny(name, dtype=torch.float32)
    tensors = write_hub(tmp_path / name, model)
    reads = run_ranks(_load_and_save_in_all_layouts, 4, str(tmp_path), name)
    size = sum(tensor.nbytes for tensor in tensors.values())
    for layout, sizes in LAYOUTS.items():
        folder = tmp_path / f"{name} {layout}"
        assert len(list(folder.glob("*.safetensors"))) > 3
        assert_equal(read_all(folder), tensors)
        names = set().union(*(rank[layout] for rank in reads))
        times = [sum(r[layout][n] for r in reads if n in r[layout]) for n in names]
        counts = torch.cat([t[t > 0] for t in times])
        assert counts.unique().tolist() == [sizes.get("dp_replicate_size", 1)], "no byte twice"
        assert len(counts) == size, "every byte is read"
        assert_equal(hub_state(type(model).from_pretrained(folder)), tensors)


def _make_meta_model(name: str, **options: Any) -> PreTrainedModel:
    with init_empty_weights(include_buffers=False):
        model = tiny(name, **options)
    model.tie_weights()
    return model


def _compare_loaded_models(rank: int, world: int, folder: str, name: str) -> None:
    """Compare loss and gradients after from_pretrained, and with weights= and a model on meta."""
    cases: dict[str, dict[str, Any]] = {"plain": {}}
    if name == "qwen3_moe":
        cases["tied"] = {"tie_word_embeddings": True}
    for case, options in cases.items():
        stock = tiny(name, **options)
        if rank == 0:
            write_hub(Path(folder, case), stock)
        dist.barrier()
        sharded = apply_ep_fsdp2(copy.deepcopy(stock), ep_size=2)
        ours = from_pretrained(Path(folder, case), ep_size=2, experts_implementation="eager")
        assert not ours.training and ours.train().generation_config is not None
        meta_loaded = apply_ep_fsdp2(
            _make_meta_model(name, **options), weights=f"{folder}/{case}", ep_size=2
        )
        inputs = batch(stock, 2, 9, seed=rank)
        inputs["input_ids"].clamp_(max=89)  # image tokens begin at 90
        losses: list[Tensor] = []
        grads: list[dict[str, Tensor]] = []
        for model in (sharded, ours, meta_loaded):
            loss = model(**inputs).loss
            loss.backward()
            losses.append(loss.detach())
            trained = ((n, p.grad) for n, p in model.named_parameters())
            grads.append({n: grad.to_local() for n, grad in trained if grad is not None})
        for loss, grad in zip(losses[1:], grads[1:], strict=True):
            assert torch.equal(loss, losses[0]) and grad.keys() == grads[0].keys()
            assert all(torch.equal(grad[n], grads[0][n]) for n in grad)
        assert next(sharded.parameters()).dtype == next(ours.parameters()).dtype == torch.float64


@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=[] if x == "qwen3_moe" else pytest.mark.slow) for x in ARCHITECTURES],
)
def test_a_loaded_model_has_the_loss_and_gradients_of_stock(name: str, tmp_path: Path) -> None:
    run_ranks(_compare_loaded_models, 2, str(tmp_path), name)


def _save_both_dtypes(rank: int, world: int, folder: str) -> None:
    """Load a bf16 checkpoint as fp32 master weights, and save it in bf16 and in fp32."""
    model = from_pretrained(f"{folder}/hub", ep_size=2)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    save_pretrained(model, f"{folder}/again")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 1e-5)  # a change that bf16 rounds away
    save_pretrained(model, f"{folder}/masters", dtype=torch.float32)


def test_bf16_is_saved_as_bf16_or_as_fp32_masters(tmp_path: Path) -> None:
    tensors = write_hub(tmp_path / "hub", tiny(dtype=torch.bfloat16))
    run_ranks(_save_both_dtypes, 2, str(tmp_path))
    assert_equal(read_all(tmp_path / "again"), tensors)
    changed = {key: tensor.float() * (1 + 1e-5) for key, tensor in tensors.items()}
    assert_equal(read_all(tmp_path / "masters"), changed)
    for folder, dtype in (("again", "bfloat16"), ("masters", "float32")):
        assert json.loads((tmp_path / folder / "config.json").read_text())["dtype"] == dtype


# gate_up_proj of an expert is square, so its shape does not say whether it is transposed.
SQUARE = {"text_config": QWEN3_VL_MOE["text_config"] | {"moe_intermediate_size": 16}}


def _load_and_save_files_of_stock(rank: int, world: int, folder: str) -> list[dict[str, Tensor]]:
    states = []
    for case in ("v5", "square v5", "square hub", "fused"):
        model = from_pretrained(f"{folder}/{case}", ep_size=2)
        save_pretrained(model, f"{folder}/{case} again")
        states.append({n: full_tensor(p) for n, p in model.named_parameters()})
    return states


def test_layouts_that_transformers_5_writes_are_read(tmp_path: Path) -> None:
    """transformers 5 saves Qwen3-VL-MoE as in memory, and other models stacked with one option."""
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
    states = run_ranks(_load_and_save_files_of_stock, 2, str(tmp_path))[0]
    for model, state, case in zip(
        models, states, ("v5", "square v5", "square hub", "fused"), strict=True
    ):
        for name, parameter in model.named_parameters():
            assert torch.equal(state[name], parameter), f"{case}: {name}"
        assert_equal(read_all(tmp_path / f"{case} again"), hub_state(model))


def _compare_adapters_with_peft(rank: int, world: int, folder: str) -> None:
    """Rank 0 draws factors as PEFT does, and modules_to_save have values of the base model."""
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
        loaded = from_pretrained(folder, ep_size=2, peft_config=config)
        gathered = {n: full_tensor(p) for n, p in loaded.named_parameters() if "lora_" in n}
        for name, factor in gathered.items():
            assert factor.isfinite().all() and (factor.std() > 0) == (
                "lora_A" in name or not drawn
            ), name
        everyone = [None] * world
        dist.all_gather_object(everyone, gathered)
        assert all(torch.equal(everyone[1][n], factor) for n, factor in everyone[0].items())
        model = get_peft_model(copy.deepcopy(base), config)
        packed = factors.pack_factors(loaded, gathered)
        assert packed.keys() == {n for n, _ in model.named_parameters() if "lora_" in n}
        model.load_state_dict(packed, strict=False)
        inputs = batch(base, 2, 9, seed=rank)
        assert_close("logits", loaded.eval()(**inputs).logits, model.eval()(**inputs).logits, 1e-5)
        trained = {n for n, p in loaded.named_parameters() if p.requires_grad}
        assert trained == {n for n, p in model.named_parameters() if p.requires_grad}


def test_adapters_of_a_sharded_model_begin_as_in_peft(tmp_path: Path) -> None:
    run_ranks(_compare_adapters_with_peft, 2, str(tmp_path / "hub"))


def _train_three_steps(accelerator: Any, model: Any, optimizer: Any, rank: int) -> list[float]:
    losses_and_norms = []
    for step in range(3):
        loss = model(**batch(model, 2, 9, seed=10 * step + rank)).loss
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses_and_norms += [loss.item(), float(norm)]
    return losses_and_norms


def _train_with_accelerate(rank: int, world: int, folder: str) -> None:
    """Compare clipping and AdamW with those of a model that `prepare` shards; load a state."""
    base = tiny(dtype=torch.float32)
    if rank == 0:
        write_hub(Path(folder, "base"), base)
    dist.barrier()
    with launched():
        accelerator = Accelerator(cpu=True)
        loaded = from_pretrained(f"{folder}/base", ep_size=2).train()
        optimizer = torch.optim.AdamW(loaded.parameters(), lr=0.1)
        loaded, optimizer = accelerator.prepare(loaded, optimizer)
        losses_and_norms = _train_three_steps(accelerator, loaded, optimizer, rank)
        accelerator.save_state(f"{folder}/state")
        saved = {n: full_tensor(p) for n, p in loaded.named_parameters()}
        _train_three_steps(accelerator, loaded, optimizer, rank)
        accelerator.load_state(f"{folder}/state")
        for name, parameter in loaded.named_parameters():
            assert torch.equal(full_tensor(parameter), saved[name]), name
    with launched():
        assert losses_and_norms == _train_three_steps(
            *prepared(copy.deepcopy(base), ep_size=2), rank
        )
    with launched():
        accelerator = Accelerator(cpu=True)
        small = tiny(dtype=torch.float32, num_experts=2, moe_intermediate_size=9)
        apply_ep_fsdp2(small)
        small, optimizer = accelerator.prepare(small, torch.optim.AdamW(small.parameters()))
        trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
        assert trained == {id(p) for p in small.parameters()}


@pytest.mark.slow
def test_accelerate_trains_and_restores_a_sharded_model(tmp_path: Path) -> None:
    run_ranks(_train_with_accelerate, 4, str(tmp_path))


def _train_with_the_trainer(rank: int, world: int, folder: str) -> list[list[Any]]:
    base = tiny(dtype=torch.float32)
    if rank == 0:
        write_hub(Path(folder, "base"), base)
    dist.barrier()
    ids = torch.randint(0, 97, (32, 9), generator=torch.Generator().manual_seed(0))
    logs = []
    for kind in ("sharded", "stock"):
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
            if kind == "sharded":
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
def test_the_trainer_trains_a_sharded_model_like_a_stock_model(tmp_path: Path) -> None:
    for sharded, stock in run_ranks(_train_with_the_trainer, 2, str(tmp_path)):
        assert sharded == stock and len(sharded) == 4
    assert_equal(read_all(tmp_path / "sharded"), read_all(tmp_path / "stock"))


def _save_gathered(rank: int, world: int, folder: str) -> None:
    """Gather a state dict and pass it to save_pretrained, as in the examples of Accelerate."""
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
    run_ranks(_save_gathered, 2, str(tmp_path))
    assert_equal(read_all(tmp_path), hub_state(tiny("qwen3_vl_moe", dtype=torch.float32)))


def test_one_process_saves_a_patched_model_over_an_older_save(tmp_path: Path) -> None:
    """Loaders prefer stock's single file to an index, so a save removes it and older shards."""
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


# The files of a model class in a checkpoint. Only another file imports names.py.
CODE = {
    "configuration_mine.py": """
from transformers import Qwen3MoeConfig
class MyConfig(Qwen3MoeConfig):
    pass
""",
    "modeling_mine.py": """
from transformers import Qwen3MoeForCausalLM
from .configuration_mine import MyConfig
from .names import NAME
class MyMoE(Qwen3MoeForCausalLM):
    config_class = MyConfig
""",
    "names.py": "NAME = 'mine'\n",
}


def test_a_failed_save_keeps_the_previous_adapter(tmp_path: Path) -> None:
    """PEFT overwrites the file in place, so a full disk would leave neither adapter."""
    model = patch(with_lora(tiny(dtype=torch.float32)))
    save_pretrained(model, tmp_path, processor=None)
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    stock = peft_model.safe_save_file

    def fail(tensors: dict[str, Tensor], file: str, **kwargs: Any) -> None:
        stock(tensors, file, **kwargs)
        Path(file).write_bytes(Path(file).read_bytes()[:100])
        raise OSError(errno.ENOSPC, "No space left on device")

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    with (
        mock.patch.object(peft_model, "safe_save_file", fail),
        pytest.raises(RuntimeError, match="No space left"),
    ):
        save_pretrained(model, tmp_path)
    assert {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()} == before
    save_pretrained(model, tmp_path)
    after = {file for file in tmp_path.rglob("*") if file.is_file()}
    assert after == before.keys()
    weights = tmp_path / "adapter_model.safetensors"
    assert weights.read_bytes() != before[weights]
    with pytest.raises(ValueError, match=r"in their own dtype; leave out dtype=torch.bfloat16"):
        save_pretrained(model, tmp_path, dtype=torch.bfloat16)


def test_the_code_of_a_model_is_saved_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stock saves the code of a model with trust_remote_code=True. FSDP2 replaces its class."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "hf"))
    monkeypatch.syspath_prepend(tmp_path / "hf")
    base = tmp_path / "base"
    tiny(dtype=torch.float32).save_pretrained(base)
    for name, text in CODE.items():
        (base / name).write_text(text)
    config = json.loads((base / "config.json").read_text())
    auto_map = {
        "AutoConfig": "configuration_mine.MyConfig",
        "AutoModelForCausalLM": "modeling_mine.MyMoE",
    }
    config |= {"auto_map": auto_map, "architectures": ["MyMoE"]}
    (base / "config.json").write_text(json.dumps(config))
    model = AutoModelForCausalLM.from_pretrained(base, trust_remote_code=True)
    want = hub_state(model)
    patch(model)
    model.save_pretrained(tmp_path / "patched")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        apply_ep_fsdp2(model)
        assert type(model).__name__ == "FSDPMyMoE"
        save_pretrained(model, tmp_path / "sharded")
        save_checkpoint(tmp_path / "training", model, None)
        own = from_pretrained(base, trust_remote_code=True)
        assert type(own).__name__ == "FSDPMyMoE"
        # Now the config class is transformers' own, and only the model class is in a file.
        (base / "config.json").write_text(
            json.dumps(config | {"auto_map": {"AutoModelForCausalLM": "modeling_mine.MyMoE"}})
        )
        if SINCE_5_23:  # earlier versions require a config class from the model's own code
            own = from_pretrained(base, trust_remote_code=True)
            assert type(own).__name__ == "FSDPMyMoE"
        with pytest.raises(ValueError, match="pass trust_remote_code=True to run its code"):
            from_pretrained(base)
    finally:
        dist.destroy_process_group()
    (base / "config.json").write_text(json.dumps(config))
    for folder in ("patched", "sharded", "training"):
        saved = tmp_path / folder
        assert {file.name: file.read_text() for file in saved.glob("*.py")} == CODE
        assert json.loads((saved / "config.json").read_text())["auto_map"] == auto_map
        if folder != "training":
            loaded = AutoModelForCausalLM.from_pretrained(saved, trust_remote_code=True)
            assert type(loaded).__name__ == "MyMoE"
            assert_equal(hub_state(loaded), want)
    converted = tmp_path / "converted"
    with pytest.raises(ValueError, match="trust_remote_code"):
        convert(tmp_path / "training", converted)
    convert(tmp_path / "training", converted, trust_remote_code=True)
    assert_equal(read_all(converted), read_all(tmp_path / "sharded"))
    # A save that was killed before its manifest was written can be repeated.
    (tmp_path / "training" / "manifest.json").unlink()
    stock = Qwen3MoeForCausalLM.from_pretrained(base)
    save_checkpoint(tmp_path / "training", patch(stock), None)
    assert not list((tmp_path / "training").glob("*.py"))
