"""PEFT: a LoRA adapter's folder, laid over a model without values.

peft/config.py, peft/mapping_func.py, peft/tuners/lora/config.py and layer.py (the first values of
factors), peft/utils/save_and_load.py; transformers saves adapters with the same keys.
"""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hf_moe_ep.upstream.adapters import PROMPT_ENCODERS, no_lean_adapters

_PREFIX = "base_model.model."
# Fields of a LoraConfig that make something else of it than W + scale * B A of the base's W.
_MORE_THAN_A_PRODUCT = {
    "use_dora": "DoRA (use_dora)",
    "use_qalora": "QALoRA (use_qalora)",
    "use_bdlora": "BD-LoRA (use_bdlora)",
    "alora_invocation_tokens": "activated LoRA (alora_invocation_tokens)",
    "arrow_config": "Arrow (arrow_config)",
    "monteclora_config": "MonteCLoRA (monteclora_config)",
    "kasa_config": "KaSA (kasa_config)",
    "velora_config": "VeLoRA (velora_config)",
    "lora_bias": "a bias of its own (lora_bias)",
    "layer_replication": "replicated layers (layer_replication)",
    "trainable_token_indices": "single rows of embeddings (trainable_token_indices)",
}
# First values that leave the base as it is; all others take something out of it.
_KEEP_THE_BASE = ("gaussian", "eva", "orthogonal")
_ELSEWHERE = "merge it in one process, with PEFT's merge_and_unload"
# Of these fields, the ones that need no tensors but the factors, nor values of the base.
_FACTORS_ALONE = ("lora_bias", "alora_invocation_tokens")
_EMBEDDINGS = "embed_tokens"


def check_attachable(config: Any) -> None:
    """Raise where `attach_adapters` cannot attach the adapters of a config to a model on meta.

    Such a model has no values yet, so an adapter may consist of the factors of LoRA alone, and
    their first values may not be computed from the weights. LoRA on embeddings is found here where
    the config names them, otherwise by `attach_adapters`.

    Raises:
        ValueError: it is of another kind; it says which, and how to load the model instead.
    """
    found = getattr(config, "peft_type", None)
    kind = str(getattr(found, "value", found))
    if kind != "LORA":
        raise no_lean_adapters(f"{type(config).__name__} (peft_type {kind})")
    if more := _beyond_a_product(config, _FACTORS_ALONE):
        raise no_lean_adapters(f"LoRA with {', '.join(more)}")
    first = config.init_lora_weights
    if not isinstance(first, bool) and str(first).lower() != "gaussian":
        raise no_lean_adapters(f"LoRA with init_lora_weights={first!r}")
    targets = config.target_modules
    names = [targets] if isinstance(targets, str) else targets or ()
    if any(name.endswith(_EMBEDDINGS) for name in names):
        raise no_lean_adapters(f"LoRA on embeddings ({_EMBEDDINGS})")


def read_lora_config(folder: Path) -> Any:
    """Read the config of an adapter that is a product of two factors, and of nothing more.

    Raises:
        ValueError: it is of another kind; it says which.
    """
    import peft

    try:
        config: Any = peft.PeftConfig.from_pretrained(os.fspath(folder))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{folder} has no config that PEFT {peft.__version__} reads: {type(error).__name__}: "
            f"{error}; a newer PEFT may, if a newer one wrote it"
        ) from error
    kind = str(getattr(config.peft_type, "value", config.peft_type))
    if config.is_prompt_learning:
        raise ValueError(
            f"{folder} learns a prompt ({kind}: {PROMPT_ENCODERS}), which no weight can hold; "
            f"serve the base together with it"
        )
    if kind != "LORA":
        raise ValueError(
            f"{folder} is of peft_type {kind}, and only LORA is a product of two factors; "
            f"{_ELSEWHERE}"
        )
    if found := _beyond_a_product(config):
        raise ValueError(
            f"{folder} is LoRA with {', '.join(found)}, and only a product of two factors is "
            f"merged here; {_ELSEWHERE}"
        )
    first = config.init_lora_weights
    if isinstance(first, str) and first.lower() not in _KEEP_THE_BASE:
        raise ValueError(
            f"{folder} began with init_lora_weights={first!r}, which may change the base too; save "
            f"it with path_initial_model_for_weight_conversion= as plain LoRA, or {_ELSEWHERE}"
        )
    return config


def _beyond_a_product(config: Any, allowed: Iterable[str] = ()) -> list[str]:
    """Name what an adapter has beside two factors, also what only a newer PEFT knows as such.

    The fields `allowed` are left out.
    """
    variants = (
        field.name for field in dataclasses.fields(config) if field.metadata.get("is_lora_variant")
    )
    names = {name: name for name in variants} | _MORE_THAN_A_PRODUCT
    return [
        name
        for field, name in names.items()
        if field not in allowed and getattr(config, field, None)
    ]


def attach_without_values(model: nn.Module, config: Any) -> nn.Module:
    """Put PEFT's layers around a model on meta; what they add is on meta, too.

    Raises:
        ValueError: PEFT finds nothing to adapt, or cannot adapt what it finds.
    """
    from peft import get_peft_model

    config = dataclasses.replace(
        copy.deepcopy(config),  # PEFT writes into it what it makes of older configs
        init_lora_weights=False,
        inference_mode=True,
        base_model_name_or_path=model.__dict__.get("name_or_path") or None,
    )
    adapted: nn.Module = get_peft_model(model, config, low_cpu_mem_usage=True)
    return adapted


def factor_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that a factor is loaded in, beside a weight of `dtype`.

    `autocast_adapter_dtype`, which is PEFT's default (peft/tuners/tuners_utils.py).
    """
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def saved_tensors(model: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return by the keys that PEFT saves them with: those of the adapter, and those of the base.

    The latter are saved where the vocabulary was resized, and by save_embedding_layers=True.
    """
    from peft import get_peft_model_state_dict

    state: dict[str, Tensor] = model.state_dict(keep_vars=True)
    own = get_peft_model_state_dict(model, state, save_embedding_layers=False)
    known = {id(tensor) for tensor in own.values()}
    return own, {key: tensor for key, tensor in state.items() if id(tensor) not in known}


def with_prefix(keys: Iterable[str]) -> Mapping[str, str]:
    """Map the keys of a file to those of PEFT: transformers may save them without its prefix."""
    names = list(keys)
    add = "" if any(name.startswith(_PREFIX) for name in names) else _PREFIX
    return {f"{add}{name}": name for name in names}
