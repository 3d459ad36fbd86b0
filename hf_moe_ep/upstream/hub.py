"""Download folders of the Hugging Face hub, and build the model that a config describes.

The private names come from transformers/modeling_utils.py, transformers/utils/logging.py and
transformers/generation/configuration_utils.py. The names of huggingface_hub and Accelerate are
public.
"""

from __future__ import annotations

import glob
import json
import os
import re
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import init_empty_weights
from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import (
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)
from torch import nn
from transformers.dynamic_module_utils import custom_object_save
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, logging

from hf_moe_ep.config import ParallelConfig, suggest_name
from hf_moe_ep.plan import MTP_HEAD
from hf_moe_ep.upstream.adapters import without_adapters
from hf_moe_ep.upstream.conversion import map_to_model_names
from hf_moe_ep.upstream.module_names import get_stock_name, remove_names_of_copies
from hf_moe_ep.upstream.named_weights import WEIGHTS_FIELD, find_named_weights

# Matches paths. The name of a model on the hub, "model" or "owner/model", does not match.
_PATH = re.compile(r"[/.~]|.*/.*/|.*/$")
_SHARDS = "; leave it out: each rank reads only its own shards, to its own device"
_EXPERTS = "; experts_dtype='nf4' or 'fp8' quantises frozen experts under LoRA"
_VARIANT = "; load these weights with transformers' from_pretrained, and patch the model"
# Hints for options that only stock's from_pretrained has. Errors end with them.
_ONLY_IN_STOCK = {
    "device_map": _SHARDS,
    "max_memory": _SHARDS,
    "offload_folder": _SHARDS,
    "tp_plan": _SHARDS,
    "load_in_4bit": _EXPERTS,
    "load_in_8bit": _EXPERTS,
    "variant": _VARIANT,
    "use_safetensors": _VARIANT,
    "gguf_file": _VARIANT,
}
_PEFT_PREFIX = "base_model.model."
# The name of a parameter in our head for multi-token prediction. Files store the head as a layer.
_HEAD = re.compile(rf"^{MTP_HEAD}\.model\.(layers\.\d+\.)(?:mtp_block\.)?")
# The options of snapshot_download that callers may pass.
_DOWNLOAD_OPTIONS = (
    "cache_dir",
    "force_download",
    "local_files_only",
    "revision",
    "token",
)
# The quantization methods whose checkpoints are decoded while they are read.
_DECODED = ("mxfp4", "fp8")
# The files of a model's config and tokenizer, in the top folder of a repository.
_SMALL = ("*.json", "*.jinja", "*.txt", "*.model", "*.py")
# The additional chat templates of a tokenizer, as transformers saves them.
_TEMPLATES = "additional_chat_templates/*.jinja"
_COMMIT = re.compile(r"[0-9a-f]{40}")
# Fields of a config with the number of layers for multi-token prediction. These layers follow the
# last decoder layer.
_MTP_LAYERS = ("num_nextn_predict_layers", "num_mtp_layers")
# Buffers that models compute, but that old checkpoints contain: the end of a buffer's name, and
# stock's pattern for the keys of such buffers in checkpoints.
_OLD_BUFFERS = {
    "rotary_emb.inv_freq": r"rotary_emb\.inv_freq",
    "position_ids": r"(^|\.)position_ids$",
}


def pop_download_options(options: dict[str, Any]) -> dict[str, Any]:
    """Remove the options of `find_local_folder` (`revision`, `subfolder`, ...) from `options`.

    Returns the removed options.
    """
    return {
        name: options.pop(name) for name in (*_DOWNLOAD_OPTIONS, "subfolder") if name in options
    }


