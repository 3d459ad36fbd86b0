"""Compare the calls of all ranks before a model with pipeline stages computes, or refuse them all.

    rank 0    rank 1    stage 0; rank 0 and rank 2 share a batch: they are a column
    rank 2    rank 3    stage 1

If rank 0 gets an argument that stages do not support, or another batch than rank 2, no rank may
start to compute, because it would wait for the others forever. First the ranks of each column
compare their calls, so that rank 2 knows if rank 0 refuses its call. Then the ranks of each stage
compare theirs, so that rank 1 knows it from rank 0, and rank 3 from rank 2.

This file makes all checks that need the data of a call and can run before its forward. An error
inside of the forward of a stage ends the call on all ranks (`failure.py`).
"""

from __future__ import annotations

import warnings
import zlib
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hf_moe_ep.pipeline.micro_batches import check_can_be_cut, needs_grad
from hf_moe_ep.pipeline.schedule import compute_bubble
from hf_moe_ep.ranks.boxes import get_local_tensor
from hf_moe_ep.ranks.collectives import gather_counts
from hf_moe_ep.sequence.same_batch import check_sizes, compute_batch_numbers, find_other_batch
from hf_moe_ep.sequence.split import FindDocuments, SplitSequence, check_packed_rows
from hf_moe_ep.state import ModelState
from hf_moe_ep.upstream.autograd_modes import has_gradient_hooks
from hf_moe_ep.upstream.models import asks_for, find_cache, find_tokens, is_fused_head, text_config
from hf_moe_ep.upstream.modules import list_pre_forward_hooks
from hf_moe_ep.upstream.replaced_forwards import is_computed_by_liger

# What a call computes. All ranks must agree.
LOGITS, LOSS, TRAINING = range(3)
_MODES = ("a forward without labels", "a forward with labels but no training", "training")
# The dtypes in which `_sum_tied_weight` reads a parameter, by the bytes of one element.
_INTEGER_DTYPES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Agreement(NamedTuple):
    """The result of `agree`, equal on all ranks, apart from the text of `refusal`.

    Attributes:
        mode: what the call computes: LOGITS, LOSS or TRAINING.
        num_micro_batches: the number of micro-batches.
        may_learn: True if stock's outputs would have gradients.
        refusal: the error that this rank must raise, or None. All ranks have an error, or no rank.
    """

    mode: int
    num_micro_batches: int
    may_learn: bool
    refusal: ValueError | None


class _Call(NamedTuple):
    """The facts about the call of one rank, which other ranks compare with theirs.

    Attributes:
        mode: LOGITS, LOSS or TRAINING.
        refuses: 1 if the rank refuses the call.
        may_learn: 1 if stock's outputs would have gradients.
        options: a checksum of `read_options`.
        trains_tied, tied_sum: the results of `_trains_tied_weight` and `_sum_tied_weight`.
        batch: the result of `compute_batch_numbers`, which begins with the number of rows.
    """

    mode: int
    refuses: int
    may_learn: int
    options: int
    trains_tied: int
    tied_sum: int
    batch: tuple[int, ...] = ()


