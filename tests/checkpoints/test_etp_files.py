"""Files of a model with etp_size > 1 equal the files of any other layout, bit by bit.

Gate and up of a rank are two boxes of one stock tensor (`hf_moe_ep/etp.py`).
"""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from support.adapters import EXPERTS, with_lora
from support.architectures import tiny as tiny_of
from support.architectures.steps import adamw
from support.checks import Check, Found, on_ranks
from support.close import FP64_MODEL, assert_close
from support.hub_files import assert_saved_as_read
from support.launched import launched, prepared
from support.parity import full_tensor, whole_parameters, whole_state
from support.tiny_models import batch, tiny
from torch import Tensor, nn

from hf_moe_ep import (
    apply_ep_fsdp2,
    from_pretrained,
    hub_tensors,
    load_checkpoint,
    save_checkpoint,
    save_pretrained,
)
from hf_moe_ep.checkpoints.training.base import describe_base
from hf_moe_ep.etp import list_stock_parts, restore_stock_shapes
from hf_moe_ep.state import patched_state

SIZES = {"ep_size": 2, "etp_size": 2}
ONE_EP_RANK = {"ep_size": 1, "etp_size": 2}


def _compare_hub_files(
    model_type: str, sizes: dict[str, int], rank: int, world: int, folder: str
) -> None:
    """Each rank reads its part of the files of stock, and the written files have the same bytes."""
    stock, ours = Path(folder, "stock"), Path(folder, "ours")
    model_class = type(tiny_of(model_type, dtype=torch.float32))
    if rank == 0:
        tiny_of(model_type, dtype=torch.float32).save_pretrained(stock)
    dist.barrier()
    model = from_pretrained(stock, model_class=model_class, **sizes)
    assert patched_state(model).meshes.etp_size == 2
    assert_saved_as_read(model, stock, ours)


HUB = [
    Check(
        f"{name}, ep {sizes['ep_size']}",
        4,
        partial(_compare_hub_files, name, sizes),
        slow=True,
    ).as_parameter()
    for name in ("qwen3_moe", "mixtral", "gpt_oss", "llama4_text", "dbrx")
    for sizes in (SIZES, ONE_EP_RANK)
]


@pytest.mark.parametrize("claim", HUB)
def test_hub_files_equal_those_of_stock(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)


def _make_run(model_type: str, seed: int, **sizes: int) -> tuple[nn.Module, Any]:
    model = tiny(seed=seed) if model_type == "qwen3_moe" else tiny_of(model_type, seed=seed)
    apply_ep_fsdp2(model, **sizes)
    return model, adamw(model)


def _train_one_step(model: Any, optimizer: Any, seed: int) -> Tensor:
    loss: Tensor = model(**batch(model, 2, 7, seed=seed + dist.get_rank())).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


TWO_LAYOUTS = [SIZES, {"ep_size": 4}]
LAYOUTS = [*TWO_LAYOUTS, ONE_EP_RANK, {"ep_size": 1}, {"ep_size": 1, "etp_size": 4}, SIZES]


def _resume_at_each_layout(
    model_type: str, layouts: list[dict[str, int]], rank: int, world: int, folder: str
) -> None:
    """A run is saved at each layout and resumed at the next layout, with the same bits."""
    run = _make_run(model_type, 0, **layouts[0])
    _train_one_step(*run, seed=10)
    for number, sizes in enumerate(layouts[1:]):
        path = Path(folder, str(number))
        save_checkpoint(path, *run)
        old = whole_state(*run)
        run = _make_run(model_type, 1, **sizes)
        load_checkpoint(path, *run)
        new = whole_state(*run)
        assert old.keys() == new.keys()
        for name, value in new.items():
            assert torch.equal(value, old[name]), f"{sizes}: {name}"
        if number == 0:
            expected = _make_run(model_type, 2, **layouts[0])
            load_checkpoint(path, *expected)
            losses = [_train_one_step(*one_run, seed=20) for one_run in (run, expected)]
            assert_close("loss of the next step", *losses, FP64_MODEL)
            pair = [whole_parameters(one_run[0]) for one_run in (run, expected)]
            for name, want in pair[1].items():
                assert_close(f"after the next step: {name}", pair[0][name], want, FP64_MODEL)


