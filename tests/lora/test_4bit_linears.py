"""Test that 4-bit Linear layers of bitsandbytes and quantised experts train like stock PEFT.

`BitsAndBytesConfig(load_in_4bit=True)` packs the Linear layers of attention into tensors of the
dtype `bnb_4bit_quant_storage`. It skips stacked experts, so `experts_dtype` quantises them. A
storage dtype that an all-gather would round is refused.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import PeftModel
from support.adapters import with_lora
from support.checks import Check, Found, on_ranks
from support.close import assert_close, max_error
from support.hub_files import assert_equal
from support.launched import FP32_BUDGET, launched, prepared
from support.parity import full_tensor
from support.quantised import SIZES, dequantise_experts
from support.tiny_models import batch, tiny
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Trainer, TrainingArguments

from hf_moe_ep import (
    apply_ep_fsdp2,
    from_pretrained,
    load_checkpoint,
    patch,
    save_checkpoint,
)
from hf_moe_ep.lora.factors import pack_factors
from hf_moe_ep.sharding.options import choose_default_policy
from hf_moe_ep.upstream.models import list_packed_parameters

STORAGE = {"bytes": torch.uint8, "fp32": torch.float32, "bf16": torch.bfloat16}
NF4: dict[str, Any] = {"experts_dtype": "nf4"}


def load_lora(folder: str, storage: torch.dtype, dtype: torch.dtype, seed: int = 5) -> nn.Module:
    """Load stock's model with packed Linear layers, and add LoRA to them and to the experts."""
    return with_lora(load_4_bits(folder, storage, dtype), r=3, seed=seed)


def load_4_bits(folder: str, storage: torch.dtype, dtype: torch.dtype) -> nn.Module:
    """Load stock's model with packed Linear layers, without adapters."""
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
        bnb_4bit_quant_storage=storage,
    )
    model: nn.Module = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=config, dtype=dtype, experts_implementation="eager"
    )
    return model


def run_steps(model: nn.Module, num: int = 3) -> dict[str, Tensor]:
    """Return the losses and adapter gradients of SGD steps. All ranks have the same batches."""
    model.train()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    results: dict[str, Tensor] = {}
    for number in range(num):
        loss = model(**batch(model, 2, 9, seed=number)).loss
        loss.backward()
        results[f"{number} loss"] = loss.detach().float()
        grads = {name: full_tensor(p.grad).float() for name, p in trained.items()}
        if dist.is_initialized() and _is_sharded(model):
            grads = pack_factors(model, grads)
        results |= {f"{number} {name}": grad for name, grad in grads.items()}
        with torch.no_grad():
            for parameter in trained.values():
                parameter -= 0.1 * parameter.grad
                parameter.grad = None
    return results


def _is_sharded(model: nn.Module) -> bool:
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def _write_base(rank: int, folder: str, seed: int = 0) -> None:
    if rank == 0:
        tiny(dtype=torch.bfloat16, seed=seed, **SIZES["nf4"]).save_pretrained(folder)
    dist.barrier()


def _shard(loop: str, model: nn.Module, ep_size: int, **settings: str) -> nn.Module:
    if loop == "own loop":
        return apply_ep_fsdp2(model, ep_size=ep_size, **NF4)

    def adamw(parameters: Any, lr: float) -> Any:
        return torch.optim.AdamW([p for p in parameters if p.requires_grad], lr=lr)

    with launched(**settings):
        return prepared(model, make_optimizer=adamw, ep_size=ep_size, **NF4)[1]


def fp32_steps_equal_stock(rank: int, world: int, folder: str) -> None:
    """Losses and gradients of three steps equal stock's for all storages, with Accelerate, too."""
    _write_base(rank, folder)
    stock = load_lora(folder, torch.uint8, torch.float32)
    unquantised = run_steps(stock)
    stock = load_lora(folder, torch.uint8, torch.float32)
    dequantise_experts(stock, "nf4")
    expected = run_steps(stock)
    assert max_error(unquantised["0 loss"], expected["0 loss"]) > 1e-4, "quantising has no effect"
    for name, storage in STORAGE.items():
        for loop, ep_size in (("own loop", 1), ("own loop", 2), ("Accelerate", 2)):
            # Ranks create different adapters, and all must train the adapters of rank 0.
            model = load_lora(folder, storage, torch.float32, seed=5 + rank)
            model = _shard(loop, model, ep_size)
            packed = model.get_submodule("base_model.model.model.layers.0.self_attn.o_proj").weight
            assert isinstance(packed, DTensor) == (name != "bytes"), "bytes are not sharded"
            for key, tensor in run_steps(model).items():
                assert_close(f"{name}, {loop}, {key}", tensor, expected[key], FP32_BUDGET)


