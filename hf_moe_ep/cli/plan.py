"""`hf-moe-ep plan`: list parallel layouts of a model that fit on N GPUs, the best first.

    hf-moe-ep plan Qwen/Qwen3-30B-A3B --gpus 16 --gpu h100 --seq 4096 --batch 64 --write fsdp.yaml

Memory is planned as in `hf-moe-ep memory ... --seq`. With `--gpu` the seconds of a step are
computed as well, from the speed of that GPU (`planner/seconds.py`).
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_moe_ep.cli.layout_options import (
    add_model_and_gpus,
    add_sizes,
    add_training,
    check_adapters,
    select_parallel_fields,
)
from hf_moe_ep.cli.progress import Progress
from hf_moe_ep.planner.hardware import (
    ASSUMED,
    Hardware,
    apply_measured_rates,
    find_hardware,
    read_known_hardware,
)
from hf_moe_ep.planner.options import (
    GIB,
    NO_WHOLE_LOGITS,
    NODE,
    STEP_NOT_COUNTED,
    WHOLE_LOGITS,
)

if TYPE_CHECKING:
    from hf_moe_ep.planner.search import Layout, LayoutRequest, PlannedLayout, SearchResult
    from hf_moe_ep.planner.seconds import StepTime

_BEST = 5
_OPTIONS = ("masters", "optimizer", "lora_rank", "lora_targets", "offload")
_SIZES = ("ep", "etp", "sp", "cp", "dp_replicate")
_POSITIVE = ("gpus", "gpu_memory", "seq", "batch", *_SIZES, "train_tokens")
# Accelerate sets up activation checkpointing while it shards a model, and refuses to do so for a
# model that is sharded already.
_FOR_SHARDED = (
    "  # For a model of hf_moe_ep.from_pretrained, which is sharded already, write false here and\n"
    "  # call model.gradient_checkpointing_enable() in the script."
)
# Without this setting FSDP2 keeps unsharded gradients until the last micro-batch.
_SYNC_EACH_BATCH = (
    "# With the Trainer, the plan needs accelerator_config=\n"
    "#   {'gradient_accumulation_kwargs': {'sync_each_batch': True}}"
)
# The names of the parts of `StepTime` in the output.
_PART_NAMES = {
    "matmul": "matrix products",
    "grouped": "experts",
    "memory": "operators that move bytes",
    "parameters": "all-gather of parameters",
    "gradients": "reduce-scatter of gradients",
    "rows": "all-to-all of tokens",
    "counts": "exchange of token counts",
    "sequence": "sequence and context parallelism",
    "numbers": "small all-reduces",
    "bubble": "wait for other stages",
    "stages": "hidden states between stages",
    "offload": "copies to the host",
    "on_host": "optimizer on the host",
    "host": "kernel launches of the host",
}


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "plan",
        description="List parallel layouts of a model that training accepts on N GPUs, with the "
        "peak memory of a whole step in each. Sizes that are not given are searched; an ep_size "
        "larger than a node must be given. Only the config is downloaded, and the step runs "
        "on tensors without memory, which takes minutes for a large model. With --gpu, the layouts "
        "are sorted by planned seconds per step. The seconds are computed from the speed of the "
        "GPU, not measured; trust their order more than their values.",
    )
    add_model_and_gpus(parser)
    add = parser.add_argument
    add(
        "--gpu",
        metavar="NAME",
        help=f"kind of GPU, to plan seconds as well: {', '.join(read_known_hardware())}",
    )
    add(
        "--calibrate",
        type=Path,
        metavar="FILE",
        help="JSON file of measured speeds, which replace the speeds of --gpu",
    )
    add(
        "--gpu-memory",
        type=float,
        metavar="GIB",
        help="memory of one GPU; default: the memory of --gpu",
    )
    add("--seq", type=int, metavar="S", help="tokens per sequence")
    add("--batch", type=int, metavar="B", help="sequences per optimizer step, summed over all GPUs")
    helps = {
        "ep": f"ep_size; default: powers of two up to {NODE}",
        "etp": "etp_size; default: 1, larger for a model with fewer experts than ranks",
        "sp": "sp_size; default: 1, larger if nothing fits",
        "cp": "cp_size; default: 1, larger if nothing fits with any sp_size",
        "dp_replicate": f"HSDP replicas; default: both 1 and one per {NODE} GPUs are tried",
    }
    add_sizes(parser, helps, default=None)
    add(
        "--pp-size",
        "--pp",
        dest="pp",
        type=int,
        nargs="+",
        default=[1],
        metavar="N",
        help="pp_size; several numbers are compared; default: 1",
    )
    add(
        "--compile-layers",
        action="store_true",
        help="compile the decoder layers (patch(model, compile_layers=True))",
    )
    add("--whole-logits", action="store_true", help=WHOLE_LOGITS)
    add(
        "--offload",
        action="store_true",
        help="keep parameters and optimizer state on the host",
    )
    add(
        "--train-tokens",
        type=float,
        metavar="N",
        help="tokens of the whole training, to print how many hours it takes (needs --gpu)",
    )
    add("--plot", type=Path, metavar="PNG", help="draw the memory of the best layout over a step")
    add(
        "--write",
        type=Path,
        metavar="FILE",
        help="write a config file of the best layout for accelerate launch",
    )
    add_training(parser)


def run(options: argparse.Namespace) -> int:
    """Print the layouts that fit and the layouts that do not; return 1 if no layout fits."""
    _check_nothing_is_missing(options)
    _check_options(options)
    hardware = _read_hardware(options)
    if options.gpu_memory is None:
        assert hardware is not None
        memory = {"gpu_memory": hardware.memory_bytes / GIB}
        options = argparse.Namespace(**(vars(options) | memory))
    extra = select_parallel_fields(vars(options))
    extra |= {"compile_layers": True} if options.compile_layers else {}
    import torch

    from hf_moe_ep.planner.search import LayoutRequest, find_layouts

    draw = None if options.plot is None else _import_draw_memory()
    progress = Progress("layout")
    request = LayoutRequest(
        model=options.model,
        gpus=options.gpus,
        limit=int(options.gpu_memory * GIB),
        seq=options.seq,
        batch=options.batch,
        **{name: getattr(options, name) for name in _SIZES},
        pp=tuple(dict.fromkeys(options.pp)),
        only_loss_is_read=not options.whole_logits,
        options={name: getattr(options, name) for name in _OPTIONS}
        | {"dtype": getattr(torch, options.dtype)},
        parallel=extra,
        hardware=hardware,
        on_plan=lambda layout: progress.finished(_describe(layout, extra)),
    )
    result = find_layouts(request)
    if options.json:
        print(json.dumps(as_json(result, request), indent=2))
    else:
        print("\n".join(_format_result(result, options, request)))
    if draw is not None:
        drawn = (result.fit or result.too_large)[0]
        title = f"{options.model}, {options.gpus} GPUs: {_describe(drawn.layout, extra)}"
        draw(drawn.step, options.plot, title=title, limit=request.limit)
    if not result.fit:
        return 1
    if options.write is not None:
        best = result.fit[0].layout
        text = format_launch_config(
            best,
            options.gpus,
            request.node,
            mixed_precision=_choose_mixed_precision(options),
            offload=options.offload,
            **extra,
        )
        options.write.write_text(text)
    return 0


def _check_nothing_is_missing(options: argparse.Namespace) -> None:
    """Raise one error that names all missing arguments."""
    needed = {"gpus": "--gpus N", "seq": "--seq S", "batch": "--batch B"}
    missing = [flag for name, flag in needed.items() if getattr(options, name) is None]
    if options.gpu is None and options.gpu_memory is None:
        missing.append(
            f"--gpu-memory GIB (or --gpu NAME, one of {', '.join(read_known_hardware())})"
        )
    if missing:
        raise ValueError(f"plan needs more arguments; add {', '.join(missing)}")


def _check_options(options: argparse.Namespace) -> None:
    """Raise an error if an option is wrong by itself or contradicts another option."""
    for name in _POSITIVE:
        value = getattr(options, name)
        if value is not None and not 0 < value < math.inf:
            size = "-size" if name in _SIZES else ""
            flag = "--" + name.replace("_", "-") + size
            finite = " and finite" if isinstance(value, float) else ""
            raise ValueError(f"{flag} ({value:g}) must be more than 0{finite}")
    if min(options.pp) < 1:
        raise ValueError(f"--pp-size ({min(options.pp)}) must be more than 0")
    check_adapters(options)
    for flag, file in (("--write", options.write), ("--plot", options.plot)):
        if file is not None and not file.absolute().parent.is_dir():
            raise ValueError(f"{flag} {file}: the folder {file.absolute().parent} does not exist")


def _import_draw_memory() -> Callable[..., None]:
    """Import the function that draws a plan. Without matplotlib, raise an error before planning."""
    try:
        from hf_moe_ep.planner.plot import draw_memory
    except ImportError as error:
        raise ValueError(f"--plot: {error}") from error
    return draw_memory


def _describe(layout: Layout, extra: dict[str, Any]) -> str:
    layers = "twice" if layout.checkpointing else "once"
    return (
        f"{layout.format_patch_line(**extra)}, {layout.per_forward} x {layout.accumulated} "
        f"sequences, layers run {layers}"
    )


def _read_hardware(options: argparse.Namespace) -> Hardware | None:
    if options.gpu is None:
        for flag in ("calibrate", "train_tokens"):
            if getattr(options, flag) is not None:
                raise ValueError(
                    f"--{flag.replace('_', '-')} has no effect without --gpu; add --gpu NAME, "
                    f"one of {', '.join(read_known_hardware())}"
                )
        return None
    hardware = find_hardware(options.gpu)
    if options.calibrate is None:
        return hardware
    if not options.calibrate.is_file():
        raise ValueError(f"--calibrate {options.calibrate} is not a file")
    return apply_measured_rates(hardware, options.calibrate)


def as_json(result: SearchResult, request: LayoutRequest) -> dict[str, Any]:
    """Return the result of a search as plain data, with sizes in bytes."""

    def to_plain(planned: PlannedLayout) -> dict[str, Any]:
        step = planned.step
        plain = {"layout": asdict(planned.layout), "step": step.as_json(), "left": planned.left}
        plain |= {"peak": step.peak, "why": _explain_rank(planned, result, request)}
        if planned.layout.pp > 1:
            plain |= {"bubble": planned.bubble, "sent_between_stages": planned.sent}
        return plain if planned.time is None else plain | {"time": asdict(planned.time)}

    return {
        "hardware": None if request.hardware is None else asdict(request.hardware),
        "fit": [to_plain(planned) for planned in result.fit],
        "too_large": [to_plain(planned) for planned in result.too_large],
        "illegal": [asdict(layout) | {"reason": why} for layout, why in result.illegal.items()],
    }


def _choose_mixed_precision(options: argparse.Namespace) -> str:
    """Return Accelerate's mixed_precision for the planned dtypes."""
    if options.masters != "fp32":
        return "no"
    return {"bfloat16": "bf16", "float16": "fp16"}.get(options.dtype, "no")


