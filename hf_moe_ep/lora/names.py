"""Which key of an adapter's file is what, and the names that LoRA on experts has in either form.

    layers.0.mlp.experts.lora_A.weight               stacked: the outer wrapper of PEFT's
    layers.0.mlp.experts.base_layer.lora_A.weight    stacked: an inner one
    layers.0.mlp.experts.3.up_proj.lora_A.weight     single: the matrix of one expert
    layers.0.self_attn.q_proj.lora_A.weight          neither: copied as it is

Which parameter a wrapper adapts no key says (`per_expert.py`). PEFT compares targets with whole
components at the end of a name: `up_proj` and `experts.3.up_proj` hit the third key, `proj` does
not.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

# Stacked parameter -> the matrices of one expert that it holds, one above the other.
PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}

STACKED_KEY = re.compile(r"(?P<experts>.+\.experts)(\.base_layer)*\.lora_[AB]\.weight")
SINGLE_KEY = re.compile(
    r"(?P<experts>.+\.experts)\.\d+\.(gate_proj|up_proj|down_proj)\.lora_[AB]\.weight"
)
_ANY_KEY = re.compile(r"(?P<module>.+?)\.lora_(embedding_)?[AB](\.|$)")


@dataclass(frozen=True)
class Stack:
    """LoRA on one stacked parameter of one layer.

    Attributes:
        experts: the experts module.
        parameter: its parameter, a key of `PARTS`.
        num_experts: how many it holds.
        rank, alpha: those of a single expert.
        wrapper: the module whose lora_A and lora_B it has in the stacked form.
    """

    experts: str
    parameter: str
    num_experts: int
    rank: int
    alpha: float
    wrapper: str

    @property
    def name(self) -> str:
        return f"{self.experts}.{self.parameter}"

    @property
    def short_name(self) -> str:
        """The name without its layer, as it stands in target_parameters."""
        return re.sub(r".*\.\d+\.", "", self.name)

    def modules(self) -> list[list[str]]:
        """List, for each expert, the modules it has instead of the parameter."""
        return [
            [f"{self.experts}.{expert}.{part}" for part in PARTS[self.parameter]]
            for expert in range(self.num_experts)
        ]

    def all_modules(self) -> list[str]:
        return [module for modules in self.modules() for module in modules]


def is_of_experts(key: str) -> bool:
    """Tell whether a key is LoRA on experts, in either form."""
    return bool(STACKED_KEY.fullmatch(key) or SINGLE_KEY.fullmatch(key))


def other_modules(keys: Iterable[str]) -> list[str]:
    """List the modules with LoRA that are no experts, sorted."""
    found = [_ANY_KEY.match(key) for key in keys if not is_of_experts(key)]
    return sorted({match["module"] for match in found if match})


def targets_that_hit(names: Iterable[str]) -> set[str]:
    """Collect every target that hits one of `names`: all ends that begin at a component."""
    targets: set[str] = set()
    for name in names:
        components = name.split(".")
        targets.update(".".join(components[start:]) for start in range(len(components)))
    return targets
