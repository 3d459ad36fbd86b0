"""Yield a model's weights as the hub stores them, one tensor after the other, on every rank.

An inference engine that receives the weights of a training run needs whole tensors under the keys
of a checkpoint, and there is no memory for a second copy of the model. `save.py` sends such tensors
to rank 0, which writes them to disk; `hub_tensors` yields them on every rank. For Qwen3-MoE on 4
ranks, each rank receives

    model.embed_tokens.weight, model.layers.0.self_attn.q_proj.weight, ..,
    model.layers.0.mlp.experts.0.gate_proj.weight, model.layers.0.mlp.experts.0.up_proj.weight, ..

A slab is a few rows of a parameter. Slabs are gathered one after the other, and a checkpoint tensor
is yielded as soon as slabs have filled it. Before each slab the ranks check that all ranks still
iterate.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hf_moe_ep.checkpoints.hub.extra import find_to_copy, send_extra
from hf_moe_ep.checkpoints.hub.fp8 import SCALE, find_unjoined_weights, list_fp8_keys
from hf_moe_ep.checkpoints.hub.fp8_blocks import (
    FP8,
    has_blocks,
    list_fp8_parameters,
    make_fp8_config,
)
from hf_moe_ep.checkpoints.hub.gather import gather_tensor
from hf_moe_ep.checkpoints.hub.layout import list_distinct_tensors
from hf_moe_ep.checkpoints.hub.pieces import cut_pieces
from hf_moe_ep.checkpoints.hub.stages import (
    assign_groups,
    gather_from_stages,
    iterate_slabs_for_all_stages,
    list_tensors_of_model,
)
from hf_moe_ep.checkpoints.hub.sync_token import SyncToken, compute_checksums
from hf_moe_ep.checkpoints.hub.write import TensorGroup, choose_dtypes, group_tensors
from hf_moe_ep.checkpoints.storage.safetensors_file import FileTensor
from hf_moe_ep.etp import convert_slabs_to_stock, for_each_half, map_ids_to_split_dims
from hf_moe_ep.lora.merged import add_updates, gather_whole_factors
from hf_moe_ep.ops.quantised import encode_blocks
from hf_moe_ep.placement.hub_order import map_parameters_to_slots
from hf_moe_ep.ranks.all_ranks import (
    StillHere,
    check_alike,
    check_everyone_calls,
    format_in_one_line,
    gather,
    run_on_all,
    run_on_first,
)
from hf_moe_ep.ranks.boxes import Box
from hf_moe_ep.state import (
    ModelState,
    get_computing_device,
    patched_state,
    refuse_quantised_experts,
)
from hf_moe_ep.upstream.adapters import (
    LowRank,
    check_mergeable,
    group_updates_by_parameter,
    iterate_active_updates,
    iterate_adapter_layers,
    list_active_adapters,
    list_names_lost_by_merging,
)
from hf_moe_ep.upstream.hub import get_checkpoint_name
from hf_moe_ep.upstream.module_names import unwrap

# A slab has max_bytes // _SLABS_IN_MEMORY bytes, because a rank needs memory for 8 slabs: the slab
# that the caller still holds (1) and the slab that is being filled (1). The rank that owns a shard
# also needs the shard in the dtype of the master weights, the product of the adapter's factors, and
# the sum of both; each is up to twice as large as the sent values (3 x 2). An all-gather needs two
# slabs besides its result, but then a rank owns only a part of the slab.
_SLABS_IN_MEMORY = 8
# Errors that engines raise for a key or a shape that they do not know.
_REFUSALS = (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


def hub_tensors(
    model: nn.Module,
    *,
    merge_adapters: bool = False,
    dtype: torch.dtype | str | None = None,
    max_bytes: int = 2**30,
    extra_tensors: bool = True,
    since: SyncToken | None = None,
) -> HubTensors:
    """Iterate over (hub key, full tensor) of a patched model, the same on every rank.

        for tensors in hub_tensors(model).by_module():
            engine.load_weights(tensors)

    Keys, values and dtypes are the same as in the files of `save_pretrained`. The order is layer by
    layer; tied weights are yielded once. Each tensor is a contiguous copy on the device on which
    the model computes. The model does not change.

    All ranks must iterate at the same time and to the end, because each tensor is gathered from all
    ranks. Do not run the model or move its experts during the iteration. If a rank stops early
    (`break`, `close()`, an error that is handled), the other ranks raise a RuntimeError at their
    next tensor, which names this rank; if all ranks stop, no rank raises an error. If you store a
    caught exception (`last = error`), its traceback keeps the local variables of the loop's
    function alive, so the iterator is not closed and the other ranks wait. To avoid this, write the
    loop inside `with contextlib.closing(tensors):`. An unhandled error ends the process, and
    torchrun then ends the other ranks.

    Args:
        model: patched, sharded or not, with adapters or not.
        merge_adapters: add LoRA, on experts and other modules, to the yielded tensors, as PEFT's
            `merge_adapter` adds it to the model: all active adapters are added with their scales,
            and modules_to_save replace the originals. A model without adapters has the same keys.
        dtype: the dtype of the tensors, as in `save_pretrained`; by default, the dtype in which the
            model was loaded. "fp8" yields the weights of experts and Linear layers in E4M3 with one
            fp32 scale per block of 128 x 128, as published FP8 checkpoints store them (`x.weight`,
            then `x.weight_scale_inv`). `HubTensors.quantization_config` describes this format.
        max_bytes: the limit of the memory needed besides the shards, including the tensor that was
            yielded last. A larger tensor (the embedding, or all experts of a layer if the hub
            stores them in one tensor) is yielded all the same, but assembled from small slabs. A
            slab has at least one row of dim 0, such as gate and up of one expert, so the limit
            holds from 8 such rows on. In addition each rank holds the whole factors of one
            parameter's adapters, twice while they are gathered.
        extra_tensors: yield, after all others, the tensors of the loaded checkpoint that the
            model's class ignores (layers for multi-token prediction), in their own dtypes. They do
            not change, so an engine needs to load them only once.
        since: a `SyncToken`, which each rank makes for each engine. Tensors that have not changed
            since the last iteration with this token are left out. The first iteration yields all
            tensors.

    Returns:
        An iterator. Its method `metadata()` lists key, dtype and shape of all tensors.

    Raises:
        ValueError: the model is not patched or is on the meta device; it has adapters and
            `merge_adapters` is False, or adapters that cannot be merged or are disabled;
            `experts_dtype` has quantised its experts; the files of the extra tensors are gone or
            have changed since the model was loaded; ranks pass different arguments (raised on every
            rank).
        RuntimeError: a rank has not begun to iterate within five minutes, or has stopped early;
            `balance_experts` has moved experts since `metadata()` or the first tensor.
    """
    model = unwrap(model)
    state = patched_state(model)
    if isinstance(max_bytes, bool) or not isinstance(max_bytes, int) or max_bytes <= 0:
        raise ValueError(f"max_bytes {max_bytes!r} is not a number of bytes; try 2**30")
    is_float = isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize > 1
    if dtype not in (None, FP8) and not is_float:
        raise ValueError(
            f"dtype {dtype!r} is not a floating point dtype; try torch.bfloat16, or {FP8!r} for "
            f"E4M3 with scales of blocks"
        )
    if since is not None and not isinstance(since, SyncToken):
        raise ValueError(f"since={since!r} is not a SyncToken; make one per engine: SyncToken()")
    if state.unread is None:  # the tensors of unread layers can be listed before they are read
        _check_has_values(model)
    refuse_quantised_experts(model, "hub_tensors")
    if state.stage is None:
        _check_adapters(model, merge_adapters)
    return HubTensors(_Source(model, state, merge_adapters, dtype, max_bytes, extra_tensors, since))


def _check_has_values(model: nn.Module) -> None:
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError(
            "this model is on the meta device, without values to send; load it first, or, below "
            "hf-moe-ep run, send it after accelerator.prepare or the Trainer has sharded it"
        )


def _check_adapters(model: nn.Module, merge_adapters: bool) -> None:
    """Raise ValueError if adapters cannot be merged, or would be left out.

    With pipeline stages each rank checks the adapters of its own stage.
    """
    if not merge_adapters:
        if any(True for _ in iterate_adapter_layers(model)):
            raise ValueError(
                "this model has adapters, which are not part of its own weights; pass "
                "merge_adapters=True, or save the adapters with save_pretrained(model, directory)"
            )
        return
    check_mergeable(model)
    stage = patched_state(model).stage
    copied = None if stage is None else stage.copied_weight
    if copied is not None and any(
        update.parameter is copied for update in iterate_active_updates(model)
    ):
        raise ValueError(
            f"the output head has an adapter, and its weight is tied to the embedding, which lies "
            f"on another of the {stage.size} pipeline stages, so the adapter cannot be merged into "
            f"it; adapt the embedding instead, or load the model with pp_size=1"
        )


class TensorInfo(NamedTuple):
    """A tensor that `hub_tensors` yields."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True)
