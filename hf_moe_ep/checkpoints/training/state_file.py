"""Convert the training state, except the tensors, to `state.json` and back.

    {"format": 1,
     "layout": {"world_size": 8, "ep_size": 4, ...},         the layout at the time of the save
     "progress": {"step": 100},                              given by the user
     "scheduler": {"last_epoch": 100, ...},                  null without a scheduler
     "spreads": [{"grid": [8], "ranks": [0, 1, ...], "cuts": [0]}, ...],     the shardings
     "tensors": {"model.norm.weight": {"shape": [32], "dtype": "float32",
                                       "spread": 0, "replica": 0}, ...},
     "rest": {"scalars": {"scale": ...},                     0-dim tensors of the model
              "kind": "MyAdamW", "bases": ["AdamW"],         null without an optimizer
              "groups": [{"names": ["norm.weight"], "options": {"lr": 0.1, ...}}],
              "optimizer": {"norm.weight": {
                  "exp_avg": {"__in_file__": "optimizer.exp_avg.norm.weight"},
                  "step": {"on": "host", "value": ...}}}}}

The "spread" of a tensor is its index in "spreads", and "replica" is the replica that wrote it
(`spread.py`). Only this module uses the names of these fields. `json_values.py` encodes the values.
Older files lack "format", which means format 1, "bases", "spreads", "spread" and "replica".
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_moe_ep.checkpoints.storage.json_values import decode, encode
from hf_moe_ep.checkpoints.storage.spread import Spread

FORMAT = 1
# The place of a 0-dim tensor of the optimizer: host memory, or the device of its parameter.
_HOST, _PARAMETER = "host", "parameter"


@dataclass(frozen=True)
class SavedTensor:
    """The global shape and dtype of a saved tensor, its sharding, and the ranks that wrote it.

    Attributes:
        spread: the sharding at the time of the save; None in files of older versions.
        replica: the replica that wrote the tensor.
    """

    shape: list[int]
    dtype: torch.dtype
    spread: Spread | None = None
    replica: int = 0


@dataclass(frozen=True)
class OptimizerValue:
    """One entry of a parameter's optimizer state: the name of a tensor in the files, or a value.

    Attributes:
        tensor_name: the name of the tensor in the files; None for a value.
        value: a number, a 0-dim tensor, or another value that JSON can hold.
        on_device: True if the value is a tensor on the parameter's device, like `step` of fused
            AdamW.
    """

    tensor_name: str | None = None
    value: Any = None
    on_device: bool = False


@dataclass(frozen=True)
class Group:
    """A parameter group of an optimizer: names of parameters, and options such as lr."""

    names: list[str]
    options: dict[str, Any]


@dataclass(frozen=True)
class OptimizerState:
    """The state and the options of an optimizer.

    Attributes:
        kind: the name of the optimizer's class; None in files of older versions.
        bases: the names of its base classes, up to the first class of torch.
        values: the state, {parameter: {key: value}}.
    """

    kind: str | None
    bases: list[str]
    values: dict[str, dict[str, OptimizerValue]]
    groups: list[Group]


@dataclass(frozen=True)
class StateFile:
    """The content of `state.json`; `scalars` are the model's 0-dim tensors."""

    layout: dict[str, Any]
    progress: dict[str, Any] = field(default_factory=dict)
    scheduler: dict[str, Any] | None = None
    tensors: dict[str, SavedTensor] = field(default_factory=dict)
    scalars: dict[str, Tensor] = field(default_factory=dict)
    optimizer: OptimizerState | None = None

    def to_json(self) -> dict[str, Any]:
        """Convert everything to values that JSON can hold; tensors are copied.

        Raises:
            ValueError: a value has no form in JSON; the error names its position.
        """
        scheduler = None if self.scheduler is None else encode(self.scheduler, "scheduler")
        saved_tensors = self.tensors.values()
        spreads = dict.fromkeys(x.spread for x in saved_tensors if x.spread is not None)
        numbers = {spread: number for number, spread in enumerate(spreads)}
        return {
            "format": FORMAT,
            "layout": self.layout,
            "progress": encode(self.progress, "progress"),
            "scheduler": scheduler,
            "rest": {
                "scalars": {name: encode(value, name) for name, value in self.scalars.items()},
                **_optimizer_to_json(self.optimizer),
            },
            "spreads": [spread.to_json() for spread in spreads],
            "tensors": {name: _tensor_to_json(x, numbers) for name, x in self.tensors.items()},
        }

    @staticmethod
    def from_json(content: dict[str, Any]) -> StateFile:
        """Restore the object from the result of `to_json`.

        Raises:
            ValueError: the file has a format that this version does not know.
            LookupError, TypeError, AttributeError: the file is damaged.
        """
        number = content.get("format", 1)
        if number != FORMAT:
            raise ValueError(f"it has format {number}, this version reads {FORMAT}")
        rest, scheduler = content["rest"], content["scheduler"]
        spreads = [Spread.from_json(spread) for spread in content.get("spreads", [])]
        return StateFile(
            layout=content["layout"],
            progress=decode(content["progress"]),
            scheduler=None if scheduler is None else decode(scheduler),
            tensors={
                name: _tensor_from_json(entry, spreads)
                for name, entry in content["tensors"].items()
            },
            scalars={name: decode(value) for name, value in rest["scalars"].items()},
            optimizer=_optimizer_from_json(rest),
        )


