"""Compute PEFT's LoRA adapters of experts without merging them into the stacked weights.

PEFT adapts a parameter such as `gate_up_proj` by a wrapper around its module. During a forward the
wrapper replaces the parameter by `W + scale * B A`. This tensor has the size of all experts, is
computed twice and is saved for backward. With `activate` the wrapper stores only its factors on the
experts module. For each row x, the experts then add `scale * B (A x)` to `W x` (`_multiply` in
ops/torch_mlp.py, `_compute_low_rows` in ops/triton_mlp.py).

The factors stay parameters of PEFT's wrappers. When the model is sharded, the factors are sharded
over ep with their experts, in the same FSDP2 unit (`factors.py` describes the layouts). Adapters
are saved in PEFT's layout, so stock PEFT can load them.

`integrations/install.py` wraps functions of PEFT with `activate`, `call_base_model`,
`load_adapter`, `get_status` and `merge`. Only adapters of patched models are affected.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from hf_moe_ep.config import ParallelConfig
from hf_moe_ep.lora.factors import Adapter, pack_a, pack_b, stack_a, stack_b
from hf_moe_ep.ranks.all_ranks import get_rank_of_launch
from hf_moe_ep.state import STATE, ModelState, MoELayer, find_state
from hf_moe_ep.upstream.adapters import (
    ParameterFactor,
    allowing_no_adapter_layers,
    before_loaded_values,
    counts_from_end_of_row,
    factors_on_host,
    has_copies_on_meta,
    has_own_forward,
    iterate_parameter_factors,
)

_logger = logging.getLogger("hf_moe_ep.runner")
Conversion = Callable[[Tensor], Tensor]


def iterate_stacked_factors(model: nn.Module) -> Iterator[ParameterFactor]:
    """Yield every LoRA factor of experts that this package computes.

    If the model's own code computes the experts, their factors are omitted and keep PEFT's layout.
    """
    for _, factor in iterate_parameter_factors(model):
        if _is_computed_here(factor.module):
            yield factor


def stack_conversion(factor: ParameterFactor) -> Conversion:
    """Return the function that converts a factor from PEFT's layout to experts as the first dim."""
    return partial(stack_b if factor.is_b else stack_a, num_experts=factor.num_experts)


def pack_conversion(factor: ParameterFactor) -> Conversion:
    """Return the function that converts a factor with experts as the first dim to PEFT's layout."""
    return pack_b if factor.is_b else pack_a


def activate(original: Callable[..., Any], self: Any, active_adapters: list[str]) -> Any:
    """Wrap `ParamWrapper._activate_lora`: compute with the factors, which PEFT would merge."""
    experts = self.get_base_layer()
    if not _is_computed_here(experts):
        return original(self, active_adapters)
    adapters = [
        Adapter(self.lora_A[n].weight, self.lora_B[n].weight, self.scaling[n], self.num_experts)
        for n in active_adapters
        if n in self.lora_A
    ]
    return _store_adapters(experts, self.parameter_name, adapters)


@contextmanager
def _store_adapters(experts: Any, parameter: str, adapters: list[Adapter]) -> Iterator[None]:
    layer: MoELayer = getattr(experts, STATE)
    assert layer.compute is not None
    adaptable = layer.compute.parameters
    if parameter not in adaptable:
        raise ValueError(
            f"an adapter targets {parameter} of {type(experts).__name__}; only adapters of "
            f"{' and '.join(adaptable)} can be computed: take {parameter} out of target_parameters"
        )
    layer.adapters[parameter] = adapters
    try:
        yield
    finally:
        del layer.adapters[parameter]