def find_local_folder(
    name_or_dir: str | os.PathLike[str], options: dict[str, Any], *, after_another: bool = False
) -> Path:
    """Return the folder `name_or_dir`, or the cache folder of the hub's model with this name.

    Files that are not in the cache are downloaded: the small files of the top folder (configs,
    tokenizer) and the weights that config.json or model.safetensors.index.json names, or
    model.safetensors without them. The weights in other formats that many repositories also have
    (original/, consolidated.safetensors) are not downloaded.

    Args:
        name_or_dir: a folder, or the name of a model on the hub.
        options: the result of `pop_download_options`.
        after_another: True if another process of this machine has downloaded the model. The cache
            is then read without a request to the hub. If the model is not in the cache, the two
            processes have different caches, so the model is downloaded.

    Raises:
        ValueError: `name_or_dir` is a path where no folder exists; the hub does not know the name;
            or the hub cannot be reached and the model is not in the cache.
    """
    name = os.fspath(name_or_dir)
    if not os.path.isdir(name) and (os.path.exists(name) or _PATH.match(name)):
        problem = "is a file" if os.path.exists(name) else "does not exist on this machine"
        raise ValueError(
            f"{name} {problem}; pass a folder with config.json, or the name of a model on the hub"
        )
    download_kwargs = dict(options)
    subfolder = download_kwargs.pop("subfolder", None) or ""
    if os.path.isdir(name_or_dir):
        return Path(name_or_dir, subfolder)
    try:
        if after_another:
            cache_only = download_kwargs | {"local_files_only": True}
            cache_only.pop("force_download", None)
            try:
                return _download(name, subfolder, cache_only)
            except LocalEntryNotFoundError:
                pass
        return _download(name, subfolder, download_kwargs)
    except (HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError) as error:
        raise ValueError(
            f"{name!r} is neither a folder on this machine nor a model in the cache of the hub, "
            f"and it cannot be downloaded: {error}"
        ) from error


def _download(name: str, subfolder: str, kwargs: dict[str, Any]) -> Path:
    """Download the small files of a model, then the weights that its index names."""
    # In patterns of the hub, * also matches the / between folders.
    top = glob.escape(f"{subfolder.strip('/')}/") if subfolder else ""
    small = [f"{top}{pattern}" for pattern in _SMALL]
    folder = snapshot_download(name, allow_patterns=small, ignore_patterns=[f"{top}*/*"], **kwargs)
    # The folder is named after the commit. The second call must download the same commit, even if
    # the branch has a newer one by then.
    if _COMMIT.fullmatch(Path(folder).name):
        kwargs = kwargs | {"revision": Path(folder).name}
    names = _list_weight_files(Path(folder, subfolder))
    weights = [f"{top}{glob.escape(file)}" for file in names]
    folder = snapshot_download(name, allow_patterns=[*weights, f"{top}{_TEMPLATES}"], **kwargs)
    return Path(folder, subfolder)


def _list_weight_files(folder: Path) -> list[str]:
    """List the weight files that the config or the index in a folder names.

    If neither of the two names a file, the list has model.safetensors.
    """
    named = find_named_weights(folder)
    if named is not None and not (named.endswith(".json") and (folder / named).is_file()):
        return [named]
    index = folder / (named or SAFE_WEIGHTS_INDEX_NAME)
    if not index.is_file():
        return [SAFE_WEIGHTS_NAME]
    file_of = read_object(index).get("weight_map")
    if not isinstance(file_of, dict) or not all(isinstance(x, str) for x in file_of.values()):
        raise ValueError(
            f"{index} is not an index: its weight_map does not map tensors to files; download the "
            f"file again"
        )
    return sorted(set(file_of.values()))


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON file that contains one object, such as config.json.

    Raises:
        ValueError: the file is damaged, or contains something else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged or not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} contains a {type(content).__name__}, but must contain an object")
    return content


