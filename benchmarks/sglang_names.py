"""Record which tensors of `hub_tensors` SGLang's own model classes load, one tensor at a time.

    PYTHONPATH=SGLANG_SOURCE python benchmarks/sglang_names.py tests/checkpoints/engine_names.json

This script does for SGLang what `engine_names.py` does for vLLM. SGLang builds its own class from
the config of a tiny model, in one process per type on the CPU. The class's `load_weights` gets the
tensors of `hub_tensors` one by one. SGLang does not return which tensors it has loaded, so all its
parameters are NaN at first. A key is skipped if it changes no parameter. A parameter is unfilled if
it has NaN at the end. Keys that SGLang loads only in one call with another key of their module are
listed as "together".

Packages that SGLang imports, but that are not installed, are replaced (`absent_packages.py`). This
works because SGLang's loaders need neither kernels nor servers. The rows "head of .." are SGLang's
classes for draft models. They get the tensors of a head for multi-token prediction that
`patch(model, mtp_layers=1)` trains. SGLang takes the embedding and the output head of these classes
from the main model, so it skips their copies.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, os.fspath(Path(__file__).parents[1] / "tests"))

from absent_packages import stand_in_for_absent
from engine_names import HEAD, HEADS, TYPES, digest, make_model
from support.extra_files import is_of_head

from hf_moe_ep import hub_tensors
from hf_moe_ep.mtp_head import find_head

_DELTA_NETS: dict[str, Any] = {
    "full_attention_interval": lambda model: model.config.layer_types.index("full_attention") + 1,
    # SGLang sets these for a CPU.
    "linear_num_key_heads_cpu": lambda model: model.config.linear_num_key_heads,
    "linear_num_value_heads_cpu": lambda model: model.config.linear_num_value_heads,
}
# Further fields of published configs that transformers' config classes lack.
FIELDS: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"moe_layer_freq": 1, "scoring_func": "softmax"},
    "deepseek_v3": {"moe_layer_freq": 1, "scoring_func": "sigmoid"},
    "qwen3_next": _DELTA_NETS,
    "qwen3_5_moe_text": _DELTA_NETS,
}
# SGLang builds every layer of the first three types as a MoE layer, as in all published models. It
# builds the norm of OLMoE's keys with the width of the queries.
SIZES: dict[str, dict[str, Any]] = {
    "qwen2_moe": {"mlp_only_layers": []},
    "qwen3_moe": {"mlp_only_layers": []},
    "qwen3_next": {"mlp_only_layers": []},
    "olmoe": {"num_key_value_heads": 4},
}
ABSENT = (
    "IPython", "PIL", "aiohttp", "av", "cuda", "decord", "flashinfer", "gguf", "hf_transfer",
    "interegular", "llguidance", "loguru", "modelscope", "ninja", "numba", "nvidia",
    "openai_harmony", "opentelemetry", "outlines", "prometheus_client", "pynvml", "requests",
    "sentencepiece", "setproctitle", "sgl_kernel", "soundfile", "tiktoken", "timm", "torchao",
    "torchaudio", "torchvision", "tvm_ffi", "uvicorn", "uvloop", "xgrammar",
)  # fmt: skip
# Kernels to which qwen3_5.py refers while it is imported.
KERNELS = (
    "fused_sigmoid_mul_cpu", "fused_qk_gemma_rmsnorm_cpu", "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
)  # fmt: skip
# Modules of SGLang that no loader uses.
UNUSED = tuple(
    f"sglang.srt.{name}" for name in ("entrypoints", "constrained", "parser", "function_call")
)


def build_engine(model_type: str, folder: Path, head: bool) -> Any:
    """Build SGLang's own class for a checkpoint, on the CPU and without values."""
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    stand_in_for_absent(ABSENT, UNUSED)
    for name in KERNELS:
        torch.library.define(f"sgl_kernel::{name}", "(Tensor x) -> ()")
    from sglang.srt.arg_groups import mamba_hook
    from sglang.srt.layers.rotary_embedding import factory

    # These checks and kernels belong to a forward, which never runs.
    mamba_hook.validate_mamba_extra_buffer = lambda *args, **kwargs: None
    factory.get_rope_cpu = lambda *args, **kwargs: torch.nn.Identity()
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed import parallel_state
    from sglang.srt.layers import dp_attention
    from sglang.srt.layers.moe import initialize_moe_config
    from sglang.srt.model_loader.utils import get_model_architecture
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.weight_cache.daemon import SpawnRanks, publish, spawn_world_rank

    backend = "triton" if model_type == "gpt_oss" else "torch_native"
    options = {"dtype": "bfloat16", "skip_tokenizer_init": True, "attention_backend": backend}
    arguments = ServerArgs(model_path=os.fspath(folder / "model"), device="cpu", **options)
    rank = spawn_world_rank(arguments, tp_rank=0, pp_rank=0)
    publish(arguments, role="weight_cache_daemon", ranks=SpawnRanks(world_rank=rank, gpu_id=0))
    initialize_moe_config()
    config = ModelConfig(
        model_path=os.fspath(folder / "model"), dtype="bfloat16", is_draft_model=head
    )
    rendezvous = f"file://{folder}/rendezvous"
    parallel_state.init_distributed_environment(1, 0, rendezvous, 0, "gloo")
    parallel_state.initialize_model_parallel()
    dp_attention.initialize_dp_attention(arguments)
    dp_attention.init_dp_gathered_buffer(config)
    engine_class, _ = get_model_architecture(config)
    torch.set_default_dtype(torch.bfloat16)
    return engine_class(config=config.hf_config, quant_config=None)


