"""Read the keys of adapter files, with LoRA on stacked experts or on single experts.

    layers.0.mlp.experts.lora_A.weight               stacked: the outer wrapper of PEFT
    layers.0.mlp.experts.base_layer.lora_A.weight    stacked: an inner wrapper
    layers.0.mlp.experts.3.up_proj.lora_A.weight     single: the matrix of one expert
    layers.0.self_attn.q_proj.lora_A.weight          another module, which is copied unchanged

A key does not name the parameter that its wrapper adapts (see `per_expert.py`). PEFT compares a
target with whole components at the end of a module's name: `up_proj` and `experts.3.up_proj` match
the module of the third key, but `proj` does not.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

# For each stacked parameter: the matrices of one expert, in the order of their rows.
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
        experts: the name of the experts module.
        parameter: the name of the module's stacked parameter, a key of `PARTS`.
        num_experts: the number of experts in the parameter.
        rank, alpha: the rank and the alpha of the LoRA of one expert.
        wrapper: the name of PEFT's wrapper that has lora_A and lora_B in the stacked form.
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
        """The name without the layer, such as `mlp.experts.down_proj`."""
        return re.sub(r".*\.\d+\.", "", self.name)

    def list_modules_by_expert(self) -> list[list[str]]:
        """List the names of each expert's modules in the single form."""
        return [
            [f"{self.experts}.{expert}.{part}" for part in PARTS[self.parameter]]
            for expert in range(self.num_experts)
        ]

    def list_modules(self) -> list[str]:
        return [module for modules in self.list_modules_by_expert() for module in modules]


def is_expert_key(key: str) -> bool:
    """Return True if a key belongs to LoRA on experts, stacked or single."""
    return bool(STACKED_KEY.fullmatch(key) or SINGLE_KEY.fullmatch(key))


def list_other_modules(keys: Iterable[str]) -> list[str]:
    """List the modules with LoRA that are not experts, in alphabetical order."""
    matches = [_ANY_KEY.match(key) for key in keys if not is_expert_key(key)]
    return sorted({match["module"] for match in matches if match})


def list_matching_targets(names: Iterable[str]) -> set[str]:
    """Return all targets that match one of `names`: a.b.c, b.c and c match the name `a.b.c`."""
    targets: set[str] = set()
    for name in names:
        components = name.split(".")
        targets.update(".".join(components[start:]) for start in range(len(components)))
    return targets