class _Names:
    """Names of tensors and adapters of the whole model, or of one pipeline stage.

    Attributes:
        left_out: the names in the state dict that do not exist after adapters are merged.
        fp8_parameters: the parameters that `dtype="fp8"` encodes, by their names in checkpoints.
        adapters: the names of the active adapters.
    """

    left_out: set[str]
    fp8_parameters: set[str]
    adapters: list[str]


@dataclass
class _Contents:
    """The tensors that one iteration yields.

    Attributes:
        groups: the tensors of the model.
        fp8_keys: the keys that are yielded in FP8.
        extra: the extra tensors in the files of rank 0.
        fingerprints: the texts that two syncs compare. A group has a hash of its checksums, under
            its first key; an extra tensor has its position in its file, under its key. Empty
            without `since`.
        slots_of_layers: `MoELayer.slots_E` of each layer when the groups were described.
    """

    groups: list[TensorGroup]
    fp8_keys: set[str]
    extra: dict[str, FileTensor]
    fingerprints: dict[str, str]
    slots_of_layers: list[Tensor | None]


class HubTensors(Iterator[tuple[str, Tensor]]):
    """Iterator over (hub key, full tensor); `hub_tensors` returns it."""

    def __init__(self, source: _Source) -> None:
        # The generator must not refer to this object: when the last reference to this object is
        # deleted, the generator is deleted too, and informs the other ranks.
        self._source = source
        self._tensors = source.iterate()

    def __next__(self) -> tuple[str, Tensor]:
        return next(self._tensors)

    def close(self) -> None:
        """Stop early. Ranks that continue to iterate raise an error."""
        self._tensors.close()

    def by_module(self) -> Iterator[list[tuple[str, Tensor]]]:
        """Iterate over lists of (hub key, full tensor): one list per attention, per expert, etc.

        Some loaders join several tensors of a module in one parameter, but only if one call passes
        all of them: SGLang joins `q_a_proj` and `kv_a_proj_with_mqa` of DeepSeek's attention, and
        loses a tensor that is passed without the other. Therefore, with `since`, all tensors of a
        module are yielded if one tensor has changed; call this method before `metadata()`, which
        then lists all of them. The tensors of a list and the next tensor are in memory together.
        """
        self._source.keep_modules_whole()
        return (
            list(tensors) for _, tensors in groupby(self, lambda item: _get_module_name(item[0]))
        )

    def check_engine(
        self, load_weights: Callable[[list[tuple[str, Tensor]]], Iterable[str] | None] | None
    ) -> None:
        """Send an engine one tensor per call, and raise one error for all keys that it refuses.

        In a sync, an engine stops at the first unknown key, or skips the key without a message.
        Call this method on every rank before the first sync. The call exhausts this iterator.

        Args:
            load_weights: the engine's method; None on ranks without an engine. The method skips a
                key if it returns an empty set of parameters, as vLLM's does. A key counts as
                skipped if all ranks with an engine skip it, because with expert parallelism in the
                engine only one rank loads the key. SGLang's method returns None, so its skipped
                keys are not noticed.

        Raises:
            ValueError: on every rank: an engine refuses or skips keys; the error lists all of them,
                with "*" for each number.
        """
        refused: dict[str, str] = {}
        skipped: dict[str, str] = {}
        with closing(self):
            for key, tensor in self:
                try:
                    loaded = load_weights([(key, tensor)]) if load_weights is not None else None
                except (torch.OutOfMemoryError, torch.AcceleratorError):
                    raise
                except _REFUSALS as error:
                    refused[key] = format_in_one_line(error)
                else:
                    if loaded is not None and not set(loaded):
                        skipped[key] = "skipped without an error"
        results = gather((load_weights is not None, refused, skipped))
        refused = {key: why for _, refusals, _ in results for key, why in refusals.items()}
        skipped_by_engine = [skips for has_engine, _, skips in results if has_engine]
        for key, why in skipped_by_engine[0].items() if skipped_by_engine else ():
            if all(key in skips for skips in skipped_by_engine):
                refused[key] = why
        if not refused:
            return
        kinds = Counter(re.sub(r"\d+", "*", key) for key in refused)
        text = ", ".join(f"{kind} ({count})" for kind, count in kinds.items())
        first, why = next(iter(refused.items()))
        raise ValueError(f"the engine does not take {len(refused)} keys: {text}; {first}: {why}")

    def metadata(self) -> list[TensorInfo]:
        """List the tensors that will be yielded, in order, without gathering their values.

        Engines that receive weights by broadcasts (vLLM, SGLang) need names, dtypes and shapes
        first. Every rank calls this, because only rank 0 knows the extra tensors, and because with
        `since` the checksums of shards are added up over all ranks.
        """
        return self._source.list_metadata()

    def metadata_of_rank(self) -> list[TensorInfo]:
        """List the tensors that this rank knows, without a collective.

        Before `metadata()` is called, only rank 0 lists the extra tensors. With `since`, tensors
        that have not changed are listed, too.

        Raises:
            ValueError: the model has pipeline stages, whose adapters and Linear layers this rank
                does not know, and `metadata()` was not called before.
        """
        return self._source.list_own_metadata()

    @property
    def quantization_config(self) -> dict[str, Any]:
        """The entry of config.json with which an engine serves the tensors of `dtype="fp8"`.

        Before `metadata()` is called, only rank 0 knows the extra tensors.

        Raises:
            ValueError: the tensors are not yielded in FP8; or the model has pipeline stages and
                `metadata()` was not called before.
        """
        return self._source.quantization_config()