def format_launch_config(
    layout: Layout,
    gpus: int,
    node: int = NODE,
    *,
    mixed_precision: str = "bf16",
    offload: bool = False,
    **extra: Any,
) -> str:
    """Return a config file for `accelerate launch --config_file`, for one layout.

    Args:
        node: GPUs per node.
        mixed_precision: the value in the file; "no" trains the weights in the dtype of the model.
        offload: keep parameters on the host.
        extra: further arguments of `patch`.
    """
    machines = -(-gpus // node)
    multi_node_lines = [
        f"# {machines} machines of {node}: add --machine_rank and --main_process_ip on each",
        "rdzv_backend: static",
        "same_network: true",
        "main_process_port: 29500",
    ]
    return "\n".join(
        [
            f"# {layout.format_patch_line(**extra)}",
            f"# sequences per forward of a data rank: {layout.per_forward}, "
            f"gradient_accumulation_steps: {layout.accumulated}",
            *[_SYNC_EACH_BATCH] * (layout.accumulated > 1),
            *(multi_node_lines if machines > 1 else ["main_process_port: 0"]),
            "compute_environment: LOCAL_MACHINE",
            "distributed_type: FSDP",
            f"mixed_precision: '{mixed_precision}'",  # YAML reads no without quotes as False
            f"num_machines: {machines}",
            "machine_rank: 0",
            f"num_processes: {gpus}",
            "fsdp_config:",
            "  fsdp_version: 2",
            "  fsdp_state_dict_type: SHARDED_STATE_DICT",
            "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP",
            "  fsdp_reshard_after_forward: true",
            *[_FOR_SHARDED] * layout.checkpointing,
            f"  fsdp_activation_checkpointing: {str(layout.checkpointing).lower()}",
            *["  fsdp_offload_params: true"] * offload,
            "",
        ]
    )


def _format_result(
    result: SearchResult, options: argparse.Namespace, request: LayoutRequest
) -> list[str]:
    shown = [*result.fit[:_BEST], *result.too_large[:_BEST]]
    lines = [
        f"{options.model} on {options.gpus} GPUs of {options.gpu_memory:.4g} GiB, {options.batch} "
        f"sequences of {options.seq} tokens per step",
        "",
        *_format_table(shown, result, request),
        "",
    ]
    lines += _format_search_notes(shown, result, request, with_host=options.offload)
    if not result.fit:
        offload = "" if options.offload else ", or add --offload"
        return [
            *lines,
            "",
            f"No layout fits. Let `hf-moe-ep memory ... --gpu-memory GIB` list options that "
            f"help{offload}.",
            *_format_needed_gpus(result, options.gpus, request.limit),
        ]
    best = result.fit[0]
    lines += ["", f"Best layout: {best.layout.format_patch_line(**request.parallel)}"]
    if request.only_loss_is_read:
        lines.append(NO_WHOLE_LOGITS)
    if best.layout.pp > 1 and request.hardware is not None:
        lines.append(_format_stage_note(best, request.model, request.hardware))
    if best.layout.cp > 1:
        lines += _format_context_note(best.layout, request)
    if options.fsdp_double_buffer:
        lines.append(_format_buffer_note(best.layout, request))
    if best.time is not None:
        lines.append(f"Parts of its step: {_format_shares(best.time)}")
    if best.time is not None and options.train_tokens is not None:
        rate = best.time.tokens_per_second_per_gpu * options.gpus
        hours = options.train_tokens / rate / 3600
        lines.append(f"{options.train_tokens:g} tokens at {rate:.4g} tokens/s: {hours:.1f} hours")
    return lines


def _format_table(
    shown: list[PlannedLayout], result: SearchResult, request: LayoutRequest
) -> list[str]:
    """Return the table of the layouts in `shown`, and the legend of its columns."""
    with_cp = any(planned.layout.cp > 1 for planned in shown)
    with_stages = max(request.pp) > 1
    cells = [_make_cells(planned, with_cp=with_cp, with_stages=with_stages) for planned in shown]
    rows = [list(cells[0]), *(list(by_name.values()) for by_name in cells)]
    widths = [max(map(len, column)) + 2 for column in zip(*rows, strict=True)]
    lines = []
    reasons = ["", *(_explain_rank(planned, result, request) for planned in shown)]
    for row, why in zip(rows, reasons, strict=True):
        line = "".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        lines.append(f"{line}   {why}".rstrip())
    return [*lines, "", *_format_legend(rows[0])]


def _format_search_notes(
    shown: list[PlannedLayout], result: SearchResult, request: LayoutRequest, *, with_host: bool
) -> list[str]:
    """Return notes: which layouts are not in the table, and how the numbers were computed."""
    lines = []
    more_fit = len(result.fit) - _BEST
    if more_fit > 0:
        lines.append(f"{more_fit} more layouts fit and come after the first {_BEST}")
    if result.illegal:
        why = next(iter(result.illegal.values()))
        lines.append(
            f"training would refuse {len(result.illegal)} layouts, the first with the error: {why}"
        )
    lines.append(f"memory that is not counted: {', '.join(STEP_NOT_COUNTED)}")
    if request.hardware is None:
        lines += [
            "Add --gpu NAME to plan seconds as well.",
            "Layouts without activation checkpointing come first, then those with more sequences "
            "per forward, then those with more GiB left.",
        ]
    else:
        lines += _format_rate_notes(request.hardware)
    if with_host:
        node_peak = max(planned.step.host_peak for planned in shown) * request.node / GIB
        lines.append(
            f"on the host of each GPU: parameters, gradients, optimizer state; up to "
            f"{node_peak:,.1f} GiB per node"
        )
    return lines


def _format_needed_gpus(result: SearchResult, gpus: int, limit: int) -> list[str]:
    """Format a line about the number of GPUs that can hold the sharded state.

    Return no line if the given GPUs can hold it.
    """
    sharded = [planned for planned in result.too_large if planned.layout.dp_replicate == 1]
    held = sharded[0].step.held if sharded else 0
    enough = gpus
    while held * gpus / enough >= limit:
        enough *= 2
    if enough == gpus:
        return []
    return [
        f"Parameters, gradients and optimizer state take {held / GIB:,.1f} GiB on each of {gpus} "
        f"GPUs; on {enough} GPUs they would take {held * gpus / enough / GIB:,.1f} GiB."
    ]


def _format_context_note(layout: Layout, request: LayoutRequest) -> list[str]:
    """Format a line about the keys and values that cp ranks exchange. Return no line if unknown."""
    from hf_moe_ep.planner.search import count_received_bytes

    received = count_received_bytes(layout, request)
    if received is None:
        return []
    return [
        f"Keys and values by cp_size {layout.cp}: a GPU receives up to {received / 2**20:,.1f} MiB "
        f"per layer in a forward; attention hides up to three quarters of this transfer (half with "
        f"2 heads of keys, nothing of latents), and with attn_implementation='flex_attention' more"
    ]


def _format_buffer_note(layout: Layout, request: LayoutRequest) -> str:
    """Format a line about the fixed buffers of FSDP2 units."""
    from hf_moe_ep.planner.search import count_fixed_buffer_bytes

    held = count_fixed_buffer_bytes(layout, request)
    return (
        f"Fixed buffers (fsdp_double_buffer): a GPU holds {held / 2**20:,.1f} MiB of them between "
        f"steps, as a part of its peak; with nccl_ub=True they are memory of NCCL's allocator"
    )


def _format_stage_note(planned: PlannedLayout, model: Any, hardware: Hardware) -> str:
    """Format a line about the layers per stage with which all stages take equally long."""
    from hf_moe_ep.planner.config import find_config
    from hf_moe_ep.planner.stages import balance_stage_layers
    from hf_moe_ep.upstream.models import text_config

    num_layers = text_config(find_config(model)).num_hidden_layers
    layers = balance_stage_layers(planned.step, hardware, num_layers, planned.layout.pp)
    return (
        f"The last stage also computes the head. With pp_layers={layers} all stages take about "
        f"equally long; the seconds above are for stages with equal numbers of layers."
    )


def _format_shares(time: StepTime) -> str:
    """Format the share of each part in the time of a step, the largest first."""
    parts = sorted(time.parts.items(), key=lambda item: -item[1])
    shares = [(part, f"{seconds / time.seconds:.0%}") for part, seconds in parts]
    return ", ".join(f"{_PART_NAMES.get(part, part)} {share}" for part, share in shares)


# Explanations of the table's columns.
_LEGEND = {
    "stages": "pp_size: groups of ranks that hold some of the layers each",
    "bubble": "share of the step in which a stage waits for other stages",
    "sent, MiB": "hidden states and gradients that a rank sends to other stages in a step",
    "ep": "ep_size: ranks over which the experts are split; x etp: ranks that share each expert",
    "sp": "sp_size: ranks over which a sequence is split",
    "cp": "cp_size: groups of sp_size ranks over which a sequence is split in attention as well",
    "replicas": "dp_replicate_size: copies of the sharded model (HSDP)",
    "chunks": "dispatch_chunks: parts of a batch that are sent to the experts one by one",
    "sequences": "sequences per forward pass of a data rank x forward passes per optimizer step",
    "layers run": "twice: with activation checkpointing, which runs each layer again in backward",
    "peak, GiB": "largest memory of one GPU during a step",
    "left, GiB": "memory of the GPU that is left at the peak",
    "host, GiB": "largest memory of one process on the host during a step",
    "s/step": "planned seconds of an optimizer step",
    "exposed": "share of the step in which a GPU waits for communication",
}


def _format_legend(names: list[str]) -> list[str]:
    width = max(map(len, _LEGEND)) + 2
    return [f"  {name:<{width}}{_LEGEND[name]}" for name in names if name in _LEGEND]


def _format_rate_notes(hardware: Hardware) -> list[str]:
    assumed = [name for name, source in hardware.sources.items() if source.startswith(ASSUMED)]
    measured = [name for name, source in hardware.sources.items() if source.startswith("measured")]
    return [
        f"Seconds are computed from the speed of {hardware.name}, not measured. All experts "
        "have equal loads.",
        f"measured: {', '.join(measured) or 'nothing'}",
        f"assumed: {', '.join(assumed) or 'nothing'}; all other speeds are published",
    ]


def _make_cells(planned: PlannedLayout, *, with_cp: bool, with_stages: bool) -> dict[str, str]:
    """Return the table cells of a layout by the names of their columns."""
    from hf_moe_ep.planner.work import PURPOSES

    layout, time = planned.layout, planned.time
    cells: dict[str, str] = {}
    if with_stages:
        cells |= {"stages": f"{layout.pp}", "bubble": f"{planned.bubble:.1%}"}
        cells["sent, MiB"] = f"{planned.sent / 2**20:.1f}"
    etp = "" if layout.etp == 1 else f" x etp {layout.etp}"
    cells["ep"] = f"{layout.ep}{etp}" + " by node" * (layout.node_size is not None)
    cells["sp"] = str(layout.sp)
    if with_cp:
        cells["cp"] = str(layout.cp)
    cells |= {"replicas": str(layout.dp_replicate), "chunks": str(layout.chunks)}
    cells["sequences"] = f"{layout.per_forward} x {layout.accumulated}"
    cells["layers run"] = "twice" if layout.checkpointing else "once"
    cells["peak, GiB"] = f"{planned.step.peak / GIB:.3f}"
    cells["left, GiB"] = f"{planned.left / GIB:.3f}"
    if planned.step.host_peak:
        cells["host, GiB"] = f"{planned.step.host_peak / GIB:.3f}"
    if time is not None:
        exposed = sum(time.parts.get(purpose, 0.0) for purpose in PURPOSES) / time.seconds
        cells["s/step"] = f"{time.seconds:.4g}"
        cells["tokens/s/GPU"] = f"{time.tokens_per_second_per_gpu:.4g}"
        cells["exposed"] = f"{exposed:.0%}"
    return cells


def _explain_rank(planned: PlannedLayout, result: SearchResult, request: LayoutRequest) -> str:
    """Explain why a layout is not the best: memory is missing, or a part of the step is slower."""
    from hf_moe_ep.planner.work import PURPOSES

    if planned.left < 0:
        return f"does not fit by {-planned.left / GIB:.1f} GiB"
    best, time = result.fit[0], planned.time
    if planned is best or time is None or best.time is None:
        return ""
    longer = {
        part: seconds - best.time.parts.get(part, 0.0) for part, seconds in time.parts.items()
    }
    part = max(longer, key=longer.__getitem__)
    slower = time.seconds / best.time.seconds - 1
    if longer[part] <= 0:
        return "as fast"
    assert request.hardware is not None
    crosses = part in PURPOSES and planned.step.work.sent(part, request.hardware.node_size)[1] > 0
    return f"{slower:.1%} slower: {_PART_NAMES.get(part, part)}{' between nodes' * crosses}"
