"""Let PEFT call the prompt encoders (prompt tuning, prefix tuning) of a sharded model.

Inside the model's forward FSDP2 has gathered the parameters of the encoder. PEFT also calls the
encoder outside the forward: in `generate`, and when it saves. There the parameters are DTensor
shards, which cannot be combined with PEFT's plain token ids, so the wrappers gather the parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.func import functional_call

from hf_moe_ep.checkpoints.hub.gather import gather_tensor
from hf_moe_ep.ranks.all_ranks import PATIENCE_OF_RANK_0, check_everyone_calls
from hf_moe_ep.upstream.adapters import PROMPT_ENCODERS


def compute_prompt_to_save(
    original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any
) -> Any:
    """Wrap `PeftModel.get_prompt_embedding_to_save`: gather the prompt encoder on every rank.

    Raises:
        RuntimeError: only rank 0 calls this.
    """
    if _find_sharded_parameters(self):
        check_everyone_calls("saving a prompt encoder", patience_of_rank_0=PATIENCE_OF_RANK_0)
    return compute_prompt(original, self, *args, **kwargs)


def compute_prompt(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap `PeftModel.get_prompt`: gather the prompt encoder outside the model's forward.

    The prompt is then computed without gradients. If no parameter is sharded at the moment, stock
    code runs, with gradients.
    """
    sharded, call = _find_sharded_parameters(self), partial(original, self, *args, **kwargs)
    if not sharded:
        return call()
    with torch.no_grad():
        gathered = {name: gather_tensor(parameter) for name, parameter in sharded.items()}
        return _call_with_parameters(self.prompt_encoder, gathered, call)


def save_prompts(model: Any, state_dict: Mapping[str, Tensor], save: Callable[[], Any]) -> None:
    """Call PEFT's `save` on one rank, with the prompt encoders' tensors of a gathered state dict.

    Raises:
        ValueError: the prompt encoders have other tensors than the state dict.
    """
    prefix = f"{PROMPT_ENCODERS}."
    values = {
        name.removeprefix(prefix): tensor
        for name, tensor in state_dict.items()
        if name.startswith(prefix)
    }
    if values.keys() != dict(model.prompt_encoder.named_parameters()).keys():
        raise ValueError(
            f"save_pretrained of a sharded model with prompts needs a state_dict whose tensors "
            f"named {prefix}* are exactly those of this model; on every rank pass "
            f"state_dict=accelerator.get_state_dict(model) unchanged, or omit state_dict"
        )
    _call_with_parameters(model.prompt_encoder, values, save)


def _find_sharded_parameters(model: Any) -> dict[str, DTensor]:
    """Return the parameters of the prompt encoders that are sharded at the moment, by name."""
    named = model.prompt_encoder.named_parameters()
    return {name: parameter for name, parameter in named if isinstance(parameter, DTensor)}


def _call_with_parameters(
    encoders: nn.Module, values: Mapping[str, Tensor], call: Callable[[], Any]
) -> Any:
    """Run `call` while `values` are the parameters of the encoders."""
    # functional_call replaces the parameters of a module and calls its forward.
    holder = nn.ModuleDict({"encoders": encoders})
    setattr(holder, "forward", call)  # noqa: B010  mypy: a method
    named = {f"encoders.{name}": tensor for name, tensor in values.items()}
    return functional_call(holder, named, ())
