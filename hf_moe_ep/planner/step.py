"""Plan the peak memory and the work of a whole training step, without a GPU.

    config = ParallelConfig(ep_size=8)
    plan = plan_step("Qwen/Qwen3-30B-A3B", config, world_size=8, batch=Batch(seq=4096))
    plan.peak, plan.where, plan.parts        # bytes, the phase with the peak, bytes by kind

A phase is a part of the step, such as the forward of one layer (`counted.py`). `held.py` counts
the memory that a rank holds between steps. A step also needs memory for activations, logits,
gathered FSDP2 units and FSDP2's copies of them, unreduced gradients, rows that are dispatched to
experts, and temporary tensors of the optimizer. `plan_step` uses three methods:

    run           The model is patched and sharded as in training. One rank's forward, backward and
                  optimizer step run on fake tensors (`fake.py`) and are counted (`counted.py`).
    draw          Drawn expert ids replace the routers' choice (`choices.py`).
    extrapolate   If all layers are alike, the step runs with 4 and with 5 layers only
                  (`extrapolate.py`).

With `compile_layers`, the plan counts the work of the kernels that a compiler makes (`fused.py`),
but the memory of uncompiled layers, which save more activations.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from itertools import count
from typing import Any

import torch
from torch import nn

from hf_moe_ep.architectures import count_router_groups, read_experts_per_token
from hf_moe_ep.config import ParallelConfig
from hf_moe_ep.moe.dispatch.make_dispatcher import make_dispatcher
from hf_moe_ep.planner.choices import Choices
from hf_moe_ep.planner.config import find_config
from hf_moe_ep.planner.counted import (
    HELD,
    OPTIMIZER,
    CountedStep,
    LocalOptimizer,
    count_step,
    make_counter,
)
from hf_moe_ep.planner.extrapolate import (
    choose_layers_to_run,
    extrapolate_bytes,
    extrapolate_peaks,
    extrapolate_work,
    keep_layers,
)
from hf_moe_ep.planner.fake import alone_on_fake_tensors, draw_missing_ids
from hf_moe_ep.planner.fused import Fusion, mark_compiled_regions
from hf_moe_ep.planner.held import PlanRequest, Unsharded
from hf_moe_ep.planner.kernels import count_kernels
from hf_moe_ep.planner.work import StepWork
from hf_moe_ep.routing.load import ExpertLoad
from hf_moe_ep.state import ModelState
from hf_moe_ep.upstream.adapters import without_adapters
from hf_moe_ep.upstream.code import list_forward_arguments
from hf_moe_ep.upstream.dispatch_modes import NoValue
from hf_moe_ep.upstream.models import (
    add_fused_head,
    enable_checkpointing,
    is_causal_lm,
    takes_images,
    takes_sound,
    text_config,
)
from hf_moe_ep.upstream.modules import get_own_buffers
from hf_moe_ep.upstream.process_groups import fake_group


@dataclass(frozen=True)
class Batch:
    """The micro-batch of one data rank, with labels.

    Attributes:
        seq: the tokens of a sequence.
        sequences: the number of sequences.
        checkpointing: True for activation checkpointing: backward recomputes the layers.
        accumulates: True if gradients of an earlier micro-batch exist already.
        fused_head: True for the loss of TRL's SFTTrainer, which never holds the logits of all
            tokens at the same time. The plan runs TRL's code without Triton, which needs more
            memory than TRL's Triton kernels.
        only_loss_is_read: True for the Trainer, in which `fused_loss="auto"` computes no logits.
            False for label smoothing, and for a loss or a loop of your own.
    """

    seq: int
    sequences: int = 1
    checkpointing: bool = False
    accumulates: bool = False
    fused_head: bool = False
    only_loss_is_read: bool = False

    def __post_init__(self) -> None:
        for name in ("seq", "sequences"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} ({getattr(self, name)}) must be 1 or more; try 1")


@dataclass(frozen=True)
class StepPlan:
    """The peak memory of one rank in one step, in bytes, and its work.

    Attributes:
        peaks: the peak of each phase, in the order of the step.
        made_of: for each phase, the bytes of each kind at its peak.
        layers: the number of layers of the model and of its head for multi-token prediction.
        layers_run: the numbers of layers that ran for the plan.
        work: the operators and collectives of the rank.
        host_peak: the peak of this rank's memory on the host with `offload`.
    """

    peaks: dict[str, int]
    made_of: dict[str, dict[str, int]]
    layers: int
    layers_run: tuple[int, ...]
    work: StepWork = field(default_factory=StepWork, repr=False)
    host_peak: int = 0

    @property
    def peak(self) -> int:
        return max(self.peaks.values())

    @property
    def where(self) -> str:
        """The phase with the highest peak."""
        return max(self.peaks, key=self.peaks.__getitem__)

    @property
    def parts(self) -> dict[str, int]:
        """The bytes of each kind at the highest peak."""
        return self.made_of[self.where]

    @property
    def held(self) -> int:
        """The bytes of parameters, gradients and optimizer state when the optimizer steps."""
        made_of = self.made_of.get(OPTIMIZER, {})
        return sum(made_of.get(kind, 0) for kind in HELD)

    def as_json(self) -> dict[str, Any]:
        """Return data that json can write, without the work, which has thousands of operators."""
        data = asdict(replace(self, work=StepWork()))
        del data["work"]
        return data | {"parts": self.parts}


def plan_step(
    model: Any,
    parallel: ParallelConfig | None = None,
    *,
    world_size: int,
    batch: Batch,
    dtype: torch.dtype = torch.bfloat16,
    masters: str = "fp32",
    optimizer: str = "adamw_fused",
    lora_rank: int | None = None,
    lora_targets: str = "both",
    offload: bool = False,
    load: ExpertLoad | None = None,
    like_gpu: bool = True,
    all_layers: bool = False,
    layers_run: tuple[int, ...] | None = None,
) -> StepPlan:
    """Plan a training step of one rank. `plan_memory` documents the arguments not listed here.

    Args:
        parallel: the settings of the model. `dispatch_chunks="auto"` is planned as one chunk.
        batch: the micro-batch of each data rank.
        optimizer: "adamw_fused" is the Trainer's default. "adamw" updates all parameters together
            (foreach), as torch does by default on a GPU, and needs memory for temporary tensors.
        offload: keep parameters, gradients and optimizer state on the host.
        load: how often each expert was chosen in a run of this model (`expert_load`). The plan is
            for the rank with most tokens, and all layers run. If it is None, the plan is for rank
            0, with evenly chosen experts.
        like_gpu: True plans a GPU, on which Triton kernels compute the experts. False plans a CPU.
        all_layers: run all layers instead of extrapolating.
        layers_run: the result of `choose_layers_to_run` for this model; several plans can share it.

    Raises:
        ValueError: as for `plan_memory`, or the model's forward needs the value of an activation.
    """
    config = find_config(model)
    if not (is_causal_lm(config) or takes_images(config) or takes_sound(config)):
        raise _make_loss_error(
            f"transformers has no {config.model_type} with a language model head"
        )
    if parallel is not None and isinstance(parallel.dispatch_chunks, str):
        parallel = replace(parallel, dispatch_chunks=1)
    request = PlanRequest(
        config, parallel, world_size, dtype, masters, optimizer, lora_rank, lora_targets, offload
    )
    layers = text_config(config).num_hidden_layers + request.mtp_layers
    if all_layers or load is not None:
        layers_run = (layers,)
    elif layers_run is None:
        layers_run = choose_layers_to_run(request)
    counted = []
    with torch.random.fork_rng(devices=[]):
        for number in layers_run:
            short = replace(request, config=keep_layers(config, number - request.mtp_layers))
            fusion = Fusion()
            with mark_compiled_regions(fusion):
                counted.append(_run_fake_step(short, batch, load, like_gpu, fusion))
    peaks, made_of = [step.peaks() for step in counted], [step.made_of() for step in counted]
    work, host_peaks = [step.work for step in counted], [step.memory.host_peak for step in counted]
    if len(layers_run) == 1:
        return StepPlan(peaks[0], made_of[0], layers, layers_run, work[0], host_peaks[0])
    all_peaks, all_parts = extrapolate_peaks(peaks, made_of, layers)
    host_peak = extrapolate_bytes(host_peaks, layers)
    return StepPlan(
        all_peaks, all_parts, layers, layers_run, extrapolate_work(work, layers), host_peak
    )


def _make_loss_error(reason: str) -> ValueError:
    return ValueError(
        f"{reason}, so a training step has no loss that could be planned; plan what a rank holds "
        f"between steps (plan_memory, or hf-moe-ep memory without --seq)"
    )


def _run_fake_step(
    request: PlanRequest, batch: Batch, load: ExpertLoad | None, like_gpu: bool, fusion: Fusion
) -> CountedStep:
    """Run and count one step of one rank on fake tensors; torch.compile only marks regions."""
    built = Unsharded.of(request)
    model, state, config = built.model, built.state, text_config(request.config)
    state.only_loss_is_read = batch.only_loss_is_read
    if "labels" not in list_forward_arguments(without_adapters(model)):
        raise _make_loss_error(f"the forward of {request.config.model_type} takes no labels")
    choices = _make_choices(built, request, load)
    head_inputs = add_fused_head(without_adapters(model)) if batch.fused_head else {}
    with fake_group(_find_planned_rank(choices, state, request), request.world_size):
        meshes = built.shard()
        draw_missing_ids(model, choices)
        state.dispatcher = make_dispatcher(state.config, meshes, num_experts=state.num_experts)
        work = make_counter(model, None if state.config.compile_kwargs is None else fusion)
        runs_kernels = (
            like_gpu and state.config.experts_backend != "torch" and request.dtype != torch.float64
        )
        kernels = count_kernels(work) if runs_kernels else nullcontext()
        with alone_on_fake_tensors(choices, like_gpu=like_gpu, work=work), kernels:
            _materialise(model)
            model.train()
            if batch.checkpointing:
                enable_checkpointing(model)
            optimizer = _make_optimizer_with_state(model, request)
            if batch.accumulates:
                optimizer.set_zero_grads()
            ids = torch.full((batch.sequences, batch.seq), _find_text_token(request.config))
            inputs = {"input_ids": ids, "labels": ids, "use_cache": False, **head_inputs}
            layers = built.units.layers
            try:
                return count_step(model, layers, optimizer, inputs, work, offload=request.offload)
            except NoValue as error:
                raise ValueError(
                    f"the forward of {config.model_type} needs the value of an activation "
                    f"({error}), but a plan has only shapes; measure the step on a small machine"
                ) from error


def _find_text_token(config: Any) -> int:
    """Return a token id that stands for no picture, no sound and no padding."""
    special = [
        value
        for part in (config, text_config(config))
        for name, value in vars(part).items()
        if name.endswith(("token_id", "token_index"))
    ]
    return next(token for token in count() if token not in special)


def _make_choices(built: Unsharded, request: PlanRequest, load: ExpertLoad | None) -> Choices:
    state = built.state
    top_k = read_experts_per_token(built.model, state.plan, text_config(request.config))
    if load is None:
        return Choices.evenly(
            state.num_experts, top_k, *count_router_groups(built.model, state.plan)
        )
    return Choices.of_load(load, top_k, len(state.moe_layers))


def _find_planned_rank(choices: Choices, state: ModelState, request: PlanRequest) -> int:
    """Return the rank to plan: the first rank whose ep coordinate has the largest load.

    With 8 ranks and ep_size 2, the first rank with ep coordinate 1 is rank 1 if ep is the inner
    axis, and rank 4 if ep is the outer axis.
    """
    ep_size, etp_size = state.config.ep_size or 1, state.config.etp_size or 1
    ep_rank = choices.find_busiest_rank(ep_size)
    if state.config.ep_outside:
        return ep_rank * (request.world_size // (state.config.dp_replicate_size or 1) // ep_size)
    return ep_rank * etp_size


def _make_optimizer_with_state(model: nn.Module, request: PlanRequest) -> LocalOptimizer:
    """Make the optimizer and run its first step, in which torch allocates its state."""
    optimizer = LocalOptimizer(request.optimizer, model.parameters(), on_host=request.offload)
    optimizer.set_zero_grads()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def _materialise(model: nn.Module) -> None:
    """Move parameters from the meta device to the (fake) CPU; buffers keep their values."""
    values = [(module, dict(get_own_buffers(module))) for module in model.modules()]
    model.to_empty(device="cpu")
    for module, buffers in values:
        get_own_buffers(module).update(buffers)