def compute_digest(content: dict[str, Any]) -> str:
    """Hash the parts of the result of `to_json` that must be equal on every rank."""
    parts = [content["spreads"], content["tensors"], content["rest"]]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def read(path: Path) -> StateFile:
    """Read a `state.json`.

    Raises:
        ValueError: the file is damaged, or has a format that this version does not know.
    """
    try:
        return StateFile.from_json(json.loads(path.read_text(encoding="utf-8")))
    except ValueError as error:  # JSON and UTF-8 errors are ValueErrors, too
        raise ValueError(f"{path} cannot be read: {error}") from error
    except (LookupError, TypeError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"{path} is damaged ({reason}); load an older checkpoint") from error


def _tensor_to_json(tensor: SavedTensor, spread_numbers: dict[Spread, int]) -> dict[str, Any]:
    fields = {"shape": tensor.shape, "dtype": str(tensor.dtype).removeprefix("torch.")}
    if tensor.spread is None:
        return fields
    return {**fields, "spread": spread_numbers[tensor.spread], "replica": tensor.replica}


def _tensor_from_json(entry: dict[str, Any], spreads: list[Spread]) -> SavedTensor:
    shape, dtype = entry["shape"], getattr(torch, entry["dtype"])
    if "spread" not in entry:
        return SavedTensor(shape, dtype)
    return SavedTensor(shape, dtype, spreads[entry["spread"]], entry["replica"])


def _optimizer_to_json(optimizer: OptimizerState | None) -> dict[str, Any]:
    if optimizer is None:
        return {"kind": None, "bases": [], "groups": [], "optimizer": {}}
    groups = [
        {"names": group.names, "options": encode(group.options, f"param_groups[{index}]")}
        for index, group in enumerate(optimizer.groups)
    ]
    values = {
        parameter: {
            key: _value_to_json(value, f"{key} of {parameter} in {optimizer.kind}")
            for key, value in entries.items()
        }
        for parameter, entries in optimizer.values.items()
    }
    return {"kind": optimizer.kind, "bases": optimizer.bases, "groups": groups, "optimizer": values}


def _optimizer_from_json(rest: dict[str, Any]) -> OptimizerState | None:
    if not rest["groups"]:  # every optimizer has at least one group
        return None
    values = {
        parameter: {key: _value_from_json(entry) for key, entry in entries.items()}
        for parameter, entries in rest["optimizer"].items()
    }
    groups = [Group(group["names"], decode(group["options"])) for group in rest["groups"]]
    return OptimizerState(rest.get("kind"), rest.get("bases", []), values, groups)


def _value_to_json(saved: OptimizerValue, where: str) -> dict[str, Any]:
    if saved.tensor_name is not None:
        return {"__in_file__": saved.tensor_name}
    value = encode(saved.value, where)
    if not isinstance(saved.value, Tensor):
        return {"value": value}
    return {"on": _PARAMETER if saved.on_device else _HOST, "value": value}


def _value_from_json(entry: dict[str, Any]) -> OptimizerValue:
    if "__in_file__" in entry:
        return OptimizerValue(tensor_name=entry["__in_file__"])
    return OptimizerValue(value=decode(entry["value"]), on_device=entry.get("on") == _PARAMETER)
