"""Find out from a config which features a model supports, and why others are not supported.

`inspect_architecture` builds the model on the meta device and derives its plan as `patch` would.
Then it tries each feature: it patches the model, patches it with each size of `SIZES` set to 2, and
attaches LoRA. If one of these steps raises an error, its feature is not supported, and the message
is the reason. Training would raise the same error, so this file has no rules of its own.
`format_architecture` formats the result. ARCHITECTURES.md lists which models were compared with
stock transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from hf_moe_ep.architectures import Parts, find_block, find_parts, read_experts_per_token
from hf_moe_ep.moe.stacked import stack_experts
from hf_moe_ep.patch import patch
from hf_moe_ep.plan import ModelPlan
from hf_moe_ep.planner.config import attach_lora, build_meta_model, find_architecture_config
from hf_moe_ep.sequence.attach import group_mixers_by_split
from hf_moe_ep.sequence.mixers import MixerSplit

YES = "yes"
# The sizes that a model may refuse. ep_size is tried first, and separately.
SIZES = ("sp_size", "cp_size", "etp_size", "pp_size")


@dataclass(frozen=True)
class Architecture:
    """The plan of a model, its sizes, and the supported features.

    Attributes:
        kind: the name of the model's class.
        layers, moe_layers: the number of decoder layers, and of decoder layers with experts.
        tied: True if the head and the embedding share a weight.
        ep_sizes: the possible values of ep_size; empty if expert parallelism is refused.
        gathered: the modules for which "sequences" or only "keys" are gathered with sp_size > 1.
        granted: for each of "ep", "lora", "vision" and SIZES: "yes", or why it is not supported.
    """

    kind: str
    plan: ModelPlan
    layers: int
    moe_layers: int
    num_experts: int
    experts_per_token: int
    tied: bool
    ep_sizes: tuple[int, ...]
    gathered: dict[str, tuple[str, ...]]
    granted: dict[str, str]

    def as_json(self) -> dict[str, Any]:
        """Return dicts and lists that json can write. A function becomes its qualified name."""
        result = asdict(self)
        block = self.plan.block
        if block is not None and block.forward is not None:
            forward = block.forward
            result["plan"]["block"]["forward"] = f"{forward.__module__}.{forward.__qualname__}"
        return result


def inspect_architecture(name: str) -> Architecture:
    """Derive the plan of a model and try every feature on it.

    Args:
        name: a model type, a hub id, a folder or a config.json. A model type is built with the
            default sizes of its config.

    Raises:
        ValueError: there is no such model, or no plan can be derived; the message says why.
    """
    config = find_architecture_config(name)
    model = build_meta_model(config, torch.bfloat16)
    stack_experts(model, find_block(model))
    parts = find_parts(model)
    mixers = group_mixers_by_split(parts)
    kinds = {"sequences": MixerSplit.WHOLE, "keys": MixerSplit.QUERIES}
    sizes_of_two: dict[str, dict[str, Any]] = {size: {size: 2} for size in SIZES}
    granted = {
        "ep": _try_feature(partial(patch, model)),
        "lora": "",
        **{
            size: _try_feature(partial(patch, model, **arguments))
            for size, arguments in sizes_of_two.items()
        },
        "vision": _explain_vision_support(config, parts),
    }
    if granted["ep"] == YES:  # LoRA is tried last, because PEFT wraps the model.
        patch(model)
        lora = partial(attach_lora, model, parts.plan, rank=8, targets="experts")
        granted["lora"] = _try_feature(lora)
    else:
        granted |= dict.fromkeys(("lora", *SIZES), granted["ep"])
    divisors = (n for n in range(1, parts.num_experts + 1) if parts.num_experts % n == 0)
    return Architecture(
        kind=type(model).__name__,
        plan=parts.plan,
        layers=len(parts.layers),
        moe_layers=len(parts.adapted_experts),
        num_experts=parts.num_experts,
        experts_per_token=read_experts_per_token(model, parts.plan, parts.config),
        tied=parts.tied,
        ep_sizes=tuple(divisors) if granted["ep"] == YES else (),
        gathered={
            kind: tuple(name for name, _ in mixers[split])
            for kind, split in kinds.items()
            if split in mixers
        },
        granted=granted,
    )


def _try_feature(attempt: Callable[[], Any]) -> str:
    """Return "yes" if the attempt succeeds, else the message of its error."""
    try:
        attempt()
    except ValueError as error:
        return str(error)
    return YES


def _explain_vision_support(config: Any, parts: Parts) -> str:
    """Return "yes" if pictures are supported, else the reason why not."""
    if parts.tower is not None or parts.encoders is not None:
        return YES
    if "vision_config" in config.sub_configs:
        return "only text is supported: this vision tower cannot be made to run on all ranks"
    return "the model has no vision tower"


def format_architecture(result: Architecture, name: str) -> list[str]:
    """Return the lines that the command prints."""
    plan = result.plan
    tower = plan.vision.tower if plan.vision is not None else ""
    facts = {
        "layers": f"{plan.layers}: {result.layers}",
        "experts": f"{plan.experts}: {result.num_experts} in each of {result.moe_layers} layers, "
        f"{result.experts_per_token} for a token",
        "weights": ", ".join(plan.expert_weights),
        "router": plan.router,
        "attention": plan.attention,
        "mixers": ", ".join(plan.mixers),
        "final norm": plan.final_norm,
        "head": "tied to the embedding" if result.tied else "its own",
        "tower": tower,
        "aux loss": plan.aux_loss_coef or "",
    }
    gathered = "".join(
        f"; {kind} are gathered for {', '.join(names)}" for kind, names in result.gathered.items()
    )
    granted = {
        "EP": f"ep_size {', '.join(map(str, result.ep_sizes))}" if result.ep_sizes else "",
        "LoRA": "on stacked experts" if result.granted["lora"] == YES else "",
        "sp_size": YES + gathered if result.granted["sp_size"] == YES else "",
        "cp_size": YES + gathered if result.granted["cp_size"] == YES else "",
        "etp_size": YES if result.granted["etp_size"] == YES else "",
        "pp_size": YES if result.granted["pp_size"] == YES else "",
        "vision": "any mix of text and pictures" if result.granted["vision"] == YES else "",
    }
    reasons = dict(zip(granted, result.granted.values(), strict=True))
    return [
        f"{name}: {result.kind} ({plan.model_type}); plan {plan.origin}",
        *(f"  {name:<11} {value or 'none'}" for name, value in facts.items()),
        "supported",
        *(f"  {name:<11} {value or 'no: ' + reasons[name]}" for name, value in granted.items()),
    ]
