"""`ModelPlan`: what an architecture declares about itself. Data; what acts on it is elsewhere.

Names are patterns over dotted module names, matched at their end and by component, `*` for one
component: "layers.*.mlp.experts" finds `model.layers.3.mlp.experts` and, under PEFT,
`base_model.model.model.layers.3.mlp.experts`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import InitVar, dataclass, field
from functools import cache


@dataclass(frozen=True)
class VisionPlan:
    """The vision tower, and its blocks; each one FSDP2 unit.

    Attributes:
        attention: modules in blocks that call transformers' attention interface.
    """

    tower: str
    blocks: str
    attention: str


@dataclass(frozen=True)
class Stored:
    """How checkpoints of the hub hold a stacked weight, which is [E, out, in] in memory.

    Attributes:
        parts: the tensors of one expert, [out / len(parts), in] each, one behind the other along
            out; "{}" is the expert. Empty: one tensor of all experts, by the weight's own name.
        transposed: that one tensor is [E, in, out].
    """

    parts: tuple[str, ...] = ()
    transposed: bool = False


@dataclass(frozen=True)
class ModelPlan:
    """One architecture: derived from a model, or given for one that cannot be derived.

    The defaults are what most architectures have.

    Attributes:
        model_type: `config.model_type` of the Hugging Face config.
        prefix: put in front of `layers`, `experts`, `router`, `attention` and `final_norm`, where
            they are not the only modules of such a name: "language_model." beside a vision tower.
        layers: decoder layers, each one FSDP2 unit.
        experts: modules that hold the stacked expert weights, each one FSDP2 unit over ep_fsdp.
        router: modules that choose a token's experts; empty where none is one of its own.
        attention: modules in decoder layers that call transformers' attention interface. Others
            of the same name do not count.
        final_norm: the outermost module of this name is the norm in front of the head, one unit
            with it, kept gathered; empty where there is none.
        mixers: modules in decoder layers that mix along the sequence outside that interface.
        sequence_parallel: whether sp_size > 1 was compared with stock; never with `mixers`.
        num_experts: field of the text config that holds the experts per layer, if it has one.
        expert_weights: parameters of an experts module that are stacked over experts (dim 0).
        stored: how the hub holds them, by name; as in memory where nothing is said.
        aux_loss_coef: attribute of the causal LM that weighs the router's load-balancing loss,
            dotted where its config holds it; None without such a loss.
        vision: a tower whose blocks are units of their own; None for a model of text alone, or
            one whose towers are `encoders`.
        encoders: modules beside the decoder that make embeddings of pictures or sound: towers and
            what is behind them, each one FSDP2 unit, whole where some rank has input for any.
        origin: where the plan comes from, for `describe`.
    """

    model_type: str
    prefix: InitVar[str] = ""
    layers: str = "layers.*"
    experts: str = "layers.*.mlp.experts"
    router: str = "layers.*.mlp.gate"
    attention: str = "layers.*.self_attn"
    final_norm: str = "norm"
    mixers: tuple[str, ...] = ()
    sequence_parallel: bool = False
    num_experts: str | None = "num_experts"
    expert_weights: tuple[str, ...] = ("gate_up_proj", "down_proj")
    stored: Mapping[str, Stored] = field(default_factory=dict)
    aux_loss_coef: str | None = None
    vision: VisionPlan | None = None
    encoders: tuple[str, ...] = ()
    origin: str = "given"

    def __post_init__(self, prefix: str) -> None:
        for name in ("layers", "experts", "router", "attention", "final_norm"):
            object.__setattr__(self, name, prefix + getattr(self, name))


# One key per expert and projection, as most published checkpoints have it.
PER_EXPERT: Mapping[str, Stored] = {
    "gate_up_proj": Stored(("{}.gate_proj.weight", "{}.up_proj.weight")),
    "down_proj": Stored(("{}.down_proj.weight",)),
}


def matches(pattern: str, module_name: str) -> bool:
    """Tell whether `module_name` ends in `pattern` (whole components; `*` stands for one)."""
    return _compiled(pattern).search(module_name) is not None


def as_pattern(module_name: str) -> str:
    """Return the pattern of a name and of all that differ from it in numbers of elements alone."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", module_name)


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    regex = r"\.".join("[^.]+" if part == "*" else re.escape(part) for part in pattern.split("."))
    return re.compile(rf"(?:^|\.){regex}$")
