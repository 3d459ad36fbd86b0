"""A model -> a Hugging Face checkpoint in hub layout.

Rank 0 writes (`write.py`) what it is sent: one tensor after the other, and of a tensor one rank's
part after the other (`gather.py`). A model with adapters is saved as PEFT saves it: small, and
whole on rank 0.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hf_moe_ep.checkpoints.hub.configs import stage_configs
from hf_moe_ep.checkpoints.hub.gather import gather_state_dict, slabs_of
from hf_moe_ep.checkpoints.hub.layout import distinct_tensors, list_names
from hf_moe_ep.checkpoints.hub.whole_weights import check_whole_weights
from hf_moe_ep.checkpoints.hub.write import (
    first_dtype,
    parse_size,
    saved_dtype,
    sources_of,
    split_files,
    write_checkpoint,
)
from hf_moe_ep.checkpoints.storage.boxes import whole
from hf_moe_ep.placement.hub_order import experts_in_hub_order
from hf_moe_ep.ranks.together import (
    check_alike,
    check_everyone_calls,
    is_first,
    on_first,
    together,
)
from hf_moe_ep.state import ModelState, find_state
from hf_moe_ep.upstream.adapters import has_adapters
from hf_moe_ep.upstream.module_names import canonical_name, unwrap


def save_pretrained(
    model: nn.Module,
    directory: str | os.PathLike[str],
    *,
    max_shard_size: int | str = "5GB",
    dtype: torch.dtype | None = None,
    processor: Any = (),
    **kwargs: Any,
) -> None:
    """Write `model` so that stock `from_pretrained(directory)` loads it; every rank calls this.

    Beside its shards a rank needs memory for another rank's part of one tensor; rank 0, with
    expert_shard_dim=1, for one ep rank's experts of a layer. A process killed on the way leaves
    the checkpoint that was there.

    Args:
        model: patched, sharded or not.
        directory: created if missing; only rank 0 writes.
        max_shard_size: bytes of a file, or "5GB".
        dtype: None is the one that the model was loaded in; fp32 keeps the fp32 masters of a bf16
            model.
        processor: tokenizer or processor to save beside the model, or several.
        kwargs: of a model with adapters alone: passed to PEFT's `save_pretrained`.

    Raises:
        ValueError: a size that is none; experts that are held quantised, without adapters; on every
            rank, where ranks disagree about the arguments.
        RuntimeError: some rank has not called this within five minutes; on every rank, where rank
            0 cannot write: what was there stays.
    """
    check_everyone_calls("save_pretrained")
    folder, model = Path(directory), unwrap(model)
    others = processor if isinstance(processor, (list, tuple)) else [processor]
    if has_adapters(model):
        _save_adapters(model, folder, others, kwargs)
        return
    # These decide where ranks meet.
    check_alike("save_pretrained", max_shard_size=max_shard_size, dtype=dtype)
    if kwargs:
        raise TypeError(f"save_pretrained() got unexpected arguments: {', '.join(kwargs)}")
    state = find_state(model)
    if state is None:
        raise ValueError(f"this {type(model).__name__} is not patched; call its save_pretrained")
    check_whole_weights(model, "save_pretrained")
    size = parse_size(max_shard_size)
    with experts_in_hub_order(model):
        _save_weights(model, state, folder, size, dtype, others)


def _save_weights(
    model: nn.Module,
    state: ModelState,
    folder: Path,
    max_shard_size: int,
    dtype: torch.dtype | None,
    others: Sequence[Any],
) -> None:
    tensors = distinct_tensors(model)
    sources = sources_of(
        model,
        state.plan,
        tensors,
        lambda name, tensor: saved_dtype(tensor, dtype or state.dtypes.get(name)),
        lambda _, tensor: slabs_of(tensor),
    )
    files = split_files(sources, max_shard_size)

    def begin() -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        return stage_configs(model, folder, first_dtype(sources), others)

    configs = on_first(f"saving to {folder}", begin)
    write_checkpoint(folder, files, writes=is_first(), together=together, configs=configs)


def save_state_dict(
    model: nn.Module,
    directory: str | os.PathLike[str],
    state_dict: Mapping[str, Tensor],
    max_shard_size: int | str = "5GB",
) -> None:
    """Write tensors gathered before, as `save_pretrained` does; one process calls this.

    Raises:
        ValueError: tensors of the model are missing, or some are no part of it; nothing is written.
    """
    state = find_state(model)
    assert state is not None
    check_whole_weights(model, "save_pretrained")
    folder, names = Path(directory), distinct_tensors(model).keys()
    given = {canonical_name(name): tensor for name, tensor in state_dict.items()}
    tied = {canonical_name(name) for name in model.state_dict(keep_vars=True)}
    problems = [
        list_names("missing", sorted(names - given.keys())),
        list_names("unexpected", sorted(given.keys() - tied)),
    ]
    if any(problems):
        raise ValueError(
            f"state_dict is not that of this {type(model).__name__}: "
            f"{'; '.join(filter(None, problems))}"
        )
    tensors = {name: tensor for name, tensor in given.items() if name in names}
    sources = sources_of(
        model,
        state.plan,
        tensors,
        lambda _, tensor: tensor.dtype,
        lambda _, tensor: whole(tensor),
    )
    folder.mkdir(parents=True, exist_ok=True)
    files = split_files(sources, parse_size(max_shard_size))
    configs = stage_configs(model, folder, first_dtype(sources), ())
    write_checkpoint(folder, files, configs=configs)


def _save_adapters(model: Any, folder: Path, others: Iterable[Any], kwargs: dict[str, Any]) -> None:
    state_dict = gather_state_dict(model, kwargs.get("save_embedding_layers", "auto"))

    def write() -> None:
        model.save_pretrained(os.fspath(folder), state_dict=state_dict, **kwargs)
        for other in others:
            other.save_pretrained(folder)

    on_first(f"saving to {folder}", write)
