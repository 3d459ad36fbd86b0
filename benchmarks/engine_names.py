"""Record which tensors of `hub_tensors` vLLM's own model classes load, one tensor at a time.

    PYTHONPATH=VLLM_SOURCE python benchmarks/engine_names.py tests/checkpoints/engine_names.json

For each model type, vLLM builds its own class from the config of a tiny model, in one process on
the CPU. The class's `load_weights` gets the tensors of `hub_tensors` one by one, as TRL sends them.
The script records the keys that vLLM skips without a message, and the parameters that no key has
filled. If vLLM refuses a key, the script prints the traceback and records nothing. No forward runs,
so vLLM's compiled kernels are not needed, and the script replaces vLLM's choice of kernels for
experts. The rows "head of .." are vLLM's classes for draft models. They get the tensors of a head
for multi-token prediction that `patch(model, mtp_layers=1)` trains. vLLM takes the embedding and
the output head of these classes from the main model. The rows "carrier of .." are vLLM's classes
for main models, which also get the tensors of a head that is not trained (extra tensors), and must
skip these tensors only.

The test `tests/checkpoints/test_engine_names.py` compares the keys of the current stream with the
recorded keys. It does not need vLLM.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, os.fspath(Path(__file__).parents[1] / "tests"))

from support.architectures.models import tiny
from support.extra_files import is_of_head, load_stock, write_with_extra
from transformers import AutoModelForCausalLM

from hf_moe_ep import hub_tensors, patch, save_pretrained
from hf_moe_ep.mtp_head import find_head

# The types of ARCHITECTURES.md that are downloaded most often, and for which vLLM has a class.
TYPES = (
    "qwen3_moe",
    "qwen3_next",
    "qwen2_moe",
    "deepseek_v3",
    "deepseek_v2",
    "glm4_moe",
    "gpt_oss",
    "mixtral",
    "ernie4_5_moe",
    "olmoe",
    "granitemoe",
    "qwen3_5_moe_text",
)
# Types whose heads for multi-token prediction can be trained, and for which engines have classes.
HEADS = ("qwen3_next", "qwen3_5_moe_text", "deepseek_v3", "glm4_moe")
HEAD = "head of "  # begins the name of a row about a head
CARRIER = "carrier of "  # begins the name of a row about a model with a head that is not trained
CARRIERS = (*HEADS, "qwen3_5_moe")
# Fields of published configs that vLLM reads, but that transformers' config classes lack.
PUBLISHED: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"topk_method": "noaux_tc"},
    "glm4_moe": {"head_dim": lambda model: model.model.layers[0].self_attn.head_dim},
}
# vLLM numbers the layer of a head 0. Layer 0 of the tiny model is dense, but the layer of the head
# has experts, so these fields say that no layer is dense.
FIELDS_OF_HEADS: dict[str, dict[str, Any]] = {"qwen3_next": {"mlp_only_layers": []}}
# The errors that vLLM raises for a type that it cannot build or load.
FAILURES = (
    AssertionError, AttributeError, ImportError, LookupError, RuntimeError, TypeError, ValueError,
)  # fmt: skip


def digest(keys: list[str]) -> str:
    """Return a hash that identifies a set of keys."""
    return hashlib.sha256("\n".join(sorted(keys)).encode()).hexdigest()


def prepare_vllm() -> None:
    """Let vLLM run in this process on a CPU, without its kernels."""
    import vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method as unquantized
    import vllm.model_executor.models.registry as registry
    import vllm.platforms
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
    from vllm.platforms.cpu import CpuPlatform

    # vLLM would start a process for each class, to keep CUDA out of this process.
    registry._run_in_subprocess = lambda inspect: inspect()
    vllm.platforms._current_platform = CpuPlatform()
    backend = (UnquantizedMoeBackend.TRITON, None)
    unquantized.select_unquantized_moe_backend = lambda **_: backend


def make_model(
    name: str, folder: Path, sizes: dict[str, Any] | None = None, **fields: Any
) -> torch.nn.Module:
    """Write a tiny checkpoint into the folder "model", and return the patched model.

    Args:
        name: a model type, or "head of" or "carrier of" and a model type.
        sizes: sizes of a model without a head.
        fields: fields of the config, or functions that return them for a model.
    """
    model_type = name.removeprefix(HEAD).removeprefix(CARRIER)
    if name.startswith(CARRIER):
        write_with_extra(folder / "base", model_type, dtype=torch.bfloat16)
        model = patch(load_stock(folder / "base", dtype=torch.bfloat16))
    elif name.startswith(HEAD):
        write_with_extra(folder / "base", model_type, dtype=torch.bfloat16, in_fp8=False)
        base = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.bfloat16)
        model = patch(base, mtp_layers=1)
    else:
        model = patch(tiny(model_type, dtype=torch.bfloat16, **(sizes or {})))
    for field, value in (PUBLISHED.get(model_type, {}) | fields).items():
        setattr(model.config, field, value(model) if callable(value) else value)
    save_pretrained(model, folder / "model")
    return model


def record_keys(name: str, folder: Path) -> dict[str, Any]:
    """Send the tensors of a tiny model to vLLM's class. Returns which keys the class has loaded."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
    from vllm.model_executor.model_loader.utils import initialize_model

    torch.set_default_dtype(torch.float32)
    options = {"dtype": "bfloat16", "max_model_len": 128, "skip_tokenizer_init": True}
    is_head = name.startswith(HEAD)
    fields = FIELDS_OF_HEADS.get(name.removeprefix(HEAD), {}) if is_head else {}
    model = make_model(name, folder, **fields)
    if is_head:
        options["speculative_config"] = {"method": "mtp", "num_speculative_tokens": 1}
    config = EngineArgs(
        os.fspath(folder / "model"), enforce_eager=True, load_format="dummy", **options
    ).create_engine_config()
    # DeepSeek's head checks after each call that it has a tensor of its layer.
    with set_current_vllm_config(config), disable_mtp_completeness_check():
        # All types share one process group, so its file must not be deleted.
        init_distributed_environment(1, 0, f"file://{folder.parent}/rendezvous", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
        torch.set_default_dtype(torch.bfloat16)
        drafts = config.speculative_config.draft_model_config if is_head else None
        engine = initialize_model(config, model_config=drafts)
        keys, skipped = [], []
        copies = find_head(model).copies if is_head else ()
        unfilled = {name for name, _ in engine.named_parameters()}
        for key, tensor in hub_tensors(model):
            if is_head and not is_of_head(key, model):
                continue
            keys.append(key)
            loaded = set(engine.load_weights([(key, tensor)]) or ())
            unfilled -= loaded
            is_for_draft = name.startswith(CARRIER) and is_of_head(key, model)
            if not loaded and key not in copies and not is_for_draft:
                skipped.append(key)
        if is_head:
            unfilled = {n for n in unfilled if "embed_tokens" not in n and "lm_head" not in n}
    return {
        "class": type(engine).__name__,
        "keys": len(keys),
        "sha256": digest(keys),
        "skipped": skipped,
        "unfilled": sorted(unfilled),
    }


def main() -> None:
    """Record the given types in the file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=Path)
    rows = [*TYPES, *(HEAD + kind for kind in HEADS), *(CARRIER + kind for kind in CARRIERS)]
    parser.add_argument("types", nargs="*", default=rows)
    options = parser.parse_args()
    import vllm

    prepare_vllm()
    table = json.loads(options.file.read_text()) if options.file.is_file() else {}
    parent = Path(tempfile.mkdtemp(prefix="engine_names_"))
    for name in options.types:
        try:
            row = record_keys(name, parent / name.replace(" ", "_"))
        except FAILURES:
            print(f"{name}: {traceback.format_exc(limit=-2)}", flush=True)
            continue
        table.setdefault(f"vllm {vllm.__version__}", {})[name] = row
        print(name, row, flush=True)
        options.file.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
