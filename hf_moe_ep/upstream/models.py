"""Read the parts, the config, the forward and the buffers of a transformers model.

The private names come from transformers' modeling_utils.py, configuration_utils.py and models/,
from trl/trainer/utils.py (TRL's fused head) and torch/nn/modules/module.py (buffers).
"""

from __future__ import annotations

import functools
import importlib
import inspect
import re
from collections.abc import Iterator
from typing import Any, cast

from packaging.version import Version
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    Cache,
    GenerationMixin,
    PreTrainedModel,
)
from transformers.modeling_layers import GenericForTokenClassification

from hf_moe_ep.upstream.graph import list_tensors_in
from hf_moe_ep.upstream.replaced_forwards import iterate_forward_functions
from hf_moe_ep.upstream.requirements import get_installed_version

# The label of tokens that the causal loss leaves out (transformers/loss/loss_utils.py).
IGNORED_LABEL = -100
# The beginning of the keys of a causal LM's output head in checkpoints.
OUTPUT_HEAD = "lm_head."
# The argument with which TRL calls a model with its fused head.
FUSED_HEAD = "fused_lm_head"
# The argument for the cache of keys and values has the first name since transformers 5.24, and had
# the second name before.
CACHE_NAMES = ("cache", "past_key_values")
_AUX_LOSS, _AUX_COEFFICIENT = "load_balancing_loss_func", "router_aux_loss_coef"
_AUX_LOSS_OF_FUSED_HEAD = "transformers.models.mixtral.modeling_mixtral"
_FUSED_HEAD_SINCE = Version("1.15")
_CORRECTION_BIAS = re.compile(r"(correction|expert|balancing)_bias(es)?$")


def text_config(config: Any) -> Any:
    """Return the config of the language model inside a model's config."""
    return config.get_text_config()


def list_attention_heads(config: Any) -> set[tuple[int, int]]:
    """Return the pairs (heads, key-value heads) that occur in the layers of a model.

    Layers may differ (transformers/integrations/heterogeneity/configuration_utils.py, and
    `num_attention_heads_per_layer` of models/laguna/configuration_laguna.py).
    """
    layers_differ = getattr(config, "is_heterogeneous", False)
    layers = list(config.per_layer_config) if layers_differ else [config]
    pairs = set()
    for layer in layers:
        by_layer = getattr(layer, "num_attention_heads_per_layer", None)
        for heads in map(int, by_layer or [layer.num_attention_heads]):
            pairs.add((heads, int(getattr(layer, "num_key_value_heads", None) or heads)))
    return pairs


def get_input_embedding(model: Any) -> nn.Module | None:
    """Return the token embedding, or None (PreTrainedModel.get_input_embeddings)."""
    return model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None


def get_output_head(model: Any) -> nn.Module | None:
    """Return the language model head, or None (PreTrainedModel.get_output_embeddings).

    The method of models/nemotron_h_omni does not return the head of its causal LM `language_model`.
    """
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    inner = getattr(model, "language_model", None)
    return get_output_head(inner) if head is None and inner is not None else head


def get_token_classifier(model: nn.Module) -> nn.Module | None:
    """Return `model` if it classifies tokens, or None (transformers/modeling_layers.py)."""
    return model if isinstance(model, GenericForTokenClassification) else None


def find_base_model_prefix(model: Any) -> str:
    """Return the name of the attribute that holds the base model, or "" without a base model."""
    prefix = str(getattr(model, "base_model_prefix", ""))
    return prefix if prefix and hasattr(model, prefix) else ""


def find_aux_loss_attribute(causal_lm: Any) -> str | None:
    """Return the attribute that stores the coefficient of the router's load-balancing loss.

    The result is a path of attributes from the causal LM, such as "config.router_aux_loss_coef".
    The result is None if the model's forward does not compute this loss (models/*/modeling_*.py).
    """
    forward = inspect.unwrap(type(causal_lm).forward)
    if _AUX_LOSS not in forward.__code__.co_names:
        return None
    for name in (_AUX_COEFFICIENT, f"config.text_config.{_AUX_COEFFICIENT}"):
        holder: Any = causal_lm
        for attribute in name.split("."):
            holder = getattr(holder, attribute, None)
        if holder is not None:
            return name
    return f"config.{_AUX_COEFFICIENT}"


def list_declared_layers(model: Any) -> list[str]:
    """Return the classes of layers that a model declares for Accelerate (modeling_utils.py)."""
    return list(getattr(model, "_no_split_modules", None) or ())


