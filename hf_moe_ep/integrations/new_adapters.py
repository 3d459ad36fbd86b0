"""Attach PEFT's adapters to a patched model that is not sharded yet.

Two settings of `hf-moe-ep run` change how PEFT attaches an adapter:

    --lora-experts              The LoraConfig also targets the stacked weights of the experts.
    layers are on meta          LoRA factors are created on the host, with stock's values. If their
    (no --stock-load)           values depend on the weights, or if the adapter is not LoRA, the
                                weights of the model are read first.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

from torch import nn

from hf_moe_ep.checkpoints.hub.unread import read_whole
from hf_moe_ep.lora import computed
from hf_moe_ep.moe.stacked import check_adapters
from hf_moe_ep.ranks.all_ranks import get_rank_of_launch
from hf_moe_ep.routing.bias import refuse_adapters
from hf_moe_ep.state import ModelState, find_state
from hf_moe_ep.upstream.adapter_files import check_supported, find_kind_that_needs_values
from hf_moe_ep.upstream.adapters import factors_on_host, make_copied_experts_error

_logger = logging.getLogger("hf_moe_ep.runner")


def check_accepts(state: ModelState, config: Any) -> None:
    """Raise ValueError if a patched model is sharded, or does not work with this adapter."""
    computed.check_attachable(state)
    check_supported(config)


def add_adapter(
    original: Callable[..., Any],
    self: Any,
    adapter_name: str,
    peft_config: Any,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Wrap `PeftModel.add_adapter`: refuse another prompt in a sharded model, as other adapters.

    Raises:
        ValueError: the patched model is sharded, or does not support this adapter.
    """
    state = find_state(self)
    if state is not None:
        check_accepts(state, peft_config)
    original(self, adapter_name, peft_config, *args, **kwargs)


def inject_adapter(
    original: Callable[..., Any],
    self: Any,
    model: nn.Module,
    adapter_name: str,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Attach an adapter with `BaseTuner.inject_adapter`, if a patched model supports the adapter.

    Raises:
        ValueError: the patched model is sharded, or does not support this adapter.
    """
    state = find_state(model)
    if state is None:
        original(self, model, adapter_name, *args, **kwargs)
        return
    config = self.peft_config[adapter_name]
    check_accepts(state, config)
    refuse_adapters(state)
    computed.check_gets_whole_rows(state.config, [config])
    _check_modules_to_save(model, getattr(config, "modules_to_save", None))
    if state.adapts_experts:
        _target_experts(config, state)
    check_adapters(model, getattr(config, "target_parameters", None))
    if state.unread is not None and (why := find_kind_that_needs_values(config)):
        if get_rank_of_launch() == 0:
            _logger.info("every process reads the whole model, because %s needs its weights", why)
        read_whole(model)
    with factors_on_host() if state.unread is not None else nullcontext():
        original(self, model, adapter_name, *args, **kwargs)


def _check_modules_to_save(model: nn.Module, targets: Iterable[str] | None) -> None:
    """Raise ValueError if PEFT would copy experts, because the copy would include the whole model.

    PEFT copies the modules whose names end with one of the targets (peft/utils/other.py).
    """
    for name, module in model.named_modules():
        if any(name.endswith(target) for target in targets or ()) and find_state(module):
            raise make_copied_experts_error(name)


def _target_experts(config: Any, state: ModelState) -> None:
    """Add the stacked weights of all experts to the parameters that an adapter targets."""
    kind = type(config).__name__
    if not hasattr(config, "target_parameters"):
        raise ValueError(
            f"--lora-experts adds the weights of experts to a LoraConfig, but this adapter has a "
            f"{kind}; train LoRA, or leave out --lora-experts"
        )
    if config.lora_dropout:
        raise ValueError(
            f"--lora-experts: LoRA on stacked weights has no dropout, but the {kind} has "
            f"lora_dropout={config.lora_dropout}; set it to 0"
        )
    experts = state.plan.experts.rpartition("*.")[2]
    names = [f"{experts}.{weight}" for weight in state.plan.expert_weights]
    before = list(config.target_parameters or ())
    # If the config was used for another adapter before, it has the names already.
    added = [name for name in names if name not in before]
    config.target_parameters = [*before, *added]
    if added and get_rank_of_launch() == 0:
        _logger.info("--lora-experts: the %s also targets %s", kind, ", ".join(added))
