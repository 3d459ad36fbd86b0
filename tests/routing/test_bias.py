"""`bias_update_rate`: the router biases are updated once per optimizer step.

The expected updates follow from the experts that a stock model chooses for the tokens of all ranks.
The tests use Accelerate, the Trainer and a user's own loop; models without such a bias are refused.
"""

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from peft import LoraConfig, get_peft_model
from support.architectures import batch, tiny
from support.architectures.steps import CUT_LOGITS, TEXT_TYPES, adamw, loss_of_sum
from support.architectures.types import OUTSIDE
from support.checks import Check, Found, on_ranks
from support.host_numbers import NoHostNumbers
from support.launched import launched
from support.tiny_models import tiny as tiny_qwen
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments

from hf_moe_ep import (
    ParallelConfig,
    apply_ep_fsdp2,
    data_parallel_rank,
    data_parallel_size,
    expert_load,
    load_checkpoint,
    patch,
    save_checkpoint,
    save_pretrained,
    unpatch,
    update_router_bias,
)
from hf_moe_ep.architectures import find_parts
from hf_moe_ep.state import STATE

RATE = 0.0625  # a power of two, so that updates are exact in every dtype
KIND = "deepseek_v3"
# Types whose routers have more classes than experts, because a token may choose no expert.
TYPES_WITH_NO_EXPERT = {"zaya"}
Batch = dict[str, Tensor]


def _find_biases(model: nn.Module) -> dict[int, Tensor]:
    """Find the bias of each MoE layer by its name, without the code under test."""
    biases = {}
    named = [*model.named_buffers(), *model.named_parameters()]
    for index, experts in enumerate(find_parts(model).experts):
        block = f"{experts.rpartition('.')[0]}."
        for name, tensor in named:
            has_name = name.startswith(block) and name.endswith(("_bias", "_find_biases"))
            if has_name and not tensor.requires_grad and tensor.is_floating_point():
                biases[index] = tensor
    return biases


def _count_choices(model: nn.Module, inputs: list[Batch]) -> list[list[int]]:
    """Count the (token, slot) pairs that a stock model's experts receive, by layer and expert."""
    parts = find_parts(model)
    counts = [[0] * parts.num_experts for _ in parts.experts]
    hooks = [
        module.register_forward_pre_hook(
            lambda _, args, row=row: (
                [row.__setitem__(e, row[e] + 1) for e in args[1].flatten()] and None
            )
        )
        for row, module in zip(counts, parts.experts.values(), strict=True)
    ]
    with torch.no_grad():
        for micro_batch in inputs:
            loss_of_sum(model, micro_batch, torch.tensor(1))
    for hook in hooks:
        hook.remove()
    return counts


def _apply_update(bias: Tensor, counts: list[int]) -> Tensor:
    """Add RATE to the bias of experts below the mean count, and subtract RATE above the mean."""
    mean = sum(counts) / len(counts)
    signs = [(mean > count) - (mean < count) for count in counts]
    return bias + RATE * torch.tensor(signs, dtype=bias.dtype).view_as(bias)


def _make_inputs(model: nn.Module, rank: int, seed: int) -> Batch:
    return batch(model, 1 + rank % 2, 9 + 2 * rank, seed=10 * seed + rank)


def _make_stock_like(model: nn.Module) -> nn.Module:
    """Make a stock model with the current biases of `model` and the initial weights."""
    stock = tiny(KIND)
    for index, bias in _find_biases(stock).items():
        bias.data = _find_biases(model)[index].detach().to(bias.dtype).clone()
    return stock


