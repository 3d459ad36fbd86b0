"""How Accelerate, the Trainer and PEFT save a patched model: in hub layout, as stock would.

saved by                          with a state dict given    without
Trainer.save_model                                           sharded save, file by file
PreTrainedModel.save_pretrained   written in hub layout      sharded save, on every rank
PeftModel.save_pretrained         packed as PEFT packs it    gathered here, on every rank
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from inspect import signature
from typing import Any

import transformers
from accelerate import Accelerator
from torch import Tensor, nn

from hf_moe_ep.checkpoints.hub.gather import gather_state_dict
from hf_moe_ep.checkpoints.hub.save import save_pretrained, save_state_dict
from hf_moe_ep.integrations.prompts import save_prompts
from hf_moe_ep.lora.factors import pack_factors
from hf_moe_ep.ranks.together import ALONE, check_everyone_calls
from hf_moe_ep.sharding.units import reshard
from hf_moe_ep.state import find_state
from hf_moe_ep.upstream.adapters import canonical_modules, has_adapters, learns_prompts
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
    """`PreTrainedModel.save_pretrained`: a sharded model, or what was gathered of it.

    Without a state dict every rank calls this, as Accelerate's examples do with `is_main_process`
    and `save_function`; rank 0 writes, whatever these two are.

    Raises:
        ValueError: the model is sharded, no state dict is given, and an option asks for what
            `hf_moe_ep.save_pretrained` does not do.
        RuntimeError: rank 0 alone calls this, without a state dict.
    """
    state = find_state(self)
    meshes = None if state is None or has_adapters(self) else state.meshes
    if meshes is None:
        original(self, save_directory, *args, **kwargs)
        return
    options = _bind_options(original, self, save_directory, args, kwargs)
    given = options.get("state_dict")
    size = {name: options[name] for name in ("max_shard_size",) if name in options}
    if given is None:
        _check_options(options)
        check_everyone_calls("save_pretrained of the model", alone=ALONE)
        save_pretrained(self, save_directory, **size)
    elif options.get("push_to_hub"):
        original(self, save_directory, *args, **kwargs)
    elif not isinstance(given, _SavedAlready) and options.get("is_main_process", True):
        save_state_dict(self, save_directory, given, **size)


def _bind_options(
    original: Callable[..., Any],
    model: transformers.PreTrainedModel,
    save_directory: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> dict[str, Any]:
    """Return the options of a call of `save_pretrained` by name, those alone that were given."""
    bound = dict(signature(original).bind(model, save_directory, *args, **kwargs).arguments)
    return bound | bound.pop("kwargs", {})


def _check_options(options: dict[str, Any]) -> None:
    """Raise on options of `save_pretrained` that a sharded save would silently not follow."""
    remedies = {
        "push_to_hub": "save, then upload_folder of huggingface_hub on rank 0",
        "variant": "save, then rename the files on rank 0",
        "distributed_checkpoint": "leave it out: the folder can be loaded at any world size",
    }
    asked = [name for name in remedies if options.get(name)]
    if options.get("save_original_format") is False:
        asked.append("save_original_format")
        remedies["save_original_format"] = (
            "leave it out: experts are written one by one, as every hub checkpoint has them"
        )
    if asked:
        raise ValueError(
            f"save_pretrained of a sharded model does not take {asked[0]}="
            f"{options[asked[0]]!r}; {remedies[asked[0]]}, or pass "
            f"state_dict=accelerator.get_state_dict(model)"
        )


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
        if learns_prompts(self):
            if kwargs.get("is_main_process", True):
                save_prompts(self, given, partial(original, self, save_directory, *args, **kwargs))
            return
        with canonical_modules(self):
            original(self, save_directory, *args, **kwargs)
    else:
        check_everyone_calls("save_pretrained of the model", alone=ALONE)
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
