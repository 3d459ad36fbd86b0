"""Convert a model's tensors to the tensors of a hub checkpoint, and match keys of old checkpoints.

transformers defines the conversions and renamings. Its from_pretrained stores in
`_weight_conversions` the conversions that matched a key of the checkpoint, and save_pretrained
reverses these. A model that was loaded from stacked experts is therefore saved with stacked
experts, although its class has a conversion for single experts (Qwen3.5 is published stacked). A
plan that says how experts are stored has precedence (`ModelPlan.stored`).

The private names come from core_model_loading.py (`revert_weight_conversion`, which save_pretrained
calls; `WeightRenaming`, `PrefixChange`, `rename_source_key`) and conversion_mapping.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, TypeVar

from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

from hf_moe_ep.upstream.adapters import without_adapters
from hf_moe_ep.upstream.module_names import get_stock_name, unwrap
from hf_moe_ep.upstream.sharded_models import get_stock_class

T = TypeVar("T")
_QUANTIZERS = "transformers.integrations."


def convert_to_hub(model: Any, tensors: Mapping[str, T], *, as_loaded: bool = True) -> dict[str, T]:
    """Convert a model's tensors to the tensors that `save_pretrained` writes.

    A model of another library has no conversions.

    Args:
        model: the model.
        tensors: the tensors by their names in a stock model. The values may also be other objects,
            if transformers' operations accept these objects.
        as_loaded: reverse the conversions that were applied when the model was loaded. If it was
            not loaded, or if one of them decoded quantized weights, or if `as_loaded` is False, the
            conversions of the model's class are reversed instead.
    """
    stock = without_adapters(unwrap(model))
    if not isinstance(stock, PreTrainedModel):
        return dict(tensors)
    conversions = _get_applied(stock) if as_loaded else None
    if conversions is None:
        conversions = _find_default_conversions(stock)
    # Modules of the model may be wrapped, so transformers gets an object with stock names instead.
    stand_in = SimpleNamespace(
        config=stock.config, _weight_conversions=conversions, get_parameter=tensors.__getitem__
    )
    return revert_weight_conversion(stand_in, dict(tensors))


def remember_conversions(model: Any, keys: Iterable[str]) -> None:
    """Store the conversions that from_pretrained would apply to a checkpoint with these keys."""
    stock = without_adapters(unwrap(model))
    if not isinstance(stock, PreTrainedModel):
        return
    conversions = _find_conversions(stock)
    renamings = [c for c in conversions if isinstance(c, WeightRenaming)]
    converters = [c for c in conversions if isinstance(c, WeightConverter)]
    for key in sorted(keys, key=dot_natural_key):
        rename_source_key(key, renamings, converters)
    stock._weight_conversions = [c for c in conversions if c.was_used()]


def describe_conversions(model: Any) -> list[list[str | None]] | None:
    """Describe the conversions with which a model was loaded, for `restore_conversions`.

    The result is None if `convert_to_hub` reverses the conversions of the model's class.
    """
    stock = without_adapters(unwrap(model))
    applied = _get_applied(stock) if isinstance(stock, PreTrainedModel) else None
    if applied is None:
        return None
    described = [_describe(conversion) for conversion in applied]
    default = [_describe(conversion) for conversion in _find_default_conversions(stock)]
    return None if described == default else described


def restore_conversions(model: Any, described: Sequence[list[str | None]]) -> bool:
    """Let a model be saved as the model that `describe_conversions` has described.

    Returns False, and changes nothing, if this version of transformers does not have one of the
    described conversions.
    """
    conversions = [c for c in _find_conversions(model) if _describe(c) in described]
    if len(conversions) != len(described):
        return False
    model._weight_conversions = conversions
    return True


def _describe(conversion: Any) -> list[str | None]:
    """Return what identifies a conversion among all conversions of a model.

    The scope "" is not the scope None, which matches keys of the whole model.
    """
    return [conversion.scope_prefix, *conversion.source_patterns]


def _get_applied(stock: PreTrainedModel) -> list[Any] | None:
    """Return the conversions that were applied when a model was loaded; None if they are unknown.

    Conversions that decoded quantized weights cannot be reversed (`_decodes_quantized_weights`).
    """
    applied: Sequence[Any] | None = getattr(stock, "_weight_conversions", None)
    if applied is None or any(map(_decodes_quantized_weights, applied)):
        return None
    return list(applied)


def _find_default_conversions(stock: PreTrainedModel) -> list[Any]:
    """Return the conversions that save_pretrained reverses if a model was not loaded."""
    conversions = _find_conversions(stock, add_legacy=False)
    return [c for c in conversions if not isinstance(c, PrefixChange)]


def map_to_model_names(model: Any, keys: Iterable[str]) -> dict[str, str]:
    """Map keys of a checkpoint to the names in the model, by the renamings of from_pretrained.

    These include the renamings for older checkpoints.
    """
    # Some renamings depend on the names to which they were applied before. Each call therefore
    # creates new renamings, and applies them in the order of from_pretrained.
    keys = sorted(keys, key=dot_natural_key)
    if not isinstance(model, PreTrainedModel):
        return {key: key for key in keys}
    renamings = [c for c in _find_conversions(model) if isinstance(c, WeightRenaming)]
    return {key: rename_source_key(key, renamings, [])[0] for key in keys}


def find_other_names(model: Any, keys: Iterable[str], wanted: Iterable[str]) -> dict[str, str]:
    """Map each of a checkpoint's `keys` to the key in `wanted` that names the same tensor.

    Two keys name the same tensor if `map_to_model_names` maps both to the same name. The result has
    only the keys for which exactly one key in `wanted` names the same tensor.
    """
    if not isinstance(model, PreTrainedModel):
        return {}
    prefix = f"{model.base_model_prefix}."

    wanted_by_final: dict[str, list[str]] = {}
    for name, final_name in map_to_model_names(model, wanted).items():
        wanted_by_final.setdefault(final_name.removeprefix(prefix), []).append(name)
    matches = {
        key: wanted_by_final.get(final_name.removeprefix(prefix), [])
        for key, final_name in map_to_model_names(model, keys).items()
    }
    return {key: names[0] for key, names in matches.items() if len(names) == 1}


def _decodes_quantized_weights(conversion: Any) -> bool:
    """Return True if a conversion decodes quantized weights.

    The reverse of such a conversion is not suitable for saving: it writes decoded weights under the
    names of encoded weights, which no loader accepts (MXFP4), or encodes the weights again (FP8 in
    transformers 5.23).
    """
    operations = getattr(conversion, "operations", ())
    return any(type(x).__module__.startswith(_QUANTIZERS) for x in operations)


def _find_conversions(model: PreTrainedModel, **options: Any) -> list[Any]:
    """Return the conversions of a model whose modules may be wrapped or sharded.

    transformers finds conversions by the classes and names of modules, but FSDP2 replaces the
    classes, and wrappers change the names.
    """
    stand_in = SimpleNamespace(
        base_model_prefix=model.base_model_prefix,
        named_modules=lambda: [
            (get_stock_name(name), _make_config_holder(module))
            for name, module in model.named_modules()
            if isinstance(module, PreTrainedModel)
        ],
    )
    return get_model_conversion_mapping(stand_in, **options)


def _make_config_holder(module: PreTrainedModel) -> PreTrainedModel:
    """Make an object of the module's stock class that has only the module's config."""
    holder: Any = object.__new__(get_stock_class(type(module)))
    holder.__dict__["config"] = module.config
    assert isinstance(holder, PreTrainedModel)
    return holder