def an_evaluation_between_steps_repacks_no_shards(rank: int, world: int, folder: str) -> None:
    """In eval mode, bitsandbytes would repack weights on AVX512-BF16, which breaks shards."""
    _write_base(rank, folder)
    for storage in STORAGE.values():
        model = _shard("own loop", load_lora(folder, storage, torch.float32), 2)
        inputs, losses = batch(model, 2, 9), []
        for training in (True, False, False, True):
            with torch.no_grad():
                losses.append(model.train(training)(**inputs).loss)
        for loss in losses[1:]:
            assert_close("loss", loss, losses[0], FP32_BUDGET)


def bf16_error_is_at_most_twice_stocks(rank: int, world: int, folder: str) -> None:
    """The error against fp32 is at most twice stock's. The storage dtype is not the model's."""
    _write_base(rank, folder)
    truth = load_lora(folder, torch.uint8, torch.float32)
    stock = load_lora(folder, torch.bfloat16, torch.bfloat16)
    for model in (truth, stock):
        dequantise_experts(model, "nf4")
    fp32, stock_results = run_steps(truth, 1), run_steps(stock, 1)
    for loop, settings in (
        ("own loop", {}),
        ("Accelerate", {"ACCELERATE_MIXED_PRECISION": "bf16"}),
    ):
        model = load_lora(folder, torch.bfloat16, torch.bfloat16)
        results = run_steps(_shard(loop, model, 2, **settings), 1)
        worst = [
            max(max_error(r[key], fp32[key]) for key in fp32) for r in (results, stock_results)
        ]
        assert 0 < worst[0] <= 2 * worst[1], (loop, worst)
    model = load_lora(folder, torch.bfloat16, torch.float32)
    assert list_packed_parameters(model) and choose_default_policy(model)[0].param_dtype is None


def storage_that_would_be_rounded_is_refused(rank: int, world: int, folder: str) -> None:
    _write_base(rank, folder)
    words = r"4-bit codes as torch.float32 .*gathers .*torch.bfloat16.*quant_storage=torch.bfloa"
    for loop, settings in (
        ("own loop", {}),
        ("Accelerate", {"ACCELERATE_MIXED_PRECISION": "bf16"}),
    ):
        model = load_lora(folder, torch.float32, torch.bfloat16)
        with pytest.raises(ValueError, match=words):
            _shard(loop, model, 2, **settings)
    with pytest.raises(
        ValueError, match=r"quantization_config= is an option of transformers' from"
    ):
        from_pretrained(Path(folder), ep_size=2, quantization_config=BitsAndBytesConfig())


class Run:
    """A training run on 2 ranks that can be saved and resumed, and that stores its losses."""

    def __init__(self, base: str, storage: torch.dtype, seed: int = 5) -> None:
        self.model = load_lora(base, storage, torch.float32, seed)
        self.losses: list[float] = []

    def adapters(self) -> dict[str, Tensor]:
        trained = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        assert trained
        return {name: full_tensor(p.detach()).clone() for name, p in trained.items()}

    def results(self) -> dict[str, Any]:
        return {"losses": self.losses} | self.adapters()


class OwnLoop(Run):
    def __init__(self, base: str, storage: torch.dtype, seed: int = 5) -> None:
        super().__init__(base, storage, seed)
        self.sharded()
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer: Any = torch.optim.AdamW(trained, lr=0.01)

    def sharded(self) -> None:
        self.model = apply_ep_fsdp2(self.model, ep_size=2, **NF4)

    def train(self, steps: range) -> None:
        for number in steps:
            loss = self.model(**batch(self.model, 2, 9, seed=7 * number + dist.get_rank())).loss
            self.backward(loss)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.losses.append(loss.item())

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def save(self, where: str) -> None:
        save_checkpoint(where, self.model, self.optimizer)

    def load(self, where: str) -> None:
        load_checkpoint(where, self.model, self.optimizer)


class Accelerated(OwnLoop):
    def __init__(self, base: str, storage: torch.dtype, seed: int = 5) -> None:
        Run.__init__(self, base, storage, seed)

        def adamw(parameters: Any, lr: float) -> Any:
            return torch.optim.AdamW([p for p in parameters if p.requires_grad], lr=0.01)

        made = prepared(self.model, make_optimizer=adamw, ep_size=2, **NF4)
        self.accelerator, self.model, self.optimizer = made

    def backward(self, loss: Tensor) -> None:
        self.accelerator.backward(loss)

    def save(self, where: str) -> None:
        self.accelerator.save_state(where)

    def load(self, where: str) -> None:
        self.accelerator.load_state(where)


STEPS, SAVED_AFTER = 4, 2


