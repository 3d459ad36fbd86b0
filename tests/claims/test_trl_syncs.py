"""After each sync of GRPO and RLOO on 2 ranks, the engine has the tensors of save_pretrained.

The engine records every (key, tensor). The model is a Qwen3-Next in bf16 whose checkpoint has a
layer for multi-token prediction. The first sync also sends this layer's tensors, byte for byte.
"""

import os
import re
from dataclasses import replace
from functools import partial
from importlib import import_module
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from packaging.version import Version
from peft import LoraConfig, PeftModel, get_peft_model
from support.adapters import EXPERTS
from support.checks import Check, Found, on_ranks
from support.extra_files import assert_same_bytes, read_files, write_with_extra
from support.launched import launched
from support.trl_engine import generation_class, reward, settings
from torch import Tensor
from transformers import AutoModelForCausalLM

from hf_moe_ep import hub_tensors, patch, save_pretrained
from hf_moe_ep.state import find_state

pytest.importorskip("trl", minversion="1.15")

STEPS = 5
LORA = LoraConfig(r=4, target_modules=["o_proj"], target_parameters=list(EXPERTS))
RANDOM_LORA = replace(LORA, init_lora_weights=False)


class Recorder:
    """An engine that stores the tensors that it receives.

    Attributes:
        held: the last tensor of each key.
        syncs: the keys of each sync, in order.
    """

    def __init__(self) -> None:
        self.held: dict[str, Tensor] = {}
        self.syncs: list[list[str]] = []

    def begin(self) -> None:
        self.syncs.append([])

    def load_weights(self, weights: Any) -> None:
        for key, tensor in weights:
            assert key not in self.syncs[-1], f"{key} was sent twice"
            self.syncs[-1].append(key)
            self.held[key] = tensor.clone()

    def update_named_params(self, metadata: Any, named_params: Any) -> None:
        """Stand for TRL's client of a server, which announces the tensors first."""
        received = []
        for key, tensor in named_params:
            received.append((key, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)))
            self.load_weights([(key, tensor)])
        assert received == list(metadata)

    def reset_prefix_cache(self) -> None: ...


def syncs(kind: str, mode: str, lora: bool, rank: int, world: int, folder: str) -> None:
    """Every sync sends all tensors of the step's checkpoint. Only the first sends extra tensors."""
    import trl
    from datasets import Dataset
    from support.words import make_tokenizer

    root, engine = Path(folder), Recorder()
    if rank == 0:
        write_with_extra(root / "base", "qwen3_next", dtype=torch.bfloat16)
    dist.barrier()
    extra = {k: t for k, t in read_files(root / "base").items() if k.startswith("mtp.")}
    experts: list[Tensor] = []

    def check(model: Any) -> None:
        number = len(experts)
        saved = root / f"step{number}"
        save_pretrained(model, saved)
        expected = _merge_adapter(root / "base", saved) if lora else read_files(saved)
        dist.barrier()
        key = next(k for k in sorted(expected) if re.match(r"model\..*experts.*down_proj", k))
        experts.append(expected[key])
        if mode == "server" and rank:
            assert not engine.held, "only rank 0 sends to a server"
            return
        assert all(tensor.dtype == torch.bfloat16 for tensor in expected.values())
        assert_same_bytes(engine.held, expected | extra)
        own = expected.keys() - extra.keys()
        assert set(engine.syncs[-1]) == own | (extra.keys() if number == 0 else set())

    module = f"trl.trainer.{kind.lower()}_trainer"
    __import__(module)
    rows = Dataset.from_list([{"prompt": f"word{3 + index}"} for index in range(24)])
    generation = generation_class(engine, check, mode=mode)
    with launched(), mock.patch(f"{module}.VLLMGeneration", generation):
        model = AutoModelForCausalLM.from_pretrained(root / "base", dtype=torch.bfloat16)
        patch(model, ep_size=2)
        trainer = getattr(trl, f"{kind}Trainer")(
            model,
            reward_funcs=reward,
            args=settings(kind, folder, STEPS, 3e-2),
            train_dataset=rows,
            processing_class=make_tokenizer(model.config.vocab_size),
            peft_config=LORA if lora else None,
        )
        trainer.train()
        trainer.vllm_generation.sync_weights()
    assert len(experts) == STEPS + 1
    assert not any(torch.equal(a, b) for a, b in pairwise(experts))


def _merge_adapter(base: Path, adapter: Path, *, is_alone: bool = False) -> dict[str, Tensor]:
    """Merge an adapter with PEFT, and return the tensors that stock's save_pretrained writes.

    `is_alone`: the other ranks do not call this function.
    """
    stock = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    model = PeftModel.from_pretrained(stock, adapter).merge_and_unload()
    folder = adapter.with_name(f"{adapter.name}-merged")
    model.save_pretrained(folder)  # writes on rank 0
    if not is_alone:
        dist.barrier()
    return read_files(folder)


