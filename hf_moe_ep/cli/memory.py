"""`hf-moe-ep memory`: plan the memory per GPU that training needs at one parallel layout.

    hf-moe-ep memory Qwen/Qwen3-30B-A3B --gpus 64 --ep-size 8 --gpu-memory 80
    hf-moe-ep memory out/config.json --gpus 8 --ep-size 8 --seq 4096 --checkpointing

Without `--seq` the command plans the memory that a rank holds between steps (`planner/held.py`).
With `--seq` it plans the peak of a whole step (`planner/step.py`). If the peak is larger than
`--gpu-memory`, the command lists options that would make the step fit (`planner/shrink.py`). To
search for a layout, use `hf-moe-ep plan`.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from hf_moe_ep.cli.layout_options import (
    DEFAULT,
    add_model_and_gpus,
    add_sizes,
    add_training,
    check_adapters,
    select_parallel_fields,
)
from hf_moe_ep.config import ParallelConfig
from hf_moe_ep.planner.options import (
    GIB,
    NO_WHOLE_LOGITS,
    NOT_COUNTED,
    STEP_NOT_COUNTED,
    WHOLE_LOGITS,
)
from hf_moe_ep.planner.shrink import shrink

if TYPE_CHECKING:
    from hf_moe_ep.planner.held import MemoryPlan
    from hf_moe_ep.planner.step import StepPlan


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "memory",
        description="Plan the memory per GPU that training a model needs at one parallel layout. "
        "Only the model's config is needed, and only the config is downloaded. Without --seq, the "
        "plan contains parameters, gradients and optimizer state. With --seq, it contains the peak "
        "of a whole training step, which runs on tensors without memory. All sizes are in GiB "
        "(2^30 bytes).",
    )
    add_model_and_gpus(parser)
    add = parser.add_argument
    add(
        "--gpu-memory",
        type=float,
        metavar="GIB",
        help="memory of one GPU, to print whether the plan fits",
    )
    helps = {
        "ep": f"expert parallel size; {DEFAULT}",
        "etp": f"expert tensor parallel size; {DEFAULT}",
        "sp": f"sequence parallel size; {DEFAULT}",
        "cp": f"context parallel size; {DEFAULT}",
        "dp_replicate": f"HSDP replicas; {DEFAULT}",
    }
    add_sizes(parser, helps, default=1)
    add("--seq", type=int, metavar="S", help="plan a whole training step on sequences of S tokens")
    batch = "sequences per step, summed over all GPUs; default: one per data rank"
    add("--batch", type=int, metavar="B", help=batch)
    add("--checkpointing", action="store_true", help="use activation checkpointing")
    loss = parser.add_mutually_exclusive_group()
    loss.add_argument("--whole-logits", action="store_true", help=WHOLE_LOGITS)
    loss.add_argument(
        "--fused-head",
        action="store_true",
        help="use TRL's chunked loss, which never holds all logits in memory",
    )
    add_training(parser)


def run(options: argparse.Namespace) -> int:
    """Print a plan."""
    from hf_moe_ep.planner.held import plan_memory

    _check_options(options)
    batch = _compute_batch_per_rank(options)
    # `shrink` changes "batch". "rows" remains the number of sequences per data rank.
    settings = vars(options) | {"batch": batch, "rows": batch}
    plan = plan_memory(options.model, **_make_layout_arguments(settings))
    step = None if options.seq is None else _plan_one_step(settings)
    if options.json:
        print(json.dumps(as_json(plan, options.gpu_memory, step), indent=2))
        return 0
    table = _format_header(plan, options) + _format_table(plan)
    if step is None:
        print("\n".join(table + _format_footer(plan, options.gpu_memory)))
        return 0
    print("\n".join(table + _format_step(step, settings)))
    if options.gpu_memory is not None:
        _print_fit(step, settings)
    return 0


def _check_options(options: argparse.Namespace) -> None:
    if options.gpus is None:
        from hf_moe_ep.planner.config import find_config

        missing = "memory needs --gpus, the number of GPUs; try --gpus 8"
        try:
            find_config(options.model)
        except ValueError as error:
            missing = f"{missing}. There is also an error about the model: {error}"
        raise ValueError(missing)
    if options.gpu_memory is not None and not 0 < options.gpu_memory < math.inf:
        raise ValueError(
            f"--gpu-memory ({options.gpu_memory:g}) must be more than 0 and finite, in GiB per "
            f"GPU; try --gpu-memory 80"
        )
    check_adapters(options)
    step_options = {
        "--checkpointing": options.checkpointing,
        "--whole-logits": options.whole_logits,
        "--fused-head": options.fused_head,
        f"--batch {options.batch}": options.batch is not None,
    }
    if options.seq is None and any(step_options.values()):
        option = next(flag for flag, is_given in step_options.items() if is_given)
        raise ValueError(
            f"{option} is an option of a training step, and a step is planned only if the length "
            f"of its sequences is given; add --seq 4096"
        )


def _compute_batch_per_rank(options: argparse.Namespace) -> int:
    """Return the number of sequences per data rank: the sp x cp ranks that share a batch."""
    data_ranks = max(options.gpus // max(options.sp * options.cp, 1), 1)
    if options.batch is None:
        return 1
    if options.batch < 1 or options.batch % data_ranks:
        context = f" --cp-size {options.cp}" if options.cp > 1 else ""
        raise ValueError(
            f"--batch ({options.batch}) counts all GPUs and must be a multiple of the {data_ranks} "
            f"data ranks of --gpus {options.gpus} --sp-size {options.sp}{context}; try "
            f"--batch {max(-(-options.batch // data_ranks), 1) * data_ranks}"
        )
    return int(options.batch) // data_ranks


def _make_layout_arguments(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments that `plan_memory` and `plan_step` have in common."""
    import torch

    parallel = ParallelConfig(
        ep_size=settings["ep"],
        etp_size=settings["etp"],
        sp_size=settings["sp"],
        cp_size=settings["cp"],
        dp_replicate_size=settings["dp_replicate"],
        **select_parallel_fields(settings),
    )
    return {
        "parallel": parallel,
        "world_size": settings["gpus"],
        "dtype": getattr(torch, settings["dtype"]),
        **{name: settings[name] for name in ("masters", "optimizer", "lora_rank", "lora_targets")},
    }


