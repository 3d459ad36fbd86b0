"""PEFT: read the config of an adapter, and attach a LoRA adapter to a model on meta.

The private names come from peft/config.py, peft/mapping_func.py, peft/tuners/lora/config.py and
layer.py (the initial values of factors) and peft/utils/save_and_load.py (the keys of saved tensors,
which transformers uses as well). The losses of other adapters are in model.py of
peft/tuners/adalora, cpt and shadow.
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

from hf_moe_ep.upstream.adapters import PROMPT_ENCODERS, make_unattachable_error

_PREFIX = "base_model.model."
# Fields of a LoraConfig. If one of them is set, the adapted weight is not simply W + scale * B A,
# where W is the weight of the base.
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
# Strings for init_lora_weights that leave the base model unchanged. All other strings change it.
_INITS_THAT_KEEP_THE_BASE = ("gaussian", "eva", "orthogonal")
_MERGE_WITH_PEFT = "merge the adapter in one process, with PEFT's merge_and_unload"
# The fields above that are possible for a model on meta, because they need no values of the base.
_ALLOWED_ON_META = ("lora_bias", "alora_invocation_tokens")
_EMBEDDINGS = "embed_tokens"
# The file by which PEFT and transformers recognise a folder with an adapter.
_CONFIG = "adapter_config.json"
# The types of adapters that a patched model cannot train, with the reasons.
_UNSUPPORTED = {
    "ADALORA": "it calls the model's forward without the model's hooks, with which FSDP2 gathers "
    "parameters, and then adds a loss of its own",
    "CPT": "it writes the values of its prompt in each forward, which do not reach FSDP2's shards, "
    "and it computes its loss from whole logits after the model's forward",
    "SHADOW": "it computes a loss of its own after the model's forward, when FSDP2 has freed the "
    "gathered parameters",
}


def check_supported(config: Any) -> None:
    """Raise ValueError if a patched model cannot train the adapter of a config."""
    kind = _get_type(config)
    if reason := _UNSUPPORTED.get(kind):
        raise ValueError(
            f"{type(config).__name__} (peft_type {kind}) does not work with a patched model: "
            f"{reason}; train LoRA, or leave out patch"
        )


def check_attachable(config: Any) -> None:
    """Raise ValueError if `attach_adapters` cannot attach the adapters of a config.

    The model is on meta and has no values. The adapters must therefore be LoRA factors whose
    initial values do not depend on the weights. LoRA on embeddings is refused here if the config
    names the embeddings, otherwise by `attach_adapters`.
    """
    if kind := find_kind_that_needs_values(config):
        raise make_unattachable_error(kind)
    targets = config.target_modules
    names = [targets] if isinstance(targets, str) else targets or ()
    if any(name.endswith(_EMBEDDINGS) for name in names):
        raise make_unattachable_error(f"LoRA on embeddings ({_EMBEDDINGS})")


def check_no_adapter_is_lost(folder: Path, peft_config: Any) -> None:
    """Raise ValueError if a folder has a trained adapter, which would not be loaded with the model.

    transformers' from_pretrained attaches such an adapter (transformers/integrations/peft.py). If a
    complete model lies beside the adapter, `peft_config` requests new adapters in its place.
    """
    has_model = (folder / "config.json").is_file()
    if not (folder / _CONFIG).is_file() or (has_model and peft_config is not None):
        return
    problem, remedy = f"an adapter ({_CONFIG}) and no model", ""
    if has_model:
        problem = f"an adapter ({_CONFIG}) beside its model"
        remedy = "pass peft_config= to train new adapters; or move the adapter to another folder, "
    raise ValueError(
        f"{folder} has {problem}, and from_pretrained of hf_moe_ep loads no trained adapters; "
        f"{remedy}load the base model with transformers' from_pretrained, attach the adapter with "
        f"PeftModel.from_pretrained(base, folder, is_trainable=True), and shard the model with "
        f"apply_ep_fsdp2"
    )


def find_kind_that_needs_values(config: Any) -> str:
    """Name the kind of a config whose adapters may need values of the base model, or return "".

    The factors of plain LoRA have initial values that do not depend on the weights.
    """
    kind = _get_type(config)
    if kind != "LORA":
        return f"{type(config).__name__} (peft_type {kind})"
    if more := _list_extras(config, _ALLOWED_ON_META):
        return f"LoRA with {', '.join(more)}"
    init = config.init_lora_weights
    if not isinstance(init, bool) and str(init).lower() != "gaussian":
        return f"LoRA with init_lora_weights={init!r}"
    return ""


def read_lora_config(folder: Path) -> Any:
    """Read the config of an adapter that is a product of two factors and nothing else.

    Raises:
        ValueError: PEFT cannot read the config, or the adapter is of another kind.
    """
    import peft

    try:
        config: Any = peft.PeftConfig.from_pretrained(os.fspath(folder))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{folder} has no config that PEFT {peft.__version__} can read: "
            f"{type(error).__name__}: {error}; if a newer PEFT wrote the config, install that "
            f"version"
        ) from error
    kind = _get_type(config)
    if config.is_prompt_learning:
        raise ValueError(
            f"{folder} is a trained prompt ({kind}: {PROMPT_ENCODERS}), which cannot be merged "
            f"into a weight; serve the base together with the prompt"
        )
    if kind != "LORA":
        raise ValueError(
            f"{folder} is of peft_type {kind}, but only LORA is a product of two factors; "
            f"{_MERGE_WITH_PEFT}"
        )
    if more := _list_extras(config):
        raise ValueError(
            f"{folder} is LoRA with {', '.join(more)}, but only a product of two factors can be "
            f"merged here; {_MERGE_WITH_PEFT}"
        )
    init = config.init_lora_weights
    if isinstance(init, str) and init.lower() not in _INITS_THAT_KEEP_THE_BASE:
        raise ValueError(
            f"{folder} was initialised with init_lora_weights={init!r}, which may change the base "
            f"too; save the adapter as plain LoRA with PEFT's "
            f"save_pretrained(path_initial_model_for_weight_conversion=...), or {_MERGE_WITH_PEFT}"
        )
    return config


def _get_type(config: Any) -> str:
    """Return the type of a config's adapter, such as "LORA"."""
    peft_type = getattr(config, "peft_type", None)
    return str(getattr(peft_type, "value", peft_type))