RESUME = [
    Check(
        "few layouts", 4, partial(_resume_at_each_layout, "qwen3_moe", TWO_LAYOUTS)
    ).as_parameter(),
    *(
        Check(name, 4, partial(_resume_at_each_layout, name, LAYOUTS), slow=True).as_parameter()
        for name in ("qwen3_moe", "gpt_oss", "llama4_text")
    ),
]


@pytest.mark.parametrize("claim", RESUME)
def test_a_run_resumes_at_any_layout(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)


def _compare_quantised_parts(kind: str, rank: int, world: int, folder: str) -> None:
    """Each rank reads and quantises its part. Bytes and hashes equal those of a whole matrix."""
    files = Path(folder, "files")
    sizes = {"hidden_size": 128, "moe_intermediate_size": 512, "initializer_range": 0.09}
    stock = tiny(dtype=torch.bfloat16, **sizes)
    if rank == 0:
        stock.save_pretrained(files)
    dist.barrier()
    lora = LoraConfig(r=2, target_parameters=list(EXPERTS))
    bases, tensors = [], []
    for layout in ({"ep_size": 2}, {"ep_size": 2, "etp_size": 2}, {"etp_size": 4}, {"etp_size": 2}):
        read = from_pretrained(files, peft_config=lora, experts_dtype=kind, **layout)
        later = apply_ep_fsdp2(
            get_peft_model(tiny(dtype=torch.bfloat16, **sizes), lora), experts_dtype=kind, **layout
        )
        for model in (read, later):
            bases.append(describe_base(model)["hashes"])
            whole = restore_stock_shapes(
                model,
                {
                    name: full_tensor(p)
                    for name, p in model.named_parameters()
                    if "lora_" not in name and ".experts." in name
                },
            )
            tensors.append(whole)
    assert len(tensors[0]) == 8
    for hashes, whole in zip(bases, tensors, strict=True):
        assert hashes == bases[0]
        for name, value in whole.items():
            assert torch.equal(value, tensors[0][name]), name


QUANTISED = [
    Check(kind, 4, partial(_compare_quantised_parts, kind), slow=True).as_parameter()
    for kind in ("nf4", "fp8")
]


@pytest.mark.parametrize("claim", QUANTISED)
def test_quantised_parts_equal_those_of_whole_matrices(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)


def _load_states_of_accelerate(rank: int, world: int, folder: str) -> None:
    """States of Accelerate, which the Trainer saves, too, are loaded at other layouts."""
    layouts = [SIZES, {"ep_size": 4}, {"etp_size": 4}, {"ep_size": 1}, ONE_EP_RANK]
    old: dict[str, Tensor] = {}
    for number, sizes in enumerate(layouts):
        with launched(FSDP_STATE_DICT_TYPE="SHARDED_STATE_DICT"):
            start = tiny(dtype=torch.float32, seed=number)
            accelerator, model, optimizer = prepared(start, **sizes)
            if number:
                accelerator.load_state(Path(folder, str(number - 1)))
                new = whole_state(model, optimizer.optimizer)
                assert new.keys() == old.keys()
                for name, value in new.items():
                    assert torch.equal(value, old[name]), f"{sizes}: {name}"
            else:
                accelerator.backward(model(**batch(model, 2, 7, seed=rank)).loss)
                optimizer.step()
            accelerator.save_state(Path(folder, str(number)))
            old = whole_state(model, optimizer.optimizer)
            whole = accelerator.get_state_dict(model)
            if rank == 0:
                stock = tiny(dtype=torch.float32)
                stock.load_state_dict(whole)
    with launched(FSDP_STATE_DICT_TYPE="FULL_STATE_DICT"):
        accelerator, *_ = prepared(tiny(dtype=torch.float32), **SIZES)
        with pytest.raises(ValueError, match=r"FULL_STATE_DICT .* etp_size > 1"):
            accelerator.save_state(Path(folder, "full"))


