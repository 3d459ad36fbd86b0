"""`hf-moe-ep inspect`: look before anything runs.

    hf-moe-ep inspect out/checkpoint-300
    hf-moe-ep inspect --plan out/config.json --world 64 --ep 8 --memory 80
    hf-moe-ep inspect --plan out/config.json --world 8 --ep 8 --seq 4096 --checkpointing
    hf-moe-ep inspect --architecture mixtral

Of a folder it prints what wrote it and at which layout; with `--plan` how much memory each rank
would need (`memory_plan.py`), with `--seq` in a whole step (`step_plan.py`), and what would make
it fit (`shrink.py`); with `--architecture` the plan that is derived from a config, and
what is granted to such a model (`architecture.py`).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch

from hf_moe_ep.checkpoints.verify import look
from hf_moe_ep.config import ParallelConfig
from hf_moe_ep.ops.quantised import KINDS
from hf_moe_ep.tools.architecture import lines, look_at
from hf_moe_ep.tools.memory_plan import MASTERS, NOT_COUNTED, OPTIMIZERS, MemoryPlan, plan_memory
from hf_moe_ep.tools.printing import print_found
from hf_moe_ep.tools.published_models import LORA_TARGETS, find_config, known_shapes
from hf_moe_ep.tools.shrink import shrink
from hf_moe_ep.tools.step_plan import NOT_COUNTED as STEP_NOT_COUNTED
from hf_moe_ep.tools.step_plan import Batch, StepPlan, plan_step
from hf_moe_ep.upstream.models import has_fused_head, is_causal_lm

_DTYPES = ("bfloat16", "float16", "float32", "float64")
_DEFAULT = "default: %(default)s"
_GIB = 2**30


def add_parser(subparsers: Any) -> None:
    """Add the command to those of `cli.py`."""
    parser = subparsers.add_parser(
        "inspect",
        description="Of a folder: what wrote this checkpoint, and at which layout. With --plan: "
        "the memory that each rank needs to hold a model for training, from its config alone. With "
        "--architecture: where its parts are, and what is granted to it.",
    )
    add = parser.add_argument
    add("folder", nargs="?", help="a checkpoint, of a model or of training")
    shapes = ", ".join(known_shapes())
    add("--plan", metavar="SHAPE", help=f"a folder, a config.json, or one of {shapes}")
    add("--architecture", metavar="SHAPE", help="the same, or a model type of transformers")
    add("--json", action="store_true", help="for programs; sizes in bytes")
    add = parser.add_argument_group("with --plan").add_argument
    of_plan = [
        add("--world", type=int, metavar="N", help="number of processes, one per GPU"),
        add("--ep", type=int, default=1, metavar="N", help=f"ep_size; {_DEFAULT}"),
        add("--sp", type=int, default=1, metavar="N", help=f"sp_size; {_DEFAULT}"),
        add("--dp-replicate", type=int, default=1, metavar="N", help=_DEFAULT),
        add("--dtype", choices=_DTYPES, default="bfloat16", help=_DEFAULT),
        add("--experts-dtype", choices=KINDS, help="hold frozen experts as bytes, under LoRA"),
        add("--double-quant", action="store_true", help="of nf4, quantise the scales too"),
        add("--masters", choices=MASTERS, default="fp32", help=f"what is trained; {_DEFAULT}"),
        add("--optimizer", choices=OPTIMIZERS, default="adamw", help=_DEFAULT),
        add("--lora-rank", type=int, metavar="R", help="train adapters alone"),
        add("--lora-targets", choices=LORA_TARGETS, default="both", help=_DEFAULT),
        add("--seq", type=int, metavar="S", help="plan a whole step on sequences of S tokens"),
        add("--batch", type=int, default=1, metavar="B", help=f"of each data rank; {_DEFAULT}"),
        add("--checkpointing", action="store_true", help="backward computes layers again"),
        add("--fused-head", action="store_true", help="no whole logits, as TRL's SFTTrainer"),
        add("--memory", type=float, metavar="GIB", help="of one GPU: say whether it fits"),
    ]
    parser.set_defaults(run=run, of_plan=of_plan)


def run(options: argparse.Namespace) -> int:
    """Print what a checkpoint is, or a plan.

    Raises:
        ValueError: wrong or missing arguments, and all of `plan_memory` and `look_at`.
    """
    if sum(x is not None for x in (options.plan, options.folder, options.architecture)) != 1:
        raise ValueError(
            "inspect wants one of a folder, --plan SHAPE and --architecture SHAPE; see --help"
        )
    if options.plan is None:
        _check_no_plan(options)
    if options.architecture is not None:
        found = look_at(options.architecture)
        text = json.dumps(found.as_json(), indent=2) if options.json else None
        print(text or "\n".join(lines(found, options.architecture)))
        return 0
    if options.folder is not None:
        checkpoint = look(options.folder)
        if options.json:
            print(json.dumps({"what": checkpoint.what} | checkpoint.facts, indent=2))
        else:
            print_found(options.folder, checkpoint)
        return 0
    if options.world is None:
        missing = "inspect --plan wants --world, the number of processes; try --world 8"
        try:
            find_config(options.plan)
        except ValueError as error:
            missing = f"{missing}. The model is wrong as well: {error}"
        raise ValueError(missing)
    if options.memory is not None and not options.memory > 0:
        raise ValueError(f"--memory ({options.memory:g}) is GiB per GPU; try --memory 80")
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
        f"--batch {options.batch}": options.batch != 1,
    }
    if options.seq is None and any(of_step.values()):
        given = next(flag for flag, is_given in of_step.items() if is_given)
        raise ValueError(
            f"{given} matters to a step, and none is planned without the length of its sequences; "
            f"add --seq 4096"
        )
    asked = vars(options)
    plan = plan_memory(options.plan, **_layout(asked))
    step = None if options.seq is None else _step(options.plan, asked)
    if options.json:
        print(json.dumps(as_json(plan, options.memory, step), indent=2))
        return 0
    table = _header(plan, options) + _table(plan)
    if step is None:
        table += _footer(plan, options.memory)
        print("\n".join(table))
        return 0
    print("\n".join(table + _step_table(step, asked)))
    if options.memory is not None:
        _say_what_fits(step, options)
    return 0


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
        "world_size": asked["world"],
        "dtype": getattr(torch, asked["dtype"]),
        **{name: asked[name] for name in ("masters", "optimizer", "lora_rank", "lora_targets")},
    }


def _step(shape: str, asked: Mapping[str, Any]) -> StepPlan:
    batch = Batch(
        asked["seq"], asked["batch"], asked["checkpointing"], fused_head=asked["fused_head"]
    )
    return plan_step(shape, batch=batch, **_layout(asked))


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


def _say_what_fits(step: StepPlan, options: argparse.Namespace) -> None:
    limit = int(options.memory * _GIB)
    left = limit - step.peak
    if left >= 0:
        print(
            f"\nfits in {options.memory:g} GiB: {_gib(left)} GiB are left for what is not counted"
        )
        return
    print(
        f"\ndoes not fit in {options.memory:g} GiB: {_gib(-left)} GiB are missing; what would help"
    )
    peaks = {str(vars(options)): step.peak}

    def peak_of(asked: Mapping[str, Any]) -> int:
        known = peaks.get(str(dict(asked)))
        return _step(options.plan, asked).peak if known is None else known

    # TRL's head is for what transformers has a causal model of.
    has_head = has_fused_head() and is_causal_lm(find_config(options.plan))
    without = () if has_head else ("fused_head",)
    for change, peak in shrink(vars(options), limit, peak_of, without=without):
        fits = "fits" if peak <= limit else f"{_gib(peak - limit)} GiB are missing"
        print(f"  {change.flag:<28}{_gib(peak):>9} GiB, {fits}", flush=True)


def _check_no_plan(options: argparse.Namespace) -> None:
    given = [x.option_strings[0] for x in options.of_plan if getattr(options, x.dest) != x.default]
    if given:
        raise ValueError(
            f"{', '.join(given)} would be ignored: only --plan SHAPE plans memory for a layout; "
            f"name the model's folder or its config.json there"
        )


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
        f"{options.plan}: {plan.total:,} parameters, {plan.trained:,} trained, "
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
