"""Stock models with random weights: routing has no ties, and every parameter has an effect."""

import re
import warnings
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import MoeCausalLMOutputWithPast

from support.architectures.sizes import tiny_config
from support.architectures.types import CLASS_NAMES, MODEL_TYPES
from support.fp64 import FP64

# The routers of these types compute in fp32 without casting their weights, so stock itself fails
# on an fp64 router outside of FP64. Every other type runs with all weights in fp64.
_FP32_ROUTERS = ("inkling2", "inkling2_loop", "inkling2_loop_text", "inkling2_text")

# The forward of Llama4ForConditionalGeneration reads this field of the output of its language
# model, which has no such field in Transformers 5.24.
if not hasattr(MoeCausalLMOutputWithPast, "image_outputs"):
    MoeCausalLMOutputWithPast.image_outputs = None


def model_class(model_type: str) -> type[PreTrainedModel]:
    """Return the class that people train: it has a head for tokens, and all towers of its type."""
    if model_type not in CLASS_NAMES:
        raise ValueError(f"{model_type!r} is no MoE type; known types: {', '.join(MODEL_TYPES)}")
    model = getattr(transformers, CLASS_NAMES[model_type])
    assert issubclass(model, PreTrainedModel)
    return model


def tiny(
    model_type: str,
    *,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    experts_implementation: str | None = "eager",
    **config_overrides: Any,
) -> PreTrainedModel:
    """Build a stock model in training mode. Equal seeds give equal weights.

    The default of `experts_implementation` is "eager", because stock's default, F.grouped_mm, has
    no fp64 on CPU. Parameters that Transformers keeps in fp32 under half precision are fp32 here,
    too.
    """
    config = tiny_config(
        model_type, **config_overrides, experts_implementation=experts_implementation
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(model_type)(config)
        _spread(model)
    half = dtype in (torch.float16, torch.bfloat16)
    fp32_routers = model_type in _FP32_ROUTERS and not FP64.is_on()
    fp32_names = model._keep_in_fp32_modules_strict if half or fp32_routers else ()
    return _cast(model, dtype, fp32_names or ()).train()


def _spread(model: nn.Module) -> None:
    """Randomise what initialisation leaves constant, such as norms and biases, and the gates."""
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Embedding) and module.padding_idx is not None:
                row = module.weight[module.padding_idx]  # with zeros here all experts would tie
                row.copy_(module.weight.std() * torch.randn_like(row))
        for name, parameter in model.named_parameters():
            if "sink" in name:
                parameter.add_(torch.randn_like(parameter))
            elif not parameter.requires_grad:  # a correction bias
                parameter.add_(0.05 * torch.randn_like(parameter))
            elif re.search(r"(gate|router)\b.*weight$", name) and _is_wide(parameter):
                # Rows of norm 1 make logits of about std 1. The GELUs of a router_mlp shrink them.
                nn.init.orthogonal_(parameter, gain=1.6 if "router_mlp" in name else 1.0)
            elif parameter.ndim == 1 or _is_constant(parameter):
                parameter.add_(0.1 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if name.endswith("tid2eid"):  # experts by token id
                router = model.get_submodule(name.rpartition(".")[0])
                scores = torch.rand(len(buffer), router.num_experts)
                buffer.copy_(scores.topk(buffer.shape[-1]).indices)
            elif re.search("bias(es)?$", name):
                buffer.add_(0.05 * torch.randn_like(buffer))


def _is_wide(tensor: torch.Tensor) -> bool:
    return tensor.ndim == 2 and tensor.shape[0] <= tensor.shape[1]


def _is_constant(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and bool((tensor == tensor.flatten()[0]).all())


def _cast(model: PreTrainedModel, dtype: torch.dtype, fp32_names: Any) -> PreTrainedModel:
    """Cast a model as from_pretrained does: modules and tensors of `fp32_names` stay in fp32."""
    # The rotary embedding of Llama-4's tower is complex, and `to` would drop its imaginary part.
    spared = {name: b.data.clone() for name, b in model.named_buffers() if b.is_complex()}
    pattern = re.compile("|".join(rf"(^|\.){re.escape(name)}($|\.)" for name in fp32_names) or "$^")
    named = [*model.named_parameters(), *model.named_buffers()]
    spared |= {name: tensor.data.clone() for name, tensor in named if pattern.search(name)}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Casting complex values to real")
        model.to(dtype)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name in spared:
            tensor.data = spared[name]
    return model
