"""Which plan fits a model: the packages of `model_patches`, by `config.model_type`."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

from torch import nn

import model_patches
from hf_moe_ep.plan import ModelPlan
from hf_moe_ep.upstream.models import text_config


def known_architectures() -> list[str]:
    """The `model_type` of every architecture that `patch` knows."""
    return sorted(module.name for module in pkgutil.iter_modules(model_patches.__path__))


def find_plan(model: nn.Module) -> tuple[ModelPlan, Any]:
    """What is declared about a model's architecture, and its text config."""
    model_config = getattr(model, "config", None)
    model_type = getattr(model_config, "model_type", None)
    if model_type not in known_architectures():
        raise ValueError(
            f"unknown architecture {model_type!r} ({type(model).__name__}); "
            f"known are: {', '.join(known_architectures())}"
        )
    plan = importlib.import_module(f"model_patches.{model_type}").PLAN
    return plan, text_config(model_config)
