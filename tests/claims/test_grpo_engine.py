"""After each of 3 GRPO steps on 4 ranks, the engine has the model's weights.

The engine gets the tensors that save_pretrained writes. In a sync each rank receives every byte
that it lacks once, in small parts, also of LoRA factors.

`support.engine` is a fake of vLLM in TRL's colocate mode (`support.trl_engine`).
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from peft import LoraConfig
from support.adapters import EXPERTS
from support.checks import Check, Found, on_ranks
from support.close import assert_close
from support.engine import Engine
from support.hub_files import hub_state, read_all
from support.launched import launched
from support.parity import full_tensor
from support.received import Received, not_here
from support.tiny_models import tiny
from support.trl_engine import generation_class, reward, settings

from hf_moe_ep import hub_tensors, patch, save_pretrained
from hf_moe_ep.integrations import engines
from hf_moe_ep.lora.factors import pack_factors

pytest.importorskip("trl", minversion="1.16")

STEPS = 3
MAX_BYTES = 40_000  # the most bytes that a sync sends at once
LORA = LoraConfig(
    r=4, target_modules=["q_proj", "v_proj"], target_parameters=list(EXPERTS), use_rslora=True
)
FP32_MERGED = 1e-6  # merging is one product and one sum in fp32, here in another order


@contextmanager
def _check_sends_small_parts(model: Any) -> Iterator[None]:
    """Check which bytes a sync sends."""
    small = partial(hub_tensors, max_bytes=MAX_BYTES)
    with mock.patch.object(engines, "hub_tensors", small), Received() as received:
        yield
    assert received.bytes == not_here(model.parameters())
    assert 0 < received.largest <= MAX_BYTES


def grpo(lora: bool, rank: int, world: int, folder: str) -> None:
    """Every sync transfers all tensors with the values that the last step gave them."""
    from datasets import Dataset
    from support.words import make_tokenizer
    from trl import GRPOTrainer
    from trl.trainer import grpo_trainer

    engine = Engine.of(tiny(dtype=torch.float32))
    synced_weights: list[torch.Tensor] = []

    def after_sync(model: Any) -> None:
        assert not engine.missing()
        expected_engine = Engine.of(tiny(dtype=torch.float32))
        if lora:
            factors = {n: full_tensor(p) for n, p in model.named_parameters()}
            from peft import get_peft_model

            stock = get_peft_model(tiny(dtype=torch.float32), LORA)
            missing, unexpected = stock.load_state_dict(pack_factors(model, factors), strict=False)
            assert not unexpected and not [n for n in missing if "lora_" in n]
            expected_engine.load_weights(hub_state(stock.merge_and_unload()).items())
            for key, tensor in expected_engine.parameters.items():
                assert_close(key, engine.parameters[key], tensor, FP32_MERGED)
        else:
            saved_folder = f"{folder}/{len(synced_weights)}"
            save_pretrained(model, saved_folder)
            expected_engine.load_weights(read_all(Path(saved_folder)).items())
            assert all(
                torch.equal(engine.parameters[k], t) for k, t in expected_engine.parameters.items()
            )
        synced_weights.append(engine.parameters["model.layers.1.mlp.experts.w13_weight"].clone())

    rows = Dataset.from_list([{"prompt": f"word{3 + index}"} for index in range(24)])
    generation = generation_class(
        engine, after_sync, during_sync=_check_sends_small_parts, vocab_size=97
    )
    with launched(), mock.patch.object(grpo_trainer, "VLLMGeneration", generation):
        model = patch(tiny(dtype=torch.float32), ep_size=2)
        trainer = GRPOTrainer(
            model,
            reward_funcs=reward,
            args=settings("GRPO", folder, STEPS, 3e-3),
            train_dataset=rows,
            processing_class=make_tokenizer(model.config.vocab_size),
            peft_config=LORA if lora else None,
        )
        trainer.train()
        trainer.vllm_generation.sync_weights()
    assert len(synced_weights) == STEPS + 1
    assert not any(torch.equal(a, b) for a, b in pairwise(synced_weights))


@pytest.mark.slow
@pytest.mark.parametrize(
    "claim", on_ranks(4, {"full": partial(grpo, False), "lora": partial(grpo, True)})
)
def test_after_each_step_the_engine_has_the_weights(found: Found, claim: Check) -> None:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    found.raise_if_failed(claim)
