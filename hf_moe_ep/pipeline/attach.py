"""Check whether a model can be cut into pipeline stages.

`patch` attaches nothing. A model is cut when it is sharded (`sharding/stages.py`), because before
that it is unknown which stage this rank holds.
"""

from __future__ import annotations

from torch import nn

from hf_moe_ep.architectures import Parts
from hf_moe_ep.derive import takes_chosen_tokens
from hf_moe_ep.loss.attach import has_causal_loss
from hf_moe_ep.pipeline.cut import assign_layers_to_stages, divide_evenly, list_parameters_outside
from hf_moe_ep.sequence.slice_arguments import list_named_parameters_of_forward
from hf_moe_ep.state import ModelState
from hf_moe_ep.upstream.causal_loss import passes_arguments_to_loss

# Arguments in which a layer receives other tensors of earlier layers than hidden states.
_FROM_EARLIER_LAYERS = {"block_states", "messages", "shared_kv_states"}


def check(parts: Parts, state: ModelState) -> None:
    """Raise ValueError if `pp_size` > 1 and the model cannot be cut into stages."""
    size = state.config.pp_size or 1
    if size == 1:
        return
    kind, model_type = type(parts.root).__name__, parts.plan.model_type
    remedy = "leave pp_size at 1 (ep_size, FSDP2 and sp_size work)"
    if parts.tower is not None or parts.encoders is not None:
        raise ValueError(
            f"pp_size ({size}) > 1 cannot place the encoders of pictures and sound of {kind}, "
            f"whose outputs several layers may need; {remedy}"
        )
    if parts.plan.block is not None:
        raise ValueError(
            f"pp_size ({size}) > 1 cannot save the MoE blocks of {model_type} from several stages, "
            f"because they do not use transformers' experts interface; {remedy}"
        )
    if parts.causal_lm is None or parts.causal_lm is not parts.root:
        raise ValueError(
            f"pp_size ({size}) > 1 computes the model's own loss on the last stage, and {kind} is "
            f"no causal language model; load it as one, or {remedy}"
        )
    if not has_causal_loss(parts.causal_lm) or not passes_arguments_to_loss(parts.causal_lm):
        raise ValueError(
            f"pp_size ({size}) > 1 divides the loss of each micro-batch by the tokens of the "
            f"batch, and the loss function of {kind} is not transformers' ForCausalLMLoss with "
            f"these arguments; {remedy}"
        )
    pp_plan = getattr(parts.config, "base_model_pp_plan", None) or {}
    if state.config.pp_layers is None and "layers" not in pp_plan:
        even = divide_evenly(len(parts.layers), size)
        raise ValueError(
            f"pp_size ({size}) > 1: the config of {model_type} has no base_model_pp_plan with "
            f"'layers', so it is not known if its layers pass on hidden states alone; if they do, "
            f"give the number of layers of each stage: pp_layers={even}"
        )
    assign_layers_to_stages(len(parts.layers), state.config)
    outside = list_parameters_outside(parts.root, parts)
    if outside:
        raise ValueError(
            f"pp_size ({size}) > 1 places layers, embedding, final norm and head of {model_type}, "
            f"but {', '.join(outside[:3])} {'belongs' if len(outside) == 1 else 'belong'} to none "
            f"of them; {remedy}"
        )
    for index, layer in enumerate(parts.layers):
        reason = _describe_extra_input(layer)
        if reason:
            raise ValueError(
                f"pp_size ({size}) > 1 sends hidden states alone from stage to stage, but layer "
                f"{index} of {model_type} {reason}; {remedy}"
            )


def attach(parts: Parts, state: ModelState) -> None:
    """Attach nothing; see the module docstring."""


def _describe_extra_input(layer: nn.Module) -> str:
    """Say what a layer gets from earlier layers besides hidden states; return "" if nothing."""
    for parameter in list_named_parameters_of_forward(layer):
        if parameter.name in _FROM_EARLIER_LAYERS or parameter.name.startswith("prev_"):
            return f"takes {parameter.name} from earlier layers"
    for module in layer.modules():
        if takes_chosen_tokens(module):
            return f"takes the tokens that an earlier layer has chosen ({type(module).__name__})"
    return ""
