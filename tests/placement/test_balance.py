"""`balance_experts` changes neither the numbers, nor the saved files, nor a resumed run.

Two models start with the same values. `model` is balanced between its steps by random loads, so
that experts of all ranks move. The experts of `twin` never move. A move keeps every bit. After a
step, the sums over an expert's tokens have another order, so the tolerance is 1e-10.
"""

import json
import random
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from support import parity
from support.adapters import with_lora
from support.architectures import batch as inputs_of
from support.architectures import loss_of
from support.architectures import tiny as tiny_of
from support.checks import Check, Found, on_ranks
from support.close import FP64_MODEL, assert_close
from support.forced import force_topk
from support.host_numbers import NoHostNumbers
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
    describe,
    expert_load,
    experts_in_hub_order,
    hub_tensors,
    load_checkpoint,
    save_checkpoint,
    save_pretrained,
    update_router_bias,
)
from hf_moe_ep.checkpoints.training.base import describe_base
from hf_moe_ep.moe.layer import _replace_ids_by_slots
from hf_moe_ep.ranks.collectives import start_all_to_all
from hf_moe_ep.state import STATE, MoELayer, patched_state
from hf_moe_ep.upstream.models import iterate_persistent_buffers
from hf_moe_ep.upstream.module_names import get_stock_name

AdamW = partial(torch.optim.AdamW, lr=1e-3)
FIRST_SEED = 1
Numbers = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """One layout and model (Qwen3-MoE if `model_type` is empty); `wrap` adds adapters."""

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
    Case("ep 2 x etp 2", 4, {"ep_size": 2, "etp_size": 2}),
    Case("LoRA, ep 2 x etp 2", 4, {"ep_size": 2, "etp_size": 2}, wrap=with_lora),
    Case("two replicas", 4, {"ep_size": 2, "dp_replicate_size": 2}),
    Case("sequence parallel", 4, {"ep_size": 2, "sp_size": 2}),
    Case("biases of experts, transposed", 2, {"ep_size": 2}, "gpt_oss"),
    Case("two experts modules in a layer", 2, {"ep_size": 2}, "ernie4_5_vl_moe"),
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


def _make_checks() -> list[Any]:
    return [
        Check(case.name, case.world, partial(_run, case), slow=case.slow).as_parameter()
        for case in CASES
    ]