def _make_frozen_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Make an optimizer with lr 0, so that a stock model keeps making the same choices."""
    return torch.optim.SGD(model.parameters(), lr=0.0)


def test_updates_follow_the_rule() -> None:
    """Each step has two micro-batches. The tokens of an evaluation are not counted."""
    model = patch(tiny(KIND), bias_update_rate=RATE)
    assert len(_find_biases(model)) == 3, "one layer is dense"
    for step in range(3):
        inputs = [_make_inputs(model, 0, 2 * step + micro) for micro in range(2)]
        stock = _make_stock_like(model)
        want = [
            _apply_update(_find_biases(stock)[i], row)
            for i, row in enumerate(_count_choices(stock, inputs))
        ]
        for micro_batch in inputs:
            model(**micro_batch).loss.backward()
        model.eval()
        with torch.no_grad():
            model(**_make_inputs(model, 1, 7))
        model.train()
        update_router_bias(model)
        for index, bias in _find_biases(model).items():
            assert torch.equal(bias, want[index]), f"step {step}, layer {index}"
        update_router_bias(model)
        assert all(torch.equal(b, want[i]) for i, b in _find_biases(model).items()), (
            "the second call must have no counts"
        )
    assert len(torch.unique(torch.cat(list(_find_biases(model).values())))) > 2


def test_layers_without_tokens_and_experts_at_the_mean_keep_their_bias() -> None:
    model = patch(tiny(KIND), bias_update_rate=RATE)
    before = {index: bias.clone() for index, bias in _find_biases(model).items()}
    counts = torch.zeros(3, 8, dtype=torch.int64)
    counts[1] = torch.tensor([6, 2, 4, 4, 4, 4, 4, 4])
    getattr(model, STATE).choice_counts = counts
    update_router_bias(model)
    after = _find_biases(model)
    assert torch.equal(after[0], before[0]) and torch.equal(after[2], before[2])
    want = torch.tensor([-RATE, RATE, 0, 0, 0, 0, 0, 0]).to(before[1])
    assert torch.equal(after[1] - before[1], want)


def test_an_update_copies_no_number_to_the_device() -> None:
    """On a GPU such a copy waits for the optimizer's step."""
    model = patch(tiny(KIND), bias_update_rate=RATE)
    model(**_make_inputs(model, 0, 0)).loss.backward()
    before = {index: bias.clone() for index, bias in _find_biases(model).items()}
    with NoHostNumbers():
        update_router_bias(model)
    assert not all(torch.equal(bias, before[index]) for index, bias in _find_biases(model).items())


def test_a_deep_copy_has_its_own_counts_and_biases() -> None:
    model = patch(tiny(KIND), bias_update_rate=RATE)
    model(**_make_inputs(model, 0, 0)).loss.backward()
    other = copy.deepcopy(model)
    assert expert_load(model).counts.any()
    before = {index: bias.clone() for index, bias in _find_biases(other).items()}
    update_router_bias(model)
    for index, bias in _find_biases(model).items():
        assert not torch.equal(bias, before[index])
        assert torch.equal(_find_biases(other)[index], before[index])
    update_router_bias(other)
    assert all(torch.equal(b, _find_biases(model)[i]) for i, b in _find_biases(other).items())


def test_biases_in_bf16_are_converted_to_fp32() -> None:
    model = tiny(KIND, dtype=torch.bfloat16)
    for bias in _find_biases(model).values():
        bias.data = torch.full_like(bias, 8.0, dtype=torch.bfloat16)
    patch(model, bias_update_rate=0.001, experts_backend="torch")
    model(**_make_inputs(model, 0, 0)).loss.backward()
    update_router_bias(model)
    for bias in _find_biases(model).values():
        assert bias.dtype == torch.float32
        moves = (bias.double() - 8).abs().round(decimals=5)
        assert set(moves.tolist()) in ({0.001}, {0.0, 0.001})


@pytest.mark.parametrize("kind", ["buffer", "parameter"])
def test_biases_stay_in_fp32_if_the_model_is_cast(kind: str) -> None:
    """In bf16, an update of 0.0625 would be rounded away. `bf16_full_eval` casts in this way."""
    model: Any = tiny(KIND, dtype=torch.float32)
    if kind == "parameter":
        for module in model.modules():
            for name, buffer in [*module.named_buffers(recurse=False)]:
                if name.endswith("correction_bias"):
                    delattr(module, name)
                    module.register_parameter(name, nn.Parameter(buffer, requires_grad=False))
    patch(model, bias_update_rate=RATE)
    for bias in _find_biases(model).values():
        bias.data.fill_(64.0)
    for patched in (copy.deepcopy(model), model):
        patched.to(torch.bfloat16)
        assert patched.lm_head.weight.dtype == torch.bfloat16
        patched.train()(**_make_inputs(patched, 0, 0))
        update_router_bias(patched)
        for bias in _find_biases(patched).values():
            assert bias.dtype == torch.float32 and (bias != 64.0).any()
    cast = unpatch(model).to(torch.bfloat16)
    assert all(bias.dtype == torch.bfloat16 for bias in _find_biases(cast).values())


def test_unpatch_restores_the_dtype_of_the_biases() -> None:
    model = tiny(KIND, dtype=torch.bfloat16)
    for bias in _find_biases(model).values():
        bias.data = bias.to(torch.bfloat16)  # stock code keeps this buffer in fp32
    before = {index: (bias, bias.clone()) for index, bias in _find_biases(model).items()}
    for _ in range(2):
        patch(model, bias_update_rate=0.001, experts_backend="torch")
        assert all(bias.dtype == torch.float32 for bias in _find_biases(model).values())
        unpatch(model)
    assert before
    for index, bias in _find_biases(model).items():
        same, value = before[index]
        assert bias is same and bias.dtype == torch.bfloat16 and torch.equal(bias, value)


