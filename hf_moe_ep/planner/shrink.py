"""Find options that make a training step fit. The changes that cost least are tried first.

    limit 24 GiB    options as given           30.0 GiB
                    --optimizer adamw_fused    28.6 GiB
                    --experts-double-quant     27.3 GiB
                    --masters model            23.7 GiB    fits

`shrink` plans the step with each change. It drops a change that training refuses, or that lowers
the peak by less than a thousandth. The changes before `experts_dtype` do not change the results of
training beyond rounding (`batch`: if gradients are accumulated instead). `experts_dtype` and the
changes after it do change the results.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

# A change must lower the peak by at least this fraction.
_MIN_FRACTION = 0.001
# The options of a step: name -> value.
Options = Mapping[str, Any]


@dataclass(frozen=True)
class Change:
    """A value to try for an option if `when(options)` returns True."""

    name: str
    value: Any
    when: Callable[[Options], bool]

    @property
    def flag(self) -> str:
        """The option as text for the command line."""
        name = "--" + self.name.replace("_", "-")
        if self.value is False:
            return f"without {name}"
        return name if self.value is True else f"{name} {self.value}"


def _has_unquantised_scales(options: Options) -> bool:
    return options["experts_dtype"] == "nf4" and not options["experts_double_quant"]


CHANGES = (
    Change("checkpointing", True, lambda options: not options["checkpointing"]),
    Change("whole_logits", False, lambda options: options["whole_logits"]),
    Change("fused_head", True, lambda a: not (a["fused_head"] or a["whole_logits"])),
    Change("optimizer", "adamw_fused", lambda options: options["optimizer"] == "adamw"),
    Change("batch", 1, lambda options: options["batch"] > 1),
    Change("experts_dtype", "fp8", lambda a: bool(a["lora_rank"]) and a["experts_dtype"] is None),
    Change("experts_dtype", "nf4", lambda a: bool(a["lora_rank"]) and a["experts_dtype"] != "nf4"),
    Change("experts_double_quant", True, _has_unquantised_scales),
    Change("masters", "model", lambda a: bool(a["lora_rank"]) and a["masters"] == "fp32"),
    Change(
        "lora_targets",
        "attention",
        lambda a: bool(a["lora_rank"]) and a["lora_targets"] != "attention",
    ),
)


def shrink(
    options: Options,
    limit: int,
    peak_of: Callable[[Options], int],
    *,
    without: Collection[str] = (),
) -> Iterator[tuple[Change, int]]:
    """Yield changes that lower the peak, until the step fits in `limit` bytes.

    Each change is yielded with the peak after this change and all changes before it. Options in
    `without` are not changed.
    """
    options = dict(options)
    peak = peak_of(options)
    for change in CHANGES:
        if peak <= limit:
            return
        if change.name in without or not change.when(options):
            continue
        changed = options | {change.name: change.value}
        try:
            new_peak = peak_of(changed)
        except (ValueError, ImportError):  # training refuses the change, or lacks a package for it
            continue
        if new_peak <= peak * (1 - _MIN_FRACTION):
            options, peak = changed, new_peak
            yield change, peak