def _build(case: Case, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
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


def _run_step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> Tensor:
    rank = data_parallel_rank(model)
    optimizer.zero_grad()
    loss = model(**batch(model, 2, 8 + 4 * (rank % 2), seed=10 * number + rank)).loss
    loss.backward()
    optimizer.step()
    if patched_state(model).config.bias_update_rate is not None:
        update_router_bias(model)
    return loss.detach()


def _gather_in_hub_order(model: nn.Module, optimizer: Any) -> Numbers:
    """Gather like _gather_in_slot_order, but with expert e in row e of each expert tensor."""
    with experts_in_hub_order(model, optimizer):
        return _gather_in_slot_order(model, optimizer)


def _gather_in_slot_order(model: nn.Module, optimizer: Any) -> Numbers:
    """Gather parameters, gradients, moments and buffers, with each expert in its slot."""
    numbers: Numbers = {}
    for name, parameter in model.named_parameters():
        numbers[name] = parameter.detach()
        if parameter.grad is not None:
            numbers[f"grad {name}"] = parameter.grad
        for key, value in optimizer.state.get(parameter, {}).items():
            numbers[f"{key} {name}"] = value
    numbers |= dict(iterate_persistent_buffers(model))
    return {name: full_tensor(value).clone() for name, value in numbers.items()}


def _check_close(where: str, got: Numbers, want: Numbers) -> None:
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        if tensor.dtype.itemsize > 1:
            assert_close(f"{where}: {name}", got[name], tensor, FP64_MODEL)
        else:
            assert torch.equal(got[name], tensor), name


def _make_random_load(model: nn.Module, seed: int) -> ExpertLoad:
    state = patched_state(model)
    generator, experts = random.Random(seed), state.num_experts
    counts = [[generator.randrange(1000) for _ in range(experts)] for _ in state.moe_layers]
    if seed == FIRST_SEED:
        # Sorted counts are uneven over the ranks in hub order, so every layer has to move experts.
        counts = [sorted(layer_counts) for layer_counts in counts]
    names = tuple(map(str, range(len(counts))))
    return ExpertLoad(torch.tensor(counts), names)


def _balance_by_random_load(model: nn.Module, optimizer: Any, seed: int) -> Tensor:
    """Move experts by a random load, and return the new slots [L, E]. FIRST_SEED moves all."""
    load = _make_random_load(model, seed)
    balanced = balance_experts(model, optimizer, load)
    assert balanced.slots is not None
    hub_order = torch.arange(load.counts.shape[1])
    for slots in balanced.slots:
        assert torch.equal(slots.sort().values, hub_order)
        assert seed != FIRST_SEED or not torch.equal(slots, hub_order)
    return balanced.slots


def _run(case: Case, rank: int, world: int, folder: str) -> None:
    model, optimizer = _build(case, seed=rank)
    twin, twin_optimizer = _build(case, seed=rank)
    losses = _run_step(model, optimizer, 0), _run_step(twin, twin_optimizer, 0)
    assert torch.equal(*losses)

    before, base = _gather_in_slot_order(model, optimizer), describe_base(model)
    slots = _balance_by_random_load(model, optimizer, FIRST_SEED)
    assert_equal(_gather_in_hub_order(model, optimizer), before)
    assert describe_base(model) == base
    assert re.search(r"this rank: .*slots \d", describe(model))
    _check_slots(model, optimizer, before, slots)

    for number in (1, 2):
        losses = _run_step(model, optimizer, number), _run_step(twin, twin_optimizer, number)
        assert_close(f"loss of step {number}", *losses, FP64_MODEL)
        numbers = _gather_in_hub_order(model, optimizer)
        _check_close(f"step {number}", numbers, _gather_in_hub_order(twin, twin_optimizer))
        _balance_by_random_load(model, optimizer, FIRST_SEED + number)
        assert_equal(_gather_in_hub_order(model, optimizer), numbers)
    _check_files(case, model, optimizer, twin, twin_optimizer, Path(folder))
    _check_refusals(model, optimizer)


def _check_slots(model: nn.Module, optimizer: Any, before: Numbers, slots: Tensor) -> None:
    """Check that expert e of `before` (in hub order) is row slots[e] of every expert tensor."""
    layers = {
        get_stock_name(name): vars(module)[STATE].index
        for name, module in model.named_modules()
        if isinstance(vars(module).get(STATE), MoELayer)
    }
    compared = 0
    for name, tensor in _gather_in_slot_order(model, optimizer).items():
        path = get_stock_name(name.rpartition(" ")[2])
        index = next((i for layer, i in layers.items() if path.startswith(f"{layer}.")), None)
        if index is None or tensor.ndim < 2:
            continue
        assert torch.equal(tensor[slots[index]], before[name]), name
        assert not torch.equal(tensor, before[name]), name
        compared += 1
    assert compared >= 2 * len(layers)


def _check_files(
    case: Case, model: nn.Module, optimizer: Any, twin: nn.Module, twin_optimizer: Any, folder: Path
) -> None:
    """Check that each model resumes from the other's checkpoint, and that both save equal files."""
    before = _gather_in_hub_order(model, optimizer)
    save_checkpoint(folder / "moved", model, optimizer)
    assert_equal(_gather_in_hub_order(model, optimizer), before)
    load_checkpoint(folder / "moved", twin, twin_optimizer)
    assert_equal(_remove_grads(_gather_in_slot_order(twin, twin_optimizer)), _remove_grads(before))
    save_checkpoint(folder / "stayed", twin, twin_optimizer, asynchronous=True).wait()
    _check_same_files(folder / "moved", folder / "stayed")

    _run_step(twin, twin_optimizer, 3)
    later = _gather_in_slot_order(twin, twin_optimizer)
    save_checkpoint(folder / "later", twin, twin_optimizer)
    slots_of_layers = [layer.slots_E for layer in _list_layers(model)]
    optimizer.state.clear()  # loading into an empty optimizer has to move the moments as well
    load_checkpoint(folder / "later", model, optimizer)
    assert_equal(_remove_grads(_gather_in_hub_order(model, optimizer)), _remove_grads(later))
    resumed = [layer.slots_E for layer in _list_layers(model)]
    assert all(torch.equal(a, b) for a, b in zip(slots_of_layers, resumed, strict=True))
    _check_close(
        "resumed", {"": _run_step(model, optimizer, 4)}, {"": _run_step(twin, twin_optimizer, 4)}
    )

    load_checkpoint(folder / "later", model, optimizer)
    load_checkpoint(folder / "later", twin, twin_optimizer)
    # A save that fails does not move experts.
    before = _gather_in_slot_order(model, optimizer)
    with pytest.raises(ValueError, match="complete checkpoint"):
        save_checkpoint(folder / "later", model, optimizer)
    assert_equal(_gather_in_slot_order(model, optimizer), before)
    if case.wrap is None:
        for name, saved in (("a", model), ("b", twin)):
            save_pretrained(saved, folder / name)
        assert_equal(read_all(folder / "a"), read_all(folder / "b"))
    else:
        save_pretrained(model, folder / "a")
        save_pretrained(twin, folder / "b")
        _check_same_files(folder / "a", folder / "b")
    if case.config.get("experts_dtype") is None:
        merged = {"merge_adapters": case.wrap is not None}
        for size in (2**30, 2**12):
            tensors = (dict(hub_tensors(m, max_bytes=size, **merged)) for m in (model, twin))
            assert_equal(*tensors)


def _remove_grads(numbers: Numbers) -> Numbers:
    return {name: tensor for name, tensor in numbers.items() if not name.startswith("grad ")}


def _list_layers(model: nn.Module) -> list[MoELayer]:
    states = (vars(module).get(STATE) for module in model.modules())
    return [layer for layer in states if isinstance(layer, MoELayer)]


def _check_same_files(first: Path, second: Path) -> None:
    """Compare the names of the files, their tensors and the JSON that describes them."""
    names, second_names = (
        sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.*"))
        for folder in (first, second)
    )
    assert names == second_names
    for name in names:
        if name.endswith(".safetensors"):
            assert_equal(load_file(first / name), load_file(second / name))
        elif name in ("state.json", "quantised_base.json"):
            assert json.loads((first / name).read_text()) == json.loads((second / name).read_text())
    assert any(name.endswith(".safetensors") for name in names), names


def _check_refusals(model: nn.Module, optimizer: Any) -> None:
    """Check that calls raise which would save or load moved experts in the wrong order."""
    with experts_in_hub_order(model, optimizer):
        state_dict = model.state_dict()
    for call in (
        model.state_dict,
        optimizer.state_dict,
        partial(model.load_state_dict, state_dict),
        partial(optimizer.load_state_dict, {}),
    ):
        with pytest.raises(
            ValueError, match=r"moved experts of this model.*`with experts_in_hub_order\("
        ):
            call()
    other_optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1)
    with pytest.raises(ValueError, match=r"is trained, but is not a parameter of this"):
        balance_experts(model, other_optimizer, _make_random_load(model, 5))
    wrong_load = ExpertLoad(torch.ones(1, 4, dtype=torch.int64), ("a",))
    with pytest.raises(ValueError, match=r"load has 1 layers of 4 experts, and this model has \d"):
        balance_experts(model, optimizer, wrong_load)
    load_of_this_rank = _make_random_load(model, 6 + dist.get_rank())
    with pytest.raises(ValueError, match="different values of load"):
        balance_experts(model, optimizer, load_of_this_rank)


