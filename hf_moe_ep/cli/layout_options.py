"""Add and check the options that `hf-moe-ep memory` and `hf-moe-ep plan` share."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from hf_moe_ep.config import EXPERTS_DTYPES
from hf_moe_ep.planner.options import LORA_TARGETS, MASTERS, OPTIMIZERS, read_published_configs

DEFAULT = "default: %(default)s"
# The options of `add_training` that are fields of ParallelConfig.
_PARALLEL_FIELDS = (
    "experts_dtype",
    "mtp_layers",
    "fsdp_double_buffer",
    "experts_double_quant",
)
_DTYPES = ("bfloat16", "float16", "float32", "float64")


def add_model_and_gpus(parser: argparse.ArgumentParser) -> None:
    models = ", ".join(read_published_configs())
    parser.add_argument(
        "model", help=f"folder, config.json or hub name; these names need no download: {models}"
    )
    parser.add_argument(
        "--gpus", type=int, metavar="N", help="number of GPUs; one process runs on each"
    )


def add_sizes(
    parser: argparse.ArgumentParser, helps: Mapping[str, str], default: int | None
) -> None:
    """Add an option for each key of `helps`: for "ep", `--ep-size` and its short form `--ep`."""
    for name, text in helps.items():
        short = f"--{name.replace('_', '-')}"
        parser.add_argument(
            f"{short}-size",
            short,
            dest=name,
            type=int,
            default=default,
            metavar="N",
            help=text,
        )


def add_training(parser: argparse.ArgumentParser) -> None:
    """Add the options that determine what is trained, and `--json`."""
    add = parser.add_argument
    add("--dtype", choices=_DTYPES, default="bfloat16", help=f"dtype of the model; {DEFAULT}")
    add("--masters", choices=MASTERS, default="fp32", help=f"dtype of trained weights; {DEFAULT}")
    add("--lora-rank", type=int, metavar="R", help="train only LoRA adapters of rank R")
    add("--lora-targets", choices=LORA_TARGETS, default="both", help=f"LoRA layers; {DEFAULT}")
    add("--experts-dtype", choices=EXPERTS_DTYPES, help="quantise the frozen experts (LoRA only)")
    add(
        "--experts-double-quant",
        "--double-quant",
        action="store_true",
        help="quantise the NF4 scales as well",
    )
    optimizer = f"optimizer; adamw (foreach) needs temporaries, adamw_fused does not; {DEFAULT}"
    add("--optimizer", choices=OPTIMIZERS, default="adamw_fused", help=optimizer)
    add(
        "--mtp-layers",
        type=int,
        default=0,
        metavar="N",
        help="train N layers of the head for multi-token prediction (patch(model, mtp_layers=N))",
    )
    add(
        "--fsdp-double-buffer",
        action="store_true",
        help="gather and reduce in fixed buffers (patch(model, fsdp_double_buffer=True))",
    )
    add("--json", action="store_true", help="print JSON, with sizes in bytes")


def select_parallel_fields(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given options of `add_training` that are fields of ParallelConfig."""
    return {name: options[name] for name in _PARALLEL_FIELDS if options[name]}


def check_adapters(options: argparse.Namespace) -> None:
    """Raise ValueError if an option that needs LoRA is given without it."""
    if options.lora_rank is not None:
        return
    if options.lora_targets != "both":
        raise ValueError(
            f"--lora-targets {options.lora_targets} chooses the layers of adapters, and this plan "
            f"trains all weights; add --lora-rank 16"
        )
    if options.experts_dtype is not None:
        raise ValueError(
            f"--experts-dtype {options.experts_dtype} quantises frozen experts, and this plan "
            f"trains all weights; add --lora-rank 16, or leave --experts-dtype out"
        )
