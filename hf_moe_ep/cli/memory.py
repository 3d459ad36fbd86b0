"""`hf-moe-ep memory`: how much memory each GPU needs to train a model at one layout.

    hf-moe-ep memory Qwen/Qwen3-30B-A3B --gpus 64 --ep 8 --gpu-memory 80
    hf-moe-ep memory out/config.json --gpus 8 --ep 8 --seq 4096 --checkpointing

Without `--seq` it is what a rank holds between steps (`memory_plan.py`), with `--seq` the peak of a
whole step (`step_plan.py`) and, where that is more than `--gpu-memory`, what would make it fit
(`shrink.py`). `hf-moe-ep plan` tries layouts instead of taking one.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch

from hf_moe_ep.config import ParallelConfig
from hf_moe_ep.ops.quantised import KINDS
from hf_moe_ep.planner.config import LORA_TARGETS, find_config, known_shapes
from hf_moe_ep.planner.held import MASTERS, NOT_COUNTED, OPTIMIZERS, MemoryPlan, plan_memory
from hf_moe_ep.planner.shrink import shrink
from hf_moe_ep.planner.step import NOT_COUNTED as STEP_NOT_COUNTED
from hf_moe_ep.planner.step import Batch, StepPlan, plan_step
from hf_moe_ep.upstream.models import has_fused_head, is_causal_lm

_DTYPES = ("bfloat16", "float16", "float32", "float64")
_DEFAULT = "default: %(default)s"
_GIB = 2**30


def add_parser(subparsers: Any) -> None:
    """Add the command to those of `cli.py`."""
    parser = subparsers.add_parser(
        "memory",
        description="Plan the memory that each GPU needs to train a model at one layout, from the "
        "model's config alone. With --seq the model's own training step runs on tensors without "
        "memory. Nothing but the config is downloaded. All sizes are in GiB.",
    )
    add = parser.add_argument
    models = ", ".join(known_shapes())
    add("model", help=f"a folder, a config.json, a name on the hub, or offline one of {models}")
    add("--gpus", type=int, metavar="N", help="number of GPUs, one process each")
    add("--gpu-memory", type=float, metavar="GIB", help="memory of one GPU: say whether it fits")
    add("--ep", type=int, default=1, metavar="N", help=f"ep_size; {_DEFAULT}")
    add("--sp", type=int, default=1, metavar="N", help=f"sp_size; {_DEFAULT}")
    add("--dp-replicate", type=int, default=1, metavar="N", help=f"replicas (HSDP); {_DEFAULT}")
    add("--dtype", choices=_DTYPES, default="bfloat16", help=f"dtype of the weights; {_DEFAULT}")
    add("--experts-dtype", choices=KINDS, help="hold frozen experts quantised, under LoRA")
    add("--double-quant", action="store_true", help="quantise the NF4 scales as well")
    add("--masters", choices=MASTERS, default="fp32", help=f"dtype of what is trained; {_DEFAULT}")
    add("--optimizer", choices=OPTIMIZERS, default="adamw", help=_DEFAULT)
    add("--lora-rank", type=int, metavar="R", help="train LoRA adapters of this rank alone")
    add("--lora-targets", choices=LORA_TARGETS, default="both", help=_DEFAULT)
    add("--seq", type=int, metavar="S", help="plan a whole step on sequences of S tokens")
    batch = "sequences of a step, of all GPUs together; default: one per data rank"
    add("--batch", type=int, metavar="B", help=batch)
    add("--checkpointing", action="store_true", help="backward computes the layers again")
    add("--fused-head", action="store_true", help="no whole logits, as TRL's SFTTrainer")
    add("--json", action="store_true", help="print JSON, sizes in bytes")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print a plan.

    Raises:
        ValueError: wrong or missing arguments, and all of `plan_memory` and `plan_step`.
    """
    _check(options)
    asked = vars(options) | {"batch": _batch_per_rank(options)}
    plan = plan_memory(options.model, **_layout(asked))
    step = None if options.seq is None else _step(asked)
    if options.json:
        print(json.dumps(as_json(plan, options.gpu_memory, step), indent=2))
        return 0
    table = _header(plan, options) + _table(plan)
    if step is None:
        print("\n".join(table + _footer(plan, options.gpu_memory)))
        return 0
    print("\n".join(table + _step_table(step, asked)))
    if options.gpu_memory is not None:
        _say_what_fits(step, asked)
    return 0


