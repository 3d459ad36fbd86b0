"""How transformers turns a model's tensors into those of a checkpoint of the hub.

transformers/core_model_loading.py (`revert_weight_conversion`, which save_pretrained calls;
`WeightRenaming`, `PrefixChange`, `rename_source_key`) and conversion_mapping.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any, TypeVar

from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

from hf_moe_ep.upstream.adapters import without_adapters
from hf_moe_ep.upstream.module_names import stock_name, unwrap
from hf_moe_ep.upstream.sharded_models import stock_class

T = TypeVar("T")
_QUANTIZERS = "transformers.integrations."


def to_hub(model: Any, tensors: Mapping[str, T]) -> dict[str, T]:
    """Turn a model's tensors into those that its `save_pretrained` writes, by transformers' code.

    Args:
        model: says which conversions are its own; those that it was loaded with, if any were and
            none decodes. One that is none of transformers' has none.
        tensors: by the names that they have in a stock model. Anything that transformers'
            operations can work on.
    """
    stock = without_adapters(unwrap(model))
    if not isinstance(stock, PreTrainedModel):
        return dict(tensors)
    conversions = list(getattr(stock, "_weight_conversions", None) or ())
    if not conversions or any(map(_is_of_quantizer, conversions)):
        conversions = [
            conversion
            for conversion in _conversions(stock, add_legacy=False)
            if not isinstance(conversion, PrefixChange)
        ]
    # A stand-in with stock names, whatever wraps the modules of the model.
    described = SimpleNamespace(
        config=stock.config, _weight_conversions=conversions, get_parameter=tensors.__getitem__
    )
    return revert_weight_conversion(described, dict(tensors))


def other_names(model: Any, keys: Iterable[str], wanted: Iterable[str]) -> dict[str, str]:
    """Find which `keys` of a checkpoint are other names of `wanted` ones, as from_pretrained would.

    Two names are one where all renamings of the model, older ones too, make the same of both.
    """
    if not isinstance(model, PreTrainedModel):
        return {}
    prefix = f"{model.base_model_prefix}."

    def final(names: Iterable[str]) -> dict[str, str]:
        # Some renamings remember what they have seen: in this order, and not again.
        renamings = [
            conversion
            for conversion in _conversions(model)
            if isinstance(conversion, WeightRenaming)
        ]
        return {
            name: rename_source_key(name, renamings, [])[0].removeprefix(prefix)
            for name in sorted(names, key=dot_natural_key)
        }

    by_final: dict[str, list[str]] = {}
    for name, at_last in final(wanted).items():
        by_final.setdefault(at_last, []).append(name)
    found = {key: by_final.get(at_last, []) for key, at_last in final(keys).items()}
    return {key: names[0] for key, names in found.items() if len(names) == 1}


def _is_of_quantizer(conversion: Any) -> bool:
    """Tell whether a conversion decodes what is quantized, beside all else that it does.

    Its reverse would write decoded weights by the names of the encoded ones, which no loading
    takes (MXFP4), or encode them again (FP8, 5.23, transformers/integrations/).
    """
    operations = getattr(conversion, "operations", ())
    return any(type(one).__module__.startswith(_QUANTIZERS) for one in operations)


def _conversions(model: PreTrainedModel, **options: Any) -> list[Any]:
    """Return the conversions of a model, whatever wraps its modules.

    transformers finds them by the classes and names of modules, and FSDP2 replaces classes.
    """
    described = SimpleNamespace(
        base_model_prefix=model.base_model_prefix,
        named_modules=lambda: [
            (stock_name(name), _shell(module))
            for name, module in model.named_modules()
            if isinstance(module, PreTrainedModel)
        ],
    )
    return get_model_conversion_mapping(described, **options)


def _shell(module: PreTrainedModel) -> PreTrainedModel:
    """Return an object of a module's own class that has its config, and nothing else of it."""
    shell: Any = object.__new__(stock_class(type(module)))
    shell.__dict__["config"] = module.config
    assert isinstance(shell, PreTrainedModel)
    return shell
