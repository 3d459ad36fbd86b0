"""`state.json`: everything of a training state that is no file of tensors.

    {"format": 1,
     "layout": {"world_size": 8, "ep_size": 4, ...},         how it was saved
     "progress": {"step": 100},                              the user's, by `json_values.py`
     "scheduler": {"last_epoch": 100, ...},                  null without one
     "spreads": [{"grid": [8], "ranks": [0, 1, ...], "cuts": [0]}, ...],     of `spread.py`
     "tensors": {"model.norm.weight": {"shape": [32], "dtype": "float32",
                                       "spread": 0, "replica": 0}, ...},
     "rest": {"scalars": {"scale": ...},                     tensors of the model without a dim
              "kind": "MyAdamW", "bases": ["AdamW"],         null without an optimizer
              "groups": [{"names": ["norm.weight"], "options": {"lr": 0.1, ...}}],
              "optimizer": {"norm.weight": {
                  "exp_avg": {"__in_file__": "optimizer.exp_avg.norm.weight"},
                  "step": {"on": "host", "value": ...}}}}}

The names of these fields stand in this file alone. A file without a number is of format 1: the
number came later, and so did "bases", "spreads", "spread" and "replica".
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
_HOST, _PARAMETER = "host", "parameter"


@dataclass(frozen=True)
class TensorForm:
    """Global shape and dtype of a tensor in the files; and who wrote them.

    Attributes:
        spread: how it lay on ranks; None in files of versions that did not write it.
        replica: which of its replicas wrote it.
    """

    shape: list[int]
    dtype: torch.dtype
    spread: Spread | None = None
    replica: int = 0


@dataclass(frozen=True)
class Kept:
    """One thing that an optimizer keeps of a parameter: a tensor in the files, or a value.

    Attributes:
        in_file: the tensor's name there; None for a value.
        value: a number, or a tensor without a dim, or anything that JSON can hold.
        beside_parameter: a tensor that lies on the parameter's device, as fused AdamW's `step`.
    """

    in_file: str | None = None
    value: Any = None
    beside_parameter: bool = False


@dataclass(frozen=True)
class Group:
    """One group of an optimizer: its parameters by name; lr and what else stands there."""

    names: list[str]
    options: dict[str, Any]


@dataclass(frozen=True)
class OptimizerState:
    """The knowledge of an optimizer, its tensors by name alone.

    Attributes:
        kind: its class; None in files of versions that did not write it.
        bases: the classes it derives from, up to torch's own.
        kept: {parameter: {key: what}}.
    """

    kind: str | None
    bases: list[str]
    kept: dict[str, dict[str, Kept]]
    groups: list[Group]


@dataclass(frozen=True)
class StateFile:
    """The content of `state.json`; `scalars` are the model's tensors without a dim."""

    layout: dict[str, Any]
    progress: dict[str, Any] = field(default_factory=dict)
    scheduler: dict[str, Any] | None = None
    tensors: dict[str, TensorForm] = field(default_factory=dict)
    scalars: dict[str, Tensor] = field(default_factory=dict)
    optimizer: OptimizerState | None = None

    def to_json(self) -> dict[str, Any]:
        """Copy everything into what JSON takes.

        Raises:
            ValueError: something has no form in JSON; it says where.
        """
        scheduler = None if self.scheduler is None else encode(self.scheduler, "scheduler")
        spreads = {form.spread: None for form in self.tensors.values() if form.spread is not None}
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
            "tensors": {name: _form_to_json(form, numbers) for name, form in self.tensors.items()},
        }

    @staticmethod
    def from_json(content: dict[str, Any]) -> StateFile:
        """Restore what `to_json` was called on.

        Raises:
            ValueError: the file is of a format that this version does not know.
            LookupError, TypeError, AttributeError: it is damaged.
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
                name: _form_from_json(form, spreads) for name, form in content["tensors"].items()
            },
            scalars={name: decode(value) for name, value in rest["scalars"].items()},
            optimizer=_optimizer_from_json(rest),
        )


def digest(content: dict[str, Any]) -> str:
    """Hash what must be alike on every rank, of what `to_json` returned."""
    alike = [content["spreads"], content["tensors"], content["rest"]]
    return hashlib.sha256(json.dumps(alike).encode()).hexdigest()


def read(path: Path) -> StateFile:
    """Read a `state.json`.

    Raises:
        ValueError: it is damaged, or of a format that this version does not know.
    """
    try:
        return StateFile.from_json(json.loads(path.read_text(encoding="utf-8")))
    except ValueError as error:  # of JSON and UTF-8, too
        raise ValueError(f"{path} cannot be read: {error}") from error
    except (LookupError, TypeError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"{path} is damaged ({reason}); take an older checkpoint") from error


def _form_to_json(form: TensorForm, numbers: dict[Spread, int]) -> dict[str, Any]:
    of_file = {"shape": form.shape, "dtype": _dtype_name(form.dtype)}
    if form.spread is None:
        return of_file
    return {**of_file, "spread": numbers[form.spread], "replica": form.replica}


def _form_from_json(form: dict[str, Any], spreads: list[Spread]) -> TensorForm:
    shape, dtype = form["shape"], getattr(torch, form["dtype"])
    if "spread" not in form:
        return TensorForm(shape, dtype)
    return TensorForm(shape, dtype, spreads[form["spread"]], form["replica"])


def _optimizer_to_json(optimizer: OptimizerState | None) -> dict[str, Any]:
    if optimizer is None:
        return {"kind": None, "bases": [], "groups": [], "optimizer": {}}
    groups = [
        {"names": group.names, "options": encode(group.options, f"param_groups[{index}]")}
        for index, group in enumerate(optimizer.groups)
    ]
    kept = {
        parameter: {
            key: _kept_to_json(value, f"{key} of {parameter} in {optimizer.kind}")
            for key, value in values.items()
        }
        for parameter, values in optimizer.kept.items()
    }
    return {"kind": optimizer.kind, "bases": optimizer.bases, "groups": groups, "optimizer": kept}


def _optimizer_from_json(rest: dict[str, Any]) -> OptimizerState | None:
    if not rest["groups"]:  # which every optimizer has
        return None
    kept = {
        parameter: {key: _kept_from_json(entry) for key, entry in entries.items()}
        for parameter, entries in rest["optimizer"].items()
    }
    groups = [Group(group["names"], decode(group["options"])) for group in rest["groups"]]
    return OptimizerState(rest.get("kind"), rest.get("bases", []), kept, groups)


def _kept_to_json(kept: Kept, where: str) -> dict[str, Any]:
    if kept.in_file is not None:
        return {"__in_file__": kept.in_file}
    value = encode(kept.value, where)
    if not isinstance(kept.value, Tensor):
        return {"value": value}
    return {"on": _PARAMETER if kept.beside_parameter else _HOST, "value": value}


def _kept_from_json(entry: dict[str, Any]) -> Kept:
    if "__in_file__" in entry:
        return Kept(in_file=entry["__in_file__"])
    return Kept(value=decode(entry["value"]), beside_parameter=entry.get("on") == _PARAMETER)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