@pytest.mark.parametrize("rate", [0, -0.001, float("nan"), float("inf"), True, "0.1"])
def test_a_rate_must_be_a_positive_number(rate: Any) -> None:
    with pytest.raises(ValueError, match=r"bias_update_rate must be None or a number > 0, got"):
        ParallelConfig(bias_update_rate=rate)


def test_models_without_a_bias_to_update_are_refused() -> None:
    with pytest.raises(ValueError, match=r"no router of qwen3_moe has a correction bias"):
        patch(tiny_qwen(), bias_update_rate=RATE)
    with pytest.raises(ValueError, match=r"has 9 entries, but the layer has 8 experts"):
        patch(tiny("zaya"), bias_update_rate=RATE)
    with pytest.raises(ValueError, match=r"bias_update_rate=0.0625 has no counts.*'eager'"):
        patch(tiny(KIND), bias_update_rate=RATE, experts_backend="eager")
    trained = tiny("afmoe")
    for name, parameter in trained.named_parameters():
        if name.endswith("expert_bias"):
            parameter.requires_grad_(True)
    with pytest.raises(ValueError, match=r"expert_bias is a trained parameter"):
        patch(trained, bias_update_rate=RATE)
    adapted = get_peft_model(tiny(KIND), LoraConfig(r=2, target_modules=["o_proj"]))
    with pytest.raises(ValueError, match=r"has adapters, which are saved without"):
        patch(adapted, bias_update_rate=RATE)
    adapted_later = patch(tiny(KIND), bias_update_rate=RATE)
    with pytest.raises(ValueError, match=r"has adapters, which are saved without"):
        get_peft_model(adapted_later, LoraConfig(r=2, target_modules=["o_proj"]))
    assert not any("lora_" in name for name, _ in adapted_later.named_parameters())
    with pytest.raises(ValueError, match=r"patched without bias_update_rate"):
        update_router_bias(patch(tiny(KIND)))
    with pytest.raises(ValueError, match=r"not patched"):
        update_router_bias(tiny(KIND))


class _SkippingScaler:
    """A gradient scaler that has found an overflow, and therefore skips the optimizer step."""

    def step(self, optimizer: Any, closure: Any) -> None:
        pass

    def update(self) -> None:
        pass


def test_a_skipped_step_drops_its_counts() -> None:
    accelerator = Accelerator(cpu=True)
    model = patch(tiny(KIND), bias_update_rate=RATE)
    model, optimizer = accelerator.prepare(model, _make_frozen_optimizer(model))
    assert isinstance(optimizer, AcceleratedOptimizer)
    before = {index: bias.clone() for index, bias in _find_biases(model).items()}
    scaled = AcceleratedOptimizer(
        optimizer.optimizer, device_placement=False, scaler=_SkippingScaler()
    )
    accelerator._optimizers.append(scaled)
    accelerator.prepare(optimizer)  # prepare also wraps optimizers that were added before
    model(**_make_inputs(model, 0, 0)).loss.backward()
    scaled.step()
    assert scaled.step_was_skipped
    optimizer.step()
    assert all(torch.equal(bias, before[i]) for i, bias in _find_biases(model).items())
    model(**_make_inputs(model, 0, 0)).loss.backward()
    optimizer.step()
    assert not any(torch.equal(bias, before[i]) for i, bias in _find_biases(model).items())


@pytest.mark.slow
@pytest.mark.parametrize("model_type", [name for name in TEXT_TYPES if name not in OUTSIDE])
def test_an_expert_with_a_lower_bias_gets_fewer_tokens_in_every_type(model_type: str) -> None:
    """This proves that the update has the right sign for the router of the type."""
    model = tiny(model_type)
    if model_type in TYPES_WITH_NO_EXPERT:
        with pytest.raises(ValueError, match=r"entries, but the layer has"):
            patch(model, bias_update_rate=RATE)
        return
    if not _find_biases(model):
        with pytest.raises(ValueError, match=r"has a correction bias"):
            patch(model, bias_update_rate=RATE)
        return
    patch(model, bias_update_rate=RATE)
    state = getattr(model, STATE)
    with_bias = [layer.index for layer in state.moe_layers if layer.correction is not None]
    assert with_bias == list(_find_biases(model))
    inputs = batch(model, 2, 16)
    before = {index: bias.clone() for index, bias in _find_biases(model).items()}
    loss_of_sum(model, inputs, torch.tensor(1)).backward()
    counts = expert_load(model).counts
    update_router_bias(model)
    for index, bias in _find_biases(model).items():
        assert torch.equal(bias, _apply_update(before[index], counts[index].tolist()))
        # With a bias far below all others, the busiest expert must lose tokens, even if the router
        # chooses groups first.
        busiest = int(counts[index].argmax())
        bias.data.view(-1)[busiest] -= 100.0
    torch.manual_seed(0)
    loss_of_sum(model, inputs, torch.tensor(1)).backward()
    counts_after = expert_load(model).counts
    for index in with_bias:
        assert counts[index].max() > 0
        assert counts_after[index, counts[index].argmax()] < counts[index].max(), f"layer {index}"