def _list_extras(config: Any, allowed: Iterable[str] = ()) -> list[str]:
    """Describe the fields that make a config's adapter more than a product, except `allowed`.

    Fields that a newer PEFT marks as a variant of LoRA are included.
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
    """Attach PEFT's layers to a model on meta, with all their tensors on meta as well.

    Raises:
        ValueError: PEFT finds no target module, or cannot adapt one.
    """
    from peft import get_peft_model

    config = dataclasses.replace(
        copy.deepcopy(config),  # PEFT converts older configs in place.
        init_lora_weights=False,
        inference_mode=True,
        base_model_name_or_path=model.__dict__.get("name_or_path") or None,
    )
    return get_peft_model(model, config, low_cpu_mem_usage=True)


def choose_factor_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which PEFT loads the factors for a weight with the dtype `dtype`.

    This is the effect of `autocast_adapter_dtype`, which is True by default
    (peft/tuners/tuners_utils.py).
    """
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def list_saved_tensors(model: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the adapter's tensors and the base model's tensors, by their keys in PEFT's files.

    A file of PEFT contains tensors of the base model if the vocabulary was resized, or if
    save_embedding_layers was True.
    """
    from peft import get_peft_model_state_dict

    state: dict[str, Tensor] = model.state_dict(keep_vars=True)
    adapter = get_peft_model_state_dict(model, state, save_embedding_layers=False)
    adapter_ids = {id(tensor) for tensor in adapter.values()}
    return adapter, {key: tensor for key, tensor in state.items() if id(tensor) not in adapter_ids}


def map_prefixed_keys(keys: Iterable[str]) -> Mapping[str, str]:
    """Map the key that PEFT gives to each tensor, with a prefix, to the tensor's key in `keys`.

    `keys` are the keys of one file. The keys of a file that transformers wrote have no prefix:
    {"base_model.model.layers.0.lora_A.weight": "layers.0.lora_A.weight"}.
    """
    names = list(keys)
    prefix = "" if any(name.startswith(_PREFIX) for name in names) else _PREFIX
    return {f"{prefix}{name}": name for name in names}
