"""Compare a training step of a model of any type with stock (`assert_same_step`).

The stock model runs the batches of all ranks, one after the other, and divides by the number of
tokens in all of them. The losses and gradients of the ranks must add up to those of stock.
"""

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import CONFIG_MAPPING

from hf_moe_ep import apply_ep_fsdp2, clip_grad_norm_
from hf_moe_ep.etp import restore_stock_shapes
from hf_moe_ep.lora.factors import pack_factors
from hf_moe_ep.moe.stacked import make_stock_tensors
from hf_moe_ep.upstream.adapters import without_adapters
from hf_moe_ep.upstream.module_names import get_canonical_name
from support.architectures.inputs import batch
from support.architectures.models import tiny
from support.architectures.sizes import tiny_config
from support.architectures.types import FAMILIES, MODEL_TYPES
from support.close import FP64_MODEL, assert_close
from support.fp64 import FP64
from support.jobs.resume import Run
from support.parity import full_tensor
from support.quantised import in_place_of_bytes

# These types compute nearly all in fp32, even in an fp64 model, so they are compared in `FP64`. So
# are those whose gate, or the norm after their experts, computes in fp32.
FP32_EVERYWHERE = {
    "beam",
    "diffusion_gemma",
    "inkling2",
    "inkling2_loop",
    "inkling2_loop_text",
    "inkling2_text",
    "muse_spark",
    "nemo_speechlm",
    "nemotron_h_omni",
}
# The eager experts of these types sum in fp32. Transformers' batched experts are stock as well, and
# sum in fp64.
BATCHED = {"nemotron_h", "openai_privacy_filter"}
# The forward of these types returns a slice of the logits: a view, which no test changes in place.
CUT_LOGITS = {
    "ernie4_5_vl_moe",
    "inkling2_loop",
    "inkling_mm_model",
    "inkling_text",
    "openai_privacy_filter",
}
# The stock experts of these types are not held in stacked weights, so they cannot have adapters.
WITHOUT_ADAPTERS = ("dbrx", "jetmoe", "longcat_flash")
# Types without a tower (towers have tests of their own), and those that represent them.
TEXT_TYPES = [name for name in MODEL_TYPES if "text_config" not in CONFIG_MAPPING[name].sub_configs]
TEXT_FAMILIES = [name if name in TEXT_TYPES else f"{name}_text" for name in FAMILIES]
# The load-balancing loss of the batches of all ranks together has tests of its own.
NO_AUX_LOSS = {"output_router_logits": False}


def build(model_type: str, seed: int = 0, **overrides: Any) -> nn.Module:
    """Build a tiny model without a load-balancing loss."""
    text = tiny_config(model_type).get_text_config()
    options: dict[str, Any] = NO_AUX_LOSS if hasattr(text, "output_router_logits") else {}
    if model_type in BATCHED:
        options = {**options, "experts_implementation": "batched_mm"}
    return tiny(model_type, seed=seed, **(options | overrides))


def exactly(model_type: str) -> Any:
    """Return a context in which a type that computes in fp32 computes in fp64."""
    return FP64() if model_type in FP32_EVERYWHERE else nullcontext()


def batches(model: nn.Module, world: int, seed: int = 0) -> list[dict[str, Any]]:
    """Make one batch per rank. Lengths differ, and even ranks have one row, odd ranks two."""
    return [batch(model, 1 + r % 2, 8 + 3 * r, seed=seed + r) for r in range(world)]


def count_tokens(by_rank: list[dict[str, Any]]) -> Tensor:
    counts = [inputs["labels"][:, 1:].ne(-100).sum() for inputs in by_rank]
    return torch.stack(counts).sum()