def build_empty_model(
    folder: Path, model_class: Any, find_dtype: Callable[[], torch.dtype], options: dict[str, Any]
) -> Any:
    """Build the model that a folder's config describes. Only its buffers have values.

    The parameters are on the meta device.

    Args:
        folder: the folder of `config.json`.
        model_class: a model class or Auto class, or None for the class that the config names.
        find_dtype: returns the dtype of the model if neither `options` nor the config has a dtype.
        options: options of the config and of `PreTrainedModel._from_config` (modeling_utils.py).

    Raises:
        ValueError: the config names a class that transformers does not have; the weights are
            quantized by a method that cannot be decoded; an option or a dtype is unknown.
    """
    if options.get("quantization_config") is not None:
        raise ValueError(
            "quantization_config= is an option of transformers' from_pretrained: load the model "
            "with that function, attach adapters, and patch the model. In hf_moe_ep, "
            "experts_dtype='nf4' or 'fp8' quantises frozen experts, and all other weights keep "
            "their dtype"
        )
    if WEIGHTS_FIELD in options:
        raise ValueError(
            f"transformers_weights={options[WEIGHTS_FIELD]!r} is not an option of hf_moe_ep: write "
            f"it into {folder}/config.json"
        )
    trusted = options.get("trust_remote_code")  # AutoConfig removes it
    dtype = options.pop("dtype", options.pop("torch_dtype", "auto"))
    if isinstance(dtype, dict):  # as in stock, the dtype of the whole model is the one of ""
        dtype = dtype.get("", torch.get_default_dtype())
    options.pop("low_cpu_mem_usage", None)  # stock ignores it as well
    if options.get("use_safetensors") in (None, True):
        options.pop("use_safetensors", None)  # no other files are read
    class_options = {
        name: options.pop(name)
        for name in ("attn_implementation", "experts_implementation")
        if name in options
    }
    config, unused = transformers.AutoConfig.from_pretrained(
        folder, return_unused_kwargs=True, **options
    )
    if unknown := sorted(options.keys() & unused.keys()):
        settings = [field.name for field in fields(ParallelConfig)]
        raise ValueError(
            f"unknown option {unknown[0]}{suggest_name(unknown[0], settings)}: it is neither an "
            f"option of from_pretrained nor a field of {type(config).__name__}"
            f"{_ONLY_IN_STOCK.get(unknown[0], '')}"
        )
    if model_class is None:
        names = getattr(config, "architectures", None) or ["AutoModelForCausalLM"]
        auto_class = _find_auto_class(config, names[0])
        model_class = getattr(
            transformers, auto_class if trusted and auto_class else names[0], None
        )
        if model_class is None:
            remedy = "trust_remote_code=True to run its code" if auto_class else "model_class="
            raise ValueError(
                f"the config in {folder} names the class {names[0]}, which transformers "
                f"{transformers.__version__} does not have; pass {remedy}"
            )
    forget_quantization(config, os.fspath(folder))
    if dtype in ("auto", None):
        dtype = getattr(config, "dtype", None) or find_dtype()
    elif isinstance(dtype, str):
        dtype = _parse_dtype(dtype)
    # As in stock, a text model gets the text part of a composite config.
    text_class = config.sub_configs.get("text_config")
    if text_class is not None and getattr(model_class, "config_class", None) is text_class:
        config = config.get_text_config()
    if hasattr(model_class, "_from_config"):
        build = model_class._from_config
    else:  # an Auto class
        build = partial(model_class.from_config, trust_remote_code=trusted)
    model: Any = on_meta(partial(build, config, dtype=dtype, **class_options))
    _keep_in_fp32(model, dtype)
    if model.can_generate():
        # Without this file, settings such as do_sample are in config.json.
        has_own_file = (folder / "generation_config.json").is_file()
        in_config = {"config_file_name": "config.json", "_from_model_config": True}
        source: dict[str, Any] = {} if has_own_file else in_config
        model.generation_config = transformers.GenerationConfig.from_pretrained(folder, **source)
    model.eval()
    return model


def _find_auto_class(config: Any, name: str) -> str | None:
    """Return the Auto class that `auto_map` maps to the model's own class `name`, or None."""
    auto_map: dict[str, Any] = getattr(config, "auto_map", None) or {}
    return next((auto for auto, code in auto_map.items() if str(code).endswith(f".{name}")), None)


def build_empty_module(build: Callable[[], Any], dtype: torch.dtype) -> Any:
    """Build a module in `dtype`. Its parameters are on meta, and its buffers have values.

    Accelerate allocates each parameter before it moves the parameter to meta. The stacked experts
    of one layer of DeepSeek-V3 are 15 GB in bf16, and 30 GB in torch's default dtype.
    """
    default = torch.get_default_dtype()
    try:
        torch.set_default_dtype(dtype)
        with init_empty_weights(include_buffers=False):
            return build()
    finally:
        torch.set_default_dtype(default)


def initialise_parameters(model: Any, module: nn.Module) -> None:
    """Give the parameters of a new module of `model` their initial values (modeling_utils.py)."""
    with torch.no_grad():
        module.apply(model._init_weights)


