"""Refuse methods of stock models that a sharded model cannot run.

    generate_batch and other functions    each rank would run the forwards that its own requests
    of continuous batching                need, and wait in collectives that other ranks never call
    resize_token_embeddings               the new embedding would be a plain parameter, which FSDP2
                                          does not know
    load_state_dict of plain tensors      PyTorch does not copy a plain tensor into a DTensor

`generate` itself may need different numbers of forwards on the ranks (`gathered.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hf_moe_ep.upstream.models import list_models_that_generate, list_pretrained_models

# The functions that start transformers' continuous batching, also for
# `generate(cache_implementation="paged")`. Not every version of transformers has all of them.
_CONTINUOUS_BATCHING = (
    "generate_batch",
    "init_continuous_batching",
    "continuous_batching_context_manager",
)


def refuse_calls(model: nn.Module, num_ranks: int) -> None:
    """Let the methods of a sharded model that the module docstring lists raise ValueError."""
    if num_ranks > 1:
        for module in list_models_that_generate(model):
            for name in _CONTINUOUS_BATCHING:
                if hasattr(module, name):
                    setattr(module, name, partial(_refuse_continuous_batching, name, num_ranks))
    for module in list_pretrained_models(model):
        module.resize_token_embeddings = partial(_refuse_new_size, module)
    model.register_load_state_dict_pre_hook(_refuse_plain_tensors)


def _refuse_continuous_batching(name: str, num_ranks: int, *args: Any, **kwargs: Any) -> NoReturn:
    raise ValueError(
        f"{name}: continuous batching runs as many forwards as the requests of one rank need, but "
        f"the {num_ranks} ranks of a sharded model must run the same number; use generate() "
        f"without cache_implementation='paged' (TRL: use_transformers_continuous_batching=False), "
        f"or vLLM"
    )


def _refuse_new_size(
    model: Any,
    new_num_tokens: int | None = None,
    pad_to_multiple_of: int | None = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Run `resize_token_embeddings` if it changes nothing; scripts often call it in any case."""
    weight = getattr(model.get_input_embeddings(), "weight", None)
    current = 0 if weight is None else weight.shape[0]
    multiple = pad_to_multiple_of or 1
    size = -(-(new_num_tokens or current) // multiple) * multiple
    if size != current:
        raise ValueError(
            f"resize_token_embeddings({size}) of a sharded model, whose embedding has {current} "
            f"tokens; load the model with transformers' from_pretrained, resize it, and shard it "
            f"afterwards (apply_ep_fsdp2 or accelerator.prepare)"
        )
    return type(model).resize_token_embeddings(
        model, new_num_tokens, pad_to_multiple_of, *args, **kwargs
    )


def _refuse_plain_tensors(
    model: nn.Module, state_dict: Mapping[str, Any], prefix: str, *_: Any
) -> None:
    """Raise ValueError before `load_state_dict` loads a plain tensor into a sharded parameter."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        value = state_dict.get(f"{prefix}{name}")
        is_plain = isinstance(value, Tensor) and not isinstance(value, DTensor)
        if is_plain and isinstance(parameter, DTensor):
            raise ValueError(
                f"load_state_dict got a plain tensor for {name}, which is sharded; load weights "
                f"with from_pretrained of hf_moe_ep, or before the model is sharded, and training "
                f"checkpoints with load_checkpoint"
            )
