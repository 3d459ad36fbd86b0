"""Experts that were moved give the same numbers, files and resumed runs as experts that were not.

Two models have the same values on the same ranks. One of them is balanced between its steps, with
random loads, so that experts of all ranks move. Moved values are bit-equal. After a step, sums over
the tokens of an expert have another order, and the tolerance is 1e-10.
"""

import json
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from support import parity
from support.adapters import with_lora
from support.architectures import tiny as tiny_of
from support.checks import Check, Found, on_ranks
from support.close import FP64_MODEL, assert_close
from support.forced import forced_topk
from support.hub_files import assert_equal, read_all
from support.parity import full_tensor
from support.quantised import SIZES
from support.tiny_models import batch, tiny
from torch import Tensor, nn

from hf_moe_ep import (
    ExpertLoad,
    apply_ep_fsdp2,
    balance_experts,
    data_parallel_rank,
    expert_load,
    experts_in_hub_order,
    hub_tensors,
    load_checkpoint,
    save_checkpoint,
    save_pretrained,
    update_router_bias,
)
from hf_moe_ep.checkpoints.training.base import describe_base
from hf_moe_ep.ranks.collectives import start_all_to_all
from hf_moe_ep.state import STATE, MoELayer, patched_state
from hf_moe_ep.upstream.models import persistent_buffers
from hf_moe_ep.upstream.module_names import stock_name

AdamW = partial(torch.optim.AdamW, lr=1e-3)
FIRST = 1
Numbers = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """A layout, and what is done to the model before it is sharded; Qwen3-MoE without a type."""

    name: str
    world: int
    config: dict[str, Any]
    model_type: str = ""
    model: dict[str, Any] = field(default_factory=dict)
    wrap: Callable[[nn.Module], nn.Module] | None = None
    optimizer: Callable[..., torch.optim.Optimizer] = AdamW
    checkpointing: bool = False
    slow: bool = True


CASES = [
    Case("ep 2", 2, {"ep_size": 2}, slow=False),
    Case(
        "ep 2, fused, checkpointing",
        2,
        {"ep_size": 2},
        optimizer=partial(AdamW, fused=True),
        checkpointing=True,
    ),
    Case("ep 2, SGD without state", 2, {"ep_size": 2}, optimizer=partial(torch.optim.SGD, lr=0.1)),
    Case("ep 4, chunks", 4, {"ep_size": 4, "dispatch_chunks": 2}),
    Case("ep 4, two nodes", 4, {"ep_size": 4, "dispatcher": "hierarchical", "node_size": 2}),
    Case("ep_fsdp 2 cuts experts", 4, {"ep_size": 2, "expert_shard_dim": 0}),
    Case("ep_fsdp 2 cuts rows", 4, {"ep_size": 2, "expert_shard_dim": 1}),
    Case("ep outside", 4, {"ep_size": 2, "ep_outside": True}),
    Case("two replicas", 4, {"ep_size": 2, "dp_replicate_size": 2}),
    Case("sequence parallel", 4, {"ep_size": 2, "sp_size": 2}),
    Case("biases of experts, transposed", 2, {"ep_size": 2}, "gpt_oss"),
    Case("a correction bias", 2, {"ep_size": 2, "bias_update_rate": 0.01}, "glm4_moe"),
    Case("LoRA", 2, {"ep_size": 2}, wrap=with_lora),
    Case("LoRA, ep_fsdp 2", 4, {"ep_size": 2}, wrap=with_lora),
    *(
        Case(
            f"LoRA on {name}",
            4 if kind == "fp8" else 2,
            {"ep_size": 2, "experts_dtype": kind, "experts_double_quant": "nested" in name},
            model=SIZES[kind],
            wrap=with_lora,
        )
        for name, kind in (("nf4", "nf4"), ("nf4, nested", "nf4"), ("fp8", "fp8"))
    ),
]


def checks() -> list[Any]:
    return [
        Check(case.name, case.world, partial(_run, case), slow=case.slow).as_parameter()
        for case in CASES
    ]


