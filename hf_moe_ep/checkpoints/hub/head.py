"""Add a head for multi-token prediction to a model, with the values of the model's checkpoint.

    the model                          values of the head
    was loaded by from_pretrained      every rank reads all values when the model is patched
    is on meta (weights=folder)        each rank reads its shards of the head during sharding
    has no head in its checkpoint      random values, if `ParallelConfig.mtp_from_scratch` is set

The tensors of the head become parameters of the model, and are then not extra tensors (`extra.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from hf_moe_ep.architectures import Parts, find_parts
from hf_moe_ep.checkpoints.hub.extra import find_loaded
from hf_moe_ep.checkpoints.hub.read import match_checkpoint
from hf_moe_ep.checkpoints.storage.safetensors_file import FileTensor, Reader, read_index
from hf_moe_ep.config import ParallelConfig
from hf_moe_ep.model_patches.standard import MTP_HEADS
from hf_moe_ep.mtp.build import (
    build_head,
    check_head_is_supported,
    count_stored_layers,
    count_trained_layers,
)
from hf_moe_ep.mtp_head import MtpHead, find_head
from hf_moe_ep.plan import MTP_HEAD, ModelPlan
from hf_moe_ep.ranks.boxes import make_whole_box
from hf_moe_ep.upstream.adapters import without_adapters
from hf_moe_ep.upstream.hub import initialise_parameters
from hf_moe_ep.upstream.modules import (
    allocate_meta,
    get_own_buffers,
    get_own_child,
    get_own_children,
)


def add_head(
    model: nn.Module, config: ParallelConfig, plan: ModelPlan | None, weights: Path | None
) -> None:
    """Add a head with `config.mtp_layers` layers, unless the model has this head already.

    Args:
        plan: the plan that the user gave, or None.
        weights: the checkpoint of a model on meta; None for a model that is loaded.

    Raises:
        ValueError: a head for this model was not tested or cannot be trained; the checkpoint was
            not found, or has fewer layers for multi-token prediction than `config.mtp_layers`; the
            model already has a head with another number of layers.
    """
    wanted, present = config.mtp_layers, find_head(model)
    if present is not None:
        if wanted != len(present.blocks):
            raise ValueError(
                f"this model was patched with mtp_layers={len(present.blocks)}, and cannot be "
                f"patched with mtp_layers={wanted} again; call unpatch(model) before"
            )
        return
    if not wanted:
        return
    parts = find_parts(model, plan)
    check_head_is_supported(parts, wanted)
    folder, tensors = _find_checkpoint(model, config, weights)
    stored = count_stored_layers(parts, tensors)
    if stored < wanted and (stored or not config.mtp_from_scratch):
        hint = f"; try mtp_layers={stored}" if stored else ""
        raise ValueError(
            f"mtp_layers={wanted}, but the checkpoint {folder} has {stored} layers for multi-token "
            f"prediction{hint or '; train a new head with mtp_from_scratch=True'}"
        )
    head = build_head(parts, wanted)
    try:
        if not stored:
            _initialise_head(head, parts)
        elif weights is None:
            assert folder is not None
            _read_head(head, model, folder, tensors, parts.plan)
    except BaseException:
        remove_head(model)
        raise


def add_empty_head(model: nn.Module, plan: ModelPlan, names: Mapping[str, object]) -> None:
    """Add a head on meta to a model on meta if the trained parameters `names` include a head."""
    num_layers = count_trained_layers(names)
    if num_layers and plan.model_type in MTP_HEADS:
        build_head(find_parts(model), num_layers)


def remove_head(model: nn.Module) -> None:
    """Remove the head of a model, if it has one."""
    for module in model.modules():
        if isinstance(get_own_child(module, MTP_HEAD), MtpHead):
            del get_own_children(module)[MTP_HEAD]
            return


def _find_checkpoint(
    model: nn.Module, config: ParallelConfig, weights: Path | None
) -> tuple[Path | None, Mapping[str, FileTensor]]:
    """Return the folder of a model's checkpoint and the folder's tensors by key.

    Without a checkpoint, the result is (None, {}) if `config.mtp_from_scratch` is set.
    """
    if weights is not None:
        return weights, read_index(weights)
    try:
        loaded = find_loaded(without_adapters(model))
    except (ValueError, OSError) as error:
        raise ValueError(
            f"mtp_layers={config.mtp_layers} builds a head from the checkpoint of the model, which "
            f"was not found: {error}"
        ) from error
    if loaded is not None:
        return loaded
    if config.mtp_from_scratch:
        return None, {}
    raise ValueError(
        f"mtp_layers={config.mtp_layers} builds a head from the checkpoint of the model, but this "
        f"model was not loaded by from_pretrained; load it, or train a new head with "
        f"mtp_from_scratch=True"
    )


def _initialise_head(head: MtpHead, parts: Parts) -> None:
    """Give a head random values by the rule with which transformers initialises a new model."""
    device = next(parts.final_norm[0].parameters()).device
    allocate_meta(head, torch.device("cpu") if device.type == "meta" else device)
    initialise_parameters(parts.causal_lm, head)


def _read_head(
    head: MtpHead,
    model: nn.Module,
    folder: Path,
    tensors: Mapping[str, FileTensor],
    plan: ModelPlan,
) -> None:
    """Let this rank read the whole head from a checkpoint."""
    prefix = next(name for name, module in model.named_modules() if module is head)
    names = [f"{prefix}.{name}" for name, _ in head.named_parameters()]
    stored = match_checkpoint(model, folder, plan, names, file_tensors=tensors).stored
    device = next(p.device for p in model.parameters() if not p.is_meta)
    allocate_meta(head, device)
    with Reader() as reader, torch.no_grad():
        for path, module in head.named_modules(prefix=prefix):
            own_tensors = dict(module.named_parameters(recurse=False)) | get_own_buffers(module)
            for name, tensor in own_tensors.items():
                source = stored.get(f"{path}.{name}")
                if tensor is not None and source is not None:
                    values = torch.empty(tensor.shape, dtype=tensor.dtype)
                    source.read_into(values, make_whole_box(tensor.shape), reader)
                    tensor.copy_(values)
