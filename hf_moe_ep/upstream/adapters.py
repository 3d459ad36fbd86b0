"""PEFT: which modules and parameters are adapters, and which tensors it would save.

peft/peft_model.py, peft/tuners/tuners_utils.py, peft/tuners/lora/layer.py and
peft/utils/save_and_load.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from hf_moe_ep.upstream.module_names import canonical_name

# Where a PeftModel keeps what makes its prompts (peft/peft_model.py).
PROMPT_ENCODERS = "prompt_encoder"


def wraps_for_adapters(module: nn.Module) -> bool:
    """Return whether `module` is PEFT's wrapper around a module that it adapts.

    peft/tuners/tuners_utils.py, BaseTunerLayer.
    """
    return hasattr(module, "get_base_layer") and hasattr(module, "base_layer")


def without_adapters(model: Any) -> Any:
    """Return the model inside a PeftModel; any other model as it is (peft/peft_model.py)."""
    is_peft_model = hasattr(model, "peft_config") and hasattr(model, "get_base_model")
    return model.get_base_model() if is_peft_model else model


def has_adapters(model: Any) -> bool:
    """Return whether `model` has adapters, from PEFT or from transformers' `add_adapter`.

    transformers/integrations/peft.py.
    """
    return bool(getattr(model, "peft_config", None))


def learns_prompts(model: Any) -> bool:
    """Return whether `model` is a PeftModel that trains prompts or prefixes.

    peft/peft_model.py; prompts stand beside the model, not in it.
    """
    return bool(getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False))


def prompt_encoders(model: Any) -> nn.Module:
    """Return what makes the prompts of a PeftModel that `learns_prompts`, by adapter."""
    encoders: nn.Module = model.prompt_encoder
    return encoders


def adapter_names(
    model: Any, state_dict: dict[str, Tensor], save_embedding_layers: str | bool = "auto"
) -> list[str] | None:
    """Return the names in `state_dict` that PEFT would save; None for a model without adapters.

    With "auto" PEFT looks into files to decide whether embeddings are saved too. Ranks may see
    different files, so call this on one rank or pass True or False.
    """
    if not has_adapters(model):
        return None
    if learns_prompts(model):  # PEFT would compute them here, on one rank
        return [name for name in state_dict if name.startswith(f"{PROMPT_ENCODERS}.")]
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
    """Let `model.named_modules()` give the names of its state dict, inside the block.

    Activation checkpointing puts a component of its own into the former, not into the latter.

    PEFT looks up by module names what it saves beside adapters (peft/utils/save_and_load.py).
    """
    original = model.named_modules

    def renamed(*args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        return ((canonical_name(name), module) for name, module in original(*args, **kwargs))

    setattr(model, "named_modules", renamed)  # noqa: B010  mypy: a method
    try:
        yield
    finally:
        delattr(model, "named_modules")


@dataclass(frozen=True)
class ParameterFactor:
    """One factor, lora_A or lora_B, of an adapter on a stacked parameter (peft, ParamWrapper).

    Attributes:
        module: the stock experts module whose parameter is adapted.
        parameter: the factor's 2-D weight; r is the rank. lora_A is (r * experts, in), lora_B is
            (out, r * experts).
        is_b: whether it is lora_B.
        num_experts: experts in the stack.
    """

    module: nn.Module
    parameter: nn.Parameter
    is_b: bool
    num_experts: int


def parameter_factors(model: nn.Module) -> Iterator[tuple[str, ParameterFactor]]:
    """Yield (name, factor) for lora_A and lora_B of every adapter on a stacked (3-D) parameter."""
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


def attach_adapters(model: nn.Module, peft_config: Any) -> nn.Module:
    """Call `get_peft_model` on a model on meta, and give the factors memory and first values.

    PEFT alone would leave them on meta, without values.
    """
    from peft import get_peft_model

    model = get_peft_model(model, peft_config)
    module: Any
    for module in model.modules():
        reset = getattr(module, "reset_lora_parameters", None)
        if reset is None:
            continue
        for adapter in module.lora_A:
            for factor in (module.lora_A[adapter], module.lora_B[adapter]):
                factor.to_empty(device="cpu")
                factor.reset_parameters()
            reset(adapter, peft_config.init_lora_weights)
    return model


def adapter_parameters(model: nn.Module) -> set[int]:
    """Return the `id` of each parameter of every adapter, active or not.

    `set_adapter` freezes adapters that are not active; they have learnt values all the same
    (peft/tuners/tuners_utils.py).
    """
    parts = [
        getattr(module, name, None)
        for module in model.modules()
        for name in getattr(module, "adapter_layer_names", ())
    ]
    return {id(p) for part in parts if isinstance(part, nn.Module) for p in part.parameters()}
