"""Change modules so that other trainers run on CPU ranks. On GPUs they need no change.

The reason for each change stands beside it.

`support.commands` puts this folder into PYTHONPATH for the stock command and for ours, so Python
imports this file when a process starts. Below `hf-moe-ep run`, the hook's own sitecustomize comes
first and runs this one. A module is changed right before or after its import, and none is imported
here.
"""

import importlib.util
import os
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from typing import Any

VARIABLES = {
    # axolotl has no key for `TrainingArguments.use_cpu`. This variable has the same effect.
    "ACCELERATE_USE_CPU": "true",
    # axolotl's telemetry waits for a server at the end of each process.
    "AXOLOTL_DO_NOT_TRACK": "1",
    "DO_NOT_TRACK": "1",
}


def _build_mesh_of_cpus(module: Any) -> None:
    """axolotl calls build_device_mesh("cuda") (axolotl/utils/distributed.py), on any machine."""
    original = module.ParallelismConfig.build_device_mesh

    def build_device_mesh(self: Any, device_type: str) -> Any:
        return original(self, "cpu")

    module.ParallelismConfig.build_device_mesh = build_device_mesh


def _stand_in_for_torchaudio(module: Any) -> None:
    """LLaMA-Factory imports torchaudio for any data (llamafactory/data/mm_plugin.py).

    Package indexes have CUDA builds of torchaudio, which cannot be imported beside torch's CPU
    build. An empty module takes its place.
    """
    if importlib.util.find_spec("torchaudio") is None:
        spec = ModuleSpec("torchaudio", None)
        sys.modules["torchaudio"] = importlib.util.module_from_spec(spec)


_operators: Any = None


def _declare_operators_of_torchvision() -> None:
    """Package indexes have CUDA builds of torchvision, whose operators need torch's CUDA build.

    torchvision cannot be imported without them, so they are declared. Nothing calls them.
    """
    global _operators
    import torch
    from torchvision.extension import _has_ops

    if not _has_ops():
        _operators = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            _operators.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


_BEFORE: dict[str, Callable[[], None]] = {
    "torchvision._meta_registrations": _declare_operators_of_torchvision,
}
_AFTER: dict[str, Callable[[Any], None]] = {
    "accelerate.parallelism_config": _build_mesh_of_cpus,
    "llamafactory": _stand_in_for_torchaudio,
}


class _ChangeAtImport:
    """A meta path finder that calls the functions above when their modules are imported."""

    def __init__(self) -> None:
        self._searches: set[str] = set()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in _BEFORE.keys() | _AFTER.keys() or name in self._searches:
            return None
        self._searches.add(name)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._searches.remove(name)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_change(module: Any) -> None:
            if name in _BEFORE:
                _BEFORE[name]()
            execute(module)
            if name in _AFTER:
                _AFTER[name](module)

        spec.loader.exec_module = execute_and_change  # type: ignore[method-assign]
        return spec


for _name, _value in VARIABLES.items():
    os.environ.setdefault(_name, _value)
sys.meta_path.insert(0, _ChangeAtImport())  # type: ignore[arg-type]
