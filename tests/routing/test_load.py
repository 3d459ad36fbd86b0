"""`expert_load` counts the choices of training forwards, and computes ratios from the counts.

The counts equal the choices of a stock model, also on several ranks, and with checkpointing,
sequence parallelism and torch.compile.
"""

import copy
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import parity
from support.architectures import batch as batch_of
from support.architectures import tiny as tiny_of
from support.architectures.steps import TEXT_TYPES, loss_of_sum
from support.architectures.types import OUTSIDE
from support.checks import Check, Found, on_ranks
from support.redirected import call_redirected
from support.tiny_models import batch, tiny
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from hf_moe_ep import ExpertLoad, apply_ep_fsdp2, expert_load, patch
from hf_moe_ep.architectures import find_parts
from hf_moe_ep.routing.load import list_slots, read_load
from hf_moe_ep.state import STATE

ACCUMULATION = 3
EXPERTS = 8


def _count_choices(model: nn.Module, inputs: list[dict[str, Tensor]]) -> Tensor:
    """Count the (token, slot) pairs that a stock model's experts receive: [layers, E].

    The pairs of padding tokens are not counted.
    """
    chosen_T = torch.empty(0)
    experts = list(find_parts(model).experts.values())
    counts = torch.zeros(len(experts), find_parts(model).num_experts, dtype=torch.int64)

    def count(index: int, module: nn.Module, args: tuple[Any, ...]) -> None:
        for expert in args[1][chosen_T].flatten().tolist():
            counts[index, expert] += 1

    hooks = [
        module.register_forward_pre_hook(partial(count, index))
        for index, module in enumerate(experts)
    ]
    with torch.no_grad():
        for micro_batch in inputs:
            mask = micro_batch.get("attention_mask", torch.ones_like(micro_batch["labels"]))
            chosen_T = mask.flatten() != 0
            loss_of_sum(model, micro_batch, torch.tensor(1))
    for hook in hooks:
        hook.remove()
    return counts


def test_the_ratios_of_an_example_equal_the_docstring() -> None:
    """Layer a is the docstring's example, layer b has one busy expert, layer c has no tokens."""
    counts = torch.tensor([[7, 5, 3, 1], [0, 8, 0, 0], [0, 0, 0, 0]])
    load = ExpertLoad(counts, ("a", "b", "c"), ep_size=2)
    assert load.max_over_mean.tolist()[:2] == [1.75, 4.0]
    assert load.rank_max_over_mean.tolist()[:2] == [1.5, 2.0]
    assert load.dead.tolist() == [0, 3, 0]
    shares = [7 / 16, 5 / 16, 3 / 16, 1 / 16]
    entropy = -sum(share * math.log(share) for share in shares)
    assert load.entropy.tolist()[:2] == pytest.approx([entropy, 0.0])
    assert round(entropy, 3) == 1.212, "the number in the docstring"
    assert load.relative_entropy.tolist()[:2] == pytest.approx([entropy / math.log(4), 0.0])
    assert load.worst_layer == 1
    for values in (load.max_over_mean, load.rank_max_over_mean, load.entropy):
        assert math.isnan(values[2])
    lines = str(load).splitlines()
    assert lines[0].startswith("expert load of 3 layers of 4 experts, ep_size 2: 24 ")
    assert lines[2].split() == ["a", "16", "1.75", "(e0)", "1.50", "0", "0.874"]
    assert lines[3].split() == ["b", "8", "4.00", "(e1)", "2.00", "3", "0.000"]
    assert lines[4].split() == ["c", "0", "no", "tokens"]


def test_the_load_is_on_the_host_whatever_the_default_device() -> None:
    """The experts of the second layer were moved, those of the first layer were not."""
    load = ExpertLoad(torch.tensor([[6, 2], [4, 4]]), ("a", "b"), ep_size=2)
    slots: Any = [SimpleNamespace(slots_E=x) for x in (None, torch.tensor([1, 0]))]
    state: Any = SimpleNamespace(moe_layers=slots, num_experts=2)
    with torch.device("meta"):
        ratio, slots_LE = load.relative_entropy[1], list_slots(state)
    assert ratio == 1
    assert slots_LE is not None and slots_LE.tolist() == [[0, 1], [1, 0]]


def test_plot_writes_a_png(tmp_path: Path) -> None:
    load = ExpertLoad(torch.tensor([[7, 5, 3, 1], [0, 0, 0, 0]]), ("a", "b"))
    load.plot(tmp_path / "load.png")
    assert (tmp_path / "load.png").read_bytes().startswith(b"\x89PNG")


def _train_two_batches(model: nn.Module, call: Callable[..., Any] | None = None) -> Tensor:
    """Train on two batches, and return the counts of a stock model for these batches."""
    inputs = [batch(model, 2, 9, seed=seed, pad=3 * seed) for seed in range(2)]
    for micro_batch in inputs:
        (model if call is None else call)(**micro_batch).loss.backward()
    return _count_choices(tiny(), inputs)


