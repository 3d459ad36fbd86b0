"""Plan a training step of a model with pipeline stages, without a GPU.

    config = make_stage_config(find_config("Qwen/Qwen3-30B-A3B"), ParallelConfig(pp_size=2))
    step = plan_step(config, world_size=8, batch=Batch(4096, accumulates=True))   # 2 x 8 GPUs
    step = add_micro_batches(step, config, pp_size=2, micro_batches=8)
    time = plan_stages_time(step, find_hardware("h100"), Transfers(2, 8, 8, nbytes), tokens=...)

One stage is planned as a model with fewer layers on the ranks of one stage (`step.py`). One plan
stands for all stages, so it takes the worst case of each part:

    layers      The plan has as many layers as the largest stage. They are the last layers of the
                model, because the first layers may be dense.
    embedding   The first stage has the embedding. The last stage has the head, which is as large
                (with tied weights, a copy of the embedding). The plan therefore counts only one.
    activations The first stage keeps the activations of min(pp_size, micro_batches) micro-batches
                ("1f1b"), and no activations during the optimizer step. Only the last stage computes
                logits, and it keeps only one micro-batch.

A step takes the seconds of all micro-batches on one stage, plus two terms:

    bubble      A stage waits while pp_size - 1 micro-batches pass through the other stages.
    stages      The hidden states and gradients of these pp_size - 1 micro-batches are sent. All
                other transfers overlap computation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from hf_moe_ep.config import ParallelConfig
from hf_moe_ep.patch import patch
from hf_moe_ep.pipeline.cut import assign_layers_to_stages
from hf_moe_ep.planner.config import build_meta_model
from hf_moe_ep.planner.counted import HELD, OPTIMIZER, TRANSIENT
from hf_moe_ep.planner.extrapolate import describe_layers, keep_layers
from hf_moe_ep.planner.hardware import Hardware
from hf_moe_ep.planner.seconds import StepTime, plan_phase_parts, plan_step_time, plan_work_time
from hf_moe_ep.planner.step import StepPlan
from hf_moe_ep.upstream.models import get_input_embedding, get_output_head, text_config

IN_FLIGHT = "activations of other micro-batches"


def make_stage_config(config: Any, parallel: ParallelConfig) -> Any:
    """Return the config of a model with the layers of the largest stage.

    Raises:
        ValueError: training cannot cut this model into these stages, or no config describes a
            model with only its last layers.
    """
    text = text_config(config)
    whole = build_meta_model(config, torch.bfloat16)
    descriptions = describe_layers(whole)
    patch(whole, parallel)
    layers = max(map(len, assign_layers_to_stages(text.num_hidden_layers, parallel)))
    stage = keep_layers(config, layers, last=True)
    if describe_layers(build_meta_model(stage, torch.bfloat16)) != descriptions[-layers:]:
        raise ValueError(
            f"plans cannot shorten the config of {text.model_type} to its last {layers} layers, as "
            f"a stage of pp_size={parallel.pp_size} has them; leave out --pp-size, or plan a "
            f"config.json with these layers alone, on the GPUs of one stage"
        )
    return stage


def add_micro_batches(
    step: StepPlan, config: Any, *, pp_size: int, micro_batches: int, trains_embedding: bool = True
) -> StepPlan:
    """Add the activations of the micro-batches whose backward has not run yet.

    The memory of an untied embedding is subtracted, because no stage has both embedding and head.

    Args:
        step: the plan of one micro-batch on one stage.
        config: the result of `make_stage_config`.
        trains_embedding: False if the embedding is frozen, as with adapters.
    """
    kept = (min(pp_size, micro_batches) - 1) * _estimate_kept_bytes(step)
    share = _compute_embedding_share(config)
    held = HELD if trains_embedding else HELD[:1]
    peaks, made_of = dict(step.peaks), dict(step.made_of)
    for name in peaks:
        less = {kind: int(share * made_of[name][kind]) for kind in held if kind in made_of[name]}
        peaks[name] -= sum(less.values())
        made_of[name] = {kind: n - less.get(kind, 0) for kind, n in made_of[name].items()}
        if "head" not in name and name != OPTIMIZER:
            peaks[name] += kept
            made_of[name] = made_of[name] | {IN_FLIGHT: kept}
    return replace(step, peaks=peaks, made_of=made_of)


def _compute_embedding_share(config: Any) -> float:
    """Return the embedding's share of all parameters; 0 if the head has the same weight."""
    model = build_meta_model(config, torch.bfloat16)
    embedding, head = (
        {id(p) for p in module.parameters()} if module is not None else set()
        for module in (get_input_embedding(model), get_output_head(model))
    )
    sizes = {id(p): p.numel() for p in model.parameters()}
    return 0.0 if embedding & head else sum(sizes[key] for key in embedding) / sum(sizes.values())