def agree(model: nn.Module, state: ModelState, given: dict[str, Any]) -> Agreement:
    """Compare the calls of all ranks.

    All ranks refuse the call if it needs something that stages cannot do, if ranks that share a
    batch have different batches, if ranks call the model for different purposes, or if routes
    cannot be replayed. A rank that has found a reason to refuse still takes part in both
    comparisons, because the other ranks wait for it.
    """
    meshes, session = state.meshes, state.routing
    assert meshes is not None and meshes.stages is not None
    stages = meshes.stages
    mode = _find_mode(model, given)
    refusal: ValueError | None = None
    try:
        tokens = require_tokens(given)
        _check_call(model, state, given, mode)
    except ValueError as error:
        refusal = error
        found = find_tokens(given)
        if isinstance(found, Tensor):
            tokens = found
        else:  # both comparisons need a tensor
            tokens = torch.zeros(0, 0, dtype=torch.int64, device=meshes.device)
            given = {"input_ids": tokens}
    routes: dict[str, Tensor] = {}
    if session is not None:
        session.begin_batch(*tokens.shape[:2])
        routes = session.tensors(tokens.device)
        refusal = refusal or session.refusal
    column = stages.column.get_group()
    shared = (*read_options(model, given, tokens), state.gather_logits, state.caller_loss is None)
    own = _Call(
        mode=mode,
        refuses=int(refusal is not None),
        may_learn=int(_may_learn(model, given)),
        options=zlib.crc32(repr(shared).encode()),
        trains_tied=_trains_tied_weight(state, mode),
        tied_sum=_sum_tied_weight(state, mode),
    )
    batch = compute_batch_numbers(given | routes, tokens)
    calls = _gather_calls(own, batch, column, "the pipeline column's batches")
    refusal = refusal or _find_difference(calls, column)
    own = own._replace(
        refuses=int(refusal is not None), may_learn=max(call.may_learn for call in calls)
    )
    calls = _gather_calls(own, batch, stages.group, "the pipeline's calls")
    refusal = refusal or _find_other_call(calls, stages.group, meshes.ranks_per_batch)
    may_learn = any(call.may_learn for call in calls)
    fewest_rows = min(call.batch[0] for call in calls)
    wanted = state.config.pp_microbatches or stages.size
    count = max(1, min(wanted, fewest_rows))
    if refusal is None and mode == TRAINING and count < stages.size and dist.get_rank() == 0:
        warnings.warn(
            f"batches of {fewest_rows} rows and pp_microbatches={wanted} make {count} "
            f"micro-batches for {stages.size} pipeline stages, so each stage waits for "
            f"{compute_bubble(stages.size, count):.0%} of the time; use batches of at least "
            f"{stages.size} rows, and pp_microbatches of {4 * stages.size} or more",
            stacklevel=2,
        )
    return Agreement(mode, count, may_learn, refusal)


def _gather_calls(own: _Call, batch: Tensor, group: Any, where: str) -> list[_Call]:
    """Return the calls of all ranks of a group. `own` has no `batch` yet."""
    *facts, _ = own
    numbers = torch.cat([torch.tensor(facts, device=batch.device), batch])
    by_rank = gather_counts(numbers, group, where=where)
    return [_Call._make([*x[: len(facts)], tuple(x[len(facts) :])]) for x in by_rank]


def require_tokens(given: dict[str, Any]) -> Tensor:
    """Return the token ids (B, S) or the embeddings (B, S, H) of a call."""
    tokens = find_tokens(given)
    if not isinstance(tokens, Tensor):
        raise ValueError(
            "a model with pp_size > 1 was called without input_ids and inputs_embeds; pass one of "
            "them"
        )
    return tokens


def read_options(model: nn.Module, given: dict[str, Any], tokens: Tensor) -> tuple[Any, ...]:
    """Return the options of a call that all stages must have in common.

    These options, the mode and the sizes of the batch determine which tensors are sent from stage
    to stage. With router logits, for example, sums for the aux loss are sent as well.
    """
    device = tokens.device.type
    cast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    flags = sorted((n, x) for n, x in given.items() if isinstance(x, int | float | str))
    router_logits = getattr(text_config(model.config), "output_router_logits", None)
    return tokens.dtype, cast, router_logits, *flags


def _find_mode(model: nn.Module, given: dict[str, Any]) -> int:
    """Return the mode of this rank's call: LOGITS, LOSS or TRAINING."""
    if given.get("labels") is None:
        return LOGITS
    return TRAINING if _may_train(model) else LOSS


def _may_train(model: nn.Module) -> bool:
    return model.training and torch.is_grad_enabled()


def _may_learn(model: nn.Module, given: dict[str, Any]) -> bool:
    """Return True if stock's outputs of this call would have gradients."""
    learns = any(p.requires_grad for p in model.parameters()) or any(
        map(needs_grad, given.values())
    )
    return torch.is_grad_enabled() and learns


