"""N ranks of a patched model against stock in one process: the cases, and the code each rank runs.

Every rank builds its model from another seed, so each case also shows that initial values come
from rank 0. The reference is the stock model of rank 0's seed on all ranks' batches, one after
the other with one global token count: the concatenated batch without padding it to one length.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import OffloadPolicy
from torch.distributed.tensor import DTensor

from hf_moe_ep import (
    apply_ep_fsdp2,
    clip_grad_norm_,
    data_parallel_rank,
    data_parallel_size,
    global_token_count,
    patch,
)
from hf_moe_ep.lora.factors import pack_factors
from hf_moe_ep.sharding.options import ShardOptions, default_policy
from hf_moe_ep.sharding.shard import shard_model
from hf_moe_ep.state import STATE, ModelState
from support.checks import Check
from support.close import FP32_INSIDE, FP64_MODEL, assert_close
from support.quantised import in_place_of_bytes
from support.tiny_models import batch, tiny

STEPS = 3
Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """One layout, model and data.

    `micro_batches(model, rank, world, step)` are the batches of one optimizer step on one rank (of
    those with different data: with `sp` there are fewer); `freeze` names modules without gradients;
    `wrap` is done to the reference too, each under its own seed; `change_reference` to it alone.
    `budget` is that of fp64, or FP32_INSIDE where the number of ranks is no power of two, for the
    loss factor then rounds in fp32; `needs` is what the versions at hand lack for it, if they do.
    `device` names where everything lies; none leaves it to `apply_ep_fsdp2`.
    """

    name: str
    world: int
    ep: int = 1
    replicate: int = 1
    sp: int = 1
    model: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    micro_batches: Callable[[nn.Module, int, int, int], list[Batch]] | None = None
    prepare: Callable[[nn.Module], None] | None = None
    wrap: Callable[[nn.Module], nn.Module] | None = None
    change_reference: Callable[[nn.Module], None] | None = None
    freeze: tuple[str, ...] = ()
    backward: Callable[[nn.Module, list[Batch], Tensor, int], None] | None = None
    budget: float = FP64_MODEL
    needs: str = ""
    device: str = ""

    def with_(self, **changes: Any) -> "Case":
        return replace(self, **changes)

    def with_config(self, **config: Any) -> "Case":
        return replace(self, config=config)


def on_ranks(cases: list[Case], **options: Any) -> list[Any]:
    """Parameters for `parametrize`: each case is a test, those of one world share a spawn."""
    return [
        Check(
            case.name, case.world, partial(run_case, case), skip=case.needs, **options
        ).as_parameter()
        for case in cases
    ]


def run_case(case: Case, rank: int, world: int) -> None:
    device = _device_of(case)
    model = tiny(seed=rank, **case.model).to(device)
    reference = tiny(seed=0, **case.model).to(device)
    if case.wrap:
        torch.manual_seed(rank)
        model = case.wrap(model)
        torch.manual_seed(0)
        reference = case.wrap(reference)
    if case.change_reference:
        case.change_reference(reference)
    if case.prepare:
        case.prepare(model)
    for part in case.freeze:
        model.get_submodule(part).requires_grad_(False)
        reference.get_submodule(part).requires_grad_(False)
    sizes = {"ep_size": case.ep, "dp_replicate_size": case.replicate, "sp_size": case.sp}
    if case.device:
        _shard_over(device, model, **sizes, **case.config)
    else:
        apply_ep_fsdp2(model, **sizes, **case.config)
    rank, world = data_parallel_rank(model), data_parallel_size(model)
    assert (rank, world) == (dist.get_rank() // case.sp, dist.get_world_size() // case.sp)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    wanted = torch.optim.AdamW(reference.parameters(), lr=1e-3, foreach=False)
    make = case.micro_batches or uneven_batches
    backward = case.backward or plain_backward
    for step in range(STEPS):
        everyone = [
            [_on(device, micro) for micro in make(reference, other, world, step)]
            for other in range(world)
        ]
        num_tokens = global_token_count(model, [b["labels"] for b in everyone[rank]])
        losses = [b["labels"][:, 1:].ne(-100).sum() for batches in everyone for b in batches]
        assert num_tokens == sum(losses), f"{case.name}: {num_tokens} tokens, want {sum(losses)}"
        _compare_outputs(
            f"{case.name} step {step}", model, reference, everyone[rank][0], case.budget
        )
        optimizer.zero_grad()
        backward(model, everyone[rank], num_tokens, world)
        wanted.zero_grad()
        for batches in everyone:
            for micro in batches:
                reference(**micro, num_items_in_batch=num_tokens).loss.backward()
        _compare_grads(f"{case.name} step {step}", model, reference, case.budget)
        got = clip_grad_norm_(model, 0.5)
        want = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        assert_close(f"{case.name} step {step} norm", got, want, case.budget)
        optimizer.step()
        wanted.step()
    # AdamW divides each gradient by its own size, so what is a rounding beside the largest of a
    # tensor moves one of a tenth by as much as ten roundings.
    budget = FP64_MODEL if case.budget == FP64_MODEL else 10 * case.budget
    for name, (got, want) in _pairs(model, reference, lambda p: p).items():
        assert_close(f"{case.name} after {STEPS} steps: {name}", got, want, budget)


def _device_of(case: Case) -> torch.device:
    """The one GPU that all ranks share, or the CPU."""
    if case.device == "cuda":
        torch.cuda.set_device(0)
        return torch.device("cuda", 0)
    return torch.device("cpu")


def _on(device: torch.device, micro: Batch) -> Batch:
    """Move what is a tensor: `use_cache` and its like are none."""
    return {
        name: value.to(device) if isinstance(value, Tensor) else value
        for name, value in micro.items()
    }


def _shard_over(device: torch.device, model: nn.Module, **config: Any) -> None:
    """Shard as `apply_ep_fsdp2` does, which takes the CPU where the group is gloo's."""
    patch(model, **config)
    state: ModelState = getattr(model, STATE)
    policy, fp32_masters = default_policy(model)
    options = ShardOptions(
        policy, OffloadPolicy(), fp32_masters, state.config.reshard_after_forward
    )
    shard_model(model, state, options, device)