def list_kept_in_fp32(model: Any, dtype: torch.dtype) -> list[re.Pattern[str]]:
    """Return patterns of the tensors that stock keeps in fp32 in a model of `dtype`.

    The patterns are searched in names (modeling_utils.py). A model whose class is not from
    transformers has no patterns.
    """
    find_plan = getattr(without_adapters(model), "_get_dtype_plan", None)
    plan: dict[str, torch.dtype] = {} if find_plan is None else find_plan(dtype)
    return [re.compile(n.replace("*", ".*")) for n, kept in plan.items() if kept == torch.float32]


def _keep_in_fp32(model: Any, dtype: torch.dtype) -> None:
    """Convert the tensors that stock keeps in fp32 to fp32 (modeling_utils.py)."""
    patterns = list_kept_in_fp32(model, dtype)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_floating_point() and any(pattern.search(name) for pattern in patterns):
            tensor.data = tensor.data.float()


def list_folders_of_loaded(model: Any) -> list[Path]:
    """List the folders from which stock's from_pretrained can have loaded a model.

    The config has the name of a local folder. For a model of the hub, transformers 5.24 does not
    keep the commit, so the list has all commits in the cache, and nothing is downloaded. The list
    is empty if the model was not loaded by from_pretrained, which sets `_weight_conversions`
    (core_model_loading.py). If from_pretrained decodes quantized weights, it deletes this attribute
    again and sets `is_quantized` to False (quantizers/base.py).

    Raises:
        ValueError: the folder does not exist any more, or the cache does not have the model.
    """
    stock = without_adapters(model)
    config = getattr(stock, "config", None)
    name = str(getattr(config, "_name_or_path", "") or "")
    was_decoded = vars(stock).get("is_quantized") is False
    if not name or not (was_decoded or hasattr(stock, "_weight_conversions")):
        return []
    if os.path.isdir(name) or _PATH.match(name):
        return [find_local_folder(name, {})]
    commits = Path(constants.HF_HUB_CACHE, f"models--{name.replace('/', '--')}", "snapshots")
    commit = getattr(config, "_commit_hash", None) or "*"
    found = [path for path in commits.glob(commit) if path.is_dir()]
    if not found:
        raise ValueError(
            f"the cache of the hub has no {name}: {commits} does not exist or is empty"
        )
    return sorted(found)


def save_code(kind: Any, config: Any, folder: Path) -> None:
    """Save the Python files of a model class that was loaded with `trust_remote_code=True`.

    Like stock's save_pretrained, this function copies the files that define the class into
    `folder`, and lets the config's `auto_map` name the class in these files
    (transformers/dynamic_module_utils.py). For a class of transformers it does nothing.
    """
    if getattr(kind, "_auto_class", None) is not None:
        # custom_object_save reads only attributes of the class.
        custom_object_save(kind.__new__(kind), folder, config=config)


def get_base_prefix(model: Any) -> str:
    """Return the prefix, such as "model.", of the base model's tensors in a model with a head."""
    return f"{model.base_model_prefix}."


def is_base_model(model: Any) -> bool:
    """Return True if `model` is a base model, which has no head."""
    return bool(model.base_model is model)


def forget_quantization(config: Any, source: str) -> None:
    """Remove the quantization from a config whose weights are decoded while they are read.

    In stock, Mxfp4Config(dequantize=True) and FineGrainedFP8Config(dequantize=True) have this
    effect (transformers/quantizers/, transformers/utils/quantization_config.py).

    Raises:
        ValueError: the weights of `source` are quantized by a method that cannot be decoded.
    """
    quantized = getattr(config, "quantization_config", None)
    if quantized is None:
        return
    fields = quantized if isinstance(quantized, dict) else quantized.to_dict()
    method = getattr(fields.get("quant_method"), "value", fields.get("quant_method"))
    has_fp4_experts = method == "fp8" and fields.get("expert_dtype") == "fp4"
    if method not in _DECODED or has_fp4_experts:
        kind = f"{method} with experts of fp4" if has_fp4_experts else method or "an unknown method"
        raise ValueError(
            f"the weights in {source} are quantized by {kind}, which cannot be trained here; use a "
            f"bf16 checkpoint of this model, or one quantized by {' or '.join(_DECODED)}, whose "
            f"weights are read as bf16"
        )
    del config.quantization_config


