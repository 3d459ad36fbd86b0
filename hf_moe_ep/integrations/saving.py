"""How Accelerate, the Trainer and PEFT save a patched model: in hub layout, as stock would.

saved by                          with a state dict given    without
Trainer.save_model                                           sharded save, file by file
PreTrainedModel.save_pretrained   written in hub layout      refused: says what to call
PeftModel.save_pretrained         packed as PEFT packs it    gathered here, on every rank
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers
from accelerate import Accelerator
from torch import Tensor, nn

from hf_moe_ep.checkpoints.hub.gather import gather_state_dict
from hf_moe_ep.checkpoints.hub.save import save_pretrained, save_state_dict
from hf_moe_ep.lora.factors import pack_factors
from hf_moe_ep.sharding.units import reshard
from hf_moe_ep.state import find_state
from hf_moe_ep.upstream.adapters import canonical_modules, has_adapters
from hf_moe_ep.upstream.module_names import unwrap
from hf_moe_ep.upstream.sharded_models import stock_class
from hf_moe_ep.upstream.training_frameworks import save_beside


def save_model(
    original: Callable[..., Any],
    self: transformers.Trainer,
    output_dir: str | None = None,
    _internal_call: bool = False,
) -> None:
    """`Trainer.save_model`: shard by shard in hub layout, or the gathered adapters."""
    state = find_state(self.model)
    sharded = state is not None and state.meshes is not None
    if not sharded or _internal_call or not self.is_fsdp_enabled:
        original(self, output_dir, _internal_call)
        return
    folder = output_dir or self.args.output_dir
    if has_adapters(unwrap(self.model)):
        state_dict = gather_state_dict(self.model)
    else:
        state_dict = _SavedAlready()
        save_pretrained(self.model, folder)
    if self.args.should_save:
        save_beside(self, folder, state_dict)
    self.accelerator.wait_for_everyone()
    if self.args.push_to_hub:
        self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)


class _SavedAlready(dict[str, Tensor]):
    """Given to `Trainer._save` as the model's state dict, for what it saves beside the model."""


def save_in_hub_layout(
    original: Callable[..., Any],
    self: transformers.PreTrainedModel,
    save_directory: Any,
    *args: Any,
    **kwargs: Any,
) -> None:
    """`PreTrainedModel.save_pretrained`: a sharded model's gathered state dict, in hub layout.

    Raises:
        ValueError: the model is sharded and no state dict is given.
    """
    state, given = find_state(self), kwargs.get("state_dict")
    meshes = None if state is None or has_adapters(self) else state.meshes
    if meshes is not None and given is None:
        raise ValueError(
            f"this model is sharded over {meshes.world_size} ranks; call "
            "hf_moe_ep.save_pretrained(model, directory) on every rank, or pass "
            "state_dict=accelerator.get_state_dict(model)"
        )
    if meshes is None or kwargs.get("push_to_hub"):
        original(self, save_directory, *args, **kwargs)
    elif isinstance(given, _SavedAlready) or not kwargs.get("is_main_process", True):
        return
    elif given is not None:
        save_state_dict(self, save_directory, given, kwargs.get("max_shard_size", "5GB"))


def save_adapters(
    original: Callable[..., Any], self: Any, save_directory: Any, *args: Any, **kwargs: Any
) -> None:
    """`PeftModel.save_pretrained`: a sharded model's adapters, as PEFT packs them."""
    state = find_state(self)
    given = kwargs.get("state_dict")
    if state is None or state.meshes is None:
        original(self, save_directory, *args, **kwargs)
    elif given is not None:
        kwargs["state_dict"] = pack_factors(self, given)
        with canonical_modules(self):
            original(self, save_directory, *args, **kwargs)
    else:
        save_pretrained(self, save_directory, *args, **kwargs)


def base_model_class(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> type:
    """`PeftModel._get_base_model_class`: the class before FSDP2 put its own in front."""
    return stock_class(original(self, *args, **kwargs))


def get_state_dict(
    original: Callable[..., Any], self: Accelerator, model: nn.Module, *args: Any, **kwargs: Any
) -> Any:
    """`Accelerator.get_state_dict`, with adapters of experts as PEFT packs them."""
    state_dict = original(self, model, *args, **kwargs)
    return state_dict if find_state(model) is None else pack_factors(model, state_dict)


def set_model_state_dict(
    original: Callable[..., Any], model: nn.Module, *args: Any, **kwargs: Any
) -> Any:
    """Accelerate's own loading of a state dict, into units that are not gathered."""
    if find_state(model) is not None:
        # A full state dict is cut to fit parameters as they are, also while they are gathered
        # (torch/distributed/checkpoint/state_dict.py).
        reshard(model)
    return original(model, *args, **kwargs)
