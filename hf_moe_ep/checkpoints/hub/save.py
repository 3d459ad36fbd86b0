"""Save a model as a Hugging Face checkpoint in the hub's layout.

`save_pretrained` sends one tensor after the other to rank 0, shard by shard (`gather.py`), and rank
0 writes the files (`write.py`). With pipeline stages the first rank of each stage receives and
writes the tensors of its stage (`stages.py`). Adapters are small, so rank 0 gathers all of them,
and PEFT saves them. `save_state_dict` writes the full state dict of one process. Both functions
also save the tensors of the loaded checkpoint that the model's class ignores (`extra.py`), but not
with adapters.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hf_moe_ep.checkpoints.hub.configs import prepare_configs, publish, stage_files
from hf_moe_ep.checkpoints.hub.extra import (
    copy_groups,
    find_to_copy,
    follow_copies,
    get_known_digests,
)
from hf_moe_ep.checkpoints.hub.gather import gather_adapters, iterate_slabs
from hf_moe_ep.checkpoints.hub.layout import list_names
from hf_moe_ep.checkpoints.hub.stages import (
    assign_groups,
    check_folder_is_shared,
    is_writer,
    list_files_of_stage,
    list_tensors_of_model,
)
from hf_moe_ep.checkpoints.hub.write import (
    TensorGroup,
    choose_dtypes,
    choose_file_names,
    get_first_dtype,
    group_tensors,
    parse_size,
    split_files,
    write_checkpoint,
)
from hf_moe_ep.checkpoints.storage.atomic import check_is_not_a_file
from hf_moe_ep.checkpoints.storage.switch import switch_files
from hf_moe_ep.etp import convert_slabs_to_stock, map_ids_to_split_dims
from hf_moe_ep.placement.hub_order import experts_in_hub_order
from hf_moe_ep.ranks.all_ranks import (
    check_alike,
    check_everyone_calls,
    is_first,
    run_on_all,
    run_on_first,
)
from hf_moe_ep.ranks.boxes import iterate_whole_tensor
from hf_moe_ep.state import ModelState, find_state, refuse_quantised_experts
from hf_moe_ep.upstream.adapters import has_adapters
from hf_moe_ep.upstream.module_names import get_canonical_name, unwrap

# The model card, which PEFT saves with adapters.
_CARD = "README.md"


def save_pretrained(
    model: nn.Module,
    directory: str | os.PathLike[str],
    *,
    max_shard_size: int | str = "5GB",
    dtype: torch.dtype | None = None,
    processor: Any = (),
    extra_tensors: bool = True,
    **kwargs: Any,
) -> None:
    """Write `model` so that stock `from_pretrained(directory)` loads it; every rank calls this.

    Besides its shards a rank needs memory for another rank's shard of one tensor; with
    expert_shard_dim=1, rank 0 needs memory for the experts of one ep rank in one layer. If a
    process is killed during the save, the previous checkpoint stays complete. With pipeline stages
    the first rank of each stage does what rank 0 does without stages, for the layers of its stage.

    Args:
        model: patched, sharded or not.
        directory: created if it is missing. Only rank 0 writes. With pipeline stages all nodes must
            share the folder, because the first rank of each stage writes.
        max_shard_size: the largest size of a file, in bytes or as text like "5GB".
        dtype: the dtype of the saved weights; by default, the dtype in which the model was loaded.
            torch.float32 saves the fp32 master weights of a bf16 model. torch.bfloat16 does not
            round tensors that `from_pretrained` keeps in fp32 in a bf16 model, such as correction
            biases. Adapters are saved in the dtypes that they had before sharding.
        processor: a tokenizer or processor to save with the model, a list of them, or None.
        extra_tensors: copy the tensors of the loaded checkpoint that the model's class ignores,
            such as layers for multi-token prediction, byte for byte and under their own keys. They
            are not saved with adapters, because the base model's checkpoint has them.
        kwargs: passed to PEFT's `save_pretrained`; allowed only for a model with adapters.

    Raises:
        ValueError: the model is not patched; `directory` is a file; `max_shard_size` is not a size;
            the experts are held quantised and the model has no adapters; the files of the extra
            tensors are gone or have changed since the model was loaded; ranks pass different
            arguments, or the first ranks of pipeline stages do not share `directory` (raised on
            every rank; nothing is written).
        TypeError: `kwargs` are given for a model without adapters.
        RuntimeError: a rank has not called this within five minutes; rank 0 cannot write (raised on
            every rank; the previous checkpoint stays complete).
    """
    check_everyone_calls("save_pretrained")
    folder, model = Path(directory), unwrap(model)
    processors = processor if isinstance(processor, (list, tuple)) else [processor]
    processors = [one for one in processors if one is not None]
    if has_adapters(model):
        if dtype is not None:
            raise ValueError(
                f"a model with adapters saves only these, in their own dtype; leave out "
                f"dtype={dtype}, or merge the adapter: hf-moe-ep merge-adapter BASE ADAPTER OUT"
            )
        _save_adapters(model, folder, processors, kwargs)
        return
    # The number of collectives depends on these arguments.
    check_alike(
        "save_pretrained",
        max_shard_size=max_shard_size,
        dtype=dtype,
        extra_tensors=extra_tensors,
    )
    if kwargs:
        raise TypeError(f"save_pretrained() got unexpected arguments: {', '.join(kwargs)}")
    state = find_state(model)
    if state is None:
        name = type(model).__name__
        raise ValueError(f"this {name} is not patched; call model.save_pretrained(directory)")
    refuse_quantised_experts(model, "save_pretrained")
    size = parse_size(max_shard_size)
    with experts_in_hub_order(model):
        _save_weights(model, state, folder, size, dtype, processors, extra_tensors)


def _save_weights(
    model: nn.Module,
    state: ModelState,
    folder: Path,
    max_shard_size: int,
    dtype: torch.dtype | None,
    processors: Sequence[Any],
    extra_tensors: bool,
) -> None:
    tensors, split_dims = list_tensors_of_model(model, state), map_ids_to_split_dims(model)
    groups = group_tensors(
        model,
        state.plan,
        tensors,
        choose_dtypes(model, dtype, state.dtypes),
        lambda name, tensor: convert_slabs_to_stock(
            iterate_slabs(tensor), split_dims.get(id(tensor))
        ),
    )
    groups = assign_groups(groups, state)
    files, what = split_files(groups, max_shard_size), f"saving to {folder}"

    extra_files: list[list[TensorGroup]] = []

    def prepare() -> tuple[Path, list[str]]:
        extra_files.extend(_list_extra_files(state, groups, max_shard_size, extra_tensors))
        check_is_not_a_file(folder)
        folder.mkdir(parents=True, exist_ok=True)
        configs = prepare_configs(model, folder, get_first_dtype(groups), processors)
        return configs, choose_file_names(len(files) + len(extra_files))

    configs, names = run_on_first(what, prepare)
    own_files = list_files_of_stage(files, len(names), state)
    files.extend(extra_files)
    # Every rank takes part in each file, but only rank 0 lists, reads and writes extra tensors. On
    # other ranks these files are empty.
    files.extend([] for _ in range(len(names) - len(files)))
    if own_files is not None:
        try:
            run_on_all(what, partial(check_folder_is_shared, folder, configs, state))
        except ValueError:
            if is_first():
                shutil.rmtree(configs)
            raise
    copied = write_checkpoint(
        folder,
        files,
        writes=is_writer(state),
        run_on_all=run_on_all,
        configs=configs,
        names=names,
        stage=own_files,
    )
    if is_first():
        follow_copies(state, folder, copied)


def _list_extra_files(
    state: ModelState, groups: Iterable[TensorGroup], max_shard_size: int, wanted: bool
) -> list[list[TensorGroup]]:
    """List the files of extra tensors: the copies that each file gets."""
    own_keys = {key for group in groups for key in group.shapes}
    extra = state.extra if wanted else None
    tensors = find_to_copy(extra, own_keys)
    return split_files(copy_groups(tensors, get_known_digests(extra)), max_shard_size)


def save_state_dict(
    model: nn.Module,
    directory: str | os.PathLike[str],
    state_dict: Mapping[str, Tensor],
    max_shard_size: int | str = "5GB",
    extra_tensors: bool = True,
) -> None:
    """Write a full state dict in the hub's layout; one process calls this.

    With pipeline stages `state_dict` has the tensors of all stages.

    Raises:
        ValueError: the state dict lacks tensors of the model or has other tensors, or the files of
            the extra tensors are gone or have changed. Nothing is written.
    """
    state = find_state(model)
    assert state is not None
    refuse_quantised_experts(model, "save_pretrained")
    folder, names = Path(directory), list_tensors_of_model(model, state).keys()
    by_name = {get_canonical_name(name): tensor for name, tensor in state_dict.items()}
    with_tied = names | {get_canonical_name(name) for name in model.state_dict(keep_vars=True)}
    problems = [
        list_names("missing", sorted(names - by_name.keys())),
        list_names("unexpected", sorted(by_name.keys() - with_tied)),
    ]
    if any(problems):
        raise ValueError(
            f"state_dict does not fit this {type(model).__name__}: "
            f"{'; '.join(filter(None, problems))}"
        )
    tensors = {name: tensor for name, tensor in by_name.items() if name in names}
    groups = group_tensors(
        model,
        state.plan,
        tensors,
        lambda _, tensor: tensor.dtype,
        lambda _, tensor: iterate_whole_tensor(tensor),
    )
    max_bytes = parse_size(max_shard_size)
    files = split_files(groups, max_bytes)
    files += _list_extra_files(state, groups, max_bytes, extra_tensors)
    check_is_not_a_file(folder)
    folder.mkdir(parents=True, exist_ok=True)
    configs = prepare_configs(model, folder, get_first_dtype(groups), ())
    follow_copies(state, folder, write_checkpoint(folder, files, configs=configs))


def _save_adapters(
    model: Any, folder: Path, processors: Iterable[Any], kwargs: dict[str, Any]
) -> None:
    state_dict = gather_adapters(model, kwargs.get("save_embedding_layers", "auto"))

    def write() -> None:
        check_is_not_a_file(folder)
        folder.mkdir(parents=True, exist_ok=True)
        with stage_files(folder) as staged:
            if (folder / _CARD).is_file():  # PEFT updates an existing model card
                shutil.copyfile(folder / _CARD, staged / _CARD)
            model.save_pretrained(os.fspath(staged), state_dict=state_dict, **kwargs)
            for processor in processors:
                processor.save_pretrained(staged)
        if not switch_files(folder, staged):
            publish(staged, folder)

    run_on_first(f"saving to {folder}", write)