def call_base_model(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap `BaseTuner.forward`: run the model's forward hooks, which PEFT 0.20 skips.

    PEFT 0.20 calls `model.forward` and thereby skips the hooks of FSDP2 and of this package. Newer
    versions of PEFT call the model. A tuner with a forward of its own also does so: Poly's forward
    gives the tasks of the batch to its layers.
    """
    if find_state(self.model) is None or has_own_forward(self):
        return original(self, *args, **kwargs)
    return self.model(*args, **kwargs)


def check_gets_whole_rows(config: ParallelConfig, adapters: Iterable[Any]) -> None:
    """Raise ValueError if an adapter counts tokens in whole rows, but layers get parts of a batch.

    `adapters` are configs of PEFT.
    """
    sizes = {name: getattr(config, name) or 1 for name in ("sp_size", "cp_size", "pp_size")}
    used = ", ".join(f"{name}={size}" for name, size in sizes.items() if size > 1)
    if used and any(map(counts_from_end_of_row, adapters)):
        raise ValueError(
            f"alora_invocation_tokens adapts the last tokens of each row, but with {used} a layer "
            f"gets a part of the batch, so other tokens would be adapted; leave {used} out, or "
            f"train LoRA without alora_invocation_tokens"
        )


def check_attachable(state: ModelState) -> None:
    """Raise ValueError if the model is sharded, because adapters can no longer be attached."""
    if state.meshes is not None:
        raise ValueError(
            f"this model is sharded over {state.meshes.world_size} ranks; attach adapters before "
            f"apply_ep_fsdp2 or accelerator.prepare, so that every rank trains its share of the "
            f"same adapter. If TRL was copying an adapter for its reference, pass "
            f"ref_model=hf_moe_ep.from_pretrained(...) to DPO and KTO; for other trainers, patch a "
            f"model of stock from_pretrained, and pass peft_config to the trainer"
        )


def load_adapter(
    original: Callable[..., Any], self: Any, model_id: Any, *args: Any, **kwargs: Any
) -> Any:
    """Wrap `PeftModel.load_adapter`: refuse a sharded model, and load values of layers on meta.

    The factors of such layers are created on the host. A module in modules_to_save is a copy of a
    module on meta, which cannot store loaded values, so all layers are read before.

    Raises:
        ValueError: the model is sharded.
    """
    if ranks := _count_sharded_ranks(self):
        raise ValueError(
            f"load_adapter on a model that is sharded over {ranks} ranks; load {model_id} before "
            f"apply_ep_fsdp2 or accelerator.prepare: PeftModel.from_pretrained(base, {model_id!r}, "
            f"is_trainable=True)"
        )
    state = find_state(self)
    if state is None or state.unread is None:
        return original(self, model_id, *args, **kwargs)

    def read_copies() -> None:
        if state.unread is not None and has_copies_on_meta(self):
            _read_whole(self, state, f"the adapter {model_id} has values of modules_to_save")

    with factors_on_host(), before_loaded_values(read_copies):
        return original(self, model_id, *args, **kwargs)


def get_status(original: Callable[..., Any], self: Any) -> Any:
    """Wrap the status methods of `PeftModel`: let a pipeline stage have no layer with an adapter.

    PEFT raises an error for such a model, also in `disable_adapter`.
    """
    state = find_state(self)
    if state is None or state.stage is None:
        return original(self)
    with allowing_no_adapter_layers():
        status = original(self)
    if getattr(status, "num_adapter_layers", None) == 0:
        # The value is "irregular", and `disable_adapter` would warn of layers that are disabled.
        return replace(status, enabled=True)
    return status


def merge(name: str, original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap the method `name` of `BaseTuner`: refuse to merge or unload in a sharded model.

    Layers on meta are read before adapters are merged into their weights.

    Raises:
        ValueError: the model is sharded.
    """
    if ranks := _count_sharded_ranks(self):
        raise ValueError(
            f"{name} on a model that is sharded over {ranks} ranks; save the adapter with "
            f"hf_moe_ep.save_pretrained(model, directory), then call it in one process on "
            f"PeftModel.from_pretrained(base, directory)"
        )
    state = find_state(self)
    if name != "unload" and state is not None and state.unread is not None:
        _read_whole(self.model, state, f"{name} changes its weights")
    return original(self, *args, **kwargs)


def _read_whole(model: nn.Module, state: ModelState, reason: str) -> None:
    """Read the layers of a model that are on meta. Rank 0 logs the reason."""
    if get_rank_of_launch() == 0:
        _logger.info("every process reads the whole model, because %s", reason)
    state.unread.read_whole(model)


def _is_computed_here(experts: Any) -> bool:
    """Return True if this package computes the experts, and not the model's own code."""
    layer = getattr(experts, STATE, None)
    return isinstance(layer, MoELayer) and layer.compute is not None


def _count_sharded_ranks(model: nn.Module) -> int:
    """Return the number of ranks over which this package has sharded a model, or 0."""
    state = find_state(model)
    return 0 if state is None or state.meshes is None else state.meshes.world_size
