"""4-bit Linear layers of bitsandbytes beside quantised experts: as stock PEFT, or refused.

`BitsAndBytesConfig(load_in_4bit=True)` packs the Linear layers of attention, whatever
`bnb_4bit_quant_storage` calls the bytes; stacked experts it leaves alone, and `experts_dtype` holds
those.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.adapters import with_lora
from support.checks import Check, Found, on_ranks
from support.close import assert_close, max_error
from support.launched import FP32_BUDGET, launched, prepared
from support.parity import full_tensor
from support.quantised import SIZES, dequantise_experts
from support.tiny_models import batch, tiny
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from hf_moe_ep import apply_ep_fsdp2, from_pretrained
from hf_moe_ep.lora.factors import pack_factors
from hf_moe_ep.sharding.options import default_policy
from hf_moe_ep.upstream.models import packed_parameters

STORAGE = {"bytes": torch.uint8, "fp32": torch.float32, "bf16": torch.bfloat16}
NF4: dict[str, Any] = {"experts_dtype": "nf4"}


def in_4_bits(folder: str, storage: torch.dtype, dtype: torch.dtype, seed: int = 5) -> nn.Module:
    """Stock's model with packed Linear layers, and adapters on all that is quantised."""
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
        bnb_4bit_quant_storage=storage,
    )
    model = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=config, dtype=dtype, experts_implementation="eager"
    )
    return with_lora(model, r=3, seed=seed)


def steps(model: nn.Module, num: int = 3) -> dict[str, Tensor]:
    """Losses and gradients of adapters in steps of SGD, the same batch on every rank."""
    model.train()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    found: dict[str, Tensor] = {}
    for number in range(num):
        loss = model(**batch(model, 2, 9, seed=number)).loss
        loss.backward()
        found[f"{number} loss"] = loss.detach().float()
        grads = {name: full_tensor(p.grad).float() for name, p in trained.items()}
        grads = pack_factors(model, grads) if dist.is_initialized() and _sharded(model) else grads
        found |= {f"{number} {name}": grad for name, grad in grads.items()}
        with torch.no_grad():
            for parameter in trained.values():
                parameter -= 0.1 * parameter.grad
                parameter.grad = None
    return found


def _sharded(model: nn.Module) -> bool:
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def _written(rank: int, folder: str) -> None:
    if rank == 0:
        tiny(dtype=torch.bfloat16, **SIZES["nf4"]).save_pretrained(folder)
    dist.barrier()


def _sharded_by(way: str, model: nn.Module, ep_size: int, **settings: str) -> nn.Module:
    if way == "own loop":
        return apply_ep_fsdp2(model, ep_size=ep_size, **NF4)

    def adamw(parameters: Any, lr: float) -> Any:
        return torch.optim.AdamW([p for p in parameters if p.requires_grad], lr=lr)

    with launched(**settings):
        return prepared(model, make_optimizer=adamw, ep_size=ep_size, **NF4)[1]


def as_stock_in_fp32(rank: int, world: int, folder: str) -> None:
    """Losses, gradients of adapters, three steps; every storage; an own loop and Accelerate."""
    _written(rank, folder)
    stock = in_4_bits(folder, torch.uint8, torch.float32)
    untouched = steps(stock)
    stock = in_4_bits(folder, torch.uint8, torch.float32)
    dequantise_experts(stock, "nf4")
    want = steps(stock)
    assert max_error(untouched["0 loss"], want["0 loss"]) > 1e-4, "4 bits change nothing"
    for name, storage in STORAGE.items():
        for way, ep_size in (("own loop", 1), ("own loop", 2), ("Accelerate", 2)):
            # Adapters begin with rank 0's values.
            model = in_4_bits(folder, storage, torch.float32, seed=5 + rank)
            model = _sharded_by(way, model, ep_size)
            packed = model.get_submodule("base_model.model.model.layers.0.self_attn.o_proj").weight
            assert isinstance(packed, DTensor) == (name != "bytes"), "floats are split, bytes whole"
            for key, tensor in steps(model).items():
                assert_close(f"{name}, {way}, {key}", tensor, want[key], FP32_BUDGET)


def evaluated_between_steps(rank: int, world: int, folder: str) -> None:
    """On a CPU with AVX512-BF16 the layers would pack their weights anew, and be wrong then."""
    _written(rank, folder)
    for storage in STORAGE.values():
        model = _sharded_by("own loop", in_4_bits(folder, storage, torch.float32), 2)
        inputs, losses = batch(model, 2, 9), []
        for training in (True, False, False, True):
            with torch.no_grad():
                losses.append(model.train(training)(**inputs).loss)
        for loss in losses[1:]:
            assert_close("loss", loss, losses[0], FP32_BUDGET)


def in_bf16_as_far_from_fp32_as_stock(rank: int, world: int, folder: str) -> None:
    """Of the first step; bytes kept as bf16 are not taken for the dtype of a model in fp32."""
    _written(rank, folder)
    truth = in_4_bits(folder, torch.uint8, torch.float32)
    stock = in_4_bits(folder, torch.bfloat16, torch.bfloat16)
    for model in (truth, stock):
        dequantise_experts(model, "nf4")
    want, theirs = steps(truth, 1), steps(stock, 1)
    for way, settings in (("own loop", {}), ("Accelerate", {"ACCELERATE_MIXED_PRECISION": "bf16"})):
        model = in_4_bits(folder, torch.bfloat16, torch.bfloat16)
        ours = steps(_sharded_by(way, model, 2, **settings), 1)
        worst = [max(max_error(run[key], want[key]) for key in want) for run in (ours, theirs)]
        assert 0 < worst[0] <= 2 * worst[1], (way, worst)
    model = in_4_bits(folder, torch.bfloat16, torch.float32)
    assert packed_parameters(model) and default_policy(model)[0].param_dtype is None


def bytes_that_would_be_rounded_are_refused(rank: int, world: int, folder: str) -> None:
    _written(rank, folder)
    words = r"4-bit codes as torch.float32 .*gathered in torch.bfloat16.*quant_storage=torch.bfloa"
    for way, settings in (("own loop", {}), ("Accelerate", {"ACCELERATE_MIXED_PRECISION": "bf16"})):
        model = in_4_bits(folder, torch.float32, torch.bfloat16)
        with pytest.raises(ValueError, match=words):
            _sharded_by(way, model, 2, **settings)
    with pytest.raises(ValueError, match=r"quantization_config= is for transformers' from_pretrai"):
        from_pretrained(Path(folder), ep_size=2, quantization_config=BitsAndBytesConfig())


CHECKS = (
    as_stock_in_fp32,
    evaluated_between_steps,
    in_bf16_as_far_from_fp32_as_stock,
    bytes_that_would_be_rounded_are_refused,
)


@pytest.mark.parametrize("claim", on_ranks(2, *CHECKS, slow=True))
def test_on_two_ranks(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)