def _check(options: argparse.Namespace) -> None:
    if options.gpus is None:
        missing = "memory needs --gpus, the number of GPUs; try --gpus 8"
        try:
            find_config(options.model)
        except ValueError as error:
            missing = f"{missing}. The model is wrong as well: {error}"
        raise ValueError(missing)
    if options.gpu_memory is not None and not options.gpu_memory > 0:
        raise ValueError(
            f"--gpu-memory ({options.gpu_memory:g}) is GiB per GPU; try --gpu-memory 80"
        )
    if options.lora_rank is None and options.lora_targets != "both":
        raise ValueError(
            f"--lora-targets {options.lora_targets} is of adapters, and full weights are planned; "
            f"add --lora-rank 16"
        )
    if options.experts_dtype is not None and options.lora_rank is None:
        raise ValueError(
            f"--experts-dtype {options.experts_dtype} holds frozen experts, and full weights are "
            f"planned; add --lora-rank 16, or leave it out"
        )
    of_step = {
        "--checkpointing": options.checkpointing,
        "--fused-head": options.fused_head,
        f"--batch {options.batch}": options.batch is not None,
    }
    if options.seq is None and any(of_step.values()):
        given = next(flag for flag, is_given in of_step.items() if is_given)
        raise ValueError(
            f"{given} matters to a step, and none is planned without the length of its sequences; "
            f"add --seq 4096"
        )


