"""Store the rates of GPUs, links and hosts, from which `seconds.py` plans the time of a step.

    h100 = find_hardware("h100")
    h100.memory_bandwidth, h100.sources["memory_bandwidth"]
    apply_measured_rates(h100, Path("rates.json"))    # h100 with the measured rates of the file

Each known GPU has a record in `rates.json` in this folder, with the source of every number. FLOP
rates are peaks for dense matrices, without sparsity. A gigabyte is 10^9 bytes, as in data sheets.
The bandwidth of a link counts one direction; data sheets often add up both directions. Three things
are assumptions until `calibrate.py` measures them: the fraction of a peak that a kernel reaches,
the latency of a link, and the time of a kernel launch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from importlib import resources
from pathlib import Path
from typing import Any

# The kinds of work for which `Hardware.fractions` has a fraction of the peak rate: matrix products,
# grouped products of the experts, attention, operators that only move bytes, the links inside and
# between nodes, operators on the host's memory, and copies between host and device.
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
            ("bfloat16", "float32", "float8_e4m3fn"). A missing dtype runs at the rate of the next
            wider dtype.
        memory_bandwidth: peak bytes per second that the GPU's memory reads and writes together.
        memory_bytes: bytes of memory that the GPU has.
        node_size: GPUs per node. Ranks 0 to node_size - 1 are on the first node, and so on.
        in_node_bandwidth: peak bytes per second that a GPU can send to other GPUs of its node while
            it receives at the same rate.
        in_node_latency: seconds that an empty message takes.
        between_nodes_bandwidth, between_nodes_latency: the same for the links between nodes. The
            bandwidth is the share of one GPU.
        host_seconds: seconds that the host takes to launch one operator.
        host_link_bandwidth: peak bytes per second between a GPU and its host, in one direction.
        host_memory_bandwidth: peak bytes per second of the host's memory, per GPU.
        host_ahead: True if the host launches operators while the device computes; a step then
            takes as long as the slower of host and device. False on a CPU; both times are added.
        overlap: the fraction of the overlappable communication that really overlaps computation,
            from 0 (nothing) to 1 (all).
        fractions: the fraction of the peak that each of KINDS reaches (above 0, at most 1). An
            entry such as "grouped float32" or "memory bfloat16" applies to one dtype only.
        sources: by field name, the source of the number: a page, a measurement or an assumption.
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
        for name, value in self._list_numbers():
            is_valid, valid_range = _find_valid_range(name)
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
            raise ValueError(f"matmul_flops of hardware {self.name!r} is empty; give a rate")
        if not isinstance(self.host_ahead, bool):
            raise ValueError(f"host_ahead ({self.host_ahead!r}) must be true or false")

    def find_reached_fraction(self, kind: str, dtype: str) -> float:
        """Return the fraction of the peak that operators of a kind reach in a dtype."""
        return self.fractions.get(f"{kind} {dtype}", self.fractions[kind])

    def _list_numbers(self) -> list[tuple[str, Any]]:
        found: list[tuple[str, Any]] = []
        for attribute in fields(self):
            value = getattr(self, attribute.name)
            if attribute.name in ("matmul_flops", "fractions"):
                found += [(f"{attribute.name}[{key!r}]", number) for key, number in value.items()]
            elif attribute.name not in ("name", "host_ahead", "sources"):
                found.append((attribute.name, value))
        return found


def read_known_hardware() -> dict[str, Hardware]:
    """Read `rates.json` and return its records by name."""
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
        values["fractions"] = shared["fractions"] | values.get("fractions", {})
        records[name] = Hardware(name=name, **(shared | values), sources=assumed | sources)
    return records


def find_hardware(name: str) -> Hardware:
    """Return the record of a GPU.

    Raises:
        ValueError: no record has this name; the message lists the known names.
    """
    known = read_known_hardware()
    if name.lower() not in known:
        raise ValueError(f"no rates are known for GPU {name!r}; choose one of {', '.join(known)}")
    return known[name.lower()]


def apply_measured_rates(hardware: Hardware, file: Path) -> Hardware:
    """Return a copy of a record with the measured numbers of a file.

    Args:
        file: a JSON object with fields of `Hardware` other than `name` and `sources`. Entries that
            `matmul_flops` or `fractions` leave out keep their values. A measured rate is the rate
            that kernels reach, so the file should set the fraction of this kind to 1.

    Raises:
        ValueError: the file is not a JSON object, a field is unknown, or a number is out of range.
    """
    try:
        measured = json.loads(file.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(measured, dict):
        raise ValueError(f"{file} must contain a JSON object, not a {type(measured).__name__}")
    names = [
        attribute.name
        for attribute in fields(Hardware)
        if attribute.name not in ("name", "sources")
    ]
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


def _find_valid_range(name: str) -> tuple[Any, str]:
    """Return a function that checks the number `name`, and the valid range in words."""
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
        raise ValueError(f"{name!r} in {where} is not known; known names: {', '.join(known)}")
