"""Every name of transformers, peft and accelerate that is not public API, and every version check.

Each function says which upstream file it leans on; when an upgrade breaks, this is the file to
read. Checked with transformers 5.23 and accelerate 1.15.
"""

from __future__ import annotations

import copy
import functools
import importlib
import importlib.util
import inspect
import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, cast

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

EXPERTS_IMPLEMENTATION = "hf_moe_ep"
# What the causal loss leaves out (transformers/loss/loss_utils.py).
IGNORED_LABEL = -100
TOWER_OUTPUTS = "mm_encoder_outputs"
_AUX_LOSS_OF_FUSED_HEAD = "transformers.models.mixtral.modeling_mixtral"
_STOCK_CONFIG = "_hf_moe_ep_stock"
_WRAPPERS = re.compile(r"_checkpoint_wrapped_module\.|_orig_mod\.|_fsdp_wrapped_module\.")


def wrap_once(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Let `wrapper(original, *args, **kwargs)` stand for `owner.name`, once per process."""
    original = getattr(owner, name)
    if hasattr(original, "_hf_moe_ep_wrapper"):
        return

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    wrapped._hf_moe_ep_wrapper = wrapper  # type: ignore[attr-defined]
    setattr(owner, name, wrapped)


def register_experts_forward(forward: Callable[..., Any]) -> None:
    """Make `forward` selectable by config (transformers/integrations/moe.py)."""
    ALL_EXPERTS_FUNCTIONS.register(EXPERTS_IMPLEMENTATION, forward)


def is_experts_module(module: nn.Module) -> bool:
    """Whether a module routes its forward through transformers' experts interface."""
    flags = ("is_transposed", "has_bias", "is_concatenated", "has_gate")
    return all(hasattr(module, flag) for flag in flags)


@dataclass(frozen=True)
class ExpertsFlags:
    """What `use_experts_implementation` wrote on an experts module (integrations/moe.py)."""

    is_transposed: bool
    has_bias: bool
    is_concatenated: bool
    has_gate: bool
    has_post_expert_norm: bool


def experts_flags(module: nn.Module) -> ExpertsFlags:
    """The layout flags of an experts module."""
    names = [field.name for field in fields(ExpertsFlags)]
    return ExpertsFlags(**{name: bool(getattr(module, name, False)) for name in names})


def experts_gate(module: Any) -> Callable[[Tensor], Tensor]:
    """From pre-activations to the down projection's input, as the module itself would."""
    return module._apply_gate if module.has_gate else module.act_fn


def experts_gate_constants(module: nn.Module) -> tuple[set[float], set[float]]:
    """Numbers that clamped gates keep on the module: candidates for alpha, and for the limit."""
    alphas, limits = ("alpha", "swiglu_alpha"), ("limit", "swiglu_limit")
    found = vars(module)
    return (
        {float(found[name]) for name in alphas if found.get(name) is not None},
        {float(found[name]) for name in limits if found.get(name) is not None},
    )


def own_experts_config(config: Any, implementation: str) -> Any:
    """A copy of `config` for the experts alone that selects `implementation`.

    Models built from one config object share it, and `model.config` is what gets saved: neither
    may learn of us, so only the experts modules see this copy.
    """
    own = copy.copy(config)
    own._experts_implementation_internal = implementation
    return own


def own_attention_config(config: Any, wrap: Callable[..., Any], *, frames: bool = False) -> Any:
    """A copy of `config` for attention modules alone, which selects `wrap(stock function)`.

    Registered for attention and for masks (modeling_utils.py, masking_utils.py): a name that the
    second does not know silently gets no mask. "flash" stays in the name, upstream asks for it.

    With `frames`, for a vision tower, `wrap` is told by `varlen=` whether stock is a flash
    attention, and "flash" is in every name: upstream then leaves it to the function to keep frames
    apart, instead of cutting its rows by lengths of which it has a slice only.

    Raises:
        ValueError: the model's attention is not in transformers' interface.
    """
    stock = config._attn_implementation
    known = ALL_ATTENTION_FUNCTIONS.valid_keys()
    if stock not in known or stock == "eager":
        raise ValueError(
            f"sp_size > 1 splits attention by heads, which attn_implementation={stock!r} does not "
            f"allow; load the model with attn_implementation='sdpa' or 'flash_attention_2'"
        )
    name = f"{EXPERTS_IMPLEMENTATION}_{'flash_frames_' if frames else ''}{stock}"
    how = {"varlen": "flash" in stock} if frames else {}
    ALL_ATTENTION_FUNCTIONS.register(name, wrap(ALL_ATTENTION_FUNCTIONS[stock], **how))
    ALL_MASK_ATTENTION_FUNCTIONS.register(name, ALL_MASK_ATTENTION_FUNCTIONS[stock])
    own = copy.copy(config)
    own._attn_implementation_internal = name
    setattr(own, _STOCK_CONFIG, config)
    return own


def stock_attention(module: nn.Module) -> Any:
    """A copy of an attention module with the config that `own_attention_config` was made of.

    Stock functions read from it which flash attention to import (integrations/flash_attention.py).
    """
    module = copy.copy(module)
    module.config = getattr(module.config, _STOCK_CONFIG)
    return module


def canonical_name(name: str) -> str:
    """A module or parameter name without what activation checkpointing and compile put in."""
    return _WRAPPERS.sub("", f"{name}.").rstrip(".")


def stock_name(module_name: str) -> str:
    """A module's name before it was wrapped for checkpointing, compile or adapters."""
    return re.sub(r"\.base_layer(?=\.|$)", "", canonical_name(module_name))


def wraps_for_adapters(module: nn.Module) -> bool:
    """Whether a module stands for another that PEFT adapts (peft/tuners/tuners_utils.py)."""
    return hasattr(module, "get_base_layer") and hasattr(module, "base_layer")


def without_adapters(model: Any) -> Any:
    """The model inside a PeftModel, which is what others call too (peft/peft_model.py)."""
    is_peft_model = hasattr(model, "peft_config") and hasattr(model, "get_base_model")
    return model.get_base_model() if is_peft_model else model


def has_adapters(model: Any) -> bool:
    """Whether PEFT, or transformers' add_adapter, attached any."""
    return bool(getattr(model, "peft_config", None))


def adapter_names(
    model: Any, state_dict: dict[str, Tensor], save_embedding_layers: str | bool = "auto"
) -> list[str] | None:
    """Which tensors PEFT would save of a model with adapters; None of any other model.

    Whether embeddings are among them "auto" tells from files, of which ranks may see different.
    """
    if not has_adapters(model):
        return None
    from peft import get_peft_model_state_dict

    saved: set[int] = set()
    with canonical_modules(model):
        for adapter in model.peft_config:
            found = get_peft_model_state_dict(
                model,
                state_dict,
                adapter_name=adapter,
                save_embedding_layers=save_embedding_layers,
            )
            saved |= {id(tensor) for tensor in found.values()}
    return [name for name, tensor in state_dict.items() if id(tensor) in saved]


@contextmanager
def canonical_modules(model: nn.Module) -> Iterator[None]:
    """Let `model` name its modules as its state dict does, without activation checkpointing.

    PEFT looks up what it saves beside adapters by the names of modules (utils/save_and_load.py).
    """
    original = model.named_modules

    def renamed(*args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        return ((canonical_name(name), module) for name, module in original(*args, **kwargs))

    setattr(model, "named_modules", renamed)  # noqa: B010  mypy: a method
    try:
        yield
    finally:
        delattr(model, "named_modules")


def peft_classes() -> tuple[Any, Any, Any] | None:
    """PeftModel, BaseTuner and ParamWrapper (peft/tuners), None where PEFT is not installed."""
    if importlib.util.find_spec("peft") is None:
        return None
    from peft import PeftModel
    from peft.tuners.lora.layer import ParamWrapper
    from peft.tuners.tuners_utils import BaseTuner

    return PeftModel, BaseTuner, ParamWrapper


@dataclass(frozen=True)
class ParameterFactor:
    """lora_A or lora_B of an adapter on a stacked parameter of `module` (peft, ParamWrapper)."""

    module: nn.Module
    parameter: nn.Parameter
    is_b: bool
    num_experts: int


def parameter_factors(model: nn.Module) -> Iterator[tuple[str, ParameterFactor]]:
    """Both factors, by name, of every adapter on a stacked parameter below `model`."""
    for prefix, wrapper in model.named_modules():
        adapted = getattr(wrapper, "parameter_name", None)
        if not adapted or getattr(wrapper.get_base_layer(), adapted).ndim != 3:
            continue
        for part in ("lora_A", "lora_B"):
            for adapter, linear in getattr(wrapper, part).items():
                name = f"{prefix}.{part}.{adapter}.weight".lstrip(".")
                yield (
                    name,
                    ParameterFactor(
                        wrapper.get_base_layer(),
                        linear.weight,
                        part == "lora_B",
                        wrapper.num_experts,
                    ),
                )


def stock_class(kind: type) -> type:
    """A module's class before FSDP2 put its own in front."""
    return next(c for c in kind.__mro__ if not issubclass(c, FSDPModule))


def mark_fsdp_managed(model: nn.Module) -> None:
    """Keep ranks in step in `generate()` (transformers/distributed/fsdp.py).

    And keep the names of model classes, which FSDP2 changes: by them the Trainer decides whether
    label smoothing shifts labels (trainer.py, compute_loss).
    """
    for module in model.modules():
        if hasattr(module, "generate"):
            setattr(module, "_is_fsdp_managed_module", True)  # noqa: B010  mypy: no such field
            if isinstance(module, FSDPModule):
                name = stock_class(type(module)).__name__
                setattr(module, "_get_name", functools.partial(str, name))  # noqa: B010  mypy


def is_distributed_by_transformers(model: nn.Module) -> bool:
    """Sharded at load time by `from_pretrained(distributed_config=...)` or `tp_plan=...`."""
    return (
        getattr(model, "is_distributed_loading_by_transformers", False) is True
        or (getattr(model, "_tp_size", None) or 1) > 1
    )


def inside_ddp_forward() -> bool:
    """Whether DistributedDataParallel is the caller (torch/nn/parallel/distributed.py)."""
    return DistributedDataParallel._active_ddp_module is not None


def forward_globals(model: nn.Module) -> dict[str, Any]:
    """The module-level names that a model's own forward sees, behind its decorators."""
    return cast(dict[str, Any], inspect.unwrap(type(model).forward).__globals__)


def is_fused_head(kwargs: dict[str, Any]) -> bool:
    """Whether TRL runs the backbone and scores labels itself (trl/trainer/utils.py, since 1.15)."""
    return bool(kwargs.get("fused_lm_head"))


def fused_head_globals() -> dict[str, Any]:
    """Where TRL's fused head takes the aux loss from, whatever the model (trl/trainer/utils.py)."""
    return vars(importlib.import_module(_AUX_LOSS_OF_FUSED_HEAD))


def model_config_fields(model: Any) -> dict[str, Any]:
    """The model's config without the place it is from, and without what saving writes into it."""
    aside = ("_name_or_path", "architectures", "dtype", "transformers_version")
    return {k: v for k, v in model.config.to_dict().items() if k not in aside}


def is_quantized(model: Any) -> bool:
    """Loaded with a quantization_config (modeling_utils.py), also below PEFT's wrapper."""
    return bool(getattr(model, "is_quantized", False))


def is_fsdp1(model: nn.Module) -> bool:
    """Whether FSDP1 wraps the model or a part of it."""
    return any(isinstance(module, FullyShardedDataParallel) for module in model.modules())


def input_embedding(model: Any) -> nn.Module | None:
    """The token embedding (PreTrainedModel.get_input_embeddings)."""
    return model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None


def output_head(model: Any) -> nn.Module | None:
    """The head onto the vocabulary, if any (PreTrainedModel.get_output_embeddings)."""
    return model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None


def unwrap(model: Any) -> Any:
    """The model behind torch.compile's wrapper (torch/_dynamo/eval_frame.py, OptimizedModule)."""
    return getattr(model, "_orig_mod", model)


def text_config(config: Any) -> Any:
    """The part of a model's config that describes its language model."""
    return config.get_text_config()


def takes_tower_outputs(inner: nn.Module) -> bool:
    """Whether forward lets us run the vision tower ourselves (models/qwen3_vl_moe, since 5.23)."""
    return TOWER_OUTPUTS in inspect.signature(inner.forward).parameters


def bind_forward(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """All arguments of a call to `module.forward`, by name."""
    bound = inspect.signature(module.forward).bind(*args, **kwargs)
    given = dict(bound.arguments)
    given.update(given.pop("kwargs", {}))
    return given


def tower_sizes(tower: Any) -> tuple[int, int]:
    """Patches that are merged along one side, and values of one patch (models/qwen3_vl_moe)."""
    return tower.spatial_merge_size, math.prod(tower.patch_embed.proj.weight.shape[1:])


def tower_heads(tower: Any) -> int:
    """Attention heads of the vision tower."""
    return int(tower.config.num_heads)


def run_tower(inner: Any, pixels: Tensor, grids: Tensor, **kwargs: Any) -> Any:
    """The vision tower's outputs, one entry per picture (models/qwen3_vl_moe)."""
    return inner.get_image_features(pixels, grids, return_dict=True, **kwargs)


def tower_tables(tower: Any, grids: Tensor) -> dict[str, Tensor]:
    """What the tower computes of `grids` with a row per patch, as it accepts it precomputed."""
    from transformers import vision_utils  # transformers 5.17 has none, and no use for it

    indices, weights = vision_utils.get_vision_interpolation_indices_and_weights(
        grids,
        num_grid_per_side=tower.num_grid_per_side,
        mode=tower.interpolation_mode,
        align_corners=tower.interpolation_align_corners,
        spatial_merge_size=tower.spatial_merge_size,
    )
    positions = vision_utils.get_vision_position_ids(grids, tower.spatial_merge_size)
    return {"interp_indices": indices, "interp_weights": weights, "position_ids": positions}


def split_tower_outputs(outputs: Any, counts: list[int]) -> list[Any]:
    """Outputs of consecutive groups of pictures, as the inner model's forward takes them."""
    parts, first = [], 0
    for count in counts:
        picked = slice(first, first + count)
        features = [feature[picked] for feature in outputs.deepstack_features]
        pooled = outputs.pooler_output[picked]
        parts.append(type(outputs)(pooler_output=pooled, deepstack_features=features))
        first += count
    return parts