def _estimate_kept_bytes(step: StepPlan) -> int:
    """Estimate the bytes that all layers keep of a micro-batch for backward.

    When the forward of the last of n layers begins, the n - 1 layers before it keep their
    activations. The peaks of the first and the last layer therefore differ by the activations of
    n - 1 layers. A single layer keeps at most its peak.
    """
    names = [name for name in step.peaks if name.startswith("forward, layer ")]
    first, last = (step.made_of[name].get(TRANSIENT, 0) for name in (names[0], names[-1]))
    if step.layers == 1:
        return last
    return max(last - first, 0) * step.layers // (step.layers - 1)


def balance_stage_layers(
    step: StepPlan, hardware: Hardware, num_layers: int, pp_size: int
) -> tuple[int, ...]:
    """Choose the numbers of layers with which all stages take about the same time.

    The last stage gets fewer layers, because it also computes the head and the loss.

    Args:
        step: the plan of a micro-batch on a stage.
        num_layers: the layers of the whole model.
    """
    head = layers = 0.0
    for name, phase in step.work.phases.items():
        seconds = phase.times * sum(plan_phase_parts(phase, hardware).values())
        head += seconds if name.endswith("head") else 0.0
        layers += seconds if "layer " in name else 0.0
    head_in_layers = head / (layers / step.layers)
    num_others = pp_size - 1

    def time_slowest_stage(last: int) -> float:
        return max(-(-(num_layers - last) // num_others), last + head_in_layers)

    last = min(
        range(1, num_layers - num_others + 1), key=lambda count: (time_slowest_stage(count), -count)
    )
    each, more = divmod(num_layers - last, num_others)
    return (*(each + (stage < more) for stage in range(num_others)), last)


@dataclass(frozen=True)
class Transfers:
    """The hidden states and gradients that a rank sends to neighbouring stages.

    Attributes:
        ranks_per_stage: rank r exchanges with the ranks r - ranks_per_stage and
            r + ranks_per_stage.
        nbytes: the bytes of the hidden states of one micro-batch on a rank.
    """

    pp_size: int
    micro_batches: int
    ranks_per_stage: int
    nbytes: int

    @property
    def sent(self) -> int:
        """The most bytes that a rank sends per batch. Inner stages send in both directions."""
        return self.micro_batches * self.nbytes * min(self.pp_size - 1, 2)

    def seconds(self, hardware: Hardware) -> float:
        """Return the seconds that one micro-batch takes to reach the next stage."""
        distance, node = self.ranks_per_stage, hardware.node_size
        crosses = any(rank // node != (rank + distance) // node for rank in range(distance))
        where = "between_nodes" if crosses else "in_node"
        bandwidth = getattr(hardware, f"{where}_bandwidth") * hardware.fractions[where]
        latency: float = getattr(hardware, f"{where}_latency")
        return latency + self.nbytes / bandwidth


def plan_stages_time(
    step: StepPlan, hardware: Hardware, transfers: Transfers, *, tokens: int
) -> StepTime:
    """Plan the seconds of an optimizer step, as `plan_step_time` does without stages.

    `tokens` is the number of tokens per step, divided by the GPUs of all stages.
    """
    time = plan_step_time(step, hardware, micro_batches=transfers.micro_batches, tokens=tokens)
    once, twice = (plan_work_time(step.work, hardware, micro_batches=n).seconds for n in (1, 2))
    others = transfers.pp_size - 1
    parts = time.parts | {
        "bubble": others * (twice - once),
        "stages": 2 * others * transfers.seconds(hardware),
    }
    total = sum(parts.values())
    return StepTime(total, tokens / total, parts)