def _assert_equal_on_ranks(model: nn.Module) -> None:
    """Compare the biases of all ranks bit by bit."""
    for bias in _find_biases(model).values():
        everyone = [torch.empty_like(bias) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, bias.detach().contiguous())
        assert all(torch.equal(everyone[0], other) for other in everyone)


def _compute_expected_biases(biases: dict[int, Tensor], micro: list[Batch]) -> dict[int, Tensor]:
    stock = tiny(KIND)
    for index, bias in _find_biases(stock).items():
        bias.data = biases[index].clone()
    counts = _count_choices(stock, micro)
    return {index: _apply_update(bias, counts[index]) for index, bias in biases.items()}


def an_own_loop_updates_and_saves_biases(rank: int, world: int, folder: str, **sizes: Any) -> None:
    """The counts of all ranks are summed. Checkpoints and hub files have exactly these biases."""
    model = apply_ep_fsdp2(tiny(KIND, seed=rank), ep_size=2, bias_update_rate=RATE, **sizes)
    data_rank, data_world = data_parallel_rank(model), data_parallel_size(model)
    want = {index: bias.detach().clone() for index, bias in _find_biases(tiny(KIND)).items()}
    optimizer = _make_frozen_optimizer(model)
    for step in range(2):
        for micro in range(2):
            model(**_make_inputs(model, data_rank, 2 * step + micro)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        update_router_bias(model)
        everyone = [
            _make_inputs(model, other, 2 * step + micro)
            for other in range(data_world)
            for micro in range(2)
        ]
        want = _compute_expected_biases(want, everyone)
        for index, bias in _find_biases(model).items():
            assert torch.equal(bias, want[index]), f"step {step}, layer {index}"
    _assert_equal_on_ranks(model)
    save_checkpoint(f"{folder}/state", model, optimizer)
    save_pretrained(model, f"{folder}/hub")
    resumed = apply_ep_fsdp2(tiny(KIND, seed=5 + rank), ep_size=1, bias_update_rate=RATE)
    load_checkpoint(f"{folder}/state", resumed, _make_frozen_optimizer(resumed))
    stock = type(tiny(KIND)).from_pretrained(f"{folder}/hub", dtype=torch.float64)
    for trained in (model, resumed):
        trained(**_make_inputs(model, data_rank, 9)).loss.backward()
        update_router_bias(trained)
    for index, bias in _find_biases(resumed).items():
        assert torch.equal(bias, _find_biases(model)[index]), f"resumed, layer {index}"
        loaded = _find_biases(stock)[index]  # since transformers 5.24 in fp32, in spite of `dtype`
        assert torch.equal(loaded, want[index].to(loaded)), "hub files"


def the_prepared_optimizer_updates_biases_once_per_step(rank: int, world: int) -> None:
    """It does not update them once per micro-batch, and needs no call of this package."""
    with launched():
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        model = patch(tiny(KIND, seed=rank), ep_size=2, bias_update_rate=RATE)
        model, optimizer = accelerator.prepare(model, _make_frozen_optimizer(model))
        want = {index: bias.detach().clone() for index, bias in _find_biases(tiny(KIND)).items()}
        for step in range(2):
            for micro in range(2):
                with accelerator.accumulate(model):
                    accelerator.backward(model(**_make_inputs(model, rank, 2 * step + micro)).loss)
                    optimizer.step()
                    optimizer.zero_grad()
            everyone = [
                _make_inputs(model, r, 2 * step + micro) for r in range(world) for micro in range(2)
            ]
            want = _compute_expected_biases(want, everyone)
            for index, bias in _find_biases(model).items():
                assert torch.equal(bias, want[index]), f"step {step}, layer {index}"
        _assert_equal_on_ranks(model)


def all_ranks_drop_their_counts_if_one_rank_skips_its_step(rank: int, world: int) -> None:
    """An overflow on one rank reaches the gradients of all ranks."""
    from hf_moe_ep.routing.bias import update_biases

    model = apply_ep_fsdp2(tiny(KIND), ep_size=2, bias_update_rate=RATE)
    before = {index: bias.detach().clone() for index, bias in _find_biases(model).items()}
    model(**_make_inputs(model, rank, 0)).loss.backward()
    update_biases(getattr(model, STATE), skipped=rank == 1)
    update_biases(getattr(model, STATE))
    assert all(torch.equal(bias, before[i]) for i, bias in _find_biases(model).items())


@contextmanager
def _make_trainer(folder: str, model: nn.Module, **arguments: Any) -> Iterator[Trainer]:
    with launched():
        args = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            learning_rate=1e-3,
            train_sampling_strategy="sequential",
            save_strategy="steps",
            save_steps=2,
            eval_strategy="steps",
            eval_steps=1,
            logging_steps=1,
            report_to=[],
            disable_tqdm=True,
            **arguments,
        )
        data = batch(tiny(KIND), 32, 10)
        rows = [{name: value[row] for name, value in data.items()} for row in range(32)]
        yield Trainer(model=model, args=args, train_dataset=rows, eval_dataset=rows[:4])


