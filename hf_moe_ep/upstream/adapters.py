"""PEFT: find the modules, parameters and products of adapters, and the tensors that PEFT saves.

The private names come from peft/peft_model.py, peft/tuners/tuners_utils.py,
peft/tuners/lora/layer.py and peft/utils/save_and_load.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial, partialmethod
from typing import Any

from accelerate.utils import fsdp_utils
from torch import Tensor, nn

from hf_moe_ep.upstream.module_names import get_canonical_name
from hf_moe_ep.upstream.replaced import replaced

# The attribute of a PeftModel with the modules that compute its prompts (peft/peft_model.py).
PROMPT_ENCODERS = "prompt_encoder"


def wraps_for_adapters(module: nn.Module) -> bool:
    """Return True if `module` is PEFT's wrapper around an adapted module (BaseTunerLayer)."""
    return hasattr(module, "get_base_layer") and hasattr(module, "base_layer")


def returns_output_of_child(module: nn.Module) -> bool:
    """Return True if `module` is a PEFT wrapper that returns the output of a module inside it.

    The two wrappers of this kind are ParamWrapper (peft/tuners/lora/layer.py), which changes a
    parameter while the module inside runs, and ModulesToSaveWrapper (peft/utils/other.py), which
    calls one of its copies of the module.
    """
    return bool(getattr(module, "parameter_name", None)) or hasattr(module, "original_module")


def without_adapters(model: Any) -> Any:
    """Return the model inside a PeftModel, or any other model itself (peft/peft_model.py)."""
    return model.get_base_model() if is_peft_model(model) else model


def is_peft_model(model: Any) -> bool:
    """Return True if `model` is a PeftModel, which holds a model with its adapters."""
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def has_adapters(model: Any) -> bool:
    """Return True if `model` is a PeftModel, or has adapters that its `add_adapter` attached.

    The method `add_adapter` is defined in transformers/integrations/peft.py.
    """
    return bool(getattr(model, "peft_config", None))


def has_added_adapters(model: Any) -> bool:
    """Return True if the method `add_adapter` of transformers attached adapters to `model`."""
    return bool(getattr(model, "_hf_peft_config_loaded", False))


def has_own_forward(tuner: nn.Module) -> bool:
    """Return True if the class of a tuner replaces the forward of peft/tuners/tuners_utils.py."""
    from peft.tuners.tuners_utils import BaseTuner

    return type(tuner).forward is not BaseTuner.forward


def learns_prompts(model: Any) -> bool:
    """Return True if `model` is a PeftModel with prompts or prefixes (peft/peft_model.py)."""
    return bool(getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False))


def list_saved_adapters(
    model: Any, state_dict: dict[str, Tensor], save_embedding_layers: str | bool = "auto"
) -> list[str] | None:
    """Return the names in `state_dict` that PEFT would save, or None for a model without adapters.

    With "auto", PEFT reads files to decide if embeddings are saved too. Ranks may see different
    files, so call this function on one rank, or pass True or False.
    """
    if not has_adapters(model):
        return None
    if learns_prompts(model):  # PEFT's function would run the prompt encoders on one rank only.
        return [name for name in state_dict if name.startswith(f"{PROMPT_ENCODERS}.")]
    by_adapter = map_keys_by_adapter(model, state_dict, save_embedding_layers)
    saved = {name for names in by_adapter.values() for name in names.values()}
    return [name for name in state_dict if name in saved]


def counts_from_end_of_row(config: Any) -> bool:
    """Return True for the config of activated LoRA, which adapts the last tokens of each row.

    Before PEFT calls the model, PEFT counts these tokens in each whole row. A layer then adapts the
    same number of tokens at the end of its input (peft/tuners/lora/variants.py).
    """
    return bool(getattr(config, "alora_invocation_tokens", None))