def _check_resuming(run: Any, folder: str, storage: torch.dtype) -> None:
    """Save in the middle of a run. A run with other adapters resumes there with the same bits."""
    base, where = f"{folder}/base", f"{folder}/{run.__name__} {storage}"
    uninterrupted = run(base, storage)
    uninterrupted.train(range(SAVED_AFTER))
    uninterrupted.save(where)
    uninterrupted.train(range(SAVED_AFTER, STEPS))
    resumed = run(base, storage, seed=6)
    resumed.load(where)
    resumed.train(range(SAVED_AFTER, STEPS))
    expected, actual = uninterrupted.results(), resumed.results()
    assert actual.pop("losses") == expected.pop("losses")[SAVED_AFTER:]
    assert_equal(actual, expected)
    other = run(f"{folder}/other base", storage)
    before = other.adapters()
    with pytest.raises(ValueError, match=r"gate_up_proj .*another base"):
        other.load(where)
    assert_equal(other.adapters(), before)


def _write_two_bases(rank: int, folder: str) -> None:
    _write_base(rank, f"{folder}/base")
    _write_base(rank, f"{folder}/other base", seed=1)


def own_loop_resumes_with_the_same_bits(rank: int, world: int, folder: str) -> None:
    """The storage is bytes (whole on each rank) or fp32 (sharded). Another base is refused."""
    _write_two_bases(rank, folder)
    for storage in (torch.uint8, torch.float32):
        _check_resuming(OwnLoop, folder, storage)


def accelerate_resumes_with_the_same_bits(rank: int, world: int, folder: str) -> None:
    """Both types of state dict are tested. Another base is refused."""
    _write_two_bases(rank, folder)
    kinds = {"SHARDED_STATE_DICT": torch.uint8, "FULL_STATE_DICT": torch.float32}
    for kind, storage in kinds.items():
        with launched(FSDP_STATE_DICT_TYPE=kind):
            _check_resuming(Accelerated, folder, storage)


def _make_trainer(base: str, folder: str, seed: int = 5) -> Trainer:
    arguments = TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        max_steps=STEPS,
        save_steps=SAVED_AFTER,
        logging_steps=1,
        per_device_train_batch_size=1,
        learning_rate=0.01,
        report_to=[],
    )
    model = load_lora(base, torch.uint8, torch.float32, seed)
    whole = batch(model, 2 * STEPS, 9)
    rows = [{key: value[row] for key, value in whole.items()} for row in range(2 * STEPS)]
    return Trainer(patch(model, ep_size=2, **NF4), arguments, train_dataset=rows)


def trainer_resumes_with_the_same_bits(rank: int, world: int, folder: str) -> None:
    """`resume_from_checkpoint` works, another base is refused, and stock PEFT opens the adapter."""
    _write_two_bases(rank, folder)
    base, out = f"{folder}/base", f"{folder}/out"
    with launched():
        uninterrupted = _make_trainer(base, out)
        uninterrupted.train()
        uninterrupted.save_model(f"{folder}/adapter")
    with launched():
        resumed = _make_trainer(base, out, seed=6)
        resumed.train(resume_from_checkpoint=f"{out}/checkpoint-{SAVED_AFTER}")
    logs = [
        [(x["loss"], x["grad_norm"]) for x in trainer.state.log_history if "loss" in x]
        for trainer in (uninterrupted, resumed)
    ]
    assert len(logs[0]) == STEPS and logs[0] == logs[1]
    assert_equal(*(_list_adapters(trainer) for trainer in (resumed, uninterrupted)))
    with launched(), pytest.raises(ValueError, match=r"gate_up_proj .*another base"):
        other = _make_trainer(f"{folder}/other base", out)
        other.train(resume_from_checkpoint=f"{out}/checkpoint-{SAVED_AFTER}")
    trained = uninterrupted.model
    inputs = batch(trained, 2, 9, seed=3)
    with torch.no_grad():
        loss = trained(**inputs).loss
    stock = load_4_bits(base, torch.uint8, torch.float32)
    dequantise_experts(stock, "nf4")
    opened = PeftModel.from_pretrained(stock, f"{folder}/adapter")
    with torch.no_grad():
        # In eval mode on a CPU, bitsandbytes would repack small layers and fail.
        peft_loss = opened.train()(**inputs).loss
        opened.base_model.disable_adapter_layers()
        base_loss = opened(**inputs).loss
    assert max_error(base_loss, peft_loss) > 1e-3, "adapters have no effect"
    assert_close("loss in stock PEFT", loss, peft_loss, FP32_BUDGET)


def _list_adapters(trainer: Trainer) -> dict[str, Tensor]:
    trained = {n: p for n, p in trainer.model.named_parameters() if p.requires_grad}
    return {name: full_tensor(p.detach()) for name, p in trained.items()}


CHECKS = (
    own_loop_resumes_with_the_same_bits,
    accelerate_resumes_with_the_same_bits,
    trainer_resumes_with_the_same_bits,
    fp32_steps_equal_stock,
    an_evaluation_between_steps_repacks_no_shards,
    bf16_error_is_at_most_twice_stocks,
    storage_that_would_be_rounded_is_refused,
)


@pytest.mark.parametrize("claim", on_ranks(2, *CHECKS, slow=True))
def test_on_two_ranks(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)