def _even_a_skewed_load(rank: int, world: int) -> None:
    """3 of 4 choices are experts of rank 0. One balance lowers the maximum to 1.15 of the mean."""
    model = tiny(seed=rank, num_experts=EXPERTS, num_experts_per_tok=TOP_K)
    apply_ep_fsdp2(model, ep_size=world)
    optimizer = AdamW(model.parameters())
    _run_skewed_step(model, rank)
    load = expert_load(model)
    assert load.rank_max_over_mean.min() > 2.8, load
    optimizer.zero_grad()
    with _count_sent_bytes() as sent:
        balanced = balance_experts(model, optimizer, load)
    assert sum(sent) == _sum_expected_bytes(model, balanced.slots, rank, world) > 0
    assert balanced.rank_max_over_mean.max() <= 1.15, balanced
    assert expert_load(model).counts.sum() == 0
    losses = _run_skewed_step(model, rank)
    measured = expert_load(model)
    assert torch.equal(measured.counts, load.counts)
    assert torch.equal(measured.rank_max_over_mean, balanced.rank_max_over_mean)
    stock = tiny(seed=0, num_experts=EXPERTS, num_experts_per_tok=TOP_K)
    assert_close("loss", losses, _run_skewed_step(stock, rank), FP64_MODEL)
    for other in range(world):
        if other != rank:
            _run_skewed_step(stock, other)
    with experts_in_hub_order(model, optimizer):
        for name, parameter in stock.named_parameters():
            got = full_tensor(model.get_parameter(name).grad)
            assert_close(name, got, parameter.grad / world, FP64_MODEL)
    assert balance_experts(model, optimizer, measured, threshold=1.15).slots is not None
    assert torch.equal(expert_load(model).slots, balanced.slots), "an even load moves nothing"


