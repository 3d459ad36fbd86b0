"""Folders and files of the Hugging Face hub: where they are, what model they describe.

transformers/modeling_utils.py, transformers/utils/logging.py; huggingface_hub and Accelerate are
used by their public names.
"""

from __future__ import annotations

import glob
import json
import os
import re
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as DeadlinePassed
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import torch
import transformers
from accelerate import init_empty_weights
from huggingface_hub import get_hf_file_metadata, hf_hub_url, snapshot_download
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, logging

from hf_moe_ep.upstream.adapters import without_adapters
from hf_moe_ep.upstream.module_names import stock_name

# What cannot be the name of a model of the hub, which is "model" or "owner/model".
_PATH = re.compile(r"[/.~]|.*/.*/|.*/$")
_PEFT_PREFIX = "base_model.model."
_COPIES = re.compile(r"\.(?:original_module|modules_to_save\.[^.]+)(?=\.)")
_DOWNLOAD = (
    "cache_dir",
    "force_download",
    "local_files_only",
    "revision",
    "token",
)
# Quantization methods whose checkpoints are decoded while they are read.
_DECODED = ("mxfp4", "fp8")
# What describes a model and its tokenizer, in the top folder of a repository.
_SMALL = ("*.json", "*.jinja", "*.txt", "*.model", "*.py")
# Where transformers saves the other chat templates of a tokenizer.
_TEMPLATES = "additional_chat_templates/*.jinja"
_COMMIT = re.compile(r"[0-9a-f]{40}")
# The HTTP library's base class of errors, those of a connection among them. The name of that
# library changes with the version of huggingface_hub (httpx, httpx2).
_HTTPError: Any = HfHubHTTPError.__bases__[0]
_ANSWER_SECONDS = 8.0


def download_options(options: dict[str, Any]) -> dict[str, Any]:
    """Remove the options of a download (`revision`, `subfolder`, ...) from `options`; return them.

    They are those that `local_folder` takes.
    """
    return {name: options.pop(name) for name in (*_DOWNLOAD, "subfolder") if name in options}


def local_folder(
    name_or_dir: str | os.PathLike[str], options: dict[str, Any], *, after_another: bool = False
) -> Path:
    """Return the folder `name_or_dir`, or the cached one of that model of the hub.

    The files of the model that are not in the cache are downloaded: the small files of the top
    folder (configs, tokenizer), and the weights that model.safetensors.index.json names, or
    model.safetensors where there is no index. The same weights in another format, which many
    repositories keep in original/ or as consolidated.safetensors, are left where they are.

    Args:
        name_or_dir: a folder or the name of a model of the hub.
        options: of `download_options`.
        after_another: another process of this machine has downloaded the model, so the cache is
            read without asking the hub. A cache that lacks the model is another one, and filled.

    Raises:
        ValueError: `name_or_dir` is a path, and no folder is there; a name that the hub does not
            know, or that is not in the cache where the hub is out of reach.
    """
    name = os.fspath(name_or_dir)
    if not os.path.isdir(name) and (os.path.exists(name) or _PATH.match(name)):
        what = "is a file" if os.path.exists(name) else "does not exist on this machine"
        raise ValueError(f"{name} {what}; name a folder with config.json, or a model of the hub")
    own = dict(options)
    subfolder = own.pop("subfolder", None) or ""
    if os.path.isdir(name_or_dir):
        return Path(name_or_dir, subfolder)
    try:
        if after_another:
            cached = {key: value for key, value in own.items() if key != "force_download"}
            try:
                return _download(name, subfolder, cached | {"local_files_only": True})
            except LocalEntryNotFoundError:
                pass
        return _download(name, subfolder, own)
    except (HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError) as error:
        raise ValueError(
            f"{name!r} is no folder on this machine and no model in the cache of the hub, and it "
            f"cannot be fetched: {error}"
        ) from error


