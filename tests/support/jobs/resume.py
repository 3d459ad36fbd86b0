"""Models, layouts and training steps for the tests that save and resume a run.

The global batch of a step has four parts, which are distributed over the data parallel ranks. So a
run can resume with another number of ranks.
"""

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from hf_moe_ep import apply_ep_fsdp2, data_parallel_rank, data_parallel_size, patch
from hf_moe_ep.lora.factors import pack_factors
from support.adapters import with_lora
from support.parity import full_tensor
from support.tiny_models import batch, tiny, vision_batch

PARTS = 4
VISION_ROWS = [[14], [3, (4, 6), 5], [2, (2, 4), 3, (4, 2), 5], [2, (3, 4, 2), 3]]


@dataclass(frozen=True)
class Layout:
    """The number of ranks, and arguments of `apply_ep_fsdp2` (none: the model is not sharded)."""

    name: str
    world: int
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def data_ranks(self) -> int:
        return self.world // (self.config.get("sp_size", 1) * self.config.get("cp_size", 1))


ORIGIN = Layout("origin", 4, {"ep_size": 2})


@dataclass
class Run:
    model: nn.Module
    optimizer: Any
    scheduler: Any


def build(kind: str, seed: int, **options: Any) -> nn.Module:
    """Build a stock model: "full", "vision", or "lora", whose frozen base is never saved."""
    if kind == "lora":
        return with_lora(tiny(seed=0, **options), r=3, seed=seed)
    return tiny("qwen3_vl_moe" if kind == "vision" else "qwen3_moe", seed=seed, **options)


def start(
    kind: str, layout: Layout, *, seed: int = 0, optimizer: Any = None, **options: Any
) -> Run:
    model = build(kind, seed, **options)
    if layout.config:
        apply_ep_fsdp2(model, **layout.config)
    else:
        patch(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    if optimizer is None:
        optimizer = torch.optim.AdamW(
            [{"params": trained[::2], "weight_decay": 0.1}, {"params": trained[1::2]}], lr=1e-2
        )
    else:
        optimizer = optimizer(trained)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
    return Run(model, optimizer, scheduler)


def step(run: Run, number: int, parts: list[dict[str, Tensor]] | None = None) -> float:
    """Take an optimizer step on global batch `number`, or on `parts`, and return its loss."""
    model, sharded = run.model, dist.is_initialized() and dist.get_world_size() > 1
    rank, world = (data_parallel_rank(model), data_parallel_size(model)) if sharded else (0, 1)
    parts = parts or [_part(model, number, index) for index in range(PARTS)]
    tokens = sum(part["labels"][:, 1:].ne(-100).sum() for part in parts)
    total = torch.zeros((), dtype=torch.float64)
    for part in parts[rank::world]:
        loss = model(**part, num_items_in_batch=tokens).loss
        (loss * world).backward()
        total += loss.detach()
    run.optimizer.step()
    run.scheduler.step()
    run.optimizer.zero_grad()
    if sharded:
        dist.all_reduce(total)
        total /= dist.get_world_size() // world  # ranks of an sp group have the same loss
    return float(total)


def _part(model: nn.Module, number: int, index: int) -> dict[str, Tensor]:
    seed = 100 * number + index
    if getattr(model.config, "vision_config", None) is not None:
        return vision_batch(model, [VISION_ROWS[index]], seed=seed)
    return batch(model, 1 + index % 2, 6 + 2 * index, seed=seed, ignore=0.3)


def everything(run: Run) -> dict[str, Any]:
    """Return gathered copies of the whole training state, by stock name. All ranks must call this.

    It contains trained parameters, the optimizer's state and groups, and the scheduler's state.
    """
    names = {id(p): name for name, p in run.model.named_parameters() if p.requires_grad}
    state: dict[str, Any] = {}
    params = {name: p.detach() for name, p in run.model.named_parameters() if p.requires_grad}
    _add(state, run.model, "parameter", params)
    for key in sorted({key for values in run.optimizer.state.values() for key in values}):
        of_key = {names[id(p)]: values[key] for p, values in run.optimizer.state.items()}
        _add(state, run.model, key, of_key)
    state["groups"] = [
        {key: value for key, value in group.items() if key != "params"}
        for group in run.optimizer.param_groups
    ]
    state["scheduler"] = run.scheduler.state_dict()
    return state


def _add(state: dict[str, Any], model: nn.Module, key: str, values: dict[str, Any]) -> None:
    """Add the values of `key` for all parameters to `state`, and gather the tensors among them."""
    gathered = {name: full_tensor(t) for name, t in values.items() if isinstance(t, Tensor)}
    for name, tensor in pack_factors(model, gathered).items():
        state[f"{key} of {name}"] = tensor.clone()
    for name, value in values.items():
        if not isinstance(value, Tensor):
            state[f"{key} of {name}"] = value


def assert_equal(where: str, got: dict[str, Any], want: dict[str, Any]) -> None:
    assert got.keys() == want.keys(), f"{where}: {got.keys() ^ want.keys()}"
    for name, value in want.items():
        if isinstance(value, Tensor):
            assert got[name].dtype == value.dtype, f"{where}: {name} is {got[name].dtype}"
            assert torch.equal(got[name], value), f"{where}: {name}"
        else:
            assert got[name] == value, f"{where}: {name}: {got[name]}, want {value}"


def draws() -> list[float]:
    """Draw a number from each of this rank's three random generators."""
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]