def list_packed_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that bitsandbytes has packed in 4 bits.

    The dtype does not show this, because `bnb_4bit_quant_storage` may be a float dtype
    (bitsandbytes/nn/modules.py).
    """
    return [p for p in model.parameters() if type(p).__name__ == "Params4bit"]


def keep_packing(model: nn.Module) -> None:
    """Stop 4-bit Linear layers on a CPU from repacking their weights during evaluation.

    A layer would repack its weight in place, and set a flag for the new packing. The next
    all-gather would write the weight in the old packing again, but the flag would stay set
    (bitsandbytes/nn/modules.py, Linear4bit.forward).
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            setattr(module, "support_avx512bf16_for_cpu", False)  # noqa: B010  mypy: no such field


def is_quantized(model: Any) -> bool:
    """Return True if `model`, or the model inside a PeftModel, was loaded quantized."""
    return bool(getattr(model, "is_quantized", False))


def list_model_config_fields(model: Any) -> dict[str, Any]:
    """Return the fields of the config that describe the model.

    The result lacks the path from which the model was loaded, and the fields that saving adds.
    """
    left_out = ("_name_or_path", "architectures", "dtype", "transformers_version")
    fields = model.config.to_dict()
    return {name: value for name, value in fields.items() if name not in left_out}


def enable_checkpointing(model: Any) -> None:
    """Enable non-reentrant activation checkpointing of each layer (modeling_utils.py).

    transformers 5.23 renamed the method, and warns if the old name is used.
    """
    enable = getattr(model, "activation_checkpointing_enable", None)
    (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})