def _download(name: str, subfolder: str, own: dict[str, Any]) -> Path:
    """Download the small files of a model, then the weights that they name."""
    # In the hub's patterns * matches the / between folders, too.
    top = glob.escape(f"{subfolder.strip('/')}/") if subfolder else ""
    small = [f"{top}{pattern}" for pattern in _SMALL]
    found = snapshot_download(name, allow_patterns=small, ignore_patterns=[f"{top}*/*"], **own)
    if _COMMIT.fullmatch(Path(found).name):  # the branch may move before the second call
        own = own | {"revision": Path(found).name}
    weights = [f"{top}{glob.escape(file)}" for file in _weight_files(Path(found, subfolder))]
    found = snapshot_download(name, allow_patterns=[*weights, f"{top}{_TEMPLATES}"], **own)
    return Path(found, subfolder)


def why_unreachable(name: str, file: str) -> str | None:
    """Ask the hub once for a file of a model; return why it cannot be had now, or None.

    The answer comes within 8 seconds. `hf_hub_download` takes 23 seconds without a network, as it
    tries a file that is not cached six more times (huggingface_hub/file_download.py), and minutes
    behind a firewall that drops packets: then each try waits a minute for every address of the
    hub. A timeout of the HTTP client would not cover the addresses and the name server, so the
    question runs in a thread of its own, which is left behind when the time is over.
    """
    answer: Future[None] = Future()

    def ask() -> None:
        try:
            get_hf_file_metadata(hf_hub_url(name, file), timeout=_ANSWER_SECONDS)
            answer.set_result(None)
        except (_HTTPError, OSError, ValueError) as error:
            answer.set_exception(error)

    Thread(target=ask, name="hf_moe_ep asks the hub", daemon=True).start()
    try:
        answer.result(_ANSWER_SECONDS)
    except DeadlinePassed:
        return f"the hub did not answer within {_ANSWER_SECONDS:g} seconds"
    except (_HTTPError, OSError, ValueError) as error:
        return " ".join(str(error).split())
    return None


