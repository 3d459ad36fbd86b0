"""`ModelPlan`: the description of an architecture, as data.

A plan names modules by patterns. A pattern matches the last components of a dotted module name, and
`*` stands for one component: "layers.*.mlp.experts" matches `model.layers.3.mlp.experts` and, under
PEFT, `base_model.model.model.layers.3.mlp.experts`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import InitVar, dataclass, field
from functools import cache
from typing import Any


@dataclass(frozen=True)
class VisionPlan:
    """The patterns that find a vision tower whose blocks are FSDP2 units.

    An FSDP2 unit is a module whose parameters FSDP2 shards and all-gathers together.

    Attributes:
        tower: the whole tower.
        blocks: the blocks of the tower; each one is an FSDP2 unit.
        attention: the modules in blocks that call transformers' attention interface.
    """

    tower: str
    blocks: str
    attention: str


@dataclass(frozen=True)
class Stored:
    """The layout that a stacked weight, [E, out, in] in memory, has in hub checkpoints.

    Attributes:
        parts: the names of the tensors of one expert, where "{}" is the number of the expert. Each
            tensor is [out / len(parts), in]; the expert's matrix is their concatenation along
            `out`. If `parts` is empty, the checkpoint has one tensor for all experts, under the
            name of the weight.
        transposed: True if the checkpoint's tensor for all experts is [E, in, out]; only used if
            `parts` is empty.
    """

    parts: tuple[str, ...] = ()
    transposed: bool = False


@dataclass(frozen=True)
class WeightSource:
    """The parameters of a stock MoE block that together hold one stacked weight, [E, out, in].

    Attributes:
        parts: the names of the parameters in the block. If a name contains "{}", the block has one
            parameter for each expert, and "{}" stands for the number of the expert. Otherwise a
            parameter has all experts. The weight is the concatenation of the parts along `out`.
        flat: True if a parameter has the experts one below the other, [E * out, in].
        transposed: True if a parameter (of one expert, if it is stacked or flat) is [in, out].

    With 2 experts, F = 3 and H = 5, gate_up_proj [2, 6, 5] can be held as

        WeightSource(("experts.{}.gate.weight", "experts.{}.up.weight"))    four parameters [3, 5]
        WeightSource(("experts.w1", "experts.v1"), flat=True)               two parameters [6, 5]
        WeightSource(("experts.w13",), transposed=True)                     one parameter [2, 5, 6]
    """

    parts: tuple[str, ...]
    flat: bool = False
    transposed: bool = False

    @property
    def is_per_expert(self) -> bool:
        """True if the block has one parameter for each expert."""
        return "{}" in "".join(self.parts)


@dataclass(frozen=True)
class MoEBlock:
    """An MoE block whose experts do not use transformers' experts interface.

    `patch` puts an experts module with stacked weights into each such block, and `unpatch` restores
    the stock block. Checkpoints in the hub's layout keep the stock names, shapes and bytes.

    All names are relative to the block. A name of an attribute may have several components, for
    example "experts.act_fn".

    Attributes:
        name: the pattern of the blocks. A module that matches but has none of the parameters of
            `weights` is a dense layer, and is not changed.
        weights: where the stock block holds each stacked weight: "gate_up_proj" (or "up_proj", if
            the experts have no gate) and "down_proj".
        experts: the name of the experts module. If the stock block has a module of this name, it is
            replaced.
        num_experts: the attribute that holds the number of experts. If a parameter holds more
            experts, the last ones are unused: they are kept and saved, and their gradient is zero.
        transposed: True if the stacked weights are [E, in, out].
        activation: the attribute that holds the activation function of the experts.
        gate: the attribute that holds the gate, a function from the pre-activations [A, 2F] of A
            rows to [A, F]; empty if it is `activation(first half) * second half`.
        forward: the forward of the block, a function of the block and of the arguments of the stock
            forward. This function must call the experts module with hidden states [T, H], and with
            the ids and the routing weights of each token's experts, both [T, K]. None if the stock
            forward does this already.
        weights_inputs: True if the routing weight of an expert multiplies the input of the expert,
            and not its output.
        identity_experts: the attribute that holds the number of experts that return their input.
            Their ids follow the ids of the other experts. Empty if no expert returns its input.
    """

    name: str
    weights: Mapping[str, WeightSource]
    experts: str = "experts"
    num_experts: str = "experts.num_experts"
    transposed: bool = False
    activation: str = "experts.act_fn"
    gate: str = ""
    forward: Callable[..., Any] | None = None
    weights_inputs: bool = False
    identity_experts: str = ""


@dataclass(frozen=True)
class ModelPlan:
    """The description of one architecture.

    Most plans are derived from the model (derive.py). You can write a plan yourself and pass it as
    `patch(model, plan=...)`; the defaults of the fields fit most architectures.

    Attributes:
        model_type: `config.model_type` of the Hugging Face config.
        prefix: a string that is added before `layers`, `experts`, `router`, `attention` and
            `final_norm`. A model with a vision tower needs "language_model." if modules of the
            tower match the same patterns.
        layers: the decoder layers; each one is an FSDP2 unit (`VisionPlan` explains the term).
        tied_layers: the layers of a second tower, if there is one. Each has the same parameters as
            the layer of `layers` with the same number, and both are one FSDP2 unit. `layers`
            matches the tower that comes first in the model, and `experts` and `router` match the
            modules of both towers.
        experts: the modules with the stacked expert weights; each one is an FSDP2 unit on the
            ep_fsdp axis of the mesh.
        router: the modules that choose the experts of a token; empty if no separate module does.
        attention: the modules in decoder layers that call transformers' attention interface. If
            the plan is derived, other modules whose names match are ignored.
        final_norm: the norm before the head; empty if there is none. If several modules match, the
            module whose name has the fewest components is the norm. Norm and head are one FSDP2
            unit, which stays all-gathered between forward and backward.
        mixers: the modules in decoder layers that mix the tokens of a sequence without calling
            the attention interface. Modules with a convolution, and modules whose forward takes a
            mask or a cache, are found even if a given plan does not list them.
        whole_sequences: the modules in decoder layers that call the attention interface, but also
            number the tokens of their input, so with sp_size > 1 they must get whole sequences.
        sequence_parallel: True if sp_size > 1 was tested against stock.
        context_parallel: True if cp_size > 1 was tested against stock.
        gathers_keys: True if attention with an indexer was tested with `GatheringCache`, which
            gathers only its keys with sp_size > 1. If False, such attention gets whole sequences.
        splits_mixers: True if mixers with a causal convolution were tested with slices of the
            sequence, and their recurrences split by heads. If False, they get whole sequences.
        num_experts: the name of the text config's field that holds the number of experts per
            layer; None if there is no such field.
        num_layers: the name of the text config's field that holds the number of decoder layers.
        expert_weights: the parameters of an experts module that are stacked over experts (dim 0).
        stored: the layout of these parameters in hub checkpoints, by name. A parameter that is not
            listed has the same layout as in memory.
        aux_loss_coef: the attribute of the causal LM that holds the coefficient of the router's
            load-balancing loss, for example "config.router_aux_loss_coef"; None if the model has no
            such loss.
        vision: a vision tower whose blocks are FSDP2 units; None if the model has no such tower.
        encoders: the modules outside of the decoder that compute embeddings of pictures or sound:
            towers and projectors. Each module is one FSDP2 unit, which is all-gathered as a whole
            if any rank has input for the module.
        block: an MoE block whose experts do not use transformers' experts interface; None if they
            use it.
        origin: "given" for a plan that the user wrote, "derived" for a plan from derive.py, with
            the name of the file of `model_patches/` that changed it. `describe` prints the origin.
    """

    model_type: str
    prefix: InitVar[str] = ""
    layers: str = "layers.*"
    tied_layers: str = ""
    experts: str = "layers.*.mlp.experts"
    router: str = "layers.*.mlp.gate"
    attention: str = "layers.*.self_attn"
    final_norm: str = "norm"
    mixers: tuple[str, ...] = ()
    whole_sequences: tuple[str, ...] = ()
    sequence_parallel: bool = False
    context_parallel: bool = False
    gathers_keys: bool = False
    splits_mixers: bool = False
    num_experts: str | None = "num_experts"
    num_layers: str = "num_hidden_layers"
    expert_weights: tuple[str, ...] = ("gate_up_proj", "down_proj")
    stored: Mapping[str, Stored] = field(default_factory=dict)
    aux_loss_coef: str | None = None
    vision: VisionPlan | None = None
    encoders: tuple[str, ...] = ()
    block: MoEBlock | None = None
    origin: str = "given"

    def __post_init__(self, prefix: str) -> None:
        for name in ("layers", "experts", "router", "attention", "final_norm"):
            object.__setattr__(self, name, prefix + getattr(self, name))


# One tensor per expert and projection, as in most published checkpoints.
PER_EXPERT: Mapping[str, Stored] = {
    "gate_up_proj": Stored(("{}.gate_proj.weight", "{}.up_proj.weight")),
    "down_proj": Stored(("{}.down_proj.weight",)),
}


# The name of the head for multi-token prediction (`mtp_head.py`) in the causal language model.
MTP_HEAD = "mtp"
_IN_HEAD = re.compile(rf"^{MTP_HEAD}\.(?:(?:model\.)?layers\.\d+\.(?:mtp_block\.)?)?(.*)")


def make_name_in_layer(name: str, plan: ModelPlan) -> str:
    """Return the name that a module of an MTP head would have in decoder layer 0.

    Other names are returned unchanged: "mtp.layers.0.mlp.gate" becomes "layers.0.mlp.gate".
    """
    found = _IN_HEAD.search(name)
    return name if found is None else f"{plan.layers.replace('*', '0')}.{found[1]}"


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