def _batch_per_rank(options: argparse.Namespace) -> int:
    """Return the sequences of one data rank; ranks of an sp group share theirs."""
    data_ranks = max(options.gpus // max(options.sp, 1), 1)
    if options.batch is None:
        return 1
    if options.batch < 1 or options.batch % data_ranks:
        raise ValueError(
            f"--batch ({options.batch}) is of all GPUs and must be a multiple of the {data_ranks} "
            f"data ranks of --gpus {options.gpus} --sp {options.sp}; try --batch "
            f"{max(-(-options.batch // data_ranks), 1) * data_ranks}"
        )
    return int(options.batch) // data_ranks


def _layout(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that `plan_memory` and `plan_step` share."""
    parallel = ParallelConfig(
        ep_size=asked["ep"],
        sp_size=asked["sp"],
        dp_replicate_size=asked["dp_replicate"],
        experts_dtype=asked["experts_dtype"],
        experts_double_quant=asked["double_quant"],
    )
    return {
        "parallel": parallel,
        "world_size": asked["gpus"],
        "dtype": getattr(torch, asked["dtype"]),
        **{name: asked[name] for name in ("masters", "optimizer", "lora_rank", "lora_targets")},
    }


def _step(asked: Mapping[str, Any]) -> StepPlan:
    batch = Batch(
        asked["seq"], asked["batch"], asked["checkpointing"], fused_head=asked["fused_head"]
    )
    return plan_step(asked["model"], batch=batch, **_layout(asked))


def _step_table(step: StepPlan, asked: Mapping[str, Any]) -> list[str]:
    run = " and ".join(map(str, step.layers_run))
    checkpointing = ", checkpointing" if asked["checkpointing"] else ""
    checkpointing += ", TRL's fused head" if asked["fused_head"] else ""
    return [
        "",
        f"one step on {asked['batch']} x {asked['seq']} tokens of each data rank{checkpointing}",
        "",
        _line("GiB at the peak", "rank 0", width=32),
        *(_line(name, _gib(size), width=32) for name, size in step.parts.items()),
        _line("sum", _gib(step.peak), width=32),
        "",
        f"the peak is in: {step.where}; counted on tensors without memory, {run} of {step.layers} "
        f"layers, all experts",
        f"  chosen as often. Not counted: {', '.join(STEP_NOT_COUNTED)}",
    ]


def _say_what_fits(step: StepPlan, asked: Mapping[str, Any]) -> None:
    memory = asked["gpu_memory"]
    limit = int(memory * _GIB)
    left = limit - step.peak
    if left >= 0:
        print(f"\nfits in {memory:g} GiB: {_gib(left)} GiB are left for what is not counted")
        return
    print(f"\ndoes not fit in {memory:g} GiB: {_gib(-left)} GiB are missing; what would help")

    def peak_of(changed: Mapping[str, Any]) -> int:
        return step.peak if dict(changed) == dict(asked) else _step(changed).peak

    # TRL's head is for what transformers has a causal model of.
    has_head = has_fused_head() and is_causal_lm(find_config(asked["model"]))
    without = () if has_head else ("fused_head",)
    data_ranks = asked["gpus"] // asked["sp"]
    for change, peak in shrink(asked, limit, peak_of, without=without):
        fits = "fits" if peak <= limit else f"{_gib(peak - limit)} GiB are missing"
        flag = f"--batch {change.value * data_ranks}" if change.name == "batch" else change.flag
        print(f"  {flag:<28}{_gib(peak):>9} GiB, {fits}", flush=True)


def as_json(
    plan: MemoryPlan, memory: float | None = None, step: StepPlan | None = None
) -> dict[str, Any]:
    """Turn a plan into plain data: bytes, and `left` if `memory` (GiB) is given."""
    found = asdict(plan)
    for kind, entry in zip(plan.kinds, found["kinds"], strict=True):
        entry["held"] = kind.held
    found["all_ranks"] = {name: plan.all_ranks(name) for name in _ROWS}
    found["not_counted"] = list(NOT_COUNTED)
    if step is not None:
        found["step"] = step.as_json() | {"peak": step.peak, "where": step.where}
        found["step"]["not_counted"] = list(STEP_NOT_COUNTED)
    if memory is not None:
        held = _left(plan, memory)
        found["left"] = held if step is None else int(memory * _GIB) - step.peak
    return found


_ROWS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "held": "held between steps",
}


def _header(plan: MemoryPlan, options: argparse.Namespace) -> list[str]:
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
    return [
        f"{options.model}: {plan.total:,} parameters, {plan.trained:,} trained, "
        f"{plan.active:,} active per token",
        f"{plan.world_size} ranks = dp_replicate {config.dp_replicate_size} x ep_fsdp "
        f"{plan.ep_fsdp_size} x ep {config.ep_size}, sp {config.sp_size}; {options.dtype}, "
        f"masters {options.masters}, optimizer {options.optimizer}{adapters}{experts}",
        "",
    ]


def _table(plan: MemoryPlan) -> list[str]:
    most, least = plan.largest, plan.smallest
    lines = [_line("GiB", f"rank {most.ranks[0]}", f"rank {least.ranks[0]}", "all ranks")]
    lines[0] += "     (largest, smallest, sum)"
    for name, title in _ROWS.items():
        sizes = (getattr(most, name), getattr(least, name), plan.all_ranks(name))
        lines.append(_line(title, *map(_gib, sizes)))
    lines.append(_line("gathered at a time", *[_gib(plan.gathered)] * 2, ""))
    sums = (_gib(kind.held + plan.gathered) for kind in (most, least))
    return [line.rstrip() for line in [*lines, _line("sum", *sums, "")]]


def _line(title: str, *cells: str, width: int = 20) -> str:
    return f"{title:<{width}}" + "".join(f"{cell:>13}" for cell in cells)


def _gib(size: int) -> str:
    return f"{size / _GIB:,.3f}"


def _footer(plan: MemoryPlan, memory: float | None) -> list[str]:
    lines = [
        "",
        "gathered: the root and two neighbouring stages (a layer and its experts), compute dtype",
        f"not counted: {', '.join(NOT_COUNTED[:3])},",
        f"  {', '.join(NOT_COUNTED[3:])},",
        f"  whole gradients of an FSDP2 unit: up to {_gib(plan.unit_gradients)} GiB, and "
        f"{_gib(plan.unit_reduction)} GiB to reduce them",
    ]
    if memory is not None:
        left = _left(plan, memory) / _GIB
        lines += [
            "",
            f"fits in {memory:g} GiB: {left:,.3f} GiB are left for all that is not counted"
            if left > 0
            else f"does not fit in {memory:g} GiB: {-left:,.3f} GiB are missing",
        ]
    return lines


def _left(plan: MemoryPlan, memory: float) -> int:
    return int(memory * _GIB) - plan.largest.held - plan.gathered