def _plan_one_step(settings: Mapping[str, Any]) -> StepPlan:
    from hf_moe_ep.planner.step import Batch, plan_step

    batch = Batch(
        settings["seq"],
        settings["batch"],
        settings["checkpointing"],
        settings["batch"] < settings["rows"],  # gradients of the other rows are accumulated
        fused_head=settings["fused_head"],
        only_loss_is_read=not settings["whole_logits"],
    )
    return plan_step(settings["model"], batch=batch, **_make_layout_arguments(settings))


def _format_step(step: StepPlan, settings: Mapping[str, Any]) -> list[str]:
    numbers = " and ".join(map(str, step.layers_run))
    checkpointing = ", checkpointing" if settings["checkpointing"] else ""
    checkpointing += ", TRL's fused head" if settings["fused_head"] else ""
    checkpointing += ", whole logits" if settings["whole_logits"] else ""
    loss_note = [] if settings["fused_head"] or settings["whole_logits"] else [NO_WHOLE_LOGITS]
    return [
        "",
        f"One training step; micro-batch per data rank: {settings['batch']} x {settings['seq']} "
        f"tokens{checkpointing}",
        "",
        _format_line("GiB at the peak of the step", "rank 0", width=32),
        *(_format_line(name, _format_gib(size), width=32) for name, size in step.parts.items()),
        _format_line("sum", _format_gib(step.peak), width=32),
        "",
        f"The peak is in: {step.where}.",
        *loss_note,
        f"{numbers} of {step.layers} layers ran on tensors without memory, with equally loaded "
        f"experts.",
        f"Not counted: {', '.join(STEP_NOT_COUNTED)}",
    ]


def _print_fit(step: StepPlan, settings: Mapping[str, Any]) -> None:
    from hf_moe_ep.planner.config import find_config
    from hf_moe_ep.upstream.models import has_fused_head, is_causal_lm

    memory = settings["gpu_memory"]
    limit = int(memory * GIB)
    left = limit - step.peak
    if left >= 0:
        print(f"\nfits in {memory:g} GiB: {_format_gib(left)} GiB are left for what is not counted")
        return
    print(
        f"\ndoes not fit in {memory:g} GiB: {_format_gib(-left)} GiB are missing. "
        f"Options that help:"
    )

    def peak_of(changed: Mapping[str, Any]) -> int:
        return step.peak if dict(changed) == dict(settings) else _plan_one_step(changed).peak

    # TRL's chunked loss needs a causal language model of transformers. The loss does not work with
    # a head for multi-token prediction, which needs the labels.
    has_head = has_fused_head() and is_causal_lm(find_config(settings["model"]))
    has_head &= not settings["mtp_layers"]
    without = () if has_head else ("fused_head",)
    data_ranks = settings["gpus"] // (settings["sp"] * settings["cp"])
    for change, peak in shrink(settings, limit, peak_of, without=without):
        fits = "fits" if peak <= limit else f"{_format_gib(peak - limit)} GiB are missing"
        flag = f"--batch {change.value * data_ranks}" if change.name == "batch" else change.flag
        print(f"  {flag:<28}{_format_gib(peak):>9} GiB, {fits}", flush=True)


