"""What `accelerator.prepare` leaves behind for the next model that the same process prepares."""

import torch
from accelerate import Accelerator
from support.launched import launched
from support.ranks import run_ranks
from support.tiny_models import tiny
from torch import nn
from torch.distributed.fsdp import FSDPModule

from hf_moe_ep import apply_ep_fsdp2

WORLD = 2


def test_a_stock_model_prepared_after_ours_has_a_unit_per_layer() -> None:
    """A reference model of DPO or GRPO with a root alone is gathered whole in each forward."""
    run_ranks(_sharded_then_stock, WORLD)


def _sharded_then_stock(rank: int, world: int) -> None:
    with launched():
        ours = apply_ep_fsdp2(tiny(dtype=torch.float32), ep_size=2)
        accelerator = Accelerator(cpu=True)
        accelerator.prepare(ours, torch.optim.SGD(ours.parameters()))
        stock = tiny(dtype=torch.float32)
        accelerator.prepare(stock, torch.optim.SGD(stock.parameters()))
        layers = {f"model.layers.{i}" for i in range(len(stock.model.layers))}
        assert _units(stock) >= layers, _units(stock)


def _units(model: nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if isinstance(module, FSDPModule)}
