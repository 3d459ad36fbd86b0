"""List the values that options of a plan may have, and read the configs that need no network.

This module needs no torch, so that `hf-moe-ep plan --help` does not wait for torch.
"""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

LORA_TARGETS = ("experts", "attention", "both")
MASTERS = ("fp32", "model")
# The state that each optimizer keeps per trained parameter: (tensors of the parameter's size,
# scalars of 4 bytes).
OPTIMIZERS = {"adamw": (2, 1), "adamw_fused": (2, 1), "sgd": (1, 0), "none": (0, 0)}
# The help of --whole-logits, and a note that is printed for plans without this option.
WHOLE_LOGITS = (
    "hold the logits of whole batches, as with label smoothing, a loss of your own, or a loop of "
    "your own without patch(model, fused_loss=True)"
)
NO_WHOLE_LOGITS = (
    "The loss is computed without whole logits where the model allows it, as the Trainer does by "
    "default; in a loop of your own add fused_loss=True to patch, or plan with --whole-logits."
)
# Bytes of a GiB.
GIB = 2**30
# GPUs per node. By default, ep and sp groups stay inside a node, and a replica (HSDP) has the GPUs
# of one node or of all nodes.
NODE = 8

# Memory that a plan of the memory between steps leaves out, and memory that a plan of a whole step
# leaves out.
NOT_COUNTED = (
    "activations",
    "buffers of the model",
    "FSDP2's copies while it gathers a unit",
    "communication buffers",
    "the CUDA context",
    "memory that the allocator reserves but does not hand out",
)
STEP_NOT_COUNTED = (
    "workspace of kernels and communication libraries",
    "the CUDA context",
    "memory that the allocator reserves but does not hand out",
    "pictures and sound",
)


def read_published_configs() -> dict[str, dict[str, Any]]:
    """Read the stored configs: {hub id: {"source": web page, "config": fields of the config}}."""
    text = (
        resources.files("hf_moe_ep.planner")
        .joinpath("published_models.json")
        .read_text(encoding="utf-8")
    )
    return json.loads(text)
