"""Read the config of a model, and build the model without weights, to plan its training.

`find_config` accepts a hub id, a folder or a config.json. For a hub id, only the config is
downloaded. `published_models.json` stores the configs of a few models by hub id, reduced to the
fields that determine sizes, so plans of these models need no network. `build_meta_model` builds a
model on the meta device, where a parameter has a shape but no memory. Buffers stay on the CPU: they
take only a few kilobytes, and sharding broadcasts their values. `attach_lora` adds adapters.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    PreTrainedConfig,
)

from hf_moe_ep.config import check_choice
from hf_moe_ep.plan import ModelPlan, matches
from hf_moe_ep.planner.options import LORA_TARGETS, read_published_configs
from hf_moe_ep.upstream.hub import on_meta, read_object
from hf_moe_ep.upstream.models import is_causal_lm, takes_images, takes_sound

_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def find_config(model: str | os.PathLike[str] | Mapping[str, Any] | PreTrainedConfig) -> Any:
    """Return the config of a model.

    Args:
        model: a hub id, a folder, a config.json or a dict with `model_type`. A config object is
            returned unchanged.

    Raises:
        ValueError: `model` names neither a known or reachable model nor an existing file, or the
            installed transformers does not know the model type.
    """
    if isinstance(model, PreTrainedConfig):
        return model
    if not isinstance(model, Mapping):
        known = read_published_configs()
        if str(model) not in known:
            return _read_config(Path(model), known)
        model = known[str(model)]["config"]
    fields = dict(model)
    return AutoConfig.for_model(fields.pop("model_type"), **fields)


def find_architecture_config(name: str) -> PreTrainedConfig:
    """Return the default config of a model type such as "qwen3_moe", or the config of a model."""
    if name in CONFIG_MAPPING and not os.path.exists(name):
        return AutoConfig.for_model(name)
    if name not in read_published_configs() and not (
        os.path.exists(name) or _HUB_ID.fullmatch(name)
    ):
        raise ValueError(
            f"{name!r} is not a model type of the installed transformers nor a folder with a "
            f"config.json; name a model of the hub as OWNER/NAME, or use one of "
            f"{', '.join(read_published_configs())}"
        )
    return find_config(name)


def _read_config(path: Path, known: Mapping[str, Any]) -> Any:
    file = path / "config.json" if path.is_dir() else path
    if not path.exists() and _HUB_ID.fullmatch(path.as_posix()):
        return _fetch_config(path.as_posix(), known)
    if not file.is_file():
        raise ValueError(
            f"{os.fspath(path)!r} is not a known model ({', '.join(known)}) nor a folder "
            f"with a config.json; name a model of the hub as OWNER/NAME"
        )
    model_type = read_object(file).get("model_type")
    if model_type is not None and model_type not in CONFIG_MAPPING:
        raise ValueError(
            f"{os.fspath(file)!r} has model_type {model_type!r}, which transformers "
            f"{transformers.__version__} does not know; for a model of your own, register its "
            f"config (AutoConfig.register) and call hf_moe_ep.cli.main.main(['memory', ...]) from "
            f"Python"
        )
    return AutoConfig.from_pretrained(file, local_files_only=True)


def _fetch_config(name: str, known: Mapping[str, Any]) -> Any:
    """Download the config of a hub repository, or read the copy in the hub's cache.

    Without a network, huggingface_hub reads a cached copy after one try. Without a cached copy it
    tries for 23 seconds, unless HF_HUB_OFFLINE=1 is set.
    """
    try:
        return AutoConfig.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"the config of {name!r} was not found on the hub or in its cache ({reason}); pass the "
            f"path of a downloaded config.json, or one of {', '.join(known)}; without a "
            f"network, HF_HUB_OFFLINE=1 searches only the cache, at once"
        ) from error


def build_meta_model(config: Any, dtype: torch.dtype) -> nn.Module:
    """Build the stock model of a config with parameters on the meta device, and tie its weights.

    The model has a language-model head if transformers has a class with a head for it.
    """
    factory: Any = AutoModel
    if takes_images(config):
        factory = AutoModelForImageTextToText
    elif is_causal_lm(config):
        factory = AutoModelForCausalLM
    elif takes_sound(config):
        factory = AutoModelForMultimodalLM
    return on_meta(partial(factory.from_config, config, dtype=dtype))


def attach_lora(
    model: nn.Module,
    plan: ModelPlan,
    rank: int,
    targets: str,
    *,
    device: str = "meta",
    fp32: bool = True,
) -> nn.Module:
    """Add PEFT's LoRA to a patched model: on stacked experts, attention projections, or both.

    With `fp32`, the adapters of a low-precision model are in fp32, which is PEFT's default.

    Raises:
        ValueError: the targets are unknown, the rank is below 1, or PEFT is not installed.
    """
    check_choice("lora_targets", targets, LORA_TARGETS)
    if rank < 1:
        raise ValueError(f"lora_rank ({rank}) must be 1 or more; try lora_rank=8")
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise ValueError(f"lora_rank ({rank}) needs PEFT; pip install 'hf_moe_ep[peft]'") from error
    experts = plan.experts.rpartition("*.")[2]
    config = LoraConfig(
        r=rank,
        target_parameters=[f"{experts}.{name}" for name in plan.expert_weights]
        if targets != "attention"
        else [],
        target_modules=_list_projections(model, plan) if targets != "experts" else [],
    )
    with torch.device(device), warnings.catch_warnings():
        # PEFT reads a model attribute that transformers has deprecated.
        warnings.filterwarnings("ignore", ".is_gradient_checkpointing. is deprecated")
        adapted: nn.Module = get_peft_model(model, config, autocast_adapter_dtype=fp32)
    if not fp32:
        # PEFT casts adapters to the dtype of the model, but not on the meta device.
        dtype = next(p.dtype for p in adapted.parameters() if not p.requires_grad)
        for module in adapted.modules():
            parameters = list(module.parameters())
            if parameters and all(parameter.requires_grad for parameter in parameters):
                module.to(dtype)
    return adapted


def _list_projections(model: nn.Module, plan: ModelPlan) -> list[str]:
    """List the names of all linear layers inside attention modules."""
    return [
        f"{name}.{part}"
        for name, attention in model.named_modules()
        if matches(plan.attention, name)
        for part, module in attention.named_modules()
        if isinstance(module, nn.Linear)
    ]
