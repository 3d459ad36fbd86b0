"""The rates of a GPU, of its links and of its host, from which the seconds of a step are planned.

    h100 = find_hardware("h100")
    h100.memory_bandwidth, h100.sources["memory_bandwidth"]
    calibrated(h100, Path("rates.json"))      # measured rates replace those of the record

The records are data: `rates.json` beside this file, with the source of every number. Rates are
dense peaks. Memory is in the 10^9 bytes of data sheets. A link's bandwidth is that of one
direction, half of what data sheets add up. The fraction of a peak that code reaches, latencies and
the time of a launch are assumptions until they are measured (`calibrate.py`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from importlib import resources
from pathlib import Path
from typing import Any

# Each of these reaches a fraction of its peak: matrix products, grouped products of the experts,
# attention, operators that only move bytes, the links inside and between nodes, operators on the
# host's memory, and copies between host and device.
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
# The source of an assumed number begins with this word.
ASSUMED = "assumption"


@dataclass(frozen=True)
class Hardware:
    """The rates of one kind of GPU in its usual node and network.

    Attributes:
        name: the name on the command line.
        matmul_flops: peak FLOPs per second of a dense product without sparsity, by dtype name
            ("bfloat16", "float32", "float8_e4m3fn"). A dtype that is missing runs at the rate of
            the next wider one.
        memory_bandwidth: peak bytes per second, read and written together.
        memory_bytes: bytes of one GPU.
        node_size: GPUs of a node; consecutive ranks are on one node.
        in_node_bandwidth: peak bytes per second that a GPU sends inside its node while it receives
            as many.
        in_node_latency: seconds of an empty message.
        between_nodes_bandwidth, between_nodes_latency: the same for one GPU's share of the links
            between nodes.
        host_seconds: seconds that the host takes to launch one operator.
        host_link_bandwidth: peak bytes per second between a GPU and its host, in one direction.
        host_memory_bandwidth: peak bytes per second of the host's memory, per GPU.
        host_ahead: True if the host launches operators while the device computes, so that a step
            takes the longer of the two. False on a CPU, where a step takes their sum.
        overlap: 0 .. 1, the part of the communication that could overlap computation and does.
        fractions: for each of KINDS the fraction of the peak that is reached, 0 < f <= 1. An entry
            such as "grouped float32" or "memory bfloat16" holds for one dtype only.
        sources: by field name, where the number is from: a page, a measurement or an assumption.
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
            is_valid, valid_range = _valid_range(name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not (is_number and math.isfinite(value) and is_valid(value)):
                raise ValueError(
                    f"{name} ({value!r}) of hardware {self.name!r} must be {valid_range}"
                )
        for name in self.fractions:
            kind, _, dtype = name.partition(" ")
            if kind in (*PRODUCTS, "memory") and dtype in self.matmul_flops:
                continue
            _check_name(name, KINDS, f"fractions of hardware {self.name!r}")
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
        """Return the fraction of the peak that operators of a kind reach in a dtype."""
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


def known_hardware() -> dict[str, Hardware]:
    """Read the records of `rates.json`, by name."""
    file = resources.files("hf_moe_ep.planner").joinpath("rates.json")
    table = json.loads(file.read_text(encoding="utf-8"))
    shared = table["same_for_all"]
    assumed = {name: ASSUMED for name in shared if name != "node_size"}
    records = {}
    for name, entries in table["gpus"].items():
        values = {field_name: entry["value"] for field_name, entry in entries.items()}
        sources = {
            field_name: table["sources"].get(entry["source"], entry["source"])
            for field_name, entry in entries.items()
        }
        records[name] = Hardware(name=name, **shared, **values, sources=sources | assumed)
    return records


def find_hardware(name: str) -> Hardware:
    """Return the record of a GPU.

    Raises:
        ValueError: there is no such record; the message lists all.
    """
    known = known_hardware()
    if name.lower() not in known:
        raise ValueError(f"{name!r} is no GPU of the table; known are: {', '.join(known)}")
    return known[name.lower()]


def calibrated(hardware: Hardware, file: Path) -> Hardware:
    """Replace numbers of a record by the measured ones of a file.

    Args:
        file: JSON with any fields of `Hardware` but `name` and `sources`. `matmul_flops` and
            `fractions` may hold some of their entries. A measured rate is not a peak: the file
            should set the fraction that belongs to it to 1.

    Raises:
        ValueError: the file is no JSON object, or has an unknown field or an impossible number.
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
        _check_name(name, names, str(file))
        if name in ("matmul_flops", "fractions"):
            if not isinstance(value, dict):
                raise ValueError(f"{name} in {file} must be an object, got {value!r}")
            value = {**getattr(hardware, name), **value}
        changes[name] = value
    sources = {**hardware.sources, **dict.fromkeys(changes, f"measured: {file.name}")}
    return replace(hardware, **changes, sources=sources)


def _valid_range(name: str) -> tuple[Any, str]:
    """Return the check that a number must pass, and the check in words."""
    if name == "node_size":
        return (lambda value: isinstance(value, int) and value >= 1), "a whole number >= 1"
    if name == "overlap":
        return (lambda value: 0 <= value <= 1), "from 0 to 1"
    if name.startswith("fractions"):
        return (lambda value: 0 < value <= 1), "more than 0 and at most 1"
    if name.endswith("latency") or name == "host_seconds":
        return (lambda value: value >= 0), "0 or more"
    return (lambda value: value > 0), "more than 0"


def _check_name(name: str, known: Any, where: str) -> None:
    if name not in known:
        raise ValueError(f"{name!r} in {where} is not known; known are: {', '.join(known)}")