def the_trainer_updates_and_resumes_biases(rank: int, world: int, folder: str) -> None:
    """Each step changes a bias by RATE or not at all; a resumed run has the same biases."""
    make = partial(tiny, KIND, dtype=torch.float32)
    model = patch(make(), ep_size=2, bias_update_rate=RATE)
    for bias in _find_biases(model).values():
        bias.data.zero_()  # a bias is then exactly RATE times an integer
    with _make_trainer(folder, model, max_steps=4) as trainer:
        trainer.train()
        model = trainer.model
    _assert_equal_on_ranks(model)
    for index, bias in _find_biases(model).items():
        steps = bias / RATE
        assert torch.equal(steps, steps.round()), f"layer {index}: {steps}"
        assert 0 < steps.abs().max() <= 4, f"layer {index}: {steps}"
    resumed = patch(make(seed=3), ep_size=2, bias_update_rate=RATE)
    with _make_trainer(folder, resumed, max_steps=4) as trainer:
        trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
        resumed = trainer.model
    for index, bias in _find_biases(resumed).items():
        assert torch.equal(bias, _find_biases(model)[index]), f"resumed, layer {index}"


def _check_type(model_type: str, rank: int, world: int, folder: str) -> None:
    """Check that a bias, which may be a buffer or a parameter, is updated, saved and loaded."""
    if model_type in CUT_LOGITS:
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
    model = apply_ep_fsdp2(tiny(model_type, seed=rank), ep_size=2, bias_update_rate=RATE)
    before = {
        index: bias.detach().clone() for index, bias in _find_biases(tiny(model_type)).items()
    }
    optimizer = adamw(model)
    loss_of_sum(model, batch(model, 1 + rank, 12, seed=rank), torch.tensor(1)).backward()
    optimizer.step()
    counts = expert_load(model).counts
    update_router_bias(model)
    for index, bias in _find_biases(model).items():
        assert torch.equal(bias, _apply_update(before[index], counts[index].tolist())), (
            f"layer {index}"
        )
    save_checkpoint(f"{folder}/state", model, optimizer)
    resumed = apply_ep_fsdp2(tiny(model_type, seed=7 + rank), bias_update_rate=RATE)
    load_checkpoint(f"{folder}/state", resumed, adamw(resumed))
    assert all(
        torch.equal(bias, _find_biases(model)[i]) for i, bias in _find_biases(resumed).items()
    )


CORRECTED = ("afmoe", "deepseek_v4", "ernie4_5_moe", "glm4_moe", "hy_v3", "lfm2_moe", "nemotron_h")
CHECKS = [
    *on_ranks(2, the_prepared_optimizer_updates_biases_once_per_step),
    *on_ranks(
        2,
        an_own_loop_updates_and_saves_biases,
        all_ranks_drop_their_counts_if_one_rank_skips_its_step,
        the_trainer_updates_and_resumes_biases,
        slow=True,
    ),
    *on_ranks(
        2, {"own loop, cp 2": partial(an_own_loop_updates_and_saves_biases, cp_size=2)}, slow=True
    ),
    *on_ranks(2, {name: partial(_check_type, name) for name in CORRECTED}, slow=True),
]


@pytest.mark.parametrize("claim", CHECKS)
def test_biases_are_updated_once_per_step_from_the_counts_of_all_ranks(
    found: Found, claim: Check
) -> None:
    found.raise_if_failed(claim)
