"""PEFT: which modules and parameters are adapters, and which tensors it would save.

peft/peft_model.py, peft/tuners/tuners_utils.py, peft/tuners/lora/layer.py and
peft/utils/save_and_load.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
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


def parts_of_wrapper(wrapper: nn.Module) -> set[str]:
    """Name what PEFT's wrapper has beside the module that it wraps: lora_A and its like."""
    return {name for name, _ in wrapper.named_children() if name != "base_layer"}


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


@dataclass(frozen=True)
class LowRank:
    """What an active adapter adds to a parameter of the model: scale * B A.

    Attributes:
        parameter: the model's own.
        a, b: the factors (r, in) and (out, r); of a stack of experts packed as PEFT packs them, or
            with the experts in front.
        scale: PEFT's `scaling` of the adapter.
        num_experts: in the stack, 0 for a parameter that is none.
        turned: the parameter is (in, out).
        casts: PEFT casts the product to the parameter's dtype before it adds it.
    """

    parameter: Tensor
    a: Tensor
    b: Tensor
    scale: float
    num_experts: int
    turned: bool
    casts: bool


def adapter_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield (name, module) for everything that PEFT put around a module of the model.

    peft/tuners/tuners_utils.py and peft/utils/other.py (AuxiliaryTrainingWrapper).
    """
    for name, module in model.named_modules():
        if hasattr(module, "adapter_layer_names"):
            yield canonical_name(name), module


def active_adapters(model: nn.Module) -> list[str]:
    """Return the names of adapters that are active somewhere in a model."""
    return sorted({name for _, layer in adapter_layers(model) for name in layer.active_adapters})


def check_mergeable(model: nn.Module) -> None:
    """Raise where an adapter is no product of two factors, so that nothing here can merge it.

    Also where one is switched off, when what is merged is not what the model computes.

    Raises:
        ValueError: it names the module and its kind.
    """
    if not has_adapters(model) and not any(True for _ in adapter_layers(model)):
        return
    from peft.tuners.lora import layer as lora
    from peft.utils.other import ModulesToSaveWrapper

    for name, config in (getattr(model, "peft_config", None) or {}).items():
        if config.is_prompt_learning:
            raise ValueError(
                f"adapter {name} learns a prompt ({type(config).__name__}), which no weight can "
                f"hold; an engine must be given the prompt itself"
            )
    for name, module in adapter_layers(model):
        if module.disable_adapters:
            raise ValueError(
                f"the adapter of {name} is switched off (disable_adapter), so the model computes "
                f"without what would be merged; do this outside of that block"
            )
        if isinstance(module, ModulesToSaveWrapper):
            continue
        kind = ""
        if not isinstance(module, (lora.Linear, lora.Embedding, lora.ParamWrapper)):
            kind = f"{type(module).__module__}.{type(module).__name__}"
        elif found := getattr(module, "lora_variant", None):
            kind = type(next(iter(found.values()))).__name__
        elif any(getattr(module, "lora_bias", {}).values()):
            kind = "lora_bias"
        elif not _adapted_parameter(module).is_floating_point():
            kind = "a quantized weight"
        if kind:
            raise ValueError(
                f"{name} has an adapter that cannot be merged in flight: {kind}; LoRA on Linear "
                f"and Embedding modules and on parameters can. Save it, and merge it with PEFT in "
                f"one process"
            )


def _adapted_parameter(layer: Any) -> Tensor:
    parameter: Tensor = getattr(layer.get_base_layer(), getattr(layer, "parameter_name", "weight"))
    return parameter


def left_out_by_merging(model: nn.Module) -> set[str]:
    """Return names in the state dict of a model that are gone when its adapters are merged.

    They are those of adapters, and all versions of a module in modules_to_save but the active one.
    """
    names: set[str] = set()
    for prefix, layer in adapter_layers(model):
        parts = [*layer.adapter_layer_names, *layer.other_param_names]
        kept = ""
        if hasattr(layer, "modules_to_save"):
            parts.append("original_module")
            active = next(iter(layer.active_adapters), None)
            kept = f"modules_to_save.{active}."
            if active not in layer.modules_to_save:
                kept = "original_module."
        for part in parts:
            inside = getattr(layer, part, None)
            if isinstance(inside, (nn.Module, nn.Parameter)):
                held = inside.state_dict() if isinstance(inside, nn.Module) else {"": inside}
                of_layer = (canonical_name(f"{part}.{name}".rstrip(".")) for name in held)
                names |= {f"{prefix}.{n}" for n in of_layer if not kept or not n.startswith(kept)}
    return names


def active_updates(model: nn.Module) -> Iterator[LowRank]:
    """Yield what PEFT's `merge_adapter()` would add, in its order; not what is merged already.

    peft/tuners/lora/layer.py: merge and get_delta_weight of Linear, Embedding and ParamWrapper.
    """
    for _, layer in adapter_layers(model):
        for adapter in layer.active_adapters:
            if hasattr(layer, "modules_to_save") or adapter in layer.merged_adapters:
                continue
            if adapter in layer.lora_A:
                a, b = layer.lora_A[adapter].weight, layer.lora_B[adapter].weight
                yield _update(layer, a, b, layer.scaling[adapter])
            elif adapter in layer.lora_embedding_A:
                a, b = layer.lora_embedding_A[adapter], layer.lora_embedding_B[adapter]
                yield replace(_update(layer, a, b, layer.scaling[adapter]), turned=True, casts=True)


def updates_of(model: nn.Module, tensors: Iterable[Tensor]) -> dict[int, list[LowRank]]:
    """Sort `active_updates` by the `id` of their parameters, all of which are in `tensors`."""
    updates: dict[int, list[LowRank]] = {}
    for update in active_updates(model):
        updates.setdefault(id(update.parameter), []).append(update)
    lost = updates.keys() - {id(tensor) for tensor in tensors}
    assert not lost, f"{len(lost)} adapted parameters are in no checkpoint"
    return updates


def _update(layer: Any, a: Tensor, b: Tensor, scale: float) -> LowRank:
    parameter, num_experts, turned = _adapted_parameter(layer), 0, False
    if parameter.ndim == 3:
        num_experts, turned = layer.num_experts, not layer._did_swap_in_out_features
    elif getattr(layer, "fan_in_fan_out", False):
        turned = True
    casts = hasattr(layer, "parameter_name")
    return LowRank(parameter, a, b, scale, num_experts, turned, casts)


def no_lean_adapters(kind: str) -> ValueError:
    """Return the error for adapters of a kind that cannot be attached before values are read."""
    return ValueError(
        f"peft_config is {kind}; from_pretrained attaches adapters before it reads any weight, "
        f"which it can for LoRA on Linear modules and target_parameters, with init_lora_weights "
        f"True, False or 'gaussian'. For other adapters, load the model with "
        f"AutoModelForCausalLM.from_pretrained, call get_peft_model(model, peft_config), and patch "
        f"it"
    )


def attach_adapters(model: nn.Module, peft_config: Any) -> nn.Module:
    """Call `get_peft_model` on a model on meta, and give the factors memory and first values.

    PEFT alone would leave them on meta, without values. `check_attachable` of adapter_files.py
    tells which configs this takes.

    Raises:
        ValueError: the adapters are LoRA on embeddings.
    """
    from peft import get_peft_model

    model = get_peft_model(model, peft_config)
    module: Any
    for name, module in model.named_modules():
        reset = getattr(module, "reset_lora_parameters", None)
        if reset is None:
            continue
        if len(module.lora_embedding_A):
            raise no_lean_adapters(f"LoRA on embeddings ({canonical_name(name)})")
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
