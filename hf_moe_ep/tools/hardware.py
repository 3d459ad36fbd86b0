"""What a step's seconds are made of: the rates of a GPU, its links and its host.

    H100 = Hardware(
        name="h100",
        matmul_flops={"bfloat16": ...}, memory_bandwidth=..., memory_bytes=..., node_size=8,
        in_node_bandwidth=..., in_node_latency=..., between_nodes_bandwidth=...,
        between_nodes_latency=..., host_seconds=...,
        sources={"memory_bandwidth": "https://..."},
    )
    calibrated(H100, Path("rates.json"))

Rates are peaks, as their source has them. What part of a peak code reaches is another number, in
`fractions`, and an assumption until it is measured: a file for `calibrated` takes the place of any
of these numbers. The table of what GPUs have is `hardware_table.py`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

# What a part of a peak is reached by: products of one matrix each, of one per expert, attention;
# operators that only move bytes; the two links; operators on the host's memory, the link to it.
KINDS = (
    "matmul",
    "grouped",
    "attention",
    "memory",
    "in_node",
    "between_nodes",
    "on_host",
    "host_copy",
)
PRODUCTS = ("matmul", "grouped", "attention")
ASSUMED = "assumption"


@dataclass(frozen=True)
class Hardware:
    """The rates of one GPU among others; one of a kind with its links is one record.

    Attributes:
        name: what a user calls it.
        matmul_flops: by name of a dtype ("bfloat16", "float32", "float8_e4m3fn"): operations per
            second of a dense product, a multiplication and an addition being two; the peak,
            without sparsity. What is not there is computed as the next wider one that is.
        memory_bandwidth: bytes per second, read and written together; the peak.
        memory_bytes: of one GPU.
        node_size: GPUs of a node, consecutive ranks.
        in_node_bandwidth: bytes per second that a GPU sends inside its node, in one direction,
            while it receives as many; the peak.
        in_node_latency: seconds of a message of no bytes.
        between_nodes_bandwidth: the same for one GPU's share of the links to other nodes.
        between_nodes_latency: the same.
        host_seconds: of the host for one operator that it launches.
        host_link_bandwidth: bytes per second between a GPU and its host, in one direction; the
            peak.
        host_memory_bandwidth: of the host's memory the share of one GPU's process, likewise.
        host_ahead: the host launches what comes next while the device computes: a step takes the
            longer of both. False, as on a CPU: it takes their sum.
        overlap: of what could travel behind computation the part that does, 0 .. 1.
        fractions: by each of KINDS the part of its peak that is reached, 0 < f <= 1; an
            assumption, if `sources` does not name a measurement. For what computes or moves one
            dtype another may stand beside it, as "grouped float32" or "memory bfloat16".
        sources: by the name of a field where its number is from: a page, or ASSUMED.
    """

    name: str
    matmul_flops: Mapping[str, float]
    memory_bandwidth: float
    memory_bytes: float
    node_size: int
    in_node_bandwidth: float
    in_node_latency: float
    between_nodes_bandwidth: float
    between_nodes_latency: float
    host_seconds: float
    host_link_bandwidth: float = 32e9
    host_memory_bandwidth: float = 40e9
    host_ahead: bool = True
    overlap: float = 1.0
    fractions: Mapping[str, float] = field(default_factory=lambda: dict.fromkeys(KINDS, 1.0))
    sources: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, value in self._numbers():
            fits, what = _range_of(name)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not (number and math.isfinite(value) and fits(value)):
                raise ValueError(f"{name} ({value!r}) of hardware {self.name!r} must be {what}")
        for name in self.fractions:
            kind, _, dtype = name.partition(" ")
            if kind in (*PRODUCTS, "memory") and dtype in self.matmul_flops:
                continue
            _known(name, KINDS, f"fractions of hardware {self.name!r}")
        if missing := [kind for kind in KINDS if kind not in self.fractions]:
            raise ValueError(
                f"fractions of hardware {self.name!r} has no {missing[0]!r}; it needs all of "
                f"{', '.join(KINDS)}"
            )
        if not self.matmul_flops:
            raise ValueError(f"matmul_flops of hardware {self.name!r} names no dtype")
        if not isinstance(self.host_ahead, bool):
            raise ValueError(f"host_ahead ({self.host_ahead!r}) must be true or false")

    def reached(self, kind: str, dtype: str) -> float:
        """Return the fraction of a kind of operators, in a dtype."""
        return self.fractions.get(f"{kind} {dtype}", self.fractions[kind])

    def _numbers(self) -> list[tuple[str, Any]]:
        found: list[tuple[str, Any]] = []
        for one in fields(self):
            value = getattr(self, one.name)
            if one.name in ("matmul_flops", "fractions"):
                found += [(f"{one.name}[{key!r}]", number) for key, number in value.items()]
            elif one.name not in ("name", "host_ahead", "sources"):
                found.append((one.name, value))
        return found


def calibrated(hardware: Hardware, file: Path) -> Hardware:
    """Put measured numbers in place of a record's own.

    Args:
        file: JSON with any of the fields of `Hardware` but `name` and `sources`; of `matmul_flops`
            and `fractions` any of their entries. A measured rate is not a peak: where the file has
            one and no fraction for it, write the fraction 1 beside it.

    Raises:
        ValueError: the file is no JSON object, names a field that there is not, or has a number
            that cannot be.
    """
    try:
        measured = json.loads(file.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{file} is no JSON: {error}") from error
    if not isinstance(measured, dict):
        raise ValueError(f"{file} must hold one JSON object, and holds a {type(measured).__name__}")
    names = [one.name for one in fields(Hardware) if one.name not in ("name", "sources")]
    changes: dict[str, Any] = {}
    for name, value in measured.items():
        _known(name, names, str(file))
        if name in ("matmul_flops", "fractions"):
            if not isinstance(value, dict):
                raise ValueError(f"{name} in {file} must be an object, got {value!r}")
            value = {**getattr(hardware, name), **value}
        changes[name] = value
    sources = {**hardware.sources, **dict.fromkeys(changes, f"measured: {file.name}")}
    return replace(hardware, **changes, sources=sources)


def _range_of(name: str) -> tuple[Any, str]:
    """Return what a number must pass, and that in words."""
    if name == "node_size":
        return (lambda value: isinstance(value, int) and value >= 1), "a whole number >= 1"
    if name == "overlap":
        return (lambda value: 0 <= value <= 1), "from 0 to 1"
    if name.startswith("fractions"):
        return (lambda value: 0 < value <= 1), "more than 0 and at most 1"
    if name.endswith("latency") or name == "host_seconds":
        return (lambda value: value >= 0), "0 or more"
    return (lambda value: value > 0), "more than 0"


def _known(name: str, known: Any, where: str) -> None:
    if name not in known:
        raise ValueError(f"{name!r} in {where} is not known; known are: {', '.join(known)}")