def _made(case: Case, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    build = partial(tiny_of, case.model_type) if case.model_type else tiny
    model: nn.Module = build(seed=seed, **case.model)
    if case.wrap:
        torch.manual_seed(seed)
        model = case.wrap(model)
    if case.checkpointing:
        parity.checkpointing(model, use_reentrant=False)
    apply_ep_fsdp2(model, **case.config)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return model, case.optimizer(trained)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> Tensor:
    rank = data_parallel_rank(model)
    optimizer.zero_grad()
    loss = model(**batch(model, 2, 8 + 4 * (rank % 2), seed=10 * number + rank)).loss
    loss.backward()
    optimizer.step()
    if patched_state(model).config.bias_update_rate is not None:
        update_router_bias(model)
    return loss.detach()


def _numbers(model: nn.Module, optimizer: Any) -> Numbers:
    """Everything by name, whole and in hub order: parameters, gradients, moments."""
    with experts_in_hub_order(model, optimizer):
        return _as_they_lie(model, optimizer)


def _as_they_lie(model: nn.Module, optimizer: Any) -> Numbers:
    found: Numbers = {}
    for name, parameter in model.named_parameters():
        found[name] = parameter.detach()
        if parameter.grad is not None:
            found[f"grad {name}"] = parameter.grad
        for key, value in optimizer.state.get(parameter, {}).items():
            found[f"{key} {name}"] = value
    found |= dict(persistent_buffers(model))
    return {name: full_tensor(value).clone() for name, value in found.items()}


def _close(where: str, got: Numbers, want: Numbers) -> None:
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        if tensor.dtype.itemsize > 1:
            assert_close(f"{where}: {name}", got[name], tensor, FP64_MODEL)
        else:
            assert torch.equal(got[name], tensor), name


def _random_load(model: nn.Module, seed: int) -> ExpertLoad:
    state = patched_state(model)
    chance, experts = random.Random(seed), state.num_experts
    counts = [[chance.randrange(1000) for _ in range(experts)] for _ in state.moe_layers]
    if seed == FIRST:
        # Uneven in hub order, however few they are.
        counts = [sorted(of_layer) for of_layer in counts]
    names = tuple(map(str, range(len(counts))))
    return ExpertLoad(torch.tensor(counts), names)


def _balance(model: nn.Module, optimizer: Any, seed: int) -> Tensor:
    """Move experts by a load that is drawn, at FIRST of each layer; where they lie then, [L, E]."""
    load = _random_load(model, seed)
    reached = balance_experts(model, optimizer, load)
    assert reached.slots is not None
    hub_order = torch.arange(load.counts.shape[1])
    for slots in reached.slots:
        assert torch.equal(slots.sort().values, hub_order)
        assert seed != FIRST or not torch.equal(slots, hub_order)
    return reached.slots


def _run(case: Case, rank: int, world: int, folder: str) -> None:
    model, optimizer = _made(case, seed=rank)
    twin, of_twin = _made(case, seed=rank)
    losses = _step(model, optimizer, 0), _step(twin, of_twin, 0)
    assert torch.equal(*losses)

    before, base = _as_they_lie(model, optimizer), describe_base(model)
    slots = _balance(model, optimizer, FIRST)
    assert_equal(_numbers(model, optimizer), before)
    assert describe_base(model) == base
    _check_lies(model, optimizer, before, slots)

    for number in (1, 2):
        losses = _step(model, optimizer, number), _step(twin, of_twin, number)
        assert_close(f"loss of step {number}", *losses, FP64_MODEL)
        numbers = _numbers(model, optimizer)
        _close(f"step {number}", numbers, _numbers(twin, of_twin))
        _balance(model, optimizer, FIRST + number)
        assert_equal(_numbers(model, optimizer), numbers)
    _check_files(case, model, optimizer, twin, of_twin, Path(folder))
    _check_refusals(model, optimizer)


def _check_lies(model: nn.Module, optimizer: Any, before: Numbers, slots: Tensor) -> None:
    """Row s of what an experts module has is the expert whose slot is s, moments too."""
    layers = {
        stock_name(name): vars(module)[STATE].index
        for name, module in model.named_modules()
        if isinstance(vars(module).get(STATE), MoELayer)
    }
    compared = 0
    for name, tensor in _as_they_lie(model, optimizer).items():
        path = stock_name(name.rpartition(" ")[2])
        index = next((i for at, i in layers.items() if path.startswith(f"{at}.")), None)
        if index is None or tensor.ndim < 2:
            continue
        assert torch.equal(tensor[slots[index]], before[name]), name
        assert not torch.equal(tensor, before[name]), name
        compared += 1
    assert compared >= 2 * len(layers)


def _check_files(
    case: Case, model: nn.Module, optimizer: Any, twin: nn.Module, of_twin: Any, folder: Path
) -> None:
    """A checkpoint of either goes on in the other, bit by bit; what is published is the same."""
    here = _numbers(model, optimizer)
    save_checkpoint(folder / "moved", model, optimizer)
    assert_equal(_numbers(model, optimizer), here)
    load_checkpoint(folder / "moved", twin, of_twin)
    assert_equal(_without_grads(_as_they_lie(twin, of_twin)), _without_grads(here))
    save_checkpoint(folder / "stayed", twin, of_twin, asynchronous=True).wait()
    _check_same_files(folder / "moved", folder / "stayed")

    _step(twin, of_twin, 3)
    later = _as_they_lie(twin, of_twin)
    save_checkpoint(folder / "later", twin, of_twin)
    placements = [layer.placement for layer in _layers(model)]
    # An optimizer without a state yet: what it is given moves as well.
    optimizer.state.clear()
    load_checkpoint(folder / "later", model, optimizer)
    assert_equal(_without_grads(_numbers(model, optimizer)), _without_grads(later))
    after = [layer.placement for layer in _layers(model)]
    assert all(torch.equal(a, b) for a, b in zip(placements, after, strict=True))
    _close("resumed", {"": _step(model, optimizer, 4)}, {"": _step(twin, of_twin, 4)})

    load_checkpoint(folder / "later", model, optimizer)
    load_checkpoint(folder / "later", twin, of_twin)
    # An error on the way leaves experts where they were.
    here = _as_they_lie(model, optimizer)
    with pytest.raises(ValueError, match="complete checkpoint"):
        save_checkpoint(folder / "later", model, optimizer)
    assert_equal(_as_they_lie(model, optimizer), here)
    if case.wrap is None:
        for name, one in (("a", model), ("b", twin)):
            save_pretrained(one, folder / name)
        assert_equal(read_all(folder / "a"), read_all(folder / "b"))
    else:
        save_pretrained(model, folder / "a")
        save_pretrained(twin, folder / "b")
        _check_same_files(folder / "a", folder / "b")
    if case.config.get("experts_dtype") is None:
        merged = {"merge_adapters": case.wrap is not None}
        for size in (2**30, 2**12):
            tensors = (dict(hub_tensors(one, max_bytes=size, **merged)) for one in (model, twin))
            assert_equal(*tensors)


def _without_grads(numbers: Numbers) -> Numbers:
    return {name: tensor for name, tensor in numbers.items() if not name.startswith("grad ")}


def _layers(model: nn.Module) -> list[MoELayer]:
    found = (vars(module).get(STATE) for module in model.modules())
    return [layer for layer in found if isinstance(layer, MoELayer)]


def _check_same_files(one: Path, other: Path) -> None:
    """The same names; the same tensors and descriptions of them."""
    names, others = (
        sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.*"))
        for folder in (one, other)
    )
    assert names == others
    for name in names:
        if name.endswith(".safetensors"):
            assert_equal(load_file(one / name), load_file(other / name))
        elif name in ("state.json", "quantised_base.json"):
            assert json.loads((one / name).read_text()) == json.loads((other / name).read_text())
    assert any(name.endswith(".safetensors") for name in names), names


def _check_refusals(model: nn.Module, optimizer: Any) -> None:
    """State dicts of code that does not know: an error, not experts in another order."""
    with experts_in_hub_order(model, optimizer):
        whole = model.state_dict()
    for call in (
        model.state_dict,
        optimizer.state_dict,
        partial(model.load_state_dict, whole),
        partial(optimizer.load_state_dict, {}),
    ):
        with pytest.raises(
            ValueError, match=r"moved experts of this model.*`with experts_in_hub_order\("
        ):
            call()
    others = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1)
    with pytest.raises(ValueError, match=r"is trained, but is not a parameter of this"):
        balance_experts(model, others, _random_load(model, 5))
    short = ExpertLoad(torch.ones(1, 4, dtype=torch.int64), ("a",))
    with pytest.raises(ValueError, match=r"load has 1 layers of 4 experts, and this model has \d"):
        balance_experts(model, optimizer, short)
    odd = _random_load(model, 6 + dist.get_rank())
    with pytest.raises(ValueError, match="different values of load"):
        balance_experts(model, optimizer, odd)


