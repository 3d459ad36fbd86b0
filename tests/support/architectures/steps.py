"""A step of training of a model of any type, compared with stock on the batches of all ranks.

Stock has the batches of all ranks, one after the other, and one count of tokens: what the ranks'
losses and gradients are to add up to.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import CONFIG_MAPPING

from hf_moe_ep import apply_ep_fsdp2, clip_grad_norm_
from hf_moe_ep.lora.factors import pack_factors
from hf_moe_ep.upstream.adapters import without_adapters
from support.architectures.inputs import batch
from support.architectures.models import tiny
from support.architectures.sizes import tiny_config
from support.architectures.types import FAMILIES, MODEL_TYPES
from support.close import FP32_INSIDE, FP64_MODEL, assert_close
from support.jobs.resume import Run
from support.parity import full_tensor
from support.quantised import in_place_of_bytes

# Their gate, or the norm behind their experts, computes in fp32, whatever it is given.
FP32_GATE = {"beam", "muse_spark"}
# Their eager experts add up in fp32; transformers' batched ones are stock as well, and do not.
BATCHED = {"nemotron_h", "openai_privacy_filter"}
# Their forward returns a part of the logits: a view, which nobody here changes in place.
CUT_LOGITS = {
    "ernie4_5_vl_moe",
    "inkling_mm_model",
    "inkling_text",
    "openai_privacy_filter",
}
REFUSED = {
    "diffusion_gemma": "its encoder and its decoder share",
    "inkling2": "the gate of Inkling2Experts",
    "inkling2_text": "the gate of Inkling2Experts",
}
TRAINED = [name for name in MODEL_TYPES if name not in REFUSED]
# Of text alone; towers have tests of their own. And those of them that stand for all.
TEXT_TYPES = [name for name in TRAINED if "text_config" not in CONFIG_MAPPING[name].sub_configs]
TEXT_FAMILIES = [name if name in TEXT_TYPES else f"{name}_text" for name in FAMILIES]
# The load-balancing loss is one of the whole batch, not of a rank's: a test of its own.
NO_AUX_LOSS = {"output_router_logits": False}
# A gradient that AdamW does not divide away: 100 times what it adds to its size.
NEXT_TO_NOTHING = 1e-6


def build(model_type: str, seed: int = 0, **overrides: Any) -> nn.Module:
    """A tiny model without a load-balancing loss."""
    text = tiny_config(model_type).get_text_config()
    options: dict[str, Any] = NO_AUX_LOSS if hasattr(text, "output_router_logits") else {}
    if model_type in BATCHED:
        options = {**options, "experts_implementation": "batched_mm"}
    return tiny(model_type, seed=seed, **(options | overrides))


def budget_of(model_type: str) -> float:
    return FP32_INSIDE if model_type in FP32_GATE else FP64_MODEL


def batches(model: nn.Module, world: int, seed: int = 0) -> list[dict[str, Any]]:
    """Another number of rows and another length on every rank."""
    return [batch(model, 1 + r % 2, 8 + 3 * r, seed=seed + r) for r in range(world)]


def count_tokens(everyone: list[dict[str, Any]]) -> Tensor:
    counts = [inputs["labels"][:, 1:].ne(-100).sum() for inputs in everyone]
    return torch.stack(counts).sum()


def loss_of_sum(model: nn.Module, inputs: dict[str, Tensor], num_tokens: Tensor) -> Tensor:
    """A loss of which those of all ranks make the sum; a fixed weighted sum where stock has none.

    Models without a language modelling head, and those whose loss is always a mean.
    """
    kind = type(without_adapters(model)).__name__.removeprefix("FSDP")
    if kind.endswith(("CausalLM", "ConditionalGeneration")):
        loss: Tensor = model(**inputs, num_items_in_batch=num_tokens).loss
        return loss
    output = model(**{name: value for name, value in inputs.items() if name != "labels"})
    found: Tensor = output.logits if hasattr(output, "logits") else output.last_hidden_state
    weights = torch.arange(found.numel(), dtype=found.dtype).sin().view_as(found)
    return (found * weights).sum() / num_tokens


def adamw(model: nn.Module) -> torch.optim.AdamW:
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-3, foreach=False)


def start_run(model_type: str, seed: int, **sizes: int) -> Run:
    """A sharded model with the initial values of `seed`, and what trains it."""
    model = build(model_type, seed=seed)
    apply_ep_fsdp2(model, **sizes)
    optimizer = adamw(model)
    return Run(model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10))


def assert_same_step(
    where: str,
    models: tuple[nn.Module, nn.Module],
    optimizers: tuple[Any, Any],
    budget: float = FP64_MODEL,
    seed: int = 0,
) -> list[float]:
    """Take a step with ours and with stock; compare loss, gradients, norm, parameters: the errors.

    `seed` is that of the batches.
    """
    model, stock = models
    rank = dist.get_rank() if dist.is_initialized() else 0
    world = dist.get_world_size() if dist.is_initialized() else 1
    everyone = batches(stock, world, seed)
    num_tokens = count_tokens(everyone)
    torch.manual_seed(rank)  # of routers that draw
    loss = loss_of_sum(model, everyone[rank], num_tokens)
    (loss * world).backward()
    wanted = []
    for other, inputs in enumerate(everyone):
        torch.manual_seed(other)
        wanted.append(loss_of_sum(stock, inputs, num_tokens))
        wanted[-1].backward()
    errors = [assert_close(f"{where}: loss", loss, wanted[rank], budget)]
    errors += assert_same_grads(where, model, stock, budget)
    norm = clip_grad_norm_(model, 0.5) if world > 1 else _clip(model)
    errors.append(assert_close(f"{where}: norm", norm, _clip(stock), budget))
    grads = {name: p.grad for name, p in stock.named_parameters()}
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    found = whole(model, {name: p.detach() for name, p in model.named_parameters()})
    for name, want in stock.named_parameters():
        step = f"{where}: {name} after a step"
        errors.append(_assert_stepped(step, found[name], want, grads[name], budget))
    return errors


def _assert_stepped(
    where: str, got: Tensor, want: Tensor, grad: Tensor | None, budget: float
) -> float:
    """Compare a parameter behind AdamW; in fp32 apart from where its gradient is next to nothing.

    AdamW divides a gradient by its own size and 1e-8: one that is not far above that makes a part
    of a step of its rounding.
    """
    if budget == FP64_MODEL or grad is None:
        return assert_close(where, got, want, budget)
    nothing = grad.abs() < NEXT_TO_NOTHING
    if not nothing.all():
        assert_close(where, got.masked_fill(nothing, 0), want.masked_fill(nothing, 0), budget)
    return assert_close(where, got, want, 100 * budget)


def assert_same_grads(where: str, model: nn.Module, stock: nn.Module, budget: float) -> list[float]:
    """Compare the gradients of all parameters with those of stock: the errors."""
    errors = []
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    found = whole(model, grads)
    for name, parameter in stock.named_parameters():
        want, got = parameter.grad, found.get(name)
        if want is None or got is None:
            # Experts without a token have zeros in stacked weights, whoever computes them.
            other = want if got is None else got
            assert other is None or not other.any(), f"{where}: one gradient of {name}"
            continue
        errors.append(assert_close(f"{where}: grad of {name}", got, want, budget))
    return errors


def whole(model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors named as the parameters of `model`, not sharded, adapters packed as PEFT does."""
    gathered = {name: full_tensor(tensor) for name, tensor in tensors.items()}
    gathered = in_place_of_bytes(model, gathered)
    return pack_factors(model, {n: t for n, t in gathered.items() if t is not None})


def _clip(model: nn.Module) -> Tensor:
    return torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