def loss_of_sum(model: nn.Module, inputs: dict[str, Tensor], num_tokens: Tensor) -> Tensor:
    """Compute a loss that adds up over the batches of all ranks.

    Models without a language modelling head, and those whose loss is always a mean, have no such
    loss. For these a fixed weighted sum of the outputs is returned.
    """
    class_name = type(without_adapters(model)).__name__.removeprefix("FSDP")
    if class_name.endswith(("CausalLM", "ConditionalGeneration")):
        loss: Tensor = model(**inputs, num_items_in_batch=num_tokens).loss
        return loss
    out = model(**{name: value for name, value in inputs.items() if name != "labels"})
    outputs: Tensor = out.logits if hasattr(out, "logits") else out.last_hidden_state
    weights = torch.arange(outputs.numel(), dtype=outputs.dtype).sin().view_as(outputs)
    return (outputs * weights).sum() / num_tokens


def adamw(model: nn.Module) -> torch.optim.AdamW:
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-3, foreach=False)


def start_run(model_type: str, seed: int, **sizes: int) -> Run:
    """Build a sharded model with the initial values of `seed`, its optimizer and its scheduler."""
    model = build(model_type, seed=seed)
    apply_ep_fsdp2(model, **sizes)
    optimizer = adamw(model)
    return Run(model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10))


def assert_same_step(
    where: str,
    models: tuple[nn.Module, nn.Module],
    optimizers: tuple[Any, Any],
    seed: int = 0,
) -> list[float]:
    """Train the patched model and stock for one step, and return the errors of all comparisons.

    The loss, all gradients, their norm and the parameters after the step are compared. `seed` is
    the seed of the batches.
    """
    model, stock = models
    rank = dist.get_rank() if dist.is_initialized() else 0
    world = dist.get_world_size() if dist.is_initialized() else 1
    by_rank = batches(stock, world, seed)
    num_tokens = count_tokens(by_rank)
    torch.manual_seed(rank)  # some routers draw random numbers
    loss = loss_of_sum(model, by_rank[rank], num_tokens)
    (loss * world).backward()
    wanted = []
    for other, inputs in enumerate(by_rank):
        torch.manual_seed(other)
        wanted.append(loss_of_sum(stock, inputs, num_tokens))
        wanted[-1].backward()
    errors = [assert_close(f"{where}: loss", loss, wanted[rank], FP64_MODEL)]
    errors += assert_same_grads(where, model, stock, FP64_MODEL)
    return errors + assert_same_update(where, models, optimizers)


def assert_same_update(
    where: str, models: tuple[nn.Module, nn.Module], optimizers: tuple[Any, Any]
) -> list[float]:
    """Clip the gradients of both models, and compare their norms and the updated parameters."""
    model, stock = models
    is_sharded = dist.is_initialized() and dist.get_world_size() > 1
    norm = clip_grad_norm_(model, 0.5) if is_sharded else _clip(model)
    errors = [assert_close(f"{where}: norm", norm, _clip(stock), FP64_MODEL)]
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    gathered = whole(model, {name: p.detach() for name, p in model.named_parameters()})
    for name, want in stock.named_parameters():
        step = f"{where}: {name} after a step"
        errors.append(assert_close(step, gathered[name], want, FP64_MODEL))
    return errors


def assert_same_grads(where: str, model: nn.Module, stock: nn.Module, budget: float) -> list[float]:
    """Compare the gradients of all parameters with those of stock, and return the errors."""
    errors = []
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    gathered = whole(model, grads)
    for name, parameter in stock.named_parameters():
        want, got = parameter.grad, gathered.get(name)
        if want is None or got is None:
            # The gradient of experts without a token is None in one model and zeros in the other.
            other = want if got is None else got
            assert other is None or not other.any(), f"{where}: only one model has grad of {name}"
            continue
        errors.append(assert_close(f"{where}: grad of {name}", got, want, budget))
    return errors


def whole(model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Gather tensors that are named like the parameters of `model`, as stock and PEFT hold them.

    Adapters are packed, quantised matrices are dequantised, and stacked weights of blocks outside
    of the experts interface become the parameters of the stock blocks.
    """
    gathered = {get_canonical_name(name): full_tensor(tensor) for name, tensor in tensors.items()}
    gathered = in_place_of_bytes(model, restore_stock_shapes(model, gathered))
    packed = pack_factors(model, {n: t for n, t in gathered.items() if t is not None})
    return make_stock_tensors(model, packed)


def _clip(model: nn.Module) -> Tensor:
    return torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