def _check_call(model: nn.Module, state: ModelState, given: dict[str, Any], mode: int) -> None:
    """Raise ValueError if a call needs what a model with several stages cannot do."""
    size = state.stage.size
    if state.caller_loss is not None:
        state.caller_loss.check(given, text_config(model.config))
    for name in ("output_hidden_states", "output_attentions"):
        if asks_for(name, given, model.config):
            raise ValueError(
                f"{name}=True asks for tensors of all layers, which lie on the ranks of "
                f"{size} pipeline stages; leave it out, or run the model with pp_size=1"
            )
    if False in (given.get("return_dict"), getattr(model.config, "return_dict", None)):
        raise ValueError("return_dict=False is not supported with pp_size > 1; leave it out")
    if find_cache(given) is not None:
        raise ValueError(
            f"a KV cache was given to a model with pp_size={size}, as generate() does; "
            f"generation needs all layers on a rank: save the model with save_pretrained, and "
            f"load it with pp_size=1"
        )
    has_labels, trains = given.get("labels") is not None, mode == TRAINING
    if (_may_train(model) or is_fused_head(given)) and not has_labels:
        raise ValueError(
            f"this forward in training mode has no labels, but with pp_size={size} only the "
            f"model's own loss can be trained: gradients of a loss that is computed from its "
            f"logits (DPO, GRPO, a custom compute_loss) would have to pass the stages again. "
            f"Pass labels and use outputs.loss, give the Trainer a compute_loss_func, or leave "
            f"pp_size at 1; call the model under torch.no_grad() if only the logits are needed"
        )
    if has_labels and is_computed_by_liger(model):
        raise ValueError(
            f"Liger's fused linear cross-entropy replaces the forward of the model, which "
            f"pp_size={size} needs; turn it off: liger_kernel_config="
            f"{{'fused_linear_cross_entropy': False}}"
        )
    assert state.meshes is not None
    # With CPU offload the parameters are on the host.
    device = state.meshes.device.type
    casts = torch.is_autocast_enabled(device)
    if trains and casts and torch.get_autocast_dtype(device) == torch.float16:
        raise ValueError(
            f"pp_size={size} computes gradients before a gradient scaler has multiplied the "
            f"loss, so gradients in fp16 would become zero; train in bf16"
        )
    differentiable = [name for name, x in given.items() if needs_grad(x)]
    if trains and differentiable:
        raise ValueError(
            f"{differentiable[0]} requires a gradient, but with pp_size={size} the forward "
            f"runs backward, and the loss has no gradient for what was computed before the "
            f"call; pass input_ids, or detach it"
        )
    if trains and any(map(has_gradient_hooks, model.parameters())):
        raise ValueError(
            f"a parameter has a hook for accumulated gradients, as optimizers that step in "
            f"backward register; with pp_size={size} it would see the gradient of one "
            f"micro-batch, before loss.backward(): step the optimizer after backward"
        )
    tokens = require_tokens(given)
    if not tokens.numel():
        raise ValueError(
            f"the batch of this rank has {len(tokens)} rows of {tokens.shape[1]} tokens; every "
            f"rank needs at least one row: drop the last batch of the data loader if it is smaller"
        )
    if state.caller_loss is None:
        check_sizes(given, tokens)
    keep, shares_batch = given.get("logits_to_keep", 0), state.config.ranks_per_batch > 1
    selects_positions = isinstance(keep, Tensor) or bool(keep)
    if selects_positions and (mode != LOGITS or (shares_batch and model.training)):
        raise ValueError(
            f"logits_to_keep={keep} selects positions, but with pp_size={size} a forward with "
            f"labels computes the logits of all tokens, and so does one in training mode with "
            f"sp_size or cp_size > 1; leave logits_to_keep out"
        )
    for hook in list_pre_forward_hooks(model):
        if isinstance(hook, FindDocuments | SplitSequence):
            check_packed_rows(model, given, hook)
    has_aux_loss = asks_for("output_router_logits", given, text_config(model.config))
    if trains and state.config.aux_loss_per_layer and not has_aux_loss:
        raise ValueError(
            "aux_loss_per_layer=True, but this training forward computed no aux loss; set "
            "output_router_logits=True in the model's config, or pass it to the forward"
        )
    if (state.config.pp_microbatches or size) > 1 and len(tokens) > 1:
        check_can_be_cut(given, len(tokens))