def _weight_files(folder: Path) -> list[str]:
    """List the weights that the index in a folder names; without one it is model.safetensors."""
    index = folder / SAFE_WEIGHTS_INDEX_NAME
    if not index.is_file():
        return [SAFE_WEIGHTS_NAME]
    places = read_object(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
        raise ValueError(f"{index} is no index: its weight_map does not map tensors to files")
    return sorted(set(places.values()))


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds one object, like config.json.

    Raises:
        ValueError: it is damaged, or holds something else; the file is named.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON or damaged: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds a {type(found).__name__}, and an object is expected")
    return found


def empty_model(
    folder: Path, model_class: Any, find_dtype: Callable[[], torch.dtype], options: dict[str, Any]
) -> Any:
    """Return the model that a folder's config describes: parameters on meta, buffers with values.

    Args:
        folder: holds `config.json`.
        model_class: a model or Auto class; None takes the class that the config names.
        find_dtype: is called for the dtype where neither `options` nor the config names one.
        options: for the config and for `PreTrainedModel._from_config` (modeling_utils.py).

    Raises:
        ValueError: the config names a class that transformers lacks, or its weights are quantized;
            an option that nothing here takes, or a dtype that torch lacks.
    """
    if options.get("quantization_config") is not None:
        raise ValueError(
            "quantization_config= is for transformers' from_pretrained: load the model by that, "
            "attach adapters and patch it; here experts_dtype='nf4' or 'fp8' holds frozen experts "
            "quantised, and the rest keeps its dtype"
        )
    wanted = options.pop("dtype", options.pop("torch_dtype", "auto"))
    of_class = {
        name: options.pop(name)
        for name in ("attn_implementation", "experts_implementation")
        if name in options
    }
    config, unused = transformers.AutoConfig.from_pretrained(
        folder, return_unused_kwargs=True, **options
    )
    if unknown := sorted(options.keys() & unused.keys()):
        raise ValueError(
            f"unknown option {unknown[0]}: from_pretrained has none of this name, and neither has "
            f"{type(config).__name__} a field"
        )
    if model_class is None:
        names = getattr(config, "architectures", None) or ["AutoModelForCausalLM"]
        model_class = getattr(transformers, names[0], None)
        if model_class is None:
            raise ValueError(
                f"{folder} names the class {names[0]}, which transformers "
                f"{transformers.__version__} has not; pass model_class="
            )
    forget_quantization(config, os.fspath(folder))
    if wanted in ("auto", None):
        wanted = getattr(config, "dtype", None) or find_dtype()
    elif isinstance(wanted, str):
        wanted = _dtype_named(wanted)
    build = model_class._from_config if hasattr(model_class, "_from_config") else None
    if build is None:  # an Auto class
        build = model_class.from_config
    model: Any = on_meta(partial(build, config, dtype=wanted, **of_class))
    _keep_in_fp32(model, wanted)
    if model.can_generate() and (folder / "generation_config.json").is_file():
        model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    model.eval()
    return model


def _keep_in_fp32(model: Any, dtype: torch.dtype) -> None:
    """Make fp32 what stock keeps in fp32 when it loads a model as `dtype` (modeling_utils.py)."""
    patterns = [
        re.compile(name.replace("*", ".*"))
        for name, kept in model._get_dtype_plan(dtype).items()
        if kept == torch.float32
    ]
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_floating_point() and any(pattern.search(name) for pattern in patterns):
            tensor.data = tensor.data.float()


def base_prefix(model: Any) -> str:
    """Return the prefix, like "model.", that a model with a head gives names of its base model."""
    return f"{model.base_model_prefix}."


def is_base_model(model: Any) -> bool:
    """Return whether `model` is a base model, which has no head."""
    return bool(model.base_model is model)


def forget_quantization(config: Any, source: str) -> None:
    """Let a config not say that weights are quantized, of kinds that are read as what trains.

    As with Mxfp4Config(dequantize=True) and FineGrainedFP8Config(dequantize=True)
    (transformers/quantizers/, transformers/utils/quantization_config.py).

    Raises:
        ValueError: they are of another kind, in the words of `source`.
    """
    quantized = getattr(config, "quantization_config", None)
    if quantized is None:
        return
    fields = quantized if isinstance(quantized, dict) else quantized.to_dict()
    method = getattr(fields.get("quant_method"), "value", fields.get("quant_method"))
    packed = method == "fp8" and fields.get("expert_dtype") == "fp4"
    if method not in _DECODED or packed:
        kind = f"{method} with experts of fp4" if packed else method or "an unknown method"
        raise ValueError(
            f"{source} holds weights quantized by {kind}, which cannot be trained here; take the "
            f"bf16 checkpoint of this model, or one quantized by {' or '.join(_DECODED)}, whose "
            f"weights are read as bf16"
        )
    del config.quantization_config


def _dtype_named(name: str) -> torch.dtype:
    """Return the dtype of torch that is called `name`, like "bfloat16"."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"dtype {name!r} is none of torch's; take 'bfloat16' or torch.bfloat16")
    return found


def on_meta(build: Callable[[], Any]) -> Any:
    """Return the model that `build` makes: parameters on meta and tied, buffers with values."""
    with init_empty_weights(include_buffers=False):
        model = build()
    model.tie_weights()
    return model


def file_name(name: str) -> str:
    """Return the name of a parameter in checkpoints, without what wrappers and PEFT put in."""
    return _COPIES.sub("", stock_name(name)).removeprefix(_PEFT_PREFIX)


def unexpected_keys(model: Any, keys: Iterable[str]) -> list[str]:
    """Return those of `keys` that the model's class does not ignore on loading.

    transformers/modeling_utils.py.
    """
    patterns = getattr(without_adapters(model), "_keys_to_ignore_on_load_unexpected", None) or ()
    return [key for key in keys if not any(re.search(pattern, key) for pattern in patterns)]


def progress_bar(total: int, what: str, shown: bool) -> AbstractContextManager[Any]:
    """Return transformers' progress bar, labelled `what`, over `total` bytes.

    transformers' `disable_progress_bar` turns it off for all, `shown=False` for this call.
    """
    bar: AbstractContextManager[Any] = logging.tqdm(
        total=total, desc=what, unit="B", unit_scale=True, unit_divisor=1024, disable=not shown
    )
    return bar
