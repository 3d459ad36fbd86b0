"""Compare N ranks of a patched model with a stock model in one process.

`on_ranks(cases)` makes a check of each `Case`, and `run_case` is the code that each rank runs.
Every rank builds its model from another seed, so each case also shows that initial values come from
rank 0. The reference is the stock model of rank 0's seed. It runs the batches of all ranks in turn,
with one global token count, which equals a run of the concatenated batch without its padding.
"""

from collections.abc import Callable
from contextlib import nullcontext
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
from hf_moe_ep.etp import map_ids_to_split_dims, restore_stock_shapes, view_in_stock_shape
from hf_moe_ep.lora.factors import pack_factors
from hf_moe_ep.sharding.options import ShardOptions, choose_default_policy
from hf_moe_ep.sharding.shard import shard_model
from hf_moe_ep.state import STATE, ModelState
from support.checks import PATIENT, Check
from support.close import FP32_INSIDE, FP64_MODEL, ROUNDING_ERROR, assert_close
from support.fp64 import FP64
from support.quantised import in_place_of_bytes
from support.tiny_models import batch, tiny

STEPS = 3
Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """A layout, a model and its data.

    Attributes:
        micro_batches: called as (model, rank, world, step), returns the batches of an optimizer
            step. `rank` and `world` count data parallel ranks, so `sp` and `cp` divide
            them.
        prepare: a function that changes the patched model only.
        wrap: a function that changes both models, each under its own seed.
        change_reference: a function that changes the reference only.
        freeze: names of modules without gradients.
        backward: replaces `plain_backward`.
        budget: the tolerance. If the number of ranks is no power of two, it is FP32_INSIDE, because
            the loss factor rounds in fp32.
        needs: a reason to skip the case, or an empty string.
        device: the device of model and batches; if empty, `apply_ep_fsdp2` chooses it.
        compare_outputs: whether the logits and the loss of a forward without gradients, before each
            step, are compared too.
        exact_loss: whether transformers computes in fp64 in this forward, so that the loss can be
            compared as closely as the logits (`support.fp64`).
    """

    name: str
    world: int
    ep: int = 1
    replicate: int = 1
    sp: int = 1
    cp: int = 1
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
    compare_outputs: bool = True
    exact_loss: bool = False

    def with_(self, **changes: Any) -> "Case":
        return replace(self, **changes)

    def with_config(self, **config: Any) -> "Case":
        return replace(self, config=config)