def as_json(
    plan: MemoryPlan, memory: float | None = None, step: StepPlan | None = None
) -> dict[str, Any]:
    """Return a plan as plain data, with sizes in bytes.

    If `memory` (GiB of a GPU) is given, the entry `left` has the memory that remains.
    """
    data = asdict(plan)
    for kind, entry in zip(plan.kinds, data["kinds"], strict=True):
        entry["held"] = kind.held
    data["all_ranks"] = {name: plan.all_ranks(name) for name in _ROWS}
    data["not_counted"] = list(NOT_COUNTED)
    if step is not None:
        data["step"] = step.as_json() | {"peak": step.peak, "where": step.where}
        data["step"]["not_counted"] = list(STEP_NOT_COUNTED)
    if memory is not None:
        left = _count_bytes_left(plan, memory)
        data["left"] = left if step is None else int(memory * GIB) - step.peak
    return data


# The title of each row of the table, by the name of the row's attribute in the plan.
_ROWS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "held": "held between steps",
}


def _format_header(plan: MemoryPlan, options: argparse.Namespace) -> list[str]:
    config = plan.parallel
    adapters = ""
    if options.lora_rank is not None:
        adapters = f", LoRA rank {options.lora_rank} on {options.lora_targets}"
    experts = ""
    if config.experts_dtype is not None:
        nested = " with nested scales" if config.experts_double_quant else ""
        experts = (
            f"; experts in {config.experts_dtype}{nested}, {plan.expert_bytes:.4f} bytes per "
            f"parameter"
        )
    context = f", cp {config.cp_size}" if (config.cp_size or 1) > 1 else ""
    etp = "" if config.etp_size in (None, 1) else f" x etp {config.etp_size}"
    return [
        f"{options.model}: {plan.total:,} parameters, {plan.trained:,} trained, "
        f"{plan.active:,} active per token",
        f"{plan.world_size} ranks = dp_replicate {config.dp_replicate_size} x ep_fsdp "
        f"{plan.ep_fsdp_size} x ep {config.ep_size}{etp}, sp {config.sp_size}{context}; "
        f"{options.dtype}, masters {options.masters}, optimizer {options.optimizer}{adapters}"
        f"{experts}",
        "",
    ]


def _format_table(plan: MemoryPlan) -> list[str]:
    most, least = plan.largest, plan.smallest
    lines = [_format_line("GiB", f"rank {most.ranks[0]}", f"rank {least.ranks[0]}", "all ranks")]
    lines[0] += "     (largest, smallest, sum)"
    for name, title in _ROWS.items():
        sizes = (getattr(most, name), getattr(least, name), plan.all_ranks(name))
        lines.append(_format_line(title, *map(_format_gib, sizes)))
    lines.append(_format_line("gathered at a time", *[_format_gib(plan.gathered)] * 2, ""))
    if plan.buffers:
        lines.append(_format_line("fixed buffers", *[_format_gib(plan.buffers)] * 2, ""))
    sums = (_format_gib(kind.held + plan.gathered + plan.buffers) for kind in (most, least))
    return [line.rstrip() for line in [*lines, _format_line("sum", *sums, "")]]


def _format_line(title: str, *cells: str, width: int = 20) -> str:
    return f"{title:<{width}}" + "".join(f"{cell:>13}" for cell in cells)


def _format_gib(size: int) -> str:
    return f"{size / GIB:,.3f}"


def _format_footer(plan: MemoryPlan, memory: float | None) -> list[str]:
    lines = [
        "",
        "gathered at a time: the root unit and two neighbouring layers with their experts, in the",
        "  compute dtype",
        f"not counted: {', '.join(NOT_COUNTED[:3])},",
        f"  {', '.join(NOT_COUNTED[3:])},",
        f"  unsharded gradients of an FSDP2 unit: up to {_format_gib(plan.unit_gradients)} GiB, "
        f"and {_format_gib(plan.unit_reduction)} GiB while they are reduced",
    ]
    if memory is not None:
        left = _count_bytes_left(plan, memory) / GIB
        lines += [
            "",
            f"fits in {memory:g} GiB: {left:,.3f} GiB are left for what is not counted"
            if left > 0
            else f"does not fit in {memory:g} GiB: {-left:,.3f} GiB are missing",
        ]
    return lines


def _count_bytes_left(plan: MemoryPlan, memory: float) -> int:
    return int(memory * GIB) - plan.largest.held - plan.gathered - plan.buffers