def _trains_tied_weight(state: ModelState, mode: int) -> int:
    """Return 1 if this stage trains its copy of the tied weight, and 0 if the copy is frozen.

    Return -1 if this stage holds no copy, or if the call does not train.
    """
    weight = state.stage.tied_weight
    return -1 if weight is None or mode != TRAINING else int(weight.requires_grad)


def _sum_tied_weight(state: ModelState, mode: int) -> int:
    """Return a checksum of this rank's shard of the tied weight; 0 if there is none.

    The checksum adds up the elements, read as integers. Both stages shard the weight in the same
    way, so the ranks of a column have equal sums if the copies are equal.
    """
    weight = state.stage.tied_weight
    if weight is None or mode != TRAINING:
        return 0
    shard = get_local_tensor(weight.detach())
    return int(shard.view(_INTEGER_DTYPES[shard.element_size()]).sum())


def _find_refusal(calls: dict[int, _Call]) -> ValueError | None:
    """Return the error of a rank if another rank refuses its call, or has another mode."""
    for rank, call in calls.items():
        if call.refuses:
            return ValueError(
                f"rank {rank} cannot run this call of a model with pipeline stages; its own error "
                f"says why"
            )
    (first, mode), *others = ((rank, call.mode) for rank, call in calls.items())
    for rank, other_mode in others:
        if other_mode != mode:
            return ValueError(
                f"ranks of a model with pipeline stages call it for different purposes: rank "
                f"{first} for {_MODES[mode]}, rank {rank} for {_MODES[other_mode]}; all ranks must "
                f"call the model alike"
            )
    return None


def _find_difference(calls_of_column: list[_Call], column: Any) -> ValueError | None:
    """Return the error for the calls of the ranks of a column; None if the calls are alike."""
    ranks = dist.get_process_group_ranks(column)
    calls = dict(zip(ranks, calls_of_column, strict=True))
    if refusal := _find_refusal(calls):
        return refusal
    tied = {rank: call.trains_tied for rank, call in calls.items() if call.trains_tied >= 0}
    if len(set(tied.values())) > 1:
        trained, frozen = (next(r for r, x in tied.items() if x == value) for value in (1, 0))
        return ValueError(
            f"the embedding is tied to the output head, and its weight requires a gradient on rank "
            f"{trained} but not on rank {frozen}, which holds the other copy; freeze or train "
            f"embedding and head on both stages, or before the model is sharded"
        )
    sums = {rank: calls[rank].tied_sum for rank in tied}
    if len(set(sums.values())) > 1:
        first, last = sums
        return ValueError(
            f"rank {first} and rank {last} have different copies of the weight that ties the "
            f"embedding to the output head, because their optimizers have trained it in different "
            f"ways; it has the name of the embedding on rank {first} and that of the head on rank "
            f"{last}, so put both names in one parameter group, and go on from a checkpoint"
        )
    first = ranks[0]
    other = next((rank for rank in ranks if calls[rank].options != calls[first].options), None)
    if other is not None:
        return ValueError(
            f"rank {first} and rank {other} of one pipeline column pass different numbers, "
            f"flags or texts to the model, as output_router_logits, or have another autocast; all "
            f"ranks must call the model alike"
        )
    return find_other_batch([call.batch for call in calls_of_column], ranks, "pipeline column")


def _find_other_call(calls: list[_Call], group: Any, ranks_per_batch: int) -> ValueError | None:
    """Return the error for the calls of the ranks of a stage; None if the calls are alike.

    Batches are only compared among the `ranks_per_batch` consecutive ranks that share a batch.
    """
    ranks = dist.get_process_group_ranks(group)
    if refusal := _find_refusal(dict(zip(ranks, calls, strict=True))):
        return refusal
    batches = [call.batch for call in calls]
    for first in range(0, len(ranks), ranks_per_batch):
        sharing = slice(first, first + ranks_per_batch)
        error = find_other_batch(batches[sharing], ranks[sharing], "sp or cp group")
        if error is not None:
            return error
    return None