def test_only_forwards_of_training_are_counted() -> None:
    """Evaluation and forwards without gradients are not counted. Each reader has its own reset."""
    model = patch(tiny())
    state = getattr(model, STATE)
    assert not expert_load(model).counts.any()
    want = _train_two_batches(model)
    assert want.sum(1).tolist() == [2 * (4 * 9 - 3)] * 2
    with torch.no_grad():
        model(**batch(model, 2, 5))
    model.eval()
    model(**batch(model, 2, 5)).loss.backward()
    model.train()
    assert torch.equal(expert_load(model, reset=False).counts, want)
    load = expert_load(model)
    assert torch.equal(load.counts, want)
    assert load.layers == ("model.layers.0.mlp.experts", "model.layers.1.mlp.experts")
    assert not expert_load(model).counts.any()
    assert torch.equal(read_load(model, state, "another", reset=True).counts, want)
    copied = copy.deepcopy(model)
    want_after_copy = _train_two_batches(model)
    assert torch.equal(expert_load(model).counts, want_after_copy)
    assert not expert_load(copied).counts.any()


def test_a_call_of_the_decoder_is_counted_if_gradients_are_enabled() -> None:
    model = patch(tiny())
    model(**batch(model, 2, 5)).loss.backward()
    expert_load(model)
    inputs = batch(model, 2, 9)
    del inputs["labels"]
    with torch.no_grad():
        model.model(**inputs)
    assert not expert_load(model).counts.any()
    model.model(**inputs)
    assert torch.equal(expert_load(model).counts, _count_choices(tiny(), [batch(model, 2, 9)]))


def test_a_layer_is_not_counted_without_gradients_after_a_forward_that_failed() -> None:
    model = patch(tiny())

    def fail(module: nn.Module, args: tuple[Any, ...]) -> None:
        raise RuntimeError("the last norm fails")

    hook = model.model.norm.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="the last norm fails"):
        model(**batch(model, 2, 5))
    hook.remove()
    expert_load(model)
    with torch.no_grad():
        model.model.layers[0].mlp(torch.randn(2, 5, model.config.hidden_size, dtype=model.dtype))
    assert not expert_load(model).counts.any()


def test_padding_is_not_counted_if_a_caller_passes_the_mask_to_the_decoder() -> None:
    """TRL's distillation trainers replace the forward of the model by a call of the decoder.

    With adapters they bypass the hooks of the causal LM.
    """
    stock, inputs = tiny(), [batch(tiny(), 2, 9, seed=seed, pad=3 * seed) for seed in range(3)]
    model = patch(tiny())

    def run_decoder(*batches: dict[str, Tensor]) -> Tensor:
        outputs = [model.base_model(x["input_ids"], x["attention_mask"]) for x in batches]
        return sum(output.last_hidden_state.sum() for output in outputs)

    call_redirected(model, run_decoder, *inputs).backward()
    assert torch.equal(expert_load(model).counts, _count_choices(stock, inputs))
    run_decoder(*inputs)
    assert torch.equal(expert_load(model).counts, _count_choices(stock, inputs))
    model(**inputs[1])
    assert torch.equal(expert_load(model).counts, _count_choices(stock, inputs[1:2]))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_recompute_is_not_counted_again(use_reentrant: bool) -> None:
    model = tiny()
    parity.checkpointing(model, use_reentrant)
    assert torch.equal(_train_two_batches(patch(model)), expert_load(model).counts)


def test_a_recompute_of_a_selective_checkpoint_is_not_counted_again() -> None:
    """Such a checkpoint returns saved results in order, so it must not see counting operators."""
    model = patch(tiny())
    experts = model.model.layers[0].mlp.experts
    x, ids = torch.randn(6, 32).double().requires_grad_(), torch.arange(12).view(6, 2) % 5
    contexts = partial(create_selective_checkpoint_contexts, [torch.ops.aten.ones_like.default])

    def part(x: Tensor) -> Tensor:
        return experts(x, ids, torch.ones(6, 2).double()) * torch.ones_like(x[:, :1])

    checkpoint(part, x, use_reentrant=False, context_fn=contexts).sum().backward()
    assert expert_load(model).counts.tolist() == [[3, 3, 2, 2, 2, 0, 0, 0], [0] * EXPERTS]


@pytest.mark.slow
@pytest.mark.parametrize("use_reentrant", [None, False, True])
def test_a_compiled_model_has_the_same_counts_and_gradients(use_reentrant: bool | None) -> None:
    torch.compiler.reset()
    model, plain = tiny(), patch(tiny())
    if use_reentrant is not None:
        parity.checkpointing(model, use_reentrant)
    patch(model)
    want = _train_two_batches(plain)
    compiled = torch.compile(model, backend="aot_eager")
    assert torch.equal(_train_two_batches(model, compiled), want)
    assert torch.equal(expert_load(model).counts, want)
    for (name, got), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.allclose(got.grad, expected.grad, rtol=1e-10, atol=1e-12), name