def _parse_dtype(name: str) -> torch.dtype:
    """Return the torch.dtype with the name `name`, such as "bfloat16"."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch has no dtype {name!r}; use 'bfloat16' or torch.bfloat16")
    return dtype


def on_meta(build: Callable[[], Any]) -> Any:
    """Build a model with tied weights. Its parameters are on meta, and its buffers have values."""
    with init_empty_weights(include_buffers=False):
        model = build()
    model.tie_weights()
    return model


def get_checkpoint_name(name: str) -> str:
    """Return a parameter's name in checkpoints, without the components of wrappers and PEFT.

    Checkpoints store some heads for multi-token prediction as decoder layers (`mtp_head.py`).
    """
    in_file = remove_names_of_copies(get_stock_name(name)).removeprefix(_PEFT_PREFIX)
    return _HEAD.sub(r"model.\1", in_file)


def list_names_of_copies(model: Any) -> set[str]:
    """Return the names of tied parameters under which transformers does not save them."""
    return set(getattr(without_adapters(model), "all_tied_weights_keys", {}))


def list_ignored_patterns(model: Any) -> list[str]:
    """Return patterns of the checkpoint keys that the model's class ignores.

    The class lists patterns for stock's from_pretrained (modeling_utils.py). Some of them contain
    the number of a layer that only the largest published model has (DeepSeek-V3: layer 61). This
    function therefore adds patterns for all layers after the last layer. The config has the number
    of these layers (`num_nextn_predict_layers` or `num_mtp_layers`).
    """
    stock = without_adapters(model)
    patterns = list(getattr(stock, "_keys_to_ignore_on_load_unexpected", None) or ())
    config = getattr(stock, "config", None)
    text: Any = getattr(config, "get_text_config", lambda: config)()
    first = getattr(text, "num_hidden_layers", None)
    counts = [getattr(text, name, None) for name in _MTP_LAYERS]
    count = next((count for count in counts if isinstance(count, int)), 0)
    if isinstance(first, int):
        patterns += [rf"(^|\.)layers\.{layer}\." for layer in range(first, first + count)]
    return patterns


def find_unexpected_keys(model: Any, keys: Iterable[str], ignored: Iterable[str] = ()) -> list[str]:
    """Return the keys that stock does not ignore, and that match none of the patterns `ignored`.

    As in stock (modeling_utils.py, _adjust_missing_and_unexpected_keys), patterns are also searched
    in the renamed keys, and buffers of older versions are ignored in models that compute them.
    """
    patterns = [re.compile(pattern) for pattern in (*list_ignored_patterns(model), *ignored)]
    left = [key for key in keys if not any(pattern.search(key) for pattern in patterns)]
    old, names = find_old_buffers(model, left), map_to_model_names(without_adapters(model), left)
    return [
        key
        for key in left
        if key not in old and not any(pattern.search(names[key]) for pattern in patterns)
    ]


def find_old_buffers(model: Any, keys: Iterable[str]) -> set[str]:
    """Return the keys of buffers that older versions saved and that the model now computes."""
    names = [name for name, _ in without_adapters(model).named_buffers()]
    old = [re.compile(p) for end, p in _OLD_BUFFERS.items() if any(n.endswith(end) for n in names)]
    return {key for key in keys if any(pattern.search(key) for pattern in old)}


def may_be_missing(model: Any, name: str) -> bool:
    """Return True if a model's class allows that a checkpoint lacks the tensor `name`."""
    patterns = getattr(without_adapters(model), "_keys_to_ignore_on_load_missing", None) or ()
    return any(re.search(pattern, name) for pattern in patterns)


def make_progress_bar(total: int, what: str, shown: bool) -> AbstractContextManager[Any]:
    """Return transformers' progress bar, labelled `what`, over `total` bytes.

    `shown=False` disables this bar. TQDM_DISABLE=1 and transformers' `disable_progress_bar` disable
    all bars.
    """
    options: dict[str, Any] = {"unit": "B", "unit_scale": True, "unit_divisor": 1024}
    if not shown:
        options["disable"] = True  # disable=False would take precedence over TQDM_DISABLE
    return logging.tqdm(total=total, desc=what, **options)
