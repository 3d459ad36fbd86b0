"""What a transformers model knows of itself: its parts, its config, its forward.

transformers/modeling_utils.py, configuration_utils.py and models/; for TRL's fused head
trl/trainer/utils.py; for buffers torch/nn/modules/module.py.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Iterator
from typing import Any, cast

from torch import Tensor, nn
from transformers import AutoModelForImageTextToText

# What the causal loss leaves out (transformers/loss/loss_utils.py).
IGNORED_LABEL = -100
_AUX_LOSS_OF_FUSED_HEAD = "transformers.models.mixtral.modeling_mixtral"


def text_config(config: Any) -> Any:
    """The part of a model's config that describes its language model."""
    return config.get_text_config()


def input_embedding(model: Any) -> nn.Module | None:
    """The token embedding (PreTrainedModel.get_input_embeddings)."""
    return model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None


def output_head(model: Any) -> nn.Module | None:
    """The head onto the vocabulary, if any (PreTrainedModel.get_output_embeddings)."""
    return model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None


def is_quantized(model: Any) -> bool:
    """Loaded with a quantization_config (modeling_utils.py), also below PEFT's wrapper."""
    return bool(getattr(model, "is_quantized", False))


def model_config_fields(model: Any) -> dict[str, Any]:
    """The model's config without the place it is from, and without what saving writes into it."""
    aside = ("_name_or_path", "architectures", "dtype", "transformers_version")
    return {k: v for k, v in model.config.to_dict().items() if k not in aside}


def bind_forward(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """All arguments of a call to `module.forward`, by name."""
    bound = inspect.signature(module.forward).bind(*args, **kwargs)
    given = dict(bound.arguments)
    given.update(given.pop("kwargs", {}))
    return given


def forward_globals(model: nn.Module) -> dict[str, Any]:
    """The module-level names that a model's own forward sees, behind its decorators."""
    return cast(dict[str, Any], inspect.unwrap(type(model).forward).__globals__)


def is_fused_head(kwargs: dict[str, Any]) -> bool:
    """Whether TRL runs the backbone and scores labels itself (trl/trainer/utils.py, since 1.15)."""
    return bool(kwargs.get("fused_lm_head"))


def fused_head_globals() -> dict[str, Any]:
    """Where TRL's fused head takes the aux loss from, whatever the model (trl/trainer/utils.py)."""
    return vars(importlib.import_module(_AUX_LOSS_OF_FUSED_HEAD))


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Buffers that state dicts, and so checkpoints, hold."""
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}".lstrip("."), buffer


def set_source(model: Any, name: str) -> None:
    """Where a model says that it is from (configuration_utils.py)."""
    model.name_or_path = model.config._name_or_path = name


def takes_images(config: Any) -> bool:
    """Whether a config is that of a model of images and text (models/auto/modeling_auto.py)."""
    return type(config) in AutoModelForImageTextToText._model_mapping