def _skewed(rank: int, world: int) -> None:
    """Three of four choices go to the first rank's experts: 1.15 of the mean behind one balance."""
    model = tiny(seed=rank, num_experts=EXPERTS, num_experts_per_tok=TOP_K)
    apply_ep_fsdp2(model, ep_size=world)
    optimizer = AdamW(model.parameters())
    _skewed_step(model, rank)
    load = expert_load(model)
    assert load.rank_max_over_mean.min() > 2.8, load
    optimizer.zero_grad()
    with _sent_bytes() as sent:
        reached = balance_experts(model, optimizer, load)
    assert sum(sent) == _bytes_that_leave(model, reached.slots, rank, world) > 0
    assert reached.rank_max_over_mean.max() <= 1.15, reached
    assert expert_load(model).counts.sum() == 0
    losses = _skewed_step(model, rank)
    measured = expert_load(model)
    assert torch.equal(measured.counts, load.counts)
    assert torch.equal(measured.rank_max_over_mean, reached.rank_max_over_mean)
    # What arrives here, counted where rows are.
    stock = tiny(seed=0, num_experts=EXPERTS, num_experts_per_tok=TOP_K)
    assert_close("loss", losses, _skewed_step(stock, rank), FP64_MODEL)
    for other in range(world):
        if other != rank:
            _skewed_step(stock, other)
    with experts_in_hub_order(model, optimizer):
        for name, parameter in stock.named_parameters():
            got = full_tensor(model.get_parameter(name).grad)
            assert_close(name, got, parameter.grad / world, FP64_MODEL)
    assert balance_experts(model, optimizer, measured, threshold=1.15).slots is not None
    assert torch.equal(expert_load(model).slots, reached.slots), "an even load moves nothing"