ASYNC = {
    "AsyncGRPOTrainer": "trl.experimental.async_grpo.async_grpo_trainer",
    "AsyncDistillationTrainer": ("trl.experimental.async_distillation.async_distillation_trainer"),
}


def a_transfer_protocol_gets_the_same_tensors(
    kind: str, lora: bool, rank: int, world: int, folder: str
) -> None:
    """Asynchronous trainers send through any object with TRL's WeightTransferProtocol."""
    module = import_module(ASYNC[kind])
    trainer_class = getattr(module, kind)
    root, engine, calls = Path(folder), Recorder(), []
    if rank == 0:
        write_with_extra(root / "base", "qwen3_next", dtype=torch.bfloat16)
    dist.barrier()
    stock = AutoModelForCausalLM.from_pretrained(root / "base", dtype=torch.bfloat16)
    torch.manual_seed(0)  # the same adapter on both ranks
    model = patch(get_peft_model(stock, RANDOM_LORA) if lora else stock)
    named = list(module._iter_vllm_named_params(model))
    from hf_moe_ep import apply_ep_fsdp2

    apply_ep_fsdp2(model, ep_size=2)

    class Transfer:
        def __init__(self) -> None:
            names = [name for name, _ in named]
            self._weight_update_info = {"names": names, "dtype_names": [], "shapes": []}

        def pause(self) -> None:
            calls.append("pause")

        def send_weights(self, iterator: Any) -> None:
            engine.begin()
            engine.load_weights(iterator)
            assert self._weight_update_info["names"] == engine.syncs[-1]

        def resume(self) -> None:
            calls.append("resume")

    trainer = SimpleNamespace(
        model=model,
        model_version=0,
        rollout_worker=None,
        weight_transfer=Transfer() if rank == 0 else None,
        accelerator=SimpleNamespace(
            unwrap_model=lambda module: module,
            is_main_process=rank == 0,
            wait_for_everyone=dist.barrier,
        ),
    )
    for _ in range(2):
        trainer_class._sync_weight_merged(trainer, 0.0)
    saved = dict(hub_tensors(model, merge_adapters=True))
    save_pretrained(model, root / "saved")
    dist.barrier()
    if rank == 0:
        of_files = read_files(root / "base") if lora else read_files(root / "saved")
        changed = {key for key in saved if not torch.equal(saved[key], of_files[key])}
        assert saved.keys() == of_files.keys() and bool(changed) == lora
        if lora:
            merged = _merge_adapter(root / "base", root / "saved", is_alone=True)
            assert_same_bytes(saved, merged)
        assert_same_bytes(engine.held, saved)
        assert calls == ["pause", "resume"] * 2 and trainer.model_version == 2
        assert {name for name, _ in named} == set(engine.syncs[0]) == saved.keys()
        assert all(tensor.is_meta for _, tensor in named)
        left = set(engine.syncs[0]) - set(engine.syncs[1])
        assert left and all(key.startswith("mtp.") for key in left)
        trainer.weight_transfer.send_weights = _fail_sync
    with pytest.raises(KeyError if rank == 0 else RuntimeError, match=r"no room|stopped iterating"):
        trainer_class._sync_weight_merged(trainer, 0.0)
    again = list(hub_tensors(model, merge_adapters=True))
    assert find_state(model) is not None and len(again) == len(saved)


def _fail_sync(iterator: Any) -> None:
    next(iterator)
    raise KeyError("no room")


CASES = {
    f"{kind} {mode} {'LoRA' if lora else 'full'}": partial(syncs, kind, mode, lora)
    for kind in ("GRPO", "RLOO")
    for mode in ("colocate", "server")
    for lora in (False, True)
}


@pytest.mark.slow
@pytest.mark.parametrize("claim", on_ranks(2, CASES))
def test_after_each_sync_the_engine_has_the_checkpoint(found: Found, claim: Check) -> None:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    found.raise_if_failed(claim)


@pytest.mark.slow
@pytest.mark.parametrize(
    "claim",
    on_ranks(
        2,
        {
            f"{kind} {'LoRA' if lora else 'full'}": partial(
                a_transfer_protocol_gets_the_same_tensors, kind, lora
            )
            for kind in ASYNC
            for lora in (False, True)
        },
    ),
)
def test_the_weight_transfer_protocol_gets_the_same_tensors(found: Found, claim: Check) -> None:
    if Version(version("trl")) < Version("1.16"):
        pytest.importorskip("aiohttp")  # imported with these trainers
    found.raise_if_failed(claim)