def map_keys_by_adapter(
    model: Any, state_dict: Mapping[str, Tensor], save_embedding_layers: str | bool
) -> dict[str, dict[str, str]]:
    """Return, for each adapter, a dict that maps the keys of PEFT's file to names in `state_dict`.

    The dict has the order of `state_dict`, and lacks tensors that PEFT computes for the file. The
    model must not learn prompts.
    """
    from peft import get_peft_model_state_dict

    by_adapter = {}
    name_of = {id(tensor): name for name, tensor in state_dict.items()}
    order = {name: number for number, name in enumerate(state_dict)}
    with canonical_modules(model):
        for adapter in model.peft_config:
            tensors = get_peft_model_state_dict(
                model,
                state_dict,
                adapter_name=adapter,
                save_embedding_layers=save_embedding_layers,
            )
            names = {key: name_of[id(x)] for key, x in tensors.items() if id(x) in name_of}
            by_adapter[adapter] = dict(sorted(names.items(), key=lambda item: order[item[1]]))
    return by_adapter


@contextmanager
def saving_as(tensors_of_adapters: Mapping[str, Mapping[str, Tensor]]) -> Iterator[None]:
    """Inside the block, make PEFT write `tensors_of_adapters[adapter]` to the adapter's file.

    PEFT finds the tensors of an adapter through the adapter's modules, but with several pipeline
    stages rank 0 has only the modules of one stage (peft/utils/save_and_load.py).
    """
    import peft
    from peft import peft_model

    def find(model: Any, *args: Any, adapter_name: str = "default", **_: Any) -> dict[str, Tensor]:
        return dict(tensors_of_adapters[adapter_name])

    name = "get_peft_model_state_dict"
    with replaced(peft, name, find), replaced(peft_model, name, find):
        yield


