"""Call a function inside transformers' from_pretrained, before it loads the weights.

The function chooses which weights stay on the meta device. The private names come from
transformers/modeling_utils.py: from_pretrained builds the model on the meta device and then calls
`_load_pretrained_model` with the files of the weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

from hf_moe_ep.upstream.replaced import replaced

_LOAD = "_load_pretrained_model"


@dataclass(frozen=True)
class WeightFiles:
    """The weights that from_pretrained is about to load.

    Attributes:
        files: the files in the order in which they are read, or an empty list for a state dict.
        problem: the reason why only stock code can load these weights, or "" if our code can, too.
    """

    files: Sequence[Path]
    problem: str = ""

    @property
    def safetensors(self) -> Sequence[Path]:
        """The files if all of them are safetensors files, otherwise an empty sequence."""
        is_safe = all(file.suffix == ".safetensors" for file in self.files)
        return self.files if is_safe else ()


@dataclass(frozen=True)
class OnMeta:
    """The tensors that from_pretrained leaves on the meta device.

    Attributes:
        module: the name of a module. The parameters and buffers of this module that are in the
            files stay on meta.
        tensors: tensors on meta that replace tensors of the files, by the keys of the files.
            from_pretrained does not read the replaced tensors. These are the tensors of `module`.
    """

    module: str
    tensors: Mapping[str, Tensor]


@contextmanager
def choose_before_loading(
    choose: Callable[[nn.Module, WeightFiles], OnMeta | None],
) -> Iterator[None]:
    """Inside the block, call `choose` once, after from_pretrained has built its model on meta.

    If `choose` returns None, from_pretrained loads all weights. transformers checks, converts and
    casts tensors on meta like tensors with values. The weights of an adapter that from_pretrained
    loads afterwards are not affected.
    """
    stock = vars(PreTrainedModel)[_LOAD]

    def load(
        model: nn.Module,
        state_dict: Mapping[str, Any] | None,
        checkpoint_files: Sequence[str] | None,
        load_config: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        setattr(PreTrainedModel, _LOAD, stock)
        files = _describe_weight_files(state_dict, checkpoint_files, load_config)
        on_meta = choose(model, files)
        if on_meta is None:
            return stock.__func__(model, state_dict, checkpoint_files, load_config, *args, **kwargs)
        device_map = load_config.device_map or {"": "cpu"}
        for conversion in load_config.weight_mapping or ():
            if getattr(conversion, "force_cpu", False):
                conversion.force_cpu = False  # it would copy tensors on meta to the CPU
        config = dataclasses.replace(load_config, device_map=device_map | {on_meta.module: "meta"})
        state_dict = _open_tensors(checkpoint_files or (), on_meta.tensors)
        return stock.__func__(model, state_dict, checkpoint_files, config, *args, **kwargs)

    with replaced(PreTrainedModel, _LOAD, staticmethod(load)):
        yield


def _describe_weight_files(
    state_dict: Mapping[str, Any] | None, checkpoint_files: Sequence[str] | None, load_config: Any
) -> WeightFiles:
    files = [Path(file) for file in checkpoint_files or ()] if state_dict is None else []
    devices = {str(device) for device in (load_config.device_map or {}).values()}
    if not files:
        problem = "they do not come from files"
    elif any(file.suffix != ".safetensors" for file in files):
        problem = "the files are not safetensors"
    elif load_config.hf_quantizer is not None:
        problem = "they are quantised while they are loaded, or were quantised before"
    elif load_config.device_mesh is not None:
        problem = "transformers shards them itself"
    elif len(devices) > 1:
        problem = f"device_map spreads them over {', '.join(sorted(devices))}"
    elif is_deepspeed_zero3_enabled():
        problem = "DeepSpeed loads them"
    else:
        problem = ""
    return WeightFiles(files, problem)


def _open_tensors(files: Sequence[str], on_meta: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return `on_meta`, and all other tensors of the files, which are read when they are sliced."""
    tensors: dict[str, Any] = dict(on_meta)
    for name in files:
        file = safe_open(name, framework="pt", device="cpu")
        tensors |= {key: file.get_slice(key) for key in set(file.keys()) - on_meta.keys()}
    return tensors
