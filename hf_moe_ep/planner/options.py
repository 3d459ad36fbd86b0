"""The values that options of a plan may have, and the models that are known without a network.

This module needs no torch, so that `hf-moe-ep plan --help` answers at once.
"""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

LORA_TARGETS = ("experts", "attention", "both")
MASTERS = ("fp32", "model")
# Optimizer -> (tensors of the parameter's size, scalars of 4 bytes) per trained parameter.
OPTIMIZERS = {"adamw": (2, 1), "adamw_fused": (2, 1), "sgd": (1, 0), "none": (0, 0)}
# The help of --whole-logits, and a note on plans without this option.
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

# Memory that is in no plan of what a rank holds between steps, and in no plan of a step.
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


def published_configs() -> dict[str, dict[str, Any]]:
    """Return the stored configs: {hub id: {"source": web page, "config": fields of the config}}."""
    text = (
        resources.files("hf_moe_ep.planner")
        .joinpath("published_models.json")
        .read_text(encoding="utf-8")
    )
    return json.loads(text)