@contextmanager
def _count_sent_bytes() -> Iterator[list[int]]:
    """Yield a list of the bytes that this rank sends to other ranks while experts move."""
    sent: list[int] = []

    def start(received: Tensor, rows: Tensor, **options: Any) -> Any:
        rows_to_itself = options["send_counts"][dist.get_rank(options["group"])]
        sent.append((len(rows) - rows_to_itself) * rows.shape[1])
        return start_all_to_all(received, rows, **options)

    with mock.patch("hf_moe_ep.placement.move.start_all_to_all", start):
        yield sent


def _sum_expected_bytes(model: nn.Module, slots: Tensor, rank: int, world: int) -> int:
    """Sum the bytes of experts that leave this rank, from hub order and without moments."""
    bytes_per_expert = sum(
        parameter.numel() // EXPERTS * parameter.element_size()
        for name, parameter in model.named_parameters()
        if name.startswith("model.layers.0.mlp.experts.")
    )
    local = slots.shape[1] // world
    slots_of_rank = slots[:, rank * local : (rank + 1) * local]
    return int((slots_of_rank // local != rank).sum()) * bytes_per_expert


EXPERTS, TOP_K = 32, 4


def _run_skewed_step(model: nn.Module, rank: int) -> Tensor:
    """Run 2 x 64 tokens forward and backward; about 3 of 4 random ids are among the first 8."""
    weights = torch.ones(EXPERTS)
    weights[:8] = 11
    generator = torch.Generator().manual_seed(rank)
    ids = torch.multinomial(weights.expand(2 * 64 * 2, -1), TOP_K, generator=generator)
    with force_topk(EXPERTS, ids.view(2, 64, 2, TOP_K)):
        loss = model(**batch(model, 2, 64, seed=rank, ignore=0.0)).loss
    loss.backward()
    return loss.detach()


def test_moved_experts_are_found_without_a_copy_of_numbers_to_the_device() -> None:
    """On a GPU such a copy waits for all earlier layers. The last id means "no expert"."""
    layer: Any = SimpleNamespace(slots_E=torch.tensor([2, 0, 1]), may_choose_no_expert=True)
    ids_TK = torch.tensor([[0, 3], [2, 1]], dtype=torch.int32)
    with NoHostNumbers():
        slots_TK = _replace_ids_by_slots(layer, ids_TK)
    assert slots_TK.dtype == torch.int32 and slots_TK.tolist() == [[2, 3], [1, 0]]


@pytest.mark.parametrize("claim", on_ranks(4, _even_a_skewed_load, slow=True))
def test_one_balance_evens_a_skewed_load(found: Found, claim: Check) -> None:
    """Loss and gradients of 4 ranks equal those of a stock model with the same routes."""
    found.raise_if_failed(claim)


def _build_plain() -> tuple[nn.Module, torch.optim.Optimizer]:
    return _build(Case("", 2, {"ep_size": 2}), seed=0)


def balancing_between_micro_batches_is_an_error(rank: int, world: int) -> None:
    """Between micro-batches FSDP2 holds unreduced gradients for the experts' old placement."""
    model, optimizer = _build_plain()
    model.set_requires_gradient_sync(False)
    model(**batch(model, 2, 8, seed=rank)).loss.backward()
    with pytest.raises(
        ValueError, match="has not reduced yet cannot move with the experts; call it"
    ):
        _balance_by_random_load(model, optimizer, FIRST_SEED)
    model.set_requires_gradient_sync(True)
    model(**batch(model, 2, 8, seed=rank)).loss.backward()
    before = _gather_in_hub_order(model, optimizer)
    _balance_by_random_load(model, optimizer, FIRST_SEED)
    assert_equal(_gather_in_hub_order(model, optimizer), before)


def an_optimizer_that_is_listed_twice_moves_once(rank: int, world: int) -> None:
    model, optimizer = _build_plain()
    _run_step(model, optimizer, 0)
    before = _gather_in_hub_order(model, optimizer)
    balance_experts(model, [optimizer, optimizer], _make_random_load(model, FIRST_SEED))
    assert_equal(_gather_in_hub_order(model, optimizer), before)


def ranks_with_different_optimizers_raise(rank: int, world: int) -> None:
    """A rank without optimizer would send no moments, while the other rank waits for them."""
    model, optimizer = _build_plain()
    _run_step(model, optimizer, 0)
    own_optimizer, load = optimizer if rank else None, _make_random_load(model, FIRST_SEED)
    with pytest.raises(ValueError, match=r"different values of optimizer: rank 0 with '4 grad \("):
        balance_experts(model, own_optimizer, load)
    _balance_by_random_load(model, optimizer, FIRST_SEED)
    before = _gather_in_slot_order(model, optimizer)
    with (
        pytest.raises(ValueError, match=r"experts_in_hub_order with different values of"),
        experts_in_hub_order(model, own_optimizer),
    ):
        pass
    assert_equal(_gather_in_slot_order(model, optimizer), before)


def an_optimizer_of_moved_experts_gives_no_state_dict(rank: int, world: int) -> None:
    model, _ = _build_plain()
    balance_experts(model, None, _make_random_load(model, FIRST_SEED))
    optimizer = AdamW(model.parameters())
    _run_step(model, optimizer, 0)
    with pytest.raises(ValueError, match=r"state dict of AdamW would have"):
        optimizer.state_dict()
    with experts_in_hub_order(model, optimizer):
        optimizer.state_dict()


def moments_that_are_not_in_hub_order_are_not_saved(rank: int, world: int, folder: str) -> None:
    model, optimizer = _build_plain()
    _run_step(model, optimizer, 0)
    _balance_by_random_load(model, optimizer, FIRST_SEED)
    before = _gather_in_slot_order(model, optimizer)
    for save in (optimizer.state_dict, partial(save_checkpoint, folder, model, optimizer)):
        with (
            pytest.raises(ValueError, match=r"not for the state of AdamW: write experts_in"),
            experts_in_hub_order(model),
        ):
            save()
    assert_equal(_gather_in_slot_order(model, optimizer), before)
    with experts_in_hub_order(model, optimizer):
        optimizer.state_dict()
        save_checkpoint(folder, model, optimizer)


def balancing_while_hub_tensors_sends_is_an_error(rank: int, world: int) -> None:
    model, optimizer = _build_plain()
    tensors = hub_tensors(model, max_bytes=2**12)
    next(tensors)
    _balance_by_random_load(model, optimizer, FIRST_SEED)
    with pytest.raises(RuntimeError, match="has moved experts since hub_tensors listed"):
        next(tensors)


def arguments_of_a_wrong_type_or_value_raise(rank: int, world: int) -> None:
    """Both ranks raise, even if only one of them received the wrong argument."""
    model, optimizer = _build_plain()
    load = _make_random_load(model, FIRST_SEED)
    for threshold in (float("nan"), 0.5, "1.2", True):
        own_threshold = threshold if rank else 1.2
        with pytest.raises(ValueError, match=r"so 1 or more, got .*; try 1.2"):
            balance_experts(model, optimizer, load, threshold=own_threshold)
    with pytest.raises(ValueError, match=r"load is a Tensor; pass expert_load\(model\)"):
        balance_experts(model, optimizer, load if rank else load.counts)
    with pytest.raises(ValueError, match=r"optimizer is a ConstantLR, which has no parameters"):
        balance_experts(model, torch.optim.lr_scheduler.ConstantLR(optimizer), load)


def _experts_modules_of_a_layer_move_separately(rank: int, world: int) -> None:
    """Layers of ERNIE-4.5-VL have two experts modules, each with its own order of experts."""
    model = tiny_of("ernie4_5_vl_moe", seed=0)
    inputs = inputs_of(model, 2, 8, seed=3 + rank)
    apply_ep_fsdp2(model, ep_size=world)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = _gather_in_slot_order(model, optimizer)
    loss = loss_of(model, inputs)
    _balance_by_random_load(model, optimizer, FIRST_SEED)
    assert_equal(_gather_in_hub_order(model, optimizer), before)
    assert_close("loss", loss_of(model, inputs), loss, FP64_MODEL)


REFUSED: list[Any] = [
    *on_ranks(2, balancing_between_micro_batches_is_an_error),
    *on_ranks(
        2,
        an_optimizer_that_is_listed_twice_moves_once,
        ranks_with_different_optimizers_raise,
        an_optimizer_of_moved_experts_gives_no_state_dict,
        moments_that_are_not_in_hub_order_are_not_saved,
        balancing_while_hub_tensors_sends_is_an_error,
        arguments_of_a_wrong_type_or_value_raise,
        slow=True,
    ),
]


@pytest.mark.parametrize("claim", REFUSED)
def test_misuse_never_mixes_experts_up(found: Found, claim: Check) -> None:
    """The checks run on 2 ranks with ep 2. If a call raises, it raises on both ranks."""
    found.raise_if_failed(claim)


@pytest.mark.parametrize("claim", on_ranks(2, _experts_modules_of_a_layer_move_separately))
def test_layers_may_have_several_experts_modules(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)


@pytest.mark.parametrize("claim", _make_checks())
def test_balancing_changes_only_the_placement_of_experts(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)
