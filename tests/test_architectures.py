"""`find_parts` finds the parts of a model in any wrapper, and compares them with the config."""

from functools import partial

import pytest
import torch
from support.adapters import with_lora
from support.needs import needs_tower_in_blocks
from support.tiny_models import tiny
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from transformers import Qwen3MoeModel

from hf_moe_ep.architectures import find_parts


def _check_parts(model: nn.Module, inner: nn.Module) -> None:
    """Check the parts of `model`, which is `inner` or wraps `inner`."""
    parts = find_parts(model)
    layers = inner.model.layers
    assert list(parts.experts.values()) == [layer.mlp.experts for layer in layers if _is_moe(layer)]
    assert list(parts.attention) == [layer.self_attn for layer in layers]
    assert parts.final_norm == (inner.model.norm,)
    assert (parts.embedding, parts.head) == (inner.model.embed_tokens, inner.lm_head)
    assert parts.causal_lm is inner and parts.num_experts == 8 and parts.tower is None


def _is_moe(layer: nn.Module) -> bool:
    return hasattr(layer.mlp, "experts")


def test_parts_of_a_stock_model() -> None:
    model = tiny(num_hidden_layers=3, mlp_only_layers=[1])
    _check_parts(model, model)
    parts = find_parts(model)
    assert parts.root is model and list(parts.layers) == list(model.model.layers)
    assert list(parts.experts) == ["model.layers.0.mlp.experts", "model.layers.2.mlp.experts"]
    assert list(parts.adapted_experts) == [0, 2], "keys are decoder layers"
    assert not parts.tied and find_parts(tiny(tie_word_embeddings=True)).tied


def test_parts_within_adapters() -> None:
    inner = tiny()
    experts = [layer.mlp.experts for layer in inner.model.layers]
    model = with_lora(inner)
    parts = find_parts(model)
    assert parts.root is inner and parts.causal_lm is inner
    assert list(parts.experts.values()) == experts
    for module, (wrapper,) in zip(experts, parts.adapted_experts.values(), strict=True):
        assert wrapper is not module and module in list(wrapper.modules())
    assert len(parts.layers) == 2 and len(parts.attention) == 2


def test_parts_within_checkpoint_wrappers_and_compile() -> None:
    model = tiny()
    layers = list(model.model.layers)
    apply_activation_checkpointing(
        model, check_fn=partial(lambda wrapped, module: module in wrapped, layers)
    )
    parts = find_parts(torch.compile(model))
    assert [layer._checkpoint_wrapped_module for layer in parts.layers] == layers
    assert list(parts.experts.values()) == [layer.mlp.experts for layer in layers]


def test_a_base_model_has_no_head() -> None:
    parts = find_parts(Qwen3MoeModel(tiny().config))
    assert parts.head is None and parts.causal_lm is None and not parts.tied


@needs_tower_in_blocks
def test_parts_of_a_vision_model() -> None:
    model = tiny("qwen3_vl_moe")
    tower = find_parts(model).tower
    assert tower is not None and tower.module is model.model.visual and tower.owner is model.model
    assert tower.decoder is model.model.language_model
    assert list(tower.blocks) == list(model.model.visual.blocks)
    assert list(tower.attention) == [block.attn for block in model.model.visual.blocks]


def test_fewer_layers_than_in_the_config_are_refused() -> None:
    model = tiny()
    del model.model.layers[1]
    with pytest.raises(ValueError, match=r"found 1 decoder layers .* expected 2"):
        find_parts(model)
