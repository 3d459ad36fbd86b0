"""PEFT's prompt encoders, which PEFT calls alone: when it saves them, and in `generate`.

In the model's forward FSDP2 has gathered their parameters. Outside of it they are shards, beside
the plain token ids that PEFT hands them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.func import functional_call

from hf_moe_ep.checkpoints.hub.gather import gather_whole
from hf_moe_ep.ranks.together import ALONE, check_everyone_calls
from hf_moe_ep.upstream.adapters import PROMPT_ENCODERS, prompt_encoders
from hf_moe_ep.upstream.sharded_models import begin_with_root


def prompt_to_save(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """`PeftModel.get_prompt_embedding_to_save`, of whole parameters; every rank calls this.

    Raises:
        RuntimeError: rank 0 alone calls this.
    """
    if _sharded(self):
        check_everyone_calls("saving a prompt encoder", alone=ALONE)
    return prompt(original, self, *args, **kwargs)


def prompt(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """`PeftModel.get_prompt`, of whole parameters, without gradient outside the model's forward."""
    sharded, call = _sharded(self), partial(original, self, *args, **kwargs)
    if not sharded:
        return call()
    with torch.no_grad():
        whole = {name: gather_whole(parameter) for name, parameter in sharded.items()}
        return _compute_with(prompt_encoders(self), whole, call)


def begin_generation(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """`prepare_inputs_for_generation` of PEFT, which calls the embedding alone, and first of all.

    Wraps `PeftModelForCausalLM.prepare_inputs_for_generation`.
    """
    begin_with_root(self)
    return original(self, *args, **kwargs)


def save_prompts(model: Any, state_dict: Mapping[str, Tensor], save: Callable[[], Any]) -> None:
    """Call PEFT's `save` on one rank, with prompt encoders as they are in a gathered state dict.

    Raises:
        ValueError: they are not in it.
    """
    prefix = f"{PROMPT_ENCODERS}."
    values = {
        name.removeprefix(prefix): tensor
        for name, tensor in state_dict.items()
        if name.startswith(prefix)
    }
    if values.keys() != dict(prompt_encoders(model).named_parameters()).keys():
        raise ValueError(
            f"state_dict lacks tensors named {prefix}*, which save_pretrained of a sharded model "
            f"with prompts needs; pass state_dict=accelerator.get_state_dict(model) as it is, or "
            f"none, on every rank"
        )
    _compute_with(prompt_encoders(model), values, save)


def _sharded(model: Any) -> dict[str, DTensor]:
    """Return parameters of the prompt encoders that are not gathered now, by name."""
    named = prompt_encoders(model).named_parameters()
    return {name: parameter for name, parameter in named if isinstance(parameter, DTensor)}


class _Call(nn.Module):
    """A call, for the time of which `functional_call` gives `encoders` other parameters."""

    def __init__(self, encoders: nn.Module, call: Callable[[], Any]) -> None:
        super().__init__()
        self.encoders = encoders
        self._call = call

    def forward(self) -> Any:
        return self._call()


def _compute_with(
    encoders: nn.Module, values: Mapping[str, Tensor], call: Callable[[], Any]
) -> Any:
    named = {f"encoders.{name}": tensor for name, tensor in values.items()}
    return functional_call(_Call(encoders, call), named, ())