def bind_forward(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Return the arguments of a call `module.forward(*args, **kwargs)` by their names."""
    bound = inspect.signature(module.forward).bind(*args, **kwargs)
    arguments = dict(bound.arguments)
    arguments.update(arguments.pop("kwargs", {}))
    return arguments


def find_tokens(given: dict[str, Any]) -> Tensor | None:
    """Return the token ids (B, S) or embeddings (B, S, H) among the arguments of a forward."""
    tokens: Tensor | None = given.get("input_ids")
    return given.get("inputs_embeds") if tokens is None else tokens


def asks_for(name: str, given: dict[str, Any], config: Any) -> bool:
    """Return True if a forward is asked for an output such as "output_hidden_states".

    If the call has no such argument, or if the argument is None, the config decides.
    """
    value = given.get(name)
    return bool(getattr(config, name, False) if value is None else value)


@functools.cache
def list_cache_methods() -> frozenset[str]:
    """Return the names by which a module reads or updates a cache (cache_utils.py)."""
    prefixes = ("get_", "has_", "is_recording", "update")
    return frozenset(name for name in dir(Cache) if name.startswith(prefixes)) | {"layers"}


def find_cache(given: dict[str, Any]) -> Any:
    """Return the cache of keys and values among the arguments of a forward, or None.

    The argument is called `cache` since transformers 5.24, but callers may still use the old name.
    """
    return next((given[name] for name in CACHE_NAMES if given.get(name) is not None), None)


def find_cached_tensors(layer: nn.Module, given: dict[str, Any]) -> list[Tensor]:
    """Return the tensors that a decoder layer has stored in the cache among its arguments."""
    cache = find_cache(given)
    if cache is None:
        return []
    index = next(
        vars(module)["layer_idx"] for module in layer.modules() if "layer_idx" in vars(module)
    )
    return list_tensors_in(vars(cache.layers[index]))


def list_models_that_generate(model: nn.Module) -> list[Any]:
    """List a module and its submodules that have transformers' `generate`."""
    return [module for module in model.modules() if isinstance(module, GenerationMixin)]


def list_pretrained_models(model: nn.Module) -> list[Any]:
    """List a module and its submodules that are models of transformers."""
    return [module for module in model.modules() if isinstance(module, PreTrainedModel)]


def get_key_value_width(module: Any, sp_size: int) -> int | None:
    """Return how many numbers the keys and values of one token have on each of `sp_size` ranks.

    For example, 8 heads of keys and 8 heads of values of width 64 are 256 numbers per rank with
    sp_size 4. The result is None if the module has no `k_proj`, or no `head_dim`.
    """
    keys, values = (getattr(module, name, None) for name in ("k_proj", "v_proj"))
    width = getattr(module, "head_dim", None)
    if keys is None or not isinstance(width, int):
        return None
    projections = [keys, keys if values is None else values]  # without v_proj, values are keys
    heads = sum(int(p.out_features) // width for p in projections if hasattr(p, "out_features"))
    return max(heads // sp_size, 2) * width


def get_latent_width(module: nn.Module) -> int | None:
    """Return the width of the latents of latent attention, or None for other attention.

    Attention in models/deepseek_v3/modeling_deepseek_v3.py and its descendants has this attribute.
    """
    width = getattr(module, "kv_lora_rank", None)
    return width if isinstance(width, int) else None


def get_compress_rate(module: nn.Module) -> int:
    """Return how many tokens the compressors in a module merge into one, or 1 without compressors.

    DeepSeek-V4's compressors have this attribute (models/deepseek_v4/modeling_deepseek_v4.py).
    """
    values = (vars(m).get("compress_rate") for m in module.modules())
    rates = {int(rate) for rate in values if rate is not None}
    assert len(rates) <= 1, f"{type(module).__name__} has compressors of several rates: {rates}"
    return rates.pop() if rates else 1


def list_forward_globals(model: nn.Module) -> list[dict[str, Any]]:
    """Return the globals of each file that defines a forward of the model, without decorators.

    The first file defines the class. There is a second file if Liger or another package has bound a
    forward to the instance.
    """
    *_, innermost = iterate_forward_functions(model)
    class_globals = cast(dict[str, Any], inspect.unwrap(type(model).forward).__globals__)
    bound_globals = getattr(innermost, "__globals__", class_globals)
    return [class_globals] if bound_globals is class_globals else [class_globals, bound_globals]


def is_cast_to_fp32(head: nn.Module) -> bool:
    """Return True if TRL has replaced the forward of this head by one that computes in fp32.

    TRL's GRPO does so with `cast_lm_head_to_fp32=True` (trl/trainer/grpo_trainer.py).
    """
    return getattr(vars(head).get("forward"), "__name__", "") == "cast_forward_to_fp32"


def is_fused_head(kwargs: dict[str, Any]) -> bool:
    """Return True if TRL calls the forward with its fused head, which computes the loss itself.

    The fused head exists since TRL 1.15 (trl/trainer/utils.py).
    """
    return bool(kwargs.get(FUSED_HEAD))


def has_fused_head() -> bool:
    """Return True if the installed TRL has the fused head."""
    found = get_installed_version("trl")
    return found is not None and Version(found) >= _FUSED_HEAD_SINCE


def add_fused_head(model: nn.Module) -> dict[str, Any]:
    """Add TRL's fused head to a model, as TRL's SFTTrainer does (trl/trainer/utils.py).

    Returns the keyword arguments that make a forward use the head.

    Raises:
        ValueError: TRL is not installed, or is too old.
    """
    try:
        from trl.trainer.utils import add_fused_lm_head
    except ImportError as error:
        raise ValueError(
            f"a loss without whole logits needs TRL's fused head, which cannot be imported "
            f"({error}); pip install 'trl>=1.15'"
        ) from error
    add_fused_lm_head(model, outputs=("log_probs", "entropy", "is_top1"))
    return {FUSED_HEAD: True}


def get_fused_head_coefficient(model: Any) -> float:
    """Return the factor of the aux loss in the loss of TRL's fused head (trl/trainer/utils.py)."""
    return float(getattr(text_config(model.config), _AUX_COEFFICIENT, 0.0) or 0.0)


def make_fused_output(**values: Any) -> Any:
    """Make an output of TRL's fused head (trl/trainer/utils.py)."""
    from trl.trainer.utils import FusedCausalLMOutput

    return FusedCausalLMOutput(**values)


def get_fused_head_globals() -> dict[str, Any]:
    """Return the globals of the file from which TRL's fused head takes the aux loss.

    TRL uses Mixtral's file for every model (trl/trainer/utils.py).
    """
    return vars(importlib.import_module(_AUX_LOSS_OF_FUSED_HEAD))


def iterate_persistent_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, buffer) for every buffer that is part of the state dict."""
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}".lstrip("."), buffer


def is_correction_bias(name: str) -> bool:
    """Return True if `name` is the name of a router's correction bias, which gets no gradient.

    The bias is called e_score_correction_bias in most architectures, expert_bias in AFMoE and LFM2,
    and balancing_biases in Zaya.
    """
    return _CORRECTION_BIAS.search(name) is not None


def get_source(model: Any) -> str:
    """Return the name or folder from which a model was loaded, or "" if it was not loaded."""
    return str(getattr(model.config, "_name_or_path", "") or "")


def set_source(model: Any, name: str) -> None:
    """Set the name or path that `model` reports as its origin (configuration_utils.py)."""
    model.name_or_path = model.config._name_or_path = name


def takes_images(config: Any) -> bool:
    """Return True if transformers has an image-text model for `config`."""
    return type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING


def takes_sound(config: Any) -> bool:
    """Return True if transformers has a model of text and sound for `config`."""
    return type(config) in MODEL_FOR_MULTIMODAL_LM_MAPPING and not takes_images(config)


def is_causal_lm(config: Any) -> bool:
    """Return True if transformers has a causal language model for `config`."""
    return type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
