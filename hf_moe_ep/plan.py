"""`ModelPlan`: the description of an architecture, as data.

A plan names modules by patterns. A pattern matches the last components of a dotted module name, and
`*` stands for one component: "layers.*.mlp.experts" matches `model.layers.3.mlp.experts` and, under
PEFT, `base_model.model.model.layers.3.mlp.experts`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import InitVar, dataclass, field
from functools import cache


@dataclass(frozen=True)
class VisionPlan:
    """A vision tower whose blocks are FSDP2 units, all fields as patterns.

    Attributes:
        tower: the tower.
        blocks: the blocks of the tower, each one FSDP2 unit.
        attention: the modules in blocks that call transformers' attention interface.
    """

    tower: str
    blocks: str
    attention: str


@dataclass(frozen=True)
class Stored:
    """The layout in hub checkpoints of a stacked weight, which is [E, out, in] in memory.

    Attributes:
        parts: the names of the tensors of one expert, where "{}" is the number of the expert. Each
            is [out / len(parts), in]; concatenated along `out` they are the expert's matrix. If
            empty, the checkpoint has one tensor for all experts, under the name of the weight.
        transposed: True if this one tensor is [E, in, out].
    """

    parts: tuple[str, ...] = ()
    transposed: bool = False


@dataclass(frozen=True)
class ModelPlan:
    """The description of one architecture. Most are derived; `patch(model, plan=...)` takes others.

    The defaults fit most architectures.

    Attributes:
        model_type: `config.model_type` of the Hugging Face config.
        prefix: is put in front of `layers`, `experts`, `router`, `attention` and `final_norm`. A
            model with a vision tower needs "language_model." if the tower has modules of the same
            names.
        layers: the decoder layers, each one FSDP2 unit.
        experts: the modules with the stacked expert weights, each one FSDP2 unit over ep_fsdp.
        router: the modules that choose the experts of a token; empty if no separate module does.
        attention: the modules in decoder layers that call transformers' attention interface. Other
            modules whose name matches are ignored, if the plan was derived.
        final_norm: the norm in front of the head; empty if there is none. If several modules match,
            the one with the shortest name is the norm. Norm and head are one FSDP2 unit, which
            stays all-gathered between forward and backward.
        mixers: the modules in decoder layers that mix the tokens of a sequence without calling
            the attention interface.
        sequence_parallel: True if sp_size > 1 was tested against stock. An architecture with
            `mixers` never has it.
        num_experts: the field of the text config with the number of experts per layer; None if
            there is no such field.
        expert_weights: the parameters of an experts module that are stacked over experts (dim 0).
        stored: the layout of these parameters in hub checkpoints, by name. A parameter that is not
            listed has the same layout as in memory.
        aux_loss_coef: the attribute of the causal LM that holds the coefficient of the router's
            load-balancing loss, for example "config.router_aux_loss_coef"; None if the model has no
            such loss.
        vision: a vision tower whose blocks are FSDP2 units; None for other models.
        encoders: the modules outside of the decoder that compute embeddings of pictures or sound:
            towers and projectors. Each is one FSDP2 unit, and is all-gathered as a whole if any
            rank has input for it.
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


# One tensor per expert and projection, as in most published checkpoints.
PER_EXPERT: Mapping[str, Stored] = {
    "gate_up_proj": Stored(("{}.gate_proj.weight", "{}.up_proj.weight")),
    "down_proj": Stored(("{}.down_proj.weight",)),
}


def matches(pattern: str, module_name: str) -> bool:
    """Return True if the last components of `module_name` match `pattern`."""
    return _compiled(pattern).search(module_name) is not None


def as_pattern(module_name: str) -> str:
    """Replace the numbers in a name: "layers.3.mlp" becomes "layers.*.mlp"."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", module_name)


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    regex = r"\.".join("[^.]+" if part == "*" else re.escape(part) for part in pattern.split("."))
    return re.compile(rf"(?:^|\.){regex}$")