def on_ranks(cases: list[Case], **options: Any) -> list[Any]:
    """Make parameters for `parametrize`. Cases with the same number of ranks share one spawn."""
    return [
        Check(
            case.name,
            case.world,
            partial(run_case, case),
            skip=case.needs,
            **(PATIENT if "compile_layers" in case.config else {}),
            **options,
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
    sizes = {"ep_size": case.ep, "dp_replicate_size": case.replicate}
    sizes |= {"sp_size": case.sp, "cp_size": case.cp}
    if case.device:
        _shard_over(device, model, **sizes, **case.config)
    else:
        apply_ep_fsdp2(model, **sizes, **case.config)
    rank, world = data_parallel_rank(model), data_parallel_size(model)
    sharing = case.sp * case.cp
    assert (rank, world) == (dist.get_rank() // sharing, dist.get_world_size() // sharing)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    reference_optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-3, foreach=False)
    make = case.micro_batches or uneven_batches
    backward = case.backward or plain_backward
    for step in range(STEPS):
        by_rank = [
            [_on(device, micro) for micro in make(reference, other, world, step)]
            for other in range(world)
        ]
        num_tokens = global_token_count(model, [b["labels"] for b in by_rank[rank]])
        counts = [b["labels"][:, 1:].ne(-100).sum() for batches in by_rank for b in batches]
        assert num_tokens == sum(counts), f"{case.name}: {num_tokens} tokens, want {sum(counts)}"
        if case.compare_outputs:
            where = f"{case.name} step {step}"
            with FP64() if case.exact_loss else nullcontext():
                _compare_outputs(
                    where, model, reference, by_rank[rank][0], case.budget, case.exact_loss
                )
        optimizer.zero_grad()
        backward(model, by_rank[rank], num_tokens, world)
        reference_optimizer.zero_grad()
        for batches in by_rank:
            for micro in batches:
                reference(**micro, num_items_in_batch=num_tokens).loss.backward()
        _compare_grads(f"{case.name} step {step}", model, reference, case.budget)
        got = clip_grad_norm_(model, 0.5)
        want = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        assert_close(f"{case.name} step {step} norm", got, want, case.budget)
        optimizer.step()
        reference_optimizer.step()
    # AdamW divides each gradient by its own size. An error that is small compared with the largest
    # gradient of a tensor is ten times larger compared with a gradient of a tenth of that size.
    budget = FP64_MODEL if case.budget == FP64_MODEL else 10 * case.budget
    for name, (got, want) in _pairs(model, reference, lambda p: p).items():
        assert_close(f"{case.name} after {STEPS} steps: {name}", got, want, budget)


def _device_of(case: Case) -> torch.device:
    """Return the GPU, which all ranks share, or the CPU."""
    if case.device == "cuda":
        torch.cuda.set_device(0)
        return torch.device("cuda", 0)
    return torch.device("cpu")


def _on(device: torch.device, micro: Batch) -> Batch:
    """Move the tensors of a batch to a device. Other values, such as `use_cache`, stay."""
    return {
        name: value.to(device) if isinstance(value, Tensor) else value
        for name, value in micro.items()
    }


def _shard_over(device: torch.device, model: nn.Module, **config: Any) -> None:
    """Shard as `apply_ep_fsdp2` does, but on `device`: with gloo it would choose the CPU."""
    patch(model, **config)
    state: ModelState = getattr(model, STATE)
    policy, fp32_masters = choose_default_policy(model)
    options = ShardOptions(
        policy, OffloadPolicy(), fp32_masters, state.config.reshard_after_forward
    )
    shard_model(model, state, options, device)


def assert_same_gradients(
    where: str, model: nn.Module, stock: nn.Module, budget: Callable[[str], float]
) -> list[float]:
    """Compare every gradient with `budget(name)` and return the errors.

    A parameter must have a gradient in both models or in none. Gradients that are rounding errors
    of 0 are not compared.
    """
    parameters, errors = dict(model.named_parameters()), []
    for key, parameter in stock.named_parameters():
        grad, want = full_tensor(parameters[key].grad), parameter.grad
        assert (grad is None) == (want is None), f"{where}: only one model has grad of {key}"
        if want is not None and max(grad.abs().max(), want.abs().max()) > ROUNDING_ERROR:
            errors.append(assert_close(f"{where}: grad of {key}", grad, want, budget(key)))
    return errors


def checkpointing(model: nn.Module, use_reentrant: bool) -> None:
    enable = getattr(model, "activation_checkpointing_enable", None)
    (enable or model.gradient_checkpointing_enable)({"use_reentrant": use_reentrant})


def plain_backward(model: nn.Module, batches: list[Batch], num_tokens: Tensor, world: int) -> None:
    """Run backward as a user would, and synchronise gradients only in the last micro-batch."""
    for index, micro in enumerate(batches):
        model.set_requires_gradient_sync(index == len(batches) - 1)
        loss = model(**micro, num_items_in_batch=num_tokens).loss
        (loss * world).backward()


def two_forwards_backward(
    model: nn.Module, batches: list[Batch], num_tokens: Tensor, world: int
) -> None:
    """Run a forward and a no_grad forward per batch, then one backward over all losses."""
    losses = []
    for micro in batches:
        losses.append(model(**micro, num_items_in_batch=num_tokens).loss)
        with torch.no_grad():
            model(**micro)
    (sum(losses) * world).backward()


def uneven_batches(model: nn.Module, rank: int, world: int, step: int) -> list[Batch]:
    """Make one batch whose number of rows, length and ignored labels depend on the rank."""
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
    """On rank 1 all tokens are equal, in rows of length 2, so few experts get all its tokens."""
    (micro,) = uneven_batches(model, rank, world, step)
    if rank == 1:
        micro = {name: value[:, :2] for name, value in micro.items()}
        micro["input_ids"] = torch.full_like(micro["input_ids"], 7)
        micro["labels"] = torch.full_like(micro["labels"], 7)
    return [micro]


def full_tensor(tensor: Tensor | None) -> Tensor | None:
    """Gather a sharded tensor, also one on a GPU that the ranks of a gloo group share."""
    if not isinstance(tensor, DTensor):
        return tensor
    if tensor.is_cuda and dist.get_backend(tensor.device_mesh.get_group(0)) == "gloo":
        # gloo has no CUDA version of this all-gather. It would read GPU memory from the host, and
        # the process would crash (pytorch issue 132471).
        return tensor.cpu().full_tensor().to(tensor.device)
    return tensor.full_tensor()


def whole_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Return gathered copies of all parameters, on every rank."""
    gathered = {n: full_tensor(p.detach()).clone() for n, p in model.named_parameters()}
    return restore_stock_shapes(model, gathered)


def whole_state(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """Return gathered copies of the parameters and of their optimizer states."""
    split_dims = map_ids_to_split_dims(model)
    return whole_parameters(model) | {
        f"{name}, {key}": view_in_stock_shape(
            full_tensor(value).clone(), split_dims.get(id(parameter)) if value.ndim else None
        )
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state[parameter].items()
    }


def _pairs(
    model: nn.Module, reference: nn.Module, pick: Callable[[Tensor], Tensor]
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return name -> (gathered value of the model, value of the reference) of all parameters."""
    wanted = dict(reference.named_parameters())
    gathered = {name: full_tensor(pick(p)) for name, p in model.named_parameters()}
    gathered = in_place_of_bytes(model, restore_stock_shapes(model, gathered))
    assert gathered.keys() == wanted.keys()
    gathered |= pack_factors(model, {name: x for name, x in gathered.items() if x is not None})
    return {name: (tensor, pick(wanted[name])) for name, tensor in gathered.items()}


def _compare_outputs(
    where: str,
    model: nn.Module,
    reference: nn.Module,
    micro: Batch,
    budget: float,
    exact_loss: bool,
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
        if exact_loss:
            assert_close(f"{where}: loss", got.loss, want.loss, budget)


def _compare_grads(where: str, model: nn.Module, reference: nn.Module, budget: float) -> None:
    for name, (got, want) in _pairs(model, reference, lambda p: p.grad).items():
        assert (got is None) == (want is None), f"{where}: grad of {name}: {got}, want {want}"
        if want is not None:
            assert_close(f"{where}: grad of {name}", got, want, budget)


# A value of `compile_layers`: sizes are constants of the graphs, not variables as they are with
# `compile_layers=True` (tests/compiled), which takes five to ten times as long to trace.
OF_ONE_SIZE = {"backend": "aot_eager", "dynamic": False}
# Values of `Case.prepare`, and fields of a `Case` with two forwards before a backward.
CHECKPOINT = partial(checkpointing, use_reentrant=False)
REENTRANT = partial(checkpointing, use_reentrant=True)
TWO_FORWARDS: dict[str, Any] = {
    "micro_batches": three_micro_batches,
    "backward": two_forwards_backward,
}
