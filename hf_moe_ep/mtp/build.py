"""Build the modules of a head for multi-token prediction on the meta device, without values.

The decoder layers of a head have the class and the dtypes of the model's last layer with attention
and experts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import partial

from torch import nn

from hf_moe_ep.architectures import Parts
from hf_moe_ep.model_patches.standard import MTP_HEADS
from hf_moe_ep.mtp_head import MtpHead, OwnProjectionHead, SharedProjectionHead
from hf_moe_ep.plan import MTP_HEAD
from hf_moe_ep.state import ModelState
from hf_moe_ep.upstream.adapters import iterate_adapter_layers
from hf_moe_ep.upstream.hub import build_empty_module, get_checkpoint_name

_SHARED_LAYOUT = "shared"  # the other layout is "own" (mtp_head.py)
# The attributes of a decoder layer with which activation checkpointing is switched on.
_CHECKPOINTING = ("gradient_checkpointing", "_gradient_checkpointing_func")
# Matches the names that the parameters of a head's layers have in a trained model.
_HEAD_LAYER = re.compile(rf"(?:^|\.){MTP_HEAD}\.(?:model\.)?layers\.(\d+)\.")


def check_head_is_supported(parts: Parts, num_layers: int) -> None:
    """Raise ValueError if a head for this model was not tested, or cannot be trained."""
    model_type = parts.plan.model_type
    if model_type not in MTP_HEADS:
        has_text_class = f"{model_type}_text" in MTP_HEADS
        other = "load its text model (AutoModelForCausalLM), or " if has_text_class else ""
        raise ValueError(
            f"mtp_layers={num_layers}: heads for multi-token prediction were tested on "
            f"{', '.join(sorted(MTP_HEADS))}, not on {model_type}; {other}leave mtp_layers out: "
            f"each save then copies the head of the loaded checkpoint"
        )
    if parts.causal_lm is None or not parts.final_norm or parts.embedding is None:
        raise ValueError(
            f"mtp_layers={num_layers}: the head shares embedding, final norm and output head with "
            f"a causal language model, and {type(parts.root).__name__} does not have all three; "
            f"load the model as a causal language model"
        )
    check_no_adapters(parts.root, num_layers)


def check_no_adapters(model: nn.Module, num_layers: int) -> None:
    """Raise ValueError if a model has adapters, because a saved adapter has no MTP head."""
    if any(True for _ in iterate_adapter_layers(model)):
        raise ValueError(
            f"mtp_layers={num_layers} trains the head for multi-token prediction, but this model "
            f"has adapters, which are saved without the head; leave mtp_layers out, or train "
            f"without adapters"
        )


def count_stored_layers(parts: Parts, keys: Iterable[str]) -> int:
    """Count the layers of a head in a checkpoint with these keys."""
    layout, _ = MTP_HEADS[parts.plan.model_type]
    first = len(parts.main_layers)
    is_shared = layout == _SHARED_LAYOUT
    pattern = r"^mtp\.layers\.(\d+)\." if is_shared else r"^model\.layers\.(\d+)\.eh_proj\."
    found = {int(match[1]) for match in map(re.compile(pattern).search, keys) if match}
    return len(found if is_shared else {index for index in found if index >= first})


def count_trained_layers(names: Iterable[str]) -> int:
    """Count the layers of a head in a trained model whose parameters have these names."""
    return len({match[1] for match in map(_HEAD_LAYER.search, names) if match})


def build_head(parts: Parts, num_layers: int) -> MtpHead:
    """Build the head of a model, with parameters on meta, and add it to the causal LM.

    Raises:
        ValueError: no layer of the model has both attention and experts.
    """
    template = find_template(parts)
    index = parts.main_layers.index(template)
    stock = _unwrap_layer(template)
    norm = parts.final_norm[0]
    eps = getattr(parts.config, "rms_norm_eps", 1e-6)
    make_norm = partial(type(norm), parts.config.hidden_size, eps=eps)
    layout, _ = MTP_HEADS[parts.plan.model_type]

    def build() -> MtpHead:
        blocks = [type(stock)(parts.config, index) for _ in range(num_layers)]
        if layout == _SHARED_LAYOUT:
            return SharedProjectionHead(blocks, parts.config.hidden_size, make_norm)
        embedding, head = _find_weight_names(parts)
        return OwnProjectionHead(
            blocks,
            parts.config.hidden_size,
            make_norm,
            first=len(parts.main_layers),
            embedding=embedding,
            head=head,
        )

    mtp: MtpHead = build_empty_module(build, next(norm.parameters()).dtype)
    _set_dtypes(mtp, stock)
    for block in mtp.blocks:
        for name in _CHECKPOINTING:
            if hasattr(stock, name):
                setattr(block, name, getattr(stock, name))
    mtp.train(parts.root.training)
    parts.causal_lm.add_module(MTP_HEAD, mtp)
    return mtp


def set_layers_in_config(parts: Parts, state: ModelState) -> None:
    """Set the config's number of MTP layers, from which an inference engine builds the head."""
    _, field = MTP_HEADS[parts.plan.model_type]
    field = getattr(parts.config, "attribute_map", {}).get(field, field)
    state.replace(parts.config, field, state.config.mtp_layers)


def find_template(parts: Parts) -> nn.Module:
    """Return the last decoder layer that has both attention and experts.

    The layers of the head have the class of this layer, and are called with its arguments.

    Raises:
        ValueError: there is no such layer.
    """
    attention, experts = set(parts.attention), set(parts.experts.values())
    for layer in reversed(parts.main_layers):
        inside = set(layer.modules())
        if inside & attention and inside & experts:
            return layer
    raise ValueError(
        f"mtp_layers: no decoder layer of this {type(parts.root).__name__} has both attention and "
        f"experts, as the layers of its head would have; leave mtp_layers out"
    )


def _unwrap_layer(layer: nn.Module) -> nn.Module:
    """Return the decoder layer inside wrappers for activation checkpointing."""
    children = list(layer.children())
    return _unwrap_layer(children[0]) if len(children) == 1 else layer


def _find_weight_names(parts: Parts) -> tuple[str, str]:
    """Return the names in checkpoints of the weights of embedding and output head.

    If the weights are tied, both names are the same.
    """
    assert parts.embedding is not None and parts.head is not None
    weights = (parts.embedding.weight, parts.head.weight)
    name_of = {
        id(parameter): get_checkpoint_name(name)
        for name, parameter in parts.root.named_parameters()
    }
    embedding, head = (name_of[id(weight)] for weight in weights)
    return embedding, head


def _set_dtypes(mtp: MtpHead, stock: nn.Module) -> None:
    """Give each tensor of the head the dtype of the main model's tensor of the same name."""
    dtypes = {name: tensor.dtype for name, tensor in stock.state_dict(keep_vars=True).items()}
    for block in mtp.blocks:
        for name, tensor in block.state_dict(keep_vars=True).items():
            tensor.data = tensor.detach().to(dtypes[name])
