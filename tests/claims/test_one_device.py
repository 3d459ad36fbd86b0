"""One process loads, trains, saves and resumes, on a GPU with NCCL or on the CPU.

Other tests run several ranks on the CPU. This test is about the device: its random generators,
copies to the host, gloo and NCCL together, and offloaded parameters.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.adapters import with_lora
from support.close import assert_close
from support.hub_files import assert_equal, hub_state, read_all, write_hub
from support.nccl import join_nccl
from support.parity import full_tensor
from support.ranks import run_ranks
from support.tiny_models import batch, tiny
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy
from transformers import AutoModelForCausalLM

from hf_moe_ep import (
    apply_ep_fsdp2,
    clip_grad_norm_,
    from_pretrained,
    load_checkpoint,
    save_checkpoint,
    save_pretrained,
)

# The Triton kernels support these sizes. Dropout uses the random generator of the device.
SIZES: dict[str, Any] = {"moe_intermediate_size": 32, "attention_dropout": 0.2}
TOLERANCE = 1e-4  # fp32 sums in another order
State = dict[str, Tensor]


def _copy_values(model: nn.Module) -> State:
    return {n: full_tensor(p.detach()).cpu().clone() for n, p in model.named_parameters()}


def _take_step(model: nn.Module, optimizer: torch.optim.Optimizer, device: str, seed: int) -> float:
    inputs = {key: tensor.to(device) for key, tensor in batch(model, 2, 17, seed).items()}
    loss = model(**inputs).loss
    loss.backward()
    clip_grad_norm_(model, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def _create_adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def _load(folder: str, device: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = from_pretrained(f"{folder}/hub").train()
    assert {p.device.type for p in model.parameters()} == {device}
    return model, _create_adamw(model)


def _resume(folder: str, name: str, device: str) -> tuple[float, State, State]:
    """Resume from checkpoint `name`, take a step, and return its loss and values around it."""
    model, optimizer = _load(folder, device)
    torch.manual_seed(17)
    load_checkpoint(f"{folder}/{name}", model, optimizer)
    before = _copy_values(model)
    return _take_step(model, optimizer, device, seed=1), before, _copy_values(model)


def _assert_close(got: State, want: State) -> None:
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert_close(name, got[name], tensor, TOLERANCE)


def _train_save_resume(folder: str, device: str) -> None:
    model, optimizer = _load(folder, device)
    _take_step(model, optimizer, device, seed=0)
    saved = _copy_values(model)
    save_checkpoint(f"{folder}/now", model, optimizer)
    handle = save_checkpoint(f"{folder}/behind", model, optimizer, asynchronous=True)
    loss = _take_step(model, optimizer, device, seed=1)  # during the asynchronous save
    after = _copy_values(model)
    handle.wait()
    for name in ("now", "behind"):
        resumed_loss, loaded, resumed_after = _resume(folder, name, device)
        assert_equal(loaded, saved)
        assert abs(resumed_loss - loss) < TOLERANCE, f"{name}: {resumed_loss} instead of {loss}"
        _assert_close(resumed_after, after)
    save_pretrained(model, f"{folder}/out")
    stock = AutoModelForCausalLM.from_pretrained(f"{folder}/out").to(device).eval()
    _assert_close(_copy_values(stock), after)
    inputs = {key: tensor.to(device) for key, tensor in batch(model, 2, 9, seed=2).items()}
    with torch.no_grad():
        got, want = model.eval()(**inputs).logits, stock(**inputs).logits
    assert_close("logits", got.cpu(), want.cpu(), 10 * TOLERANCE)  # differences grow over layers


def _train_adapters(rank: int, world: int, folder: str, device: str) -> None:
    if device == "cuda":
        join_nccl(folder)
    model = apply_ep_fsdp2(with_lora(tiny(dtype=torch.float32, **SIZES), seed=3))
    optimizer = _create_adamw(model)
    _take_step(model, optimizer, device, seed=0)
    saved = _copy_values(model)
    save_checkpoint(f"{folder}/adapters", model, optimizer)
    loss = _take_step(model, optimizer, device, seed=1)
    load_checkpoint(f"{folder}/adapters", model, optimizer)
    assert_equal(_copy_values(model), saved)
    assert abs(_take_step(model, optimizer, device, seed=1) - loss) < TOLERANCE


def _train_offloaded(folder: str) -> None:
    """Parameters and moments are on the host. Forward and backward run on the GPU."""
    model = from_pretrained(f"{folder}/hub", offload_policy=CPUOffloadPolicy()).train()
    assert {p.device.type for p in model.parameters()} == {"cpu"}
    optimizer = _create_adamw(model)
    _take_step(model, optimizer, "cuda", seed=0)
    save_checkpoint(f"{folder}/offloaded", model, optimizer)
    save_pretrained(model, f"{folder}/offloaded out")
    want = _copy_values(model)
    stock = AutoModelForCausalLM.from_pretrained(f"{folder}/offloaded out")
    assert_equal(_copy_values(stock), want)
    load_checkpoint(f"{folder}/offloaded", model, optimizer)
    assert_equal(_copy_values(model), want)


def _one_process(rank: int, world: int, folder: str, device: str) -> None:
    if device == "cuda":
        join_nccl(folder)
    base = tiny(dtype=torch.float32, **SIZES)
    write_hub(Path(folder, "hub"), base)
    save_pretrained(from_pretrained(f"{folder}/hub"), f"{folder}/copy")
    assert_equal(read_all(Path(folder, "copy")), hub_state(base))
    _train_save_resume(folder, device)
    if device == "cuda":
        _train_offloaded(folder)


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
def test_one_process_loads_trains_saves_and_resumes(tmp_path: Path, device: str) -> None:
    run_ranks(_one_process, 1, str(tmp_path), device)


@pytest.mark.parametrize("device", DEVICES)
def test_one_process_trains_saves_and_loads_adapters(tmp_path: Path, device: str) -> None:
    pytest.importorskip("peft")
    run_ranks(_train_adapters, 1, str(tmp_path), device)