@pytest.mark.slow
def test_counting_causes_no_graph_break() -> None:
    torch.compiler.reset()
    model = patch(tiny(), experts_backend="torch")
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    inputs = batch(model, 2, 9)
    del inputs["attention_mask"]
    compiled(**inputs, use_cache=False).loss.backward()
    assert torch.equal(expert_load(model).counts, _count_choices(tiny(), [inputs]))


@pytest.mark.slow
@pytest.mark.parametrize("model_type", [name for name in TEXT_TYPES if name not in OUTSIDE])
def test_every_type_counts_the_pairs_that_its_experts_receive(model_type: str) -> None:
    model = tiny_of(model_type)
    inputs = batch_of(model, 2, 9)
    torch.manual_seed(1)
    want = _count_choices(tiny_of(model_type), [inputs])
    patch(model)
    torch.manual_seed(1)
    loss_of_sum(model, inputs, torch.tensor(1)).backward()
    load = expert_load(model)
    assert torch.equal(load.counts, want)
    assert want.any() and len(load.layers) == len(want)


def test_models_without_counts_and_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="not patched"):
        expert_load(tiny())
    with pytest.raises(ValueError, match=r"experts_backend='eager'.*experts_backend='torch'"):
        expert_load(patch(tiny(), experts_backend="eager"))
    with pytest.raises(ValueError, match="reset=1"):
        expert_load(patch(tiny()), reset=1)


def _make_inputs(rank: int, micro: int, padded: bool = True) -> dict[str, Tensor]:
    """Make a padded batch, or a batch without a mask whose odd length sp does not divide."""
    length = 8 + 2 * rank + (not padded)
    inputs = batch(tiny(), 1 + rank % 2, length, seed=10 * micro + rank, pad=2 * padded)
    return {name: x for name, x in inputs.items() if padded or name != "attention_mask"}


def _compare_with_stock(
    use_reentrant: bool | None,
    config: dict[str, Any],
    rank: int,
    world: int,
    *,
    padded: bool = True,
) -> None:
    model = tiny(seed=rank)
    if use_reentrant is not None:
        parity.checkpointing(model, use_reentrant)
    apply_ep_fsdp2(model, **config)
    sp = config.get("sp_size", 1) * config.get("cp_size", 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    want = torch.zeros(2, EXPERTS, dtype=torch.int64)
    for step in range(2):
        for micro in range(ACCUMULATION):
            seed = ACCUMULATION * step + micro
            model(**_make_inputs(rank // sp, seed, padded)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        everyone = [
            _make_inputs(data_rank, ACCUMULATION * step + micro, padded)
            for data_rank in range(world // sp)
            for micro in range(ACCUMULATION)
        ]
        want += _count_choices(tiny(), everyone)
        model.eval()
        with torch.no_grad():
            model(**_make_inputs(rank // sp, 0))
        model.train()
    without_reset, load = expert_load(model, reset=False), expert_load(model)
    assert load.ep_size == config.get("ep_size", 1)
    assert torch.equal(load.counts, want), f"{load.counts}\n{want}"
    assert torch.equal(without_reset.counts, want)
    assert not expert_load(model).counts.any()


def ranks_that_pass_different_resets_raise_an_error(rank: int, world: int) -> None:
    model = apply_ep_fsdp2(tiny(), ep_size=2)
    model(**_make_inputs(rank, 0)).loss.backward()
    with pytest.raises(ValueError, match=r"1 of 2 ranks called expert_load with reset=True"):
        expert_load(model, reset=rank == 0)
    assert expert_load(model).counts.any()


ON_RANKS = [
    *on_ranks(2, ranks_that_pass_different_resets_raise_an_error),
    *on_ranks(
        2,
        {
            "2 ranks, ep 2": partial(_compare_with_stock, False, {"ep_size": 2}),
            "2 ranks, ep 1, fused loss": partial(_compare_with_stock, None, {"fused_loss": True}),
            "2 ranks, sp 2, slices with padding": partial(
                _compare_with_stock, None, {"ep_size": 2, "sp_size": 2}, padded=False
            ),
        },
    ),
    *on_ranks(
        4,
        {
            f"4 ranks, ep 2, checkpointing {kind}": partial(
                _compare_with_stock, use, {"ep_size": 2}
            )
            for kind, use in (("off", None), ("on", False), ("reentrant", True))
        }
        | {
            "4 ranks, ep 2, sp 2": partial(_compare_with_stock, None, {"ep_size": 2, "sp_size": 2}),
            "4 ranks, ep 2, cp 2": partial(_compare_with_stock, None, {"ep_size": 2, "cp_size": 2}),
            "4 ranks, HSDP": partial(
                _compare_with_stock, True, {"ep_size": 2, "dp_replicate_size": 2}
            ),
            "4 ranks, chunks": partial(
                _compare_with_stock, None, {"ep_size": 4, "dispatch_chunks": 3}
            ),
        },
        slow=True,
    ),
]


@pytest.mark.parametrize("claim", ON_RANKS)
def test_counts_are_summed_over_all_ranks(found: Found, claim: Check) -> None:
    """Two steps of three micro-batches, each followed by an evaluation, which is not counted."""
    found.raise_if_failed(claim)