def assert_same_gradients(
    where: str, model: nn.Module, stock: nn.Module, budget: Callable[[str], float]
) -> list[float]:
    """Compare every gradient at `budget(name)`; return the errors. Both have one, or neither."""
    ours, errors = dict(model.named_parameters()), []
    for key, parameter in stock.named_parameters():
        grad, want = full_tensor(ours[key].grad), parameter.grad
        assert (grad is None) == (want is None), f"{where}: one gradient of {key}"
        if want is not None:
            errors.append(assert_close(f"{where}: grad of {key}", grad, want, budget(key)))
    return errors


def checkpointing(model: nn.Module, use_reentrant: bool) -> None:
    enable = getattr(model, "activation_checkpointing_enable", None)
    (enable or model.gradient_checkpointing_enable)({"use_reentrant": use_reentrant})


def plain_backward(model: nn.Module, batches: list[Batch], num_tokens: Tensor, world: int) -> None:
    """The loop a user would write: sync only on the last micro-batch."""
    for index, micro in enumerate(batches):
        model.set_requires_gradient_sync(index == len(batches) - 1)
        loss = model(**micro, num_items_in_batch=num_tokens).loss
        (loss * world).backward()


def two_forwards_backward(
    model: nn.Module, batches: list[Batch], num_tokens: Tensor, world: int
) -> None:
    """Two forwards, a no_grad forward between, then one backward over both."""
    losses = []
    for micro in batches:
        losses.append(model(**micro, num_items_in_batch=num_tokens).loss)
        with torch.no_grad():
            model(**micro)
    (sum(losses) * world).backward()


def uneven_batches(model: nn.Module, rank: int, world: int, step: int) -> list[Batch]:
    """Another number of rows, length and share of ignored labels on every rank."""
    return [batch(model, 1 + rank % 3, 5 + 3 * rank + step, seed=100 * step + rank, ignore=0.3)]


def even_batches(model: nn.Module, rank: int, world: int, step: int) -> list[Batch]:
    return [batch(model, 2, 8, seed=100 * step + rank)]


def three_micro_batches(model: nn.Module, rank: int, world: int, step: int) -> list[Batch]:
    return [
        batch(
            model, 1 + (rank + micro) % 2, 4 + rank + 2 * micro, seed=99 * step + 9 * rank + micro
        )
        for micro in range(3)
    ]


def one_rank_without_labels(model: nn.Module, rank: int, world: int, step: int) -> list[Batch]:
    (micro,) = uneven_batches(model, rank, world, step)
    if rank == world - 1:
        micro["labels"] = torch.full_like(micro["labels"], -100)
    return [micro]


def one_token_everywhere(model: nn.Module, rank: int, world: int, step: int) -> list[Batch]:
    """Rank 1 repeats one token in rows of length 2, so few experts get all of its tokens."""
    (micro,) = uneven_batches(model, rank, world, step)
    if rank == 1:
        micro = {name: value[:, :2] for name, value in micro.items()}
        micro["input_ids"] = torch.full_like(micro["input_ids"], 7)
        micro["labels"] = torch.full_like(micro["labels"], 7)
    return [micro]


def full_tensor(tensor: Tensor | None) -> Tensor | None:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def whole_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Copies, gathered on every rank."""
    return {n: full_tensor(p.detach()).clone() for n, p in model.named_parameters()}


def whole_state(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """Copies of the parameters and of what the optimizer keeps for each, gathered."""
    return whole_parameters(model) | {
        f"{name}, {key}": full_tensor(value).clone()
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state[parameter].items()
    }


def _pairs(
    model: nn.Module, reference: nn.Module, pick: Callable[[Tensor], Tensor]
) -> dict[str, tuple[Tensor, Tensor]]:
    wanted = dict(reference.named_parameters())
    found = {name: full_tensor(pick(p)) for name, p in model.named_parameters()}
    found = in_place_of_bytes(model, found)
    assert found.keys() == wanted.keys()
    found |= pack_factors(model, {name: x for name, x in found.items() if x is not None})
    return {name: (tensor, pick(wanted[name])) for name, tensor in found.items()}


def _compare_outputs(
    where: str, model: nn.Module, reference: nn.Module, micro: Batch, budget: float
) -> None:
    unlabelled = {name: value for name, value in micro.items() if name != "labels"}
    with torch.no_grad():
        got, want = model(**micro), reference(**micro)
        got.logits = model(**{**unlabelled, "use_cache": False}).logits
    assert_close(f"{where}: logits", got.logits, want.logits, budget)
    if micro["labels"][:, 1:].ne(-100).any():
        logits, labels = got.logits[:, :-1].flatten(0, 1), micro["labels"][:, 1:].flatten()
        truth = nn.functional.cross_entropy(logits, labels)
        assert_close(f"{where}: loss", got.loss, truth, FP32_INSIDE)


def _compare_grads(where: str, model: nn.Module, reference: nn.Module, budget: float) -> None:
    for name, (got, want) in _pairs(model, reference, lambda p: p.grad).items():
        assert (got is None) == (want is None), f"{where}: grad of {name}: {got}, want {want}"
        if want is not None:
            assert_close(f"{where}: grad of {name}", got, want, budget)