class _Source:
    """Lists, gathers and converts the tensors that a `HubTensors` yields."""

    def __init__(
        self,
        model: nn.Module,
        state: ModelState,
        merge_adapters: bool,
        dtype: torch.dtype | str | None,
        max_bytes: int,
        extra_tensors: bool,
        since: SyncToken | None,
    ) -> None:
        self._model, self._state = model, state
        self._merge_adapters, self._dtype, self._max_bytes = merge_adapters, dtype, max_bytes
        self._extra_tensors, self._since = extra_tensors, since
        self._whole_modules = False
        self._contents: _Contents | None = None
        self._names: _Names | None = None
        self._extra: dict[str, FileTensor] | None = None

    def keep_modules_whole(self) -> None:
        """Yield all tensors of a module if one of them has changed since the last sync."""
        self._whole_modules = True
        if self._since is not None:
            self._contents = None

    def list_metadata(self) -> list[TensorInfo]:
        return self._describe_contents(self._prepare())

    def list_own_metadata(self) -> list[TensorInfo]:
        return self._describe_contents(self._list_known_contents())

    def _describe_contents(self, contents: _Contents) -> list[TensorInfo]:
        infos = []
        for group in contents.groups:
            for key, shape in group.shapes.items():  # `_assemble` yields them in this order
                empty = torch.empty(shape, dtype=group.dtype, device="meta")
                for new_key, encoded in self._encode(key, empty, contents):
                    infos.append(TensorInfo(new_key, encoded.dtype, tuple(encoded.shape)))
        infos += [TensorInfo(key, t.dtype, t.shape) for key, t in contents.extra.items()]
        return infos

    def quantization_config(self) -> dict[str, Any]:
        if self._dtype != FP8:
            raise ValueError(f"dtype={self._dtype!r} yields no FP8; pass dtype={FP8!r}")
        contents = self._list_known_contents()
        extra = contents.extra
        # Extra tensors keep their dtype: they are FP8 only if they come from an FP8 checkpoint.
        fp8_extra = {part for key in find_unjoined_weights(extra) for part in list_fp8_keys(key)}
        shapes = {key: shape for group in contents.groups for key, shape in group.shapes.items()}
        shapes |= {key: tensor.shape for key, tensor in extra.items()}
        matrices = {key for key, shape in shapes.items() if len(shape) > 1}
        return make_fp8_config(matrices - contents.fp8_keys - fp8_extra)

    def _list_known_contents(self) -> _Contents:
        """Return the tensors that this rank knows, without a collective."""
        names = self._get_known_names()
        groups = self._describe(names)
        extra = self._find_extra(groups) if self._extra is None else self._extra
        slots_of_layers = [layer.slots_E for layer in self._state.moe_layers]
        return _Contents(groups, self._find_fp8(groups, names), extra, {}, slots_of_layers)

    def _find_extra(self, groups: list[TensorGroup]) -> dict[str, FileTensor]:
        """Return the extra tensors to which this rank's model refers."""
        own_keys = {key for group in groups for key in group.shapes}
        return find_to_copy(self._state.extra if self._extra_tensors else None, own_keys)

    def _get_known_names(self) -> _Names:
        """Return the names that `_prepare` has found, or else the names that this rank can find."""
        if self._names is not None:
            return self._names
        stage = self._state.stage
        if stage is not None and (self._merge_adapters or self._dtype == FP8):
            raise ValueError(
                f"this rank knows the adapters and the Linear layers of stage {stage.index} of "
                f"{stage.size} only; call metadata() of this iterator on every rank before"
            )
        return self._find_own_names()

    def _find_own_names(self) -> _Names:
        """Return the names in the model, or in this rank's pipeline stage."""
        model = self._model
        parameters = list_fp8_parameters(model, self._state.plan) if self._dtype == FP8 else set()
        return _Names(list_names_lost_by_merging(model), parameters, list_active_adapters(model))

    def _join_names(self) -> _Names:
        """Return the names of all stages; every rank calls this.

        Raises:
            ValueError: on every rank: a stage has adapters that cannot be merged, or stages have
                different active adapters.
        """
        if self._state.stage is None:
            return self._find_own_names()
        run_on_all("hub_tensors", lambda: _check_adapters(self._model, self._merge_adapters))
        stage_names = gather_from_stages(self._find_own_names(), self._state)
        # Stages without an adapter are left out.
        adapters = [names.adapters for names in stage_names if names.adapters]
        if any(other != adapters[0] for other in adapters):
            raise ValueError(
                f"pipeline stages have different active adapters: {adapters}; call set_adapter on "
                f"every rank with the same names"
            )
        return _Names(
            set().union(*(names.left_out for names in stage_names)),
            set().union(*(names.fp8_parameters for names in stage_names)),
            adapters[0] if adapters else [],
        )

    def _describe(self, names: _Names) -> list[TensorGroup]:
        """Describe all checkpoint tensors. Iterating over their slabs sends values to all ranks."""
        model, state = self._model, self._state
        dtype = self._dtype if isinstance(self._dtype, torch.dtype) else None
        max_bytes = self._max_bytes // _SLABS_IN_MEMORY
        # The tensors are listed before the first all-gather, because the modules of a layer hold
        # other tensors while FSDP2 has gathered its parameters.
        tensors = list_tensors_of_model(model, state, names.left_out)
        updates = group_updates_by_parameter(model, tensors.values())
        # For each stacked tensor: the row (slot) in which each expert is stored.
        slots = map_parameters_to_slots(model)
        dtype_of = choose_dtypes(model, dtype, state.dtypes)
        # By id of a parameter: the stock dim 2F that the model holds as (2, F) with etp (`etp.py`).
        split_dims = map_ids_to_split_dims(model)

        def iterate_slabs(name: str, tensor: Tensor) -> Iterator[tuple[Box, Tensor]]:
            tensor_updates, slots_E = updates.get(id(tensor), []), slots.get(id(tensor))
            dtype, dim = dtype_of(name, tensor), split_dims.get(id(tensor))
            merge = partial(_merge_and_cast, dtype, [_gather_factors(u) for u in tensor_updates])
            # `merge` gets boxes in the stock shape, because products of adapters have this shape.
            change = for_each_half(merge, dim, 0 if dim is None else tensor.shape[dim + 1])
            slabs = iterate_slabs_for_all_stages(
                name, tensor, state, dtype, change, max_bytes, slots_E
            )
            return convert_slabs_to_stock(slabs, dim)

        return group_tensors(model, state.plan, tensors, dtype_of, iterate_slabs)

    def _find_fp8(self, groups: list[TensorGroup], names: _Names) -> set[str]:
        """Return the keys of the tensors that are yielded in FP8."""
        return {
            key
            for group in groups
            if set(map(get_checkpoint_name, group.names)) <= names.fp8_parameters
            for key, shape in group.shapes.items()
            if has_blocks(shape)
        }

    @torch.inference_mode(False)
    def _prepare(self) -> _Contents:
        """Find the tensors to yield; every rank calls this."""
        # Inference mode is off, because FSDP2 cannot make a state dict in inference mode.
        if self._contents is not None:
            return self._contents
        model, state = self._model, self._state
        _check_has_values(model)
        if state.meshes is not None:
            check_everyone_calls("hub_tensors")
        names = self._names = self._join_names()
        if state.meshes is not None:
            check_alike(
                "hub_tensors",
                model=f"{type(model).__name__} of {_count_values(model, state)} values",
                merge_adapters=self._merge_adapters,
                active_adapters=names.adapters,
                dtype=self._dtype,
                max_bytes=self._max_bytes,
                extra_tensors=self._extra_tensors,
                since=None if self._since is None else len(self._since),
                by_module=self._since is not None and self._whole_modules,
            )
        slots_of_layers = [layer.slots_E for layer in state.moe_layers]
        groups = self._describe(names)
        fp8_keys = self._find_fp8(groups, names)
        find_extra = partial(self._find_extra, groups)
        extra = find_extra() if state.meshes is None else run_on_first("hub_tensors", find_extra)
        self._extra = extra
        fingerprints: dict[str, str] = {}
        if self._since is not None:
            fingerprints = self._fingerprint(groups, extra)
            unchanged = {key for key, text in fingerprints.items() if self._since.holds(key, text)}
            changed = [group for group in groups if next(iter(group.shapes)) not in unchanged]
            if self._whole_modules:
                modules = {_get_module_name(key) for group in changed for key in group.shapes}
                changed = [
                    g for g in groups if not modules.isdisjoint(map(_get_module_name, g.shapes))
                ]
            groups = changed
            extra = {key: tensor for key, tensor in extra.items() if key not in unchanged}
        self._contents = _Contents(groups, fp8_keys, extra, fingerprints, slots_of_layers)
        return self._contents

    def _fingerprint(
        self, groups: list[TensorGroup], extra: Mapping[str, FileTensor]
    ) -> dict[str, str]:
        """Return `_Contents.fingerprints`; every rank calls this."""
        fingerprints: dict[str, str] = {}
        for stage_fingerprints in gather_from_stages(
            self._fingerprint_own_stage(groups), self._state
        ):
            fingerprints |= stage_fingerprints
        return fingerprints | {key: repr((t.file, t.start, t.dtype)) for key, t in extra.items()}

    def _fingerprint_own_stage(self, groups: list[TensorGroup]) -> dict[str, str]:
        """Return the fingerprints of the groups of this rank's pipeline stage."""
        model, stage = self._model, self._state.stage
        if stage is not None:
            assigned = assign_groups(groups, self._state)
            groups = [group for group in assigned if group.stage == stage.index]
        tensors = list_distinct_tensors(model, list_names_lost_by_merging(model))
        updates = group_updates_by_parameter(model, tensors.values())
        slots = map_parameters_to_slots(model)
        sources: dict[int, tuple[Tensor, Tensor | None]] = {}
        for tensor in tensors.values():
            sources[id(tensor)] = tensor, slots.get(id(tensor))
            for update in updates.get(id(tensor), ()):
                sources |= {id(factor): (factor, None) for factor in (update.a, update.b)}
        sums = dict(zip(sources, compute_checksums(list(sources.values())), strict=True))
        fingerprints = {}
        for group in groups:
            values = [
                [sums[id(tensors[name])]]
                + [
                    (sums[id(update.a)], sums[id(update.b)], update.scale)
                    for update in updates.get(id(tensors[name]), ())
                ]
                for name in group.names
            ]
            text = repr((list(group.shapes), group.dtype, self._dtype, values))
            fingerprints[next(iter(group.shapes))] = hashlib.sha256(text.encode()).hexdigest()
        return fingerprints

    def _encode(
        self, key: str, tensor: Tensor, contents: _Contents
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield a tensor as it is, or its values in FP8 and then their scales."""
        if key not in contents.fp8_keys:
            yield key, tensor
            return
        values, scales = encode_blocks(tensor)
        yield key, values
        yield f"{key}{SCALE}", scales

    @torch.inference_mode(False)
    def iterate(self) -> Generator[tuple[str, Tensor], None, None]:
        state = self._state
        was_prepared = self._contents is not None
        contents = self._prepare()
        still_here = None
        if state.meshes is not None:
            if was_prepared:
                check_everyone_calls("hub_tensors")
            still_here = StillHere("hub_tensors", state.mesh_device)
        device = get_computing_device(self._model)
        max_bytes = max(1, self._max_bytes // _SLABS_IN_MEMORY)
        if self._since is not None:
            self._since.clear()
        try:
            _check_not_moved(contents.slots_of_layers, state)
            for group in contents.groups:
                for key, tensor in _assemble(group, still_here):
                    yield from self._encode(key, tensor, contents)
                    del tensor
                    _check_not_moved(contents.slots_of_layers, state)
            yield from send_extra(contents.extra, device, max_bytes, still_here)
        except GeneratorExit:
            if still_here is not None:
                still_here.leave()
            raise
        if still_here is not None:
            still_here.end()
        if self._since is not None:
            self._since.set(contents.fingerprints)


def _get_module_name(key: str) -> str:
    """Return "layers.0.self_attn" for "layers.0.self_attn.q_proj.weight"."""
    return key.rsplit(".", 2)[0]


def _count_values(model: nn.Module, state: ModelState) -> int:
    if state.stage is not None:
        return sum(math.prod(tensor.shape) for tensor in state.stage.tensors.values())
    return sum(parameter.numel() for parameter in model.parameters())


def _check_not_moved(before: list[Tensor | None], state: ModelState) -> None:
    """Raise RuntimeError if experts were moved, because the next keys would name wrong experts."""
    layers = zip(state.moe_layers, before, strict=True)
    if any(layer.slots_E is not slots_E for layer, slots_E in layers):
        raise RuntimeError(
            "balance_experts has moved experts since hub_tensors listed the tensors; call it after "
            "the last tensor, or make a new iterator"
        )


@torch.no_grad()
def _gather_factors(update: LowRank) -> LowRank:
    a, b = gather_tensor(update.a.detach()), gather_tensor(update.b.detach())
    return gather_whole_factors(update, a, b)


def _merge_and_cast(dtype: torch.dtype, updates: list[LowRank], box: Box, values: Tensor) -> Tensor:
    """Return a copy of the values in a box of a parameter, with updates added, in another dtype."""
    if updates:
        rows = tuple(slice(start, stop) for start, stop in box)
        values = add_updates(values.clone(), rows, updates)
    return values.to(dtype, copy=not updates)


def _assemble(group: TensorGroup, still_here: StillHere | None) -> Iterator[tuple[str, Tensor]]:
    """Yield the checkpoint tensors of a group in order, each as soon as slabs have filled it."""
    slabs, shapes = group.slabs(), group.shapes
    num_missing = {key: math.prod(shape) for key, shape in shapes.items()}
    unfinished: dict[str, Tensor] = {}
    while num_missing:
        if still_here is not None:
            still_here.check()
        pieces, box, slab = next(slabs)
        assert slab is not None
        for key, parts in cut_pieces(pieces, box).items():
            shape = shapes[key]
            for part in parts:
                values = part.in_view(slab[part.slices_in(box)])
                num_missing[key] -= values.numel()
                if values.numel() == math.prod(shape):
                    unfinished[key] = values.reshape(shape).contiguous()
                    continue
                if key not in unfinished:
                    unfinished[key] = slab.new_empty(shape)
                filled = tuple(slice(start, stop) for start, stop in part.box_in_view)
                unfinished[key].view(part.view)[filled] = values
                del values
            if num_missing[key] == 0:
                assert key == next(iter(num_missing)), "the order of `metadata`"
                del num_missing[key]
                yield key, unfinished.pop(key)
        del slab
