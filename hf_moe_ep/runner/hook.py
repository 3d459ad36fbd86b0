"""Patch each model that transformers returns in a Python process of `hf-moe-ep run`.

`path/sitecustomize.py` calls `install` when transformers.modeling_utils is imported. From then on,
from_pretrained and from_config of auto classes and of models return patched models, unless

    the model has no experts                 a warning says so once
    the model is a part of another model     the call comes from the constructor of that model, or
                                             from another call of from_pretrained
    an inference engine builds the model     such as a worker of vLLM
    a program quantises the model            such as llm-compressor or GPTQModel
    hf_moe_ep builds the model               in its own from_pretrained or in its planner

Rank 0 prints one line for each patched model to stderr. Every process that imports transformers
imports this module, so it imports the rest of this package only when the first model is built.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import fields
from types import FrameType
from typing import Any

from hf_moe_ep.config import (
    ParallelConfig,
    RunOptions,
    environment,
    get_variable,
    read_environment_settings,
)
from hf_moe_ep.upstream.wrap import Feature, Wrap, find_owner, wrap_process

_COMMAND = "hf-moe-ep run"
_logger = logging.getLogger("hf_moe_ep.runner")
# Packages that build transformers' models for inference or to quantise them, and the module through
# which hf_moe_ep builds models without values.
_ENGINES = ("vllm", "sglang", "lmdeploy")
_QUANTISERS = ("llmcompressor", "gptqmodel", "auto_gptq", "awq", "auto_round", "modelopt")
_NOT_PATCHED_IN = (*_ENGINES, *_QUANTISERS, "hf_moe_ep.upstream.hub")
# True while from_pretrained or from_config runs.
_is_building: ContextVar[bool] = ContextVar("_is_building", default=False)


def install() -> None:
    """Wrap from_pretrained and from_config of all models of transformers.

    Raises:
        ImportError: the installed transformers lacks one of these functions.
    """
    for row in LOADERS:
        find_owner(row)
    wrap_process(LOADERS)


def load(original: Callable[..., Any], cls: type, *args: Any, **kwargs: Any) -> Any:
    """Wrap `PreTrainedModel.from_pretrained`: patch a MoE model, and read few of its weights.

    Raises:
        ValueError: the model cannot be patched with these settings. No weight has been read yet.
    """
    if not _is_top_level():
        return original(cls, *args, **kwargs)
    from hf_moe_ep.upstream.loading import choose_before_loading

    config, options = _read_settings()
    loads: list[Any] = []  # stays empty for a model without experts

    def choose(model: Any, weights: Any) -> Any:
        if not _is_moe(model):
            return None
        _warn_of_old_versions()
        loads.append(_start_load(config, options))
        return loads[0].choose(model, weights)

    with _building(), choose_before_loading(choose):
        result = original(cls, *args, **kwargs)
    # With output_loading_info=True, the result is the model and a report.
    model = result[0] if isinstance(result, tuple) else result
    if _has_experts_or_warn(model):
        _patch(model, loads[0] if loads else _start_load(config, options))
    return result


def build(original: Callable[..., Any], cls: type, *args: Any, **kwargs: Any) -> Any:
    """Wrap `PreTrainedModel._from_config`: patch a MoE model that is created from a config."""
    if not _is_top_level():
        return original(cls, *args, **kwargs)
    config, options = _read_settings()
    with _building():
        model = original(cls, *args, **kwargs)
    if _has_experts_or_warn(model):
        _patch(model, _start_load(config, options))
    return model


_FEATURE = Feature(_COMMAND)
# Only `hf-moe-ep run` installs these wrappers, for the whole process.
LOADERS = (
    Wrap("transformers.modeling_utils:PreTrainedModel.from_pretrained", load, _FEATURE),
    Wrap("transformers.modeling_utils:PreTrainedModel._from_config", build, _FEATURE),
)


@contextmanager
def _building() -> Iterator[None]:
    token = _is_building.set(True)
    try:
        yield
    finally:
        _is_building.reset(token)


def _is_top_level() -> bool:
    """Return False for a call from a part of a model or from a package in _NOT_PATCHED_IN."""
    if _is_building.get():
        return False
    model_class = sys.modules["transformers.modeling_utils"].PreTrainedModel
    frame: FrameType | None = inspect.currentframe()
    while frame is not None:
        name = f"{frame.f_globals.get('__name__')}."
        if name.startswith(tuple(f"{package}." for package in _NOT_PATCHED_IN)):
            return False
        is_constructor = frame.f_code.co_name == "__init__"
        if is_constructor and isinstance(frame.f_locals.get("self"), model_class):
            return False
        frame = frame.f_back
    return True


def _read_settings() -> tuple[ParallelConfig, RunOptions]:
    return read_environment_settings(ParallelConfig), read_environment_settings(RunOptions)


def _start_load(config: ParallelConfig, options: RunOptions) -> Any:
    # This module imports most of the package, so it is imported for models with experts only.
    from hf_moe_ep.runner.load import Load

    return Load(config, options)


def _has_experts_or_warn(model: Any) -> bool:
    """Return True if a model has experts; otherwise warn once on rank 0 that it is not patched."""
    from hf_moe_ep.ranks.all_ranks import get_rank_of_launch

    _show_log()
    has_experts = _is_moe(model)
    if not has_experts and get_rank_of_launch() == 0:
        _warn_once(f"warning: {type(model).__name__} has no experts, so it is not patched")
    return has_experts


def _patch(model: Any, this_load: Any) -> None:
    """Patch a model that has experts, and log on rank 0 what was done."""
    from hf_moe_ep.ranks.all_ranks import get_rank_of_launch

    _warn_of_old_versions()
    state = this_load.patch(model)
    how = ""
    if this_load.unread is not None:
        how = f"; sharding will read its layers from {this_load.unread.folder}"
    elif this_load.why_stock:
        how = f"; every process has read the whole model: {this_load.why_stock}"
    if get_rank_of_launch() == 0:
        _logger.info(
            "patched %s (%s): %d MoE layers of %d experts%s",
            type(model).__name__,
            _format_given_options(),
            len(state.moe_layers),
            state.num_experts,
            how,
        )


def _is_moe(model: Any) -> bool:
    from hf_moe_ep.architectures import find_block
    from hf_moe_ep.derive import has_experts

    return has_experts(model) or find_block(model) is not None


def _warn_of_old_versions() -> None:
    """Warn on rank 0 of old packages, before the checks and the patch, which may fail with them."""
    from hf_moe_ep.ranks.all_ranks import get_rank_of_launch
    from hf_moe_ep.upstream.frameworks import describe_version_problem
    from hf_moe_ep.upstream.requirements import list_version_problems

    _show_log()
    if get_rank_of_launch() == 0:
        for problem in (describe_version_problem(), *list_version_problems()):
            if problem:
                _warn_once(f"warning: {problem}")


@functools.cache
def _warn_once(sentence: str) -> None:
    _logger.warning(sentence)


def _format_given_options() -> str:
    """Return the settings of this run as options of the command."""
    from hf_moe_ep.runner.options import format_option

    before = environment()
    given = [
        (field, before.get(get_variable(field.name), "").strip())
        for kind in (ParallelConfig, RunOptions)
        for field in fields(kind)
    ]
    words = [format_option(field, text) for field, text in given if text]
    return " ".join(words) or "no options"


def _show_log() -> None:
    """Print the log of this command to stderr, even if the trainer drops other logs.

    axolotl sets a logger class that drops messages of other packages below WARNING
    (axolotl/logging_config.py), and logging.config disables loggers that a configuration omits.
    """
    _logger.filters.clear()
    _logger.disabled = False
    if any(handler.name == _COMMAND for handler in _logger.handlers):
        return
    handler = logging.StreamHandler()
    handler.name = _COMMAND
    handler.setFormatter(logging.Formatter(f"{_COMMAND}: %(message)s"))
    _logger.addHandler(handler)
    _logger.setLevel(logging.INFO)
    _logger.propagate = False