def canonical_modules(model: nn.Module) -> AbstractContextManager[None]:
    """Inside the block, make `model.named_modules()` return the names of the state dict.

    Activation checkpointing adds a component to module names, but not to the names of the state
    dict. PEFT looks up module names in the state dict, to find the other tensors that are saved
    with adapters (peft/utils/save_and_load.py).
    """
    original = model.named_modules

    def rename(*args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        return ((get_canonical_name(name), module) for name, module in original(*args, **kwargs))

    return replaced(model, "named_modules", rename)


@dataclass(frozen=True)
class ParameterFactor:
    """One factor, lora_A or lora_B, of an adapter on a stacked parameter (PEFT's ParamWrapper).

    Attributes:
        module: the stock experts module whose parameter is adapted.
        adapted: the name of the adapted parameter in this module.
        parameter: the factor's weight. With rank r, lora_A is (r * experts, in) and lora_B is
            (out, r * experts). In a sharded model both factors have the experts as first dim.
        is_b: True for lora_B.
        num_experts: the number of stacked experts.
    """

    module: nn.Module
    adapted: str
    parameter: nn.Parameter
    is_b: bool
    num_experts: int


def iterate_parameter_factors(model: nn.Module) -> Iterator[tuple[str, ParameterFactor]]:
    """Yield (name, factor) for the lora_A and the lora_B of every adapter on a stacked parameter.

    A stacked parameter has three dims. In a sharded model it may have four, [E, 2, F, H] for
    [E, 2F, H] (`etp.py`).
    """
    for prefix, wrapper in model.named_modules():
        adapted_name = getattr(wrapper, "parameter_name", None)
        if not adapted_name or getattr(wrapper.get_base_layer(), adapted_name).ndim < 3:
            continue
        for factor in ("lora_A", "lora_B"):
            for adapter, linear in getattr(wrapper, factor).items():
                name = f"{prefix}.{factor}.{adapter}.weight".lstrip(".")
                base, num_experts = wrapper.get_base_layer(), wrapper.num_experts
                is_b = factor == "lora_B"
                yield name, ParameterFactor(base, adapted_name, linear.weight, is_b, num_experts)


@dataclass(frozen=True)
class LowRank:
    """The product `scale * B A` that an active adapter adds to a parameter of the model.

    Attributes:
        parameter: the adapted parameter.
        a, b: the factors (r, in) and (out, r). The factors of stacked experts are in PEFT's
            layout, or have the experts as their first dim.
        scale: PEFT's `scaling` of the adapter.
        num_experts: the number of stacked experts, or 0 if the parameter is not stacked.
        transposed: True if the parameter is stored transposed, as (in, out).
        casts_product: True if PEFT casts the product to the parameter's dtype before the addition.
    """

    parameter: Tensor
    a: Tensor
    b: Tensor
    scale: float
    num_experts: int
    transposed: bool
    casts_product: bool


def iterate_adapter_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield (name, wrapper) for each of PEFT's wrappers in the model.

    The wrappers are BaseTunerLayers (peft/tuners/tuners_utils.py) and AuxiliaryTrainingWrappers
    (peft/utils/other.py).
    """
    for name, module in model.named_modules():
        if hasattr(module, "adapter_layer_names"):
            yield get_canonical_name(name), module


@contextmanager
def allowing_no_adapter_layers() -> Iterator[None]:
    """Inside the block, let PEFT describe a model without adapter layers (peft/peft_model.py)."""
    from peft import peft_model

    stock = peft_model.get_layer_status

    def list_status(model: nn.Module) -> Any:
        return stock(model) if any(True for _ in iterate_adapter_layers(model)) else []

    with replaced(peft_model, "get_layer_status", list_status):
        yield


def refuse_unmerge(model: nn.Module) -> None:
    """Make `unmerge` raise ValueError in the layers of a sharded model whose adapters are merged.

    PEFT unmerges such layers in `unmerge_adapter`, in `set_adapter`, and in a forward with adapters
    switched off. In a forward PEFT would change gathered weights, which are freed afterwards.
    """
    for name, layer in iterate_adapter_layers(model):
        if getattr(layer, "merged", False):
            layer.unmerge = partial(_raise_merged, name)


def _raise_merged(name: str) -> None:
    raise ValueError(
        f"the adapters of {name} were merged into its weights before the model was sharded, and "
        f"PEFT cannot take them out of shards to disable or replace them; call "
        f"model.unmerge_adapter() before apply_ep_fsdp2 or accelerator.prepare"
    )


def get_layer_replication(model: nn.Module) -> Any:
    """Return the `layer_replication` of an adapter's config (peft/tuners/lora/config.py), or None.

    PEFT then copies layers. The copies share the frozen weights, and each has its own adapters.
    """
    configs = (getattr(model, "peft_config", None) or {}).values()
    return next((r for c in configs if (r := getattr(c, "layer_replication", None))), None)


def list_active_adapters(model: nn.Module) -> list[str]:
    """Return the names of the adapters that are active in at least one wrapper of the model."""
    return sorted(
        {name for _, layer in iterate_adapter_layers(model) for name in layer.active_adapters}
    )


def check_mergeable(model: nn.Module) -> None:
    """Raise ValueError if an adapter is not a product of two factors, or is disabled.

    Only products can be merged during an export. While an adapter is disabled, the model computes
    without the adapter's product, but merging would add this product to the weights.
    """
    if not has_adapters(model) and not any(True for _ in iterate_adapter_layers(model)):
        return
    from peft.tuners.lora import layer as lora
    from peft.utils.other import ModulesToSaveWrapper

    for name, config in (getattr(model, "peft_config", None) or {}).items():
        if config.is_prompt_learning:
            raise ValueError(
                f"adapter {name} trains a prompt ({type(config).__name__}), which cannot be merged "
                f"into a weight; give the prompt itself to the inference engine"
            )
    for name, module in iterate_adapter_layers(model):
        if module.disable_adapters:
            raise ValueError(
                f"the adapter of {name} is disabled by disable_adapter, so the model computes "
                f"without the adapter that would be merged; merge outside of this `with` block"
            )
        if isinstance(module, ModulesToSaveWrapper):
            continue
        kind = ""
        if not isinstance(module, (lora.Linear, lora.Embedding, lora.ParamWrapper)):
            kind = f"{type(module).__module__}.{type(module).__name__}"
        elif variants := getattr(module, "lora_variant", None):
            kind = type(next(iter(variants.values()))).__name__
        elif any(getattr(module, "lora_bias", {}).values()):
            kind = "lora_bias"
        elif not _get_adapted_parameter(module).is_floating_point():
            kind = "a quantized weight"
        if kind:
            raise ValueError(
                f"{name} has an adapter that cannot be merged during the export: {kind}; only LoRA "
                f"on Linear and Embedding modules and on parameters can be merged. Save the "
                f"adapter, and merge it with PEFT in one process"
            )


def _get_adapted_parameter(layer: Any) -> Tensor:
    return getattr(layer.get_base_layer(), getattr(layer, "parameter_name", "weight"))


def list_names_lost_by_merging(model: nn.Module) -> set[str]:
    """Return the names in a model's state dict that do not exist after adapters are merged.

    These are the names of the adapters' tensors. PEFT also stores several copies of each module in
    modules_to_save. The result includes the names of all copies except the active copy.
    """
    left_out: set[str] = set()
    for prefix, layer in iterate_adapter_layers(model):
        attributes = [*layer.adapter_layer_names, *layer.other_param_names]
        active_copy = None
        if hasattr(layer, "modules_to_save"):
            attributes.append("original_module")
            active = next(iter(layer.active_adapters), None)
            has_copy = active in layer.modules_to_save
            active_copy = f"modules_to_save.{active}." if has_copy else "original_module."
        for attribute in attributes:
            value = getattr(layer, attribute, None)
            if isinstance(value, (nn.Module, nn.Parameter)):
                tensors = value.state_dict() if isinstance(value, nn.Module) else {"": value}
                names = (get_canonical_name(f"{attribute}.{name}".rstrip(".")) for name in tensors)
                left_out |= {
                    f"{prefix}.{name}"
                    for name in names
                    if active_copy is None or not name.startswith(active_copy)
                }
    return left_out


def iterate_active_updates(model: nn.Module) -> Iterator[LowRank]:
    """Yield the products that PEFT's `merge_adapter()` would add to parameters, in PEFT's order.

    Adapters that are merged already are left out. The formulas come from peft/tuners/lora/layer.py:
    `merge` and `get_delta_weight` of Linear, Embedding and ParamWrapper.
    """
    for _, layer in iterate_adapter_layers(model):
        for adapter in layer.active_adapters:
            if hasattr(layer, "modules_to_save") or adapter in layer.merged_adapters:
                continue
            if adapter in layer.lora_A:
                a, b = layer.lora_A[adapter].weight, layer.lora_B[adapter].weight
                yield _make_update(layer, a, b, layer.scaling[adapter])
            elif adapter in layer.lora_embedding_A:
                a, b = layer.lora_embedding_A[adapter], layer.lora_embedding_B[adapter]
                update = _make_update(layer, a, b, layer.scaling[adapter])
                yield replace(update, transposed=True, casts_product=True)


def group_updates_by_parameter(
    model: nn.Module, tensors: Iterable[Tensor]
) -> dict[int, list[LowRank]]:
    """Group the active updates by the `id` of their parameters, which must all be in `tensors`."""
    updates: dict[int, list[LowRank]] = {}
    for update in iterate_active_updates(model):
        updates.setdefault(id(update.parameter), []).append(update)
    missing = updates.keys() - {id(tensor) for tensor in tensors}
    assert not missing, f"{len(missing)} adapted parameters are missing in the checkpoint"
    return updates


def _make_update(layer: Any, a: Tensor, b: Tensor, scale: float) -> LowRank:
    parameter, num_experts, transposed = _get_adapted_parameter(layer), 0, False
    if parameter.ndim >= 3:
        num_experts, transposed = layer.num_experts, not layer._did_swap_in_out_features
    elif getattr(layer, "fan_in_fan_out", False):
        transposed = True
    casts = hasattr(layer, "parameter_name")
    return LowRank(parameter, a, b, scale, num_experts, transposed, casts)


def make_unattachable_error(kind: str) -> ValueError:
    """Return the error for adapters that cannot be attached before the weights are read."""
    return ValueError(
        f"peft_config is {kind}; from_pretrained attaches adapters before it reads any weight, "
        f"which is possible for LoRA on Linear modules and target_parameters, with "
        f"init_lora_weights True, False or 'gaussian'. For other adapters, load the model with "
        f"AutoModelForCausalLM.from_pretrained, call get_peft_model(model, peft_config), and patch "
        f"the model"
    )


def make_copied_experts_error(name: str) -> ValueError:
    """Return the error for the module `name` with experts in an adapter's modules_to_save."""
    return ValueError(
        f"modules_to_save of the adapter contains {name}: PEFT would train a copy of this module, "
        f"with all of its experts, and the experts of a copy cannot be sharded; add LoRA to the "
        f"experts by target_parameters, or train the model without adapters"
    )


def attach_adapters(model: nn.Module, peft_config: Any) -> nn.Module:
    """Call `get_peft_model` on a model on meta, then allocate and initialise the factors.

    PEFT alone would leave the factors on meta. `check_attachable` (adapter_files.py) decides which
    configs are accepted.

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
            raise make_unattachable_error(f"LoRA on embeddings ({get_canonical_name(name)})")
        for adapter in module.lora_A:
            for factor in (module.lora_A[adapter], module.lora_B[adapter]):
                factor.to_empty(device="cpu")
                factor.reset_parameters()
            reset(adapter, peft_config.init_lora_weights)
    return model


@contextmanager
def factors_on_host() -> Iterator[None]:
    """Let the factors of adapters keep their values, although the base model is on meta.

    PEFT initialises new factors on the host and then moves them to the device of the base, here to
    meta. With low_cpu_mem_usage=True it moves them again when it loads the factors of a file.
    Inside the block, the values are stored before each move. At the end of the block, the factors
    on meta get the last stored values (peft/tuners/tuners_utils.py, peft/tuners/lora/layer.py and
    model.py, peft/utils/save_and_load.py).
    """
    from peft.tuners.lora.layer import ParamWrapper
    from peft.tuners.tuners_utils import BaseTunerLayer

    method = "_move_adapter_to_device_of_base_layer"
    stored: dict[tuple[nn.Module, str], Tensor] = {}
    with ExitStack() as stack:
        for kind in (BaseTunerLayer, ParamWrapper):
            move = partialmethod(_store_and_move, stored, getattr(kind, method))
            stack.enter_context(replaced(kind, method, move))
        yield
    for (module, name), values in stored.items():
        moved = getattr(module, name)
        if moved.is_meta:
            parameter = nn.Parameter(values.to(moved.dtype), requires_grad=moved.requires_grad)
            setattr(module, name, parameter)


@contextmanager
def before_loaded_values(prepare: Callable[[], None]) -> Iterator[None]:
    """Inside the block, call `prepare` before PEFT copies the values of a file into an adapter.

    `PeftModel.load_adapter` first attaches the adapter, and then calls the function that is wrapped
    here (peft/peft_model.py).
    """
    from peft import peft_model

    stock = peft_model.set_peft_model_state_dict

    def load(*args: Any, **kwargs: Any) -> Any:
        prepare()
        return stock(*args, **kwargs)

    with replaced(peft_model, "set_peft_model_state_dict", load):
        yield


def has_copies_on_meta(model: nn.Module) -> bool:
    """Return True if modules that adapters train as a whole (modules_to_save) are on meta."""
    return any(
        parameter.is_meta
        for _, layer in iterate_adapter_layers(model)
        for parameter in getattr(layer, "modules_to_save", nn.ModuleDict()).parameters()
    )


def _store_and_move(
    layer: Any,
    stored: dict[tuple[nn.Module, str], Tensor],
    move: Callable[..., None],
    adapter_name: str,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Store the values of factors whose base is on meta, in the base's dtype, and call `move`.

    `move` is PEFT's `_move_adapter_to_device_of_base_layer`.
    """
    base = _get_adapted_parameter(layer)
    for container in (getattr(layer, name, None) for name in layer.adapter_layer_names):
        if base.is_meta and isinstance(container, nn.ModuleDict) and adapter_name in container:
            module = container[adapter_name]
            for name, parameter in module.named_parameters(recurse=False):
                if not parameter.is_meta:
                    stored[module, name] = parameter.detach().to(base.dtype)
    move(layer, adapter_name, *args, **kwargs)


def list_adapter_parameter_ids(model: nn.Module) -> set[int]:
    """Return the `id` of each parameter of every adapter, active or not.

    Parameters of adapters may have requires_grad=False, because `set_adapter` freezes inactive
    adapters. These have trained values as well (peft/tuners/tuners_utils.py).
    """
    factors = [
        getattr(module, name, None)
        for module in model.modules()
        for name in getattr(module, "adapter_layer_names", ())
    ]
    return {id(p) for x in factors if isinstance(x, nn.Module) for p in x.parameters()}


def restores_adapters_of_full_state() -> bool:
    """Return True if Accelerate loads adapters from a checkpoint of FULL_STATE_DICT.

    Accelerate 1.13 passes all keys to PEFT. PEFT ignores keys that contain an adapter's name, so
    nothing is loaded (`_set_model_state_dict` in accelerate/utils/fsdp_utils.py).
    """
    return "full_state_dict" in inspect.getsource(fsdp_utils._set_model_state_dict)
