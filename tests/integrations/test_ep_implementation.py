"""Test our dispatch and experts in transformers' own sharding.

Losses, gradients and logits of four ranks equal stock in one process, in fp64. With ep 2
two ranks have the same experts. If only one rank has an expert, transformers 5.24 divides the
expert's gradients twice over gloo, with every implementation.
"""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.checks import Check, Found, on_ranks
from support.close import FP64_MODEL, assert_close
from support.tiny_models import batch, tiny
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from hf_moe_ep.integrations.ep_implementation import register_ep_implementation

expert_parallel = pytest.importorskip("transformers.distributed.expert_parallel")
WORLD, LENGTH = 4, 9
WITHOUT_REGISTRY = not hasattr(expert_parallel, "EPImplementationInterface")


def samples(model: Any) -> dict[str, torch.Tensor]:
    return batch(model, WORLD, LENGTH, seed=5, ignore=0.0)


def _train_as_stock(ep_size: int, checkpointing: bool, rank: int, world: int, folder: str) -> None:
    """Compare a step of SGD on ranks with a step on the whole batch in this process."""
    register_ep_implementation()
    stock = tiny()
    if rank == 0:
        stock.save_pretrained(folder)
    dist.barrier()
    config = DistributedConfig(fsdp_size=world, ep_size=ep_size, ep_implementation="hf_moe_ep")
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, distributed_config=config
    ).train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    rows = samples(stock)
    mine = {name: tensor[rank : rank + 1] for name, tensor in rows.items()}
    want, got = stock(**rows).loss, model(**mine).loss
    want.backward()
    got.backward()
    mean = got.detach().clone()
    dist.all_reduce(mean, op=dist.ReduceOp.SUM)
    assert_close("loss", mean / world, want, 1e-6)  # transformers computes the loss in fp32
    gradients = {name: parameter.grad for name, parameter in stock.named_parameters()}
    experts = 0
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor) and isinstance(parameter.grad, DTensor)
        experts += "experts" in name
        assert_close(name, parameter.grad.full_tensor(), gradients[name], 1e-6)
    assert experts == 4
    model.eval()
    with torch.no_grad():
        logits = model(**mine).logits
    assert_close("logits", logits, stock.eval()(**rows).logits[rank : rank + 1], FP64_MODEL)


def _check_tensor_parallelism_is_refused(rank: int, world: int, folder: str) -> None:
    register_ep_implementation()
    if rank == 0:
        tiny().save_pretrained(folder)
    dist.barrier()
    config = DistributedConfig(fsdp_size=2, tp_size=2, ep_size=2, ep_implementation="hf_moe_ep")
    with pytest.raises(ValueError, match="but tp_size=2 ranks share a batch; use tp_size=1"):
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, distributed_config=config)


CHECKS = on_ranks(
    WORLD,
    {
        "ep 2": partial(_train_as_stock, 2, False),
        "tp 2": _check_tensor_parallelism_is_refused,
    },
    skip="this transformers has no registry" if WITHOUT_REGISTRY else "",
)

CHECKS += on_ranks(
    WORLD,
    {"ep 2, checkpointing": partial(_train_as_stock, 2, True)},
    slow=True,
    skip="this transformers has no registry" if WITHOUT_REGISTRY else "",
)


@pytest.mark.parametrize("claim", CHECKS)
def test_on_four_ranks(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)


def test_a_transformers_without_the_registry_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(expert_parallel, "EPImplementationInterface", raising=False)
    with pytest.raises(
        ImportError, match=r"has no registry .* install transformers>=5\.24, or use"
    ):
        register_ep_implementation()