@pytest.mark.parametrize("claim", on_ranks(4, _load_states_of_accelerate, slow=True))
def test_states_of_accelerate_are_loaded_at_any_layout(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)


def _check_rows_of_rank(rank: int, world: int) -> None:
    """With F = 24, rank 1 of 2 has the rows 12 .. 23, of gate, and the rows 36 .. 47, of up."""
    model = tiny()
    apply_ep_fsdp2(model, etp_size=2)
    experts = model.model.layers[0].mlp.experts
    name = "model.layers.0.mlp.experts.gate_up_proj"
    want = tiny().get_parameter(name).detach()
    assert tuple(experts.gate_up_proj.shape) == (8, 2, 24, 32)
    first = 12 * rank
    (gate_box, gate), (up_box, up) = list_stock_parts(experts.gate_up_proj, 1)
    assert gate_box[1] == (first, first + 12) and up_box[1] == (24 + first, 24 + first + 12)
    assert torch.equal(gate, want[:, first : first + 12])
    assert torch.equal(up, want[:, 24 + first : 24 + first + 12])
    assert torch.equal(experts.gate_up_proj.full_tensor().flatten(1, 2), want)
    down = tiny().get_parameter(name.replace("gate_up", "down")).detach()
    assert torch.equal(experts.down_proj.to_local(), down[..., first : first + 12])


@pytest.mark.parametrize("claim", on_ranks(2, _check_rows_of_rank, slow=True))
def test_a_rank_has_the_same_rows_of_gate_and_up(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)


def _open_adapters_elsewhere(rank: int, world: int, folder: str) -> None:
    """Adapters that were trained at etp 2 are opened by stock PEFT and at other layouts."""
    import peft

    path = Path(folder, "adapter")
    model = with_lora(tiny(), seed=0, fp32=False)
    apply_ep_fsdp2(model, **SIZES)
    optimizer = adamw(model)
    for step in range(2):
        _train_one_step(model, optimizer, seed=step)
    inputs = batch(model, 2, 9, seed=7)
    with torch.no_grad():
        logits = model(**inputs).logits
    save_pretrained(model, path)
    dist.barrier()
    opened = peft.PeftModel.from_pretrained(tiny(), path)
    with torch.no_grad():
        assert_close("logits in stock PEFT", opened(**inputs).logits, logits, FP64_MODEL)
    merged = dict(hub_tensors(model, merge_adapters=True))
    merged_by_stock = opened.merge_and_unload()
    want = merged_by_stock.get_parameter("model.layers.1.mlp.experts.gate_up_proj")[3, :24]
    got = merged["model.layers.1.mlp.experts.3.gate_proj.weight"]
    assert_close("merged gate", got, want, FP64_MODEL)
    for sizes in ({"ep_size": 4}, ONE_EP_RANK):
        again = peft.PeftModel.from_pretrained(tiny(), path, is_trainable=True)
        apply_ep_fsdp2(again, **sizes)
        with torch.no_grad():
            assert_close(f"logits at {sizes}", again(**inputs).logits, logits, FP64_MODEL)
    save_checkpoint(Path(folder, "run"), model, optimizer)
    other = with_lora(tiny(seed=0), seed=5, fp32=False)
    apply_ep_fsdp2(other, ep_size=1, etp_size=4)
    other_optimizer = adamw(other)
    load_checkpoint(Path(folder, "run"), other, other_optimizer)
    old, new = whole_state(model, optimizer), whole_state(other, other_optimizer)
    for name, value in new.items():
        if "lora_" in name:
            assert torch.equal(value, old[name]), name


@pytest.mark.parametrize("claim", on_ranks(4, _open_adapters_elsewhere, slow=True))
def test_adapters_trained_at_etp_2_are_opened_at_any_layout(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)
