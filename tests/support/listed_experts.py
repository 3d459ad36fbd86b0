"""A tiny Qwen3-MoE whose blocks hold each expert as a module of its own, outside of the interface.

`listed()` builds such a model, which stock code computes expert by expert. PLAN describes it for
`patch`.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_moe_ep.plan import ModelPlan, MoEBlock, WeightSource
from support.tiny_models import tiny


class Expert(nn.Module):
    def __init__(self, hidden: int, size: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(hidden, size, dtype=torch.float64) for _ in range(2))
        self.down = nn.Linear(size, hidden, dtype=torch.float64)
        self.act = nn.SiLU()

    def forward(self, x_XH: Tensor) -> Tensor:
        out: Tensor = self.down(self.act(self.gate(x_XH)) * self.up(x_XH))
        return out


class ListedBlock(nn.Module):
    """A block with a router and a list of experts; its forward takes sequences."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.num_experts = config.num_experts
        self.router = nn.Linear(config.hidden_size, self.num_experts, False, dtype=torch.float64)
        sizes = (config.hidden_size, config.moe_intermediate_size)
        self.experts = nn.ModuleList(Expert(*sizes) for _ in range(self.num_experts))

    def route(self, tokens_TH: Tensor) -> tuple[Tensor, Tensor]:
        weights, chosen = self.router(tokens_TH).softmax(-1).topk(self.top_k)
        return chosen, weights

    def forward(self, hidden_states: Tensor) -> Tensor:
        tokens = hidden_states.flatten(0, 1)
        chosen, weights = self.route(tokens)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            token, place = torch.where(chosen == number)
            out = out.index_add(0, token, expert(tokens[token]) * weights[token, place, None])
        return out.view_as(hidden_states)


def forward_of_tokens(block: ListedBlock, hidden_states: Tensor) -> Tensor:
    tokens = hidden_states.flatten(0, 1)
    out: Tensor = block.experts(tokens, *block.route(tokens))
    return out.view_as(hidden_states)


BLOCK = MoEBlock(
    name="layers.*.mlp",
    weights={
        "gate_up_proj": WeightSource(("experts.{}.gate.weight", "experts.{}.up.weight")),
        "gate_up_proj_bias": WeightSource(("experts.{}.gate.bias", "experts.{}.up.bias")),
        "down_proj": WeightSource(("experts.{}.down.weight",)),
        "down_proj_bias": WeightSource(("experts.{}.down.bias",)),
    },
    num_experts="num_experts",
    activation="experts.0.act",
    forward=forward_of_tokens,
)
PLAN = ModelPlan(
    "qwen3_moe",
    router="layers.*.mlp.router",
    expert_weights=tuple(BLOCK.weights),
    block=BLOCK,
)


def listed(seed: int = 0, **config: Any) -> PreTrainedModel:
    """Build a tiny stock model in fp64 whose blocks are `ListedBlock`s."""
    model = tiny(seed=seed, **config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for layer in model.model.layers:
            layer.mlp = ListedBlock(model.config)
    return model
