"""Compile the layers of a model that is patched with `compile_layers`.

torch.compile traces a layer when it first runs, so layers that are compiled here, before the model
is sharded, are traced with the parameters that FSDP2 has gathered.
"""

from __future__ import annotations

from functools import partial

from torch import nn

from hf_moe_ep.architectures import Parts
from hf_moe_ep.compiled.layers import compile_model, compile_parts, refuse_plan_forwards
from hf_moe_ep.compiled.options import check_compile_kwargs
from hf_moe_ep.state import ModelState


def check(parts: Parts, state: ModelState) -> None:
    """Raise ValueError if arguments for torch.compile are wrong, or layers cannot be compiled."""
    kwargs = state.config.compile_kwargs
    if kwargs is not None:
        check_compile_kwargs(kwargs)
        refuse_plan_forwards(parts.experts.values(), parts.plan.model_type)


def attach(parts: Parts, state: ModelState) -> None:
    """Compile the layers if the config asks for it, and replace the root's method `compile`."""
    replace_compile(parts.root, state)
    kwargs = state.config.compile_kwargs
    if kwargs is not None:
        compile_parts(parts.root, state, check_compile_kwargs(kwargs))


def replace_compile(model: nn.Module, state: ModelState) -> None:
    """Replace the method `compile` of a patched model, or of a PeftModel around it."""
    state.replace(model, "compile", partial(compile_model, model))
