"""Convert PEFT's adapter folders between LoRA on stacked experts and LoRA on single experts.

Some servers read only single experts. A conversion needs memory for the whole adapter. It writes
the new folder under a temporary name, and renames the folder when it is complete. per_expert.py
describes the layouts of tensors, and adapter_config.py describes the changes of the config. Weights
in .bin files are not supported.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from hf_moe_ep.lora.adapter_config import CONFIG, compute_scale, find_rank_and_alpha
from hf_moe_ep.lora.names import Stack, is_expert_key, list_other_modules
from hf_moe_ep.lora.per_expert import AdapterFile, Tensors, convert_to_single, convert_to_stacked
from hf_moe_ep.upstream.hub import read_object

WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."


@dataclass(frozen=True)
class Converted:
    """The contents of the folder that was written.

    Attributes:
        layers: the number of layers with adapted experts.
        experts: the number of experts in one layer.
        tensors: the number of converted tensors, which belong to experts.
        copied: the number of copied tensors.
        bytes: the size of all tensors.
        notes: warnings about values that servers ignore, or that the conversion has changed.
    """

    layers: int
    experts: int
    tensors: int
    copied: int
    bytes: int
    notes: list[str]


def export_adapter(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> Converted:
    """Convert an adapter from LoRA on stacked experts to LoRA on single experts.

    The new tensors are `...mlp.experts.{e}.{gate,up,down}_proj.lora_A.weight` (r, in) and
    `lora_B.weight` (out, r). They are slices of the old tensors. Gate and up have the same lora_A.
    Other tensors and files are copied. `fuse_adapter` restores the same bytes.

    adapter_config.py describes the changes of adapter_config.json; r, lora_alpha and use_rslora do
    not change.

    Args:
        source: a folder with adapter_config.json and adapter_model.safetensors.
        target: a folder that is missing or empty; it is written completely or not at all.

    Raises:
        ValueError: `source` is not an adapter's folder, or `target` is not empty; there is no LoRA
            on stacked experts; the architecture is unknown; shapes contradict each other or the
            config (the number of experts is the number of rows of lora_A, divided by the rank).
    """
    return _convert(source, target, convert_to_single)


def fuse_adapter(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> Converted:
    """Convert an adapter from LoRA on single experts to LoRA on stacked experts.

    Each layer gets lora_A (E * r, in) and lora_B (out, r * E) of gate_up_proj and down_proj. If
    lora_A of gate and up are equal in all experts, r does not change, and the result of
    `export_adapter` is converted back to the same bytes. Otherwise gate_up_proj gets
    A = [A_gate; A_up] and a block diagonal B, and rank_pattern and alpha_pattern keep the scale.
    lora_dropout becomes 0, the only value that PEFT accepts for parameters.

    Args:
        source, target: as in `export_adapter`.

    Raises:
        ValueError: as in `export_adapter`; experts are missing, or differ in shape, dtype or scale;
            the adapter uses DoRA.
    """
    return _convert(source, target, convert_to_stacked)


def _convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    convert: Callable[[AdapterFile], tuple[Tensors, dict[str, Any], list[Stack]]],
) -> Converted:
    """Read and convert an adapter, write it under a temporary name, and rename it."""
    source, target = Path(source).resolve(), Path(target).resolve()
    for name in (CONFIG, WEIGHTS):
        if not (source / name).is_file():
            raise ValueError(f"{source} is not an adapter folder: it has no {name}")
    if target == source or source in target.parents:
        raise ValueError(f"target {target} is inside source {source}; name another folder")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"target {target} exists and is not empty; name another folder")
    partial = target.with_name(f".{target.name}.partial-{os.getpid()}")

    def list_converted_files(folder: str, names: list[str]) -> set[str]:
        files = {name for name in names if name == CONFIG or name.startswith("adapter_model.")}
        return files if Path(folder) == source else set()

    try:
        with safe_open(source / WEIGHTS, "pt") as file:
            opened = _open_adapter(source, file)
            tensors, config, stacks = convert(opened)
            shutil.copytree(source, partial, ignore=list_converted_files)
            num_converted, num_copied, size = _write_tensors(partial / WEIGHTS, opened, tensors)
        (partial / CONFIG).write_text(json.dumps(config, indent=2), encoding="utf-8")
        partial.rename(target)
    except SafetensorError as error:
        raise ValueError(f"{source / WEIGHTS} cannot be read: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    layers = len({stack.experts for stack in stacks})
    if convert is convert_to_single:
        names = [module for stack in stacks for module in stack.list_modules()]
    else:
        names = [stack.name for stack in stacks]
    notes = _list_notes(opened.config, config, names + list_other_modules(opened.shapes))
    num_experts = stacks[0].num_experts
    return Converted(layers, num_experts, num_converted, num_copied, size, notes)


def _open_adapter(source: Path, file: Any) -> AdapterFile:
    config = read_object(source / CONFIG)
    if config.get("peft_type") != "LORA":
        raise ValueError(f"{CONFIG} is of peft_type {config.get('peft_type')!r}, not 'LORA'")
    names = list(file.keys())
    prefix = _PREFIX if all(name.startswith(_PREFIX) for name in names) else ""
    shapes = {}
    for name in names:
        part = file.get_slice(name)
        dtype = (part[:0] if part.get_shape() else file.get_tensor(name)).dtype
        shapes[name.removeprefix(prefix)] = torch.empty(
            part.get_shape(), dtype=dtype, device="meta"
        )

    def read(name: str) -> Tensor:
        return file.get_tensor(prefix + name)

    return AdapterFile(config, shapes, read, prefix, file.metadata() or {})


def _write_tensors(path: Path, adapter: AdapterFile, tensors: Tensors) -> tuple[int, int, int]:
    """Write the tensors of experts that `tensors` yields, and all other tensors of `adapter`.

    Returns:
        The number of tensors of experts, the number of other tensors, and the size of all tensors
        in bytes.
    """
    # Gate and up share lora_A, but safetensors refuses tensors that share memory, so tensors are
    # cloned.
    expert_tensors = {
        adapter.prefix + name: tensor.clone(memory_format=torch.contiguous_format)
        for name, tensor in tensors(adapter.read)
    }
    other_tensors = {
        adapter.prefix + name: adapter.read(name)
        for name in adapter.shapes
        if not is_expert_key(name)
    }
    save_file({**expert_tensors, **other_tensors}, path, adapter.metadata or None)
    size = sum(tensor.nbytes for tensor in (*expert_tensors.values(), *other_tensors.values()))
    return len(expert_tensors), len(other_tensors), size


def _list_notes(old: dict[str, Any], config: dict[str, Any], names: list[str]) -> list[str]:
    """List warnings about scales that vLLM ignores, and about a dropout that was removed.

    `names` are the modules or parameters that the new config adapts.
    """
    notes = []
    default_scale = compute_scale(config, config["r"], config["lora_alpha"])
    scales = [compute_scale(config, *find_rank_and_alpha(config, name)) for name in names]
    if not all(math.isclose(scale_of_name, default_scale) for scale_of_name in scales):
        notes.append(
            f"rank_pattern or alpha_pattern change scales; vLLM ignores them, and scales every "
            f"module by {default_scale:g}"
        )
    dropout = old.get("lora_dropout")
    if dropout and not config["lora_dropout"]:
        notes.append(f"lora_dropout {dropout} became 0: PEFT has none on stacked experts")
    return notes