def record(model_type: str, head: bool) -> dict[str, Any]:
    """Send the tensors of a tiny model to SGLang's class, and return what became of them."""
    with tempfile.TemporaryDirectory(prefix="sglang_names_") as name:
        folder = Path(name)
        sizes, fields = SIZES.get(model_type, {}), FIELDS.get(model_type, {})
        model = make_model(HEAD * head + model_type, folder, sizes, **fields)
        engine = build_engine(model_type, folder, head)
        parameters = {n: p for n, p in engine.named_parameters() if p.is_floating_point()}
        for parameter in parameters.values():
            parameter.data.fill_(float("nan"))
        shared = {n for n in parameters if "embed_tokens" in n or "lm_head" in n} if head else set()
        keys, missing = [], _count_missing(parameters)
        skipped: dict[str, torch.Tensor] = {}
        for key, tensor in hub_tensors(model):
            if head and not is_of_head(key, model):
                continue
            keys.append(key)
            engine.load_weights([(key, tensor)])
            now = _count_missing(parameters)
            if now == missing and not (head and key in find_head(model).copies):
                skipped[key] = tensor
            missing = now
        together = _load_together(engine, parameters, skipped)
        unfilled = {name for name, p in parameters.items() if p.isnan().any()} - shared
        return {
            "class": type(engine).__name__,
            "keys": len(keys),
            "sha256": digest(keys),
            "skipped": [key for key in skipped if key not in together],
            "together": together,
            "options": {} if head else sizes,
            "unfilled": sorted(unfilled),
        }


def _load_together(
    engine: Any, parameters: dict[str, torch.nn.Parameter], skipped: dict[str, torch.Tensor]
) -> list[str]:
    """Send the skipped tensors of each module in one call. Returns the keys that are then loaded.

    SGLang joins some tensors in one parameter, but only if one call has all of them.
    """
    modules: dict[str, list[str]] = {}
    for key in skipped:
        modules.setdefault(".".join(key.split(".")[:-2]), []).append(key)
    loaded = []
    for keys in modules.values():
        before = _count_missing(parameters)
        engine.load_weights([(key, skipped[key]) for key in keys])
        loaded += keys if _count_missing(parameters) < before else []
    return sorted(loaded)


def _count_missing(parameters: dict[str, torch.nn.Parameter]) -> int:
    return sum(int(parameter.isnan().sum()) for parameter in parameters.values())


def main() -> None:
    """Record each given type in a separate process, and add the types to the file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=Path)
    parser.add_argument("types", nargs="*", default=[*TYPES, *(HEAD + kind for kind in HEADS)])
    parser.add_argument("--one", action="store_true", help="print the row of one type")
    options = parser.parse_args()
    if options.one:
        (name,) = options.types
        row = record(name.removeprefix(HEAD), name.startswith(HEAD))
        print(f"ROW {json.dumps(row)}", flush=True)
        os._exit(0)  # threads of fake modules must not keep the process alive
    engine = f"sglang {version('sglang')}"
    table = json.loads(options.file.read_text()) if options.file.is_file() else {}
    for name in options.types:
        command = [sys.executable, __file__, os.fspath(options.file), name, "--one"]
        result = subprocess.run(command, capture_output=True, text=True, timeout=600)
        rows = [line for line in result.stdout.splitlines() if line.startswith("ROW ")]
        if not rows:
            print(f"{name}: {result.stderr[-1500:]}", flush=True)
            continue
        table.setdefault(engine, {})[name] = json.loads(rows[0].removeprefix("ROW "))
        print(name, rows[0], flush=True)
        options.file.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
