"""`hf-moe-ep plan`: which layouts of a model fit on some GPUs, and how to launch them.

    hf-moe-ep plan Qwen3-30B-shape --gpus 16 --gpu-memory 80 --seq 4096 --batch 64 --write fsdp.yaml

Memory is planned as `hf-moe-ep inspect --plan ... --seq` does; seconds are not.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hf_moe_ep.ops.quantised import KINDS
from hf_moe_ep.tools.layouts import NODE, Asked, Found, Layout, Planned, find_layouts
from hf_moe_ep.tools.memory_plan import OPTIMIZERS
from hf_moe_ep.tools.published_models import LORA_TARGETS, known_shapes
from hf_moe_ep.tools.step_plan import NOT_COUNTED

_BEST = 5
_GIB = 2**30
_DEFAULT = "default: %(default)s"


def add_parser(subparsers: Any) -> None:
    """Add the command to those of `cli.py`."""
    parser = subparsers.add_parser(
        "plan",
        help="which layouts of a model fit on so many GPUs",
        description="Try layouts of a model on some GPUs: which of them training would accept, and "
        "how much memory a whole step takes in each. Nothing is downloaded and nothing runs but "
        "the model's own step on tensors without memory. How fast a layout is it does not say.",
    )
    add = parser.add_argument
    shapes = ", ".join(known_shapes())
    add("shape", help=f"a folder, a config.json, or one of {shapes}")
    add("--gpus", type=int, required=True, metavar="N", help="one process each")
    add("--gpu-memory", type=float, required=True, metavar="GIB", help="of one GPU")
    add("--seq", type=int, required=True, metavar="S", help="tokens of a sequence")
    add("--batch", type=int, required=True, metavar="B", help="sequences of a step, of all GPUs")
    add("--ep", type=int, metavar="N", help=f"ep_size; default: powers of two up to {NODE}")
    add("--sp", type=int, metavar="N", help="sp_size; default: 1, more where nothing fits")
    add("--dp-replicate", type=int, metavar="N", help=f"default: 1, and one for {NODE} GPUs")
    add("--lora-rank", type=int, metavar="R", help="train adapters alone")
    add("--lora-targets", choices=LORA_TARGETS, default="both", help=_DEFAULT)
    add("--experts-dtype", choices=KINDS, help="hold frozen experts as bytes, under LoRA")
    add("--optimizer", choices=OPTIMIZERS, default="adamw", help=_DEFAULT)
    add("--write", type=Path, metavar="FILE", help="of the first one, for accelerate launch")
    add("--json", action="store_true", help="for programs; sizes in bytes")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the layouts that fit and those that do not; 1 where none fits.

    Raises:
        ValueError: wrong arguments; no layout that training would accept.
    """
    for name in ("gpus", "gpu_memory", "seq", "batch"):
        if not getattr(options, name) > 0:
            flag = "--" + name.replace("_", "-")
            raise ValueError(f"{flag} ({getattr(options, name):g}) must be more than 0")
    if options.experts_dtype is not None and options.lora_rank is None:
        raise ValueError(
            f"--experts-dtype {options.experts_dtype} holds frozen experts, and full weights are "
            f"planned; add --lora-rank 16, or leave it out"
        )
    more = {} if options.experts_dtype is None else {"experts_dtype": options.experts_dtype}
    found = find_layouts(
        Asked(
            options.shape,
            options.gpus,
            int(options.gpu_memory * _GIB),
            options.seq,
            options.batch,
            options.ep,
            options.sp,
            options.dp_replicate,
            {name: getattr(options, name) for name in ("optimizer", "lora_rank", "lora_targets")},
            more,
        )
    )
    if options.json:
        print(json.dumps(as_json(found), indent=2))
    else:
        print("\n".join(_lines(found, options, more)))
    if not found.fit:
        return 1
    if options.write is not None:
        options.write.write_text(launch_config(found.fit[0].layout, options.gpus, **more))
    return 0


def as_json(found: Found) -> dict[str, Any]:
    """Turn what was found into plain data."""

    def plain(one: Planned) -> dict[str, Any]:
        plain = {"layout": asdict(one.layout), "step": one.step.as_json(), "left": one.left}
        return plain | {"peak": one.step.peak}

    return {
        "fit": [plain(one) for one in found.fit],
        "too_large": [plain(one) for one in found.too_large],
        "illegal": [asdict(layout) | {"reason": why} for layout, why in found.illegal.items()],
    }


def launch_config(layout: Layout, gpus: int, **more: Any) -> str:
    """Write what `accelerate launch --config_file` takes for such a layout.

    `more` is what `patch` is given beside its sizes.
    """
    machines = -(-gpus // NODE)
    several = [
        f"# {machines} machines of {NODE}: add --machine_rank and --main_process_ip on each",
        "rdzv_backend: static",
        "same_network: true",
        "main_process_port: 29500",
    ]
    return "\n".join(
        [
            f"# {layout.patch_line(**more)}",
            f"# {layout.per_forward} sequences per forward of a data rank, "
            f"gradient_accumulation_steps {layout.accumulated}",
            *(several if machines > 1 else ["main_process_port: 0"]),
            "compute_environment: LOCAL_MACHINE",
            "distributed_type: FSDP",
            "mixed_precision: bf16",
            f"num_machines: {machines}",
            "machine_rank: 0",
            f"num_processes: {gpus}",
            "fsdp_config:",
            "  fsdp_version: 2",
            "  fsdp_state_dict_type: SHARDED_STATE_DICT",
            "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP",
            "  fsdp_reshard_after_forward: true",
            f"  fsdp_activation_checkpointing: {str(layout.checkpointing).lower()}",
            "",
        ]
    )


def _lines(found: Found, options: argparse.Namespace, more: dict[str, Any]) -> list[str]:
    heading = (
        f"{options.shape} on {options.gpus} GPUs of {options.gpu_memory:g} GiB, {options.batch} "
        f"sequences of {options.seq} tokens a step"
    )
    rows: list[tuple[str, ...]] = [
        ("ep", "sp", "replicas", "sequences", "layers run", "peak, GiB", "left, GiB")
    ]
    shown = [*found.fit[:_BEST], *found.too_large[:_BEST]]
    rows += [_row(one) for one in shown]
    table = ["".join(f"{cell:>12}" for cell in row) for row in rows]
    lines = [heading, "", *table, ""]
    more_fit = len(found.fit) - _BEST
    if more_fit > 0:
        lines.append(f"{more_fit} more fit, and are behind the first {_BEST}")
    if found.illegal:
        why = next(iter(found.illegal.values()))
        lines.append(f"{len(found.illegal)} would be refused, the first one because: {why}")
    lines += [
        f"not counted: {', '.join(NOT_COUNTED)}; seconds are not planned.",
        "Order: layers run once before twice, more sequences at a time, then by what is left.",
    ]
    if found.fit:
        lines += ["", f"the first one: {found.fit[0].layout.patch_line(**more)}"]
    else:
        lines += ["", "none fits; `hf-moe-ep inspect --plan ... --memory` says what would help"]
    return lines


def _row(one: Planned) -> tuple[str, ...]:
    layout = one.layout
    return (
        *(str(size) for size in layout.sizes().values()),
        f"{layout.per_forward} x {layout.accumulated}",
        "twice" if layout.checkpointing else "once",
        f"{one.step.peak / _GIB:.3f}",
        f"{one.left / _GIB:.3f}",
    )