@contextmanager
def _sent_bytes() -> Iterator[list[int]]:
    """Return the bytes that this rank sends while experts move."""
    sent: list[int] = []

    def start(received: Tensor, rows: Tensor, **options: Any) -> Any:
        own = options["send_counts"][dist.get_rank(options["group"])]
        sent.append((len(rows) - own) * rows.shape[1])
        return start_all_to_all(received, rows, **options)

    with mock.patch("hf_moe_ep.placement.move.start_all_to_all", start):
        yield sent


def _bytes_that_leave(model: nn.Module, slots: Tensor, rank: int, world: int) -> int:
    """By hand, from hub order and without moments: experts of this rank that others own now."""
    each = sum(
        parameter.numel() // EXPERTS * parameter.element_size()
        for name, parameter in model.named_parameters()
        if name.startswith("model.layers.0.mlp.experts.")
    )
    local = slots.shape[1] // world
    mine = slots[:, rank * local : (rank + 1) * local]
    return int((mine // local != rank).sum()) * each


EXPERTS, TOP_K = 32, 4


def _skewed_step(model: nn.Module, rank: int) -> Tensor:
    """Forward and backward of 2 x 64 tokens whose choices are drawn, 3 of 4 among the first 8."""
    weights = torch.ones(EXPERTS)
    weights[:8] = 11
    drawn = torch.Generator().manual_seed(rank)
    ids = torch.multinomial(weights.expand(2 * 64 * 2, -1), TOP_K, generator=drawn)
    with forced_topk(EXPERTS, ids.view(2, 64, 2, TOP_K)):
        loss = model(**batch(model, 2, 64, seed=rank, ignore=0.0)).loss
    loss.backward()
    return loss.detach()


@pytest.mark.parametrize("claim", on_ranks(4, _skewed, slow=True))
def test_a_skewed_router_ends_even(found: Found, claim: Check) -> None:
    """On 4 ranks, with the loss and gradients of a stock model that chooses the same experts."""
    found.raise_if_failed(claim)


def _plain() -> tuple[nn.Module, torch.optim.Optimizer]:
    return _made(Case("", 2, {"ep_size": 2}), seed=0)


def micro_batches_that_wait_are_an_error(rank: int, world: int) -> None:
    """Gathered gradients, in the dtype that they are reduced in: of experts where they lie now."""
    model, optimizer = _plain()
    model.set_requires_gradient_sync(False)
    model(**batch(model, 2, 8, seed=rank)).loss.backward()
    with pytest.raises(ValueError, match="wait for the last micro-batch; call it"):
        _balance(model, optimizer, FIRST)
    model.set_requires_gradient_sync(True)
    model(**batch(model, 2, 8, seed=rank)).loss.backward()
    here = _numbers(model, optimizer)
    _balance(model, optimizer, FIRST)
    assert_equal(_numbers(model, optimizer), here)


def an_optimizer_that_is_listed_twice_moves_once(rank: int, world: int) -> None:
    model, optimizer = _plain()
    _step(model, optimizer, 0)
    here = _numbers(model, optimizer)
    balance_experts(model, [optimizer, optimizer], _random_load(model, FIRST))
    assert_equal(_numbers(model, optimizer), here)


def ranks_with_other_optimizers_are_told(rank: int, world: int) -> None:
    """One sent nothing of moments that the other waited for, or took weights for them."""
    model, optimizer = _plain()
    _step(model, optimizer, 0)
    mine, load = optimizer if rank else None, _random_load(model, FIRST)
    with pytest.raises(ValueError, match=r"different values of optimizer: rank 0 with '4 grad \("):
        balance_experts(model, mine, load)
    _balance(model, optimizer, FIRST)
    here = _as_they_lie(model, optimizer)
    with (
        pytest.raises(ValueError, match="experts_in_hub_order with different values of"),
        experts_in_hub_order(model, mine),
    ):
        pass
    assert_equal(_as_they_lie(model, optimizer), here)


def an_optimizer_of_moved_experts_gives_no_state_dict(rank: int, world: int) -> None:
    model, _ = _plain()
    balance_experts(model, None, _random_load(model, FIRST))
    optimizer = AdamW(model.parameters())
    _step(model, optimizer, 0)
    with pytest.raises(ValueError, match=r"state dict of AdamW would have"):
        optimizer.state_dict()
    with experts_in_hub_order(model, optimizer):
        optimizer.state_dict()


def moments_that_stayed_behind_are_not_saved(rank: int, world: int, folder: str) -> None:
    model, optimizer = _plain()
    _step(model, optimizer, 0)
    _balance(model, optimizer, FIRST)
    here = _as_they_lie(model, optimizer)
    for save in (optimizer.state_dict, partial(save_checkpoint, folder, model, optimizer)):
        with (
            pytest.raises(ValueError, match=r"the state of AdamW is not: write experts_in"),
            experts_in_hub_order(model),
        ):
            save()
    assert_equal(_as_they_lie(model, optimizer), here)
    with experts_in_hub_order(model, optimizer):
        optimizer.state_dict()
        save_checkpoint(folder, model, optimizer)


def tensors_on_their_way_to_an_engine_do_not_change_owners(rank: int, world: int) -> None:
    model, optimizer = _plain()
    tensors = hub_tensors(model, max_bytes=2**12)
    next(tensors)
    _balance(model, optimizer, FIRST)
    with pytest.raises(RuntimeError, match="has moved experts while hub_tensors sent them"):
        next(tensors)


def what_is_no_load_threshold_or_optimizer_is_named(rank: int, world: int) -> None:
    """On the other rank too, where one alone was given it."""
    model, optimizer = _plain()
    load = _random_load(model, FIRST)
    for threshold in (float("nan"), 0.5, "1.2", True):
        given = threshold if rank else 1.2
        with pytest.raises(ValueError, match=r"so 1 or more, got .*; try 1.2"):
            balance_experts(model, optimizer, load, threshold=given)
    with pytest.raises(ValueError, match=r"load is a Tensor; pass expert_load\(model\)"):
        balance_experts(model, optimizer, load if rank else load.counts)
    with pytest.raises(ValueError, match=r"optimizer is a ConstantLR, which has no parameters"):
        balance_experts(model, torch.optim.lr_scheduler.ConstantLR(optimizer), load)


REFUSED: list[Any] = [
    *on_ranks(2, micro_batches_that_wait_are_an_error),
    *on_ranks(
        2,
        an_optimizer_that_is_listed_twice_moves_once,
        ranks_with_other_optimizers_are_told,
        an_optimizer_of_moved_experts_gives_no_state_dict,
        moments_that_stayed_behind_are_not_saved,
        tensors_on_their_way_to_an_engine_do_not_change_owners,
        what_is_no_load_threshold_or_optimizer_is_named,
        slow=True,
    ),
]


@pytest.mark.parametrize("claim", REFUSED)
def test_what_would_mix_experts_up(found: Found, claim: Check) -> None:
    """On 2 ranks with ep 2, both ranks raise, or no expert is mixed up."""
    found.raise_if_failed(claim)


@pytest.mark.parametrize("claim", checks())
def test_moved_experts_change_nothing_but_where_they_lie(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)
