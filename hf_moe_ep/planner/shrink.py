"""What to change so that a training step fits: changes that cost least first, each planned anew.

    30.1 GiB as asked > 24    --fused-head               30.0 GiB
                              --optimizer adamw_fused    28.6 GiB
                              --double-quant             27.3 GiB
                              --masters model            23.7 GiB    fits

A change that does not lower the peak is not kept. The first ones leave training what it is, to
rounding; the later ones do not, and are tried last.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

# Names and values of options; whatever may be asked of a step.
Asked = Mapping[str, Any]


@dataclass(frozen=True)
class Change:
    """An option to set, under the condition that the others are so."""

    name: str
    value: Any
    when: Callable[[Asked], bool]

    @property
    def flag(self) -> str:
        """What to write on the command line."""
        name = "--" + self.name.replace("_", "-")
        return name if self.value is True else f"{name} {self.value}"


CHANGES = (
    Change("checkpointing", True, lambda asked: not asked["checkpointing"]),
    Change("fused_head", True, lambda asked: not asked["fused_head"]),
    Change("optimizer", "adamw_fused", lambda asked: asked["optimizer"] == "adamw"),
    Change("batch", 1, lambda asked: asked["batch"] > 1),
    Change("experts_dtype", "fp8", lambda asked: _has_frozen_experts(asked)),
    Change("experts_dtype", "nf4", lambda asked: asked["experts_dtype"] == "fp8"),
    Change("double_quant", True, lambda a: a["experts_dtype"] == "nf4" and not a["double_quant"]),
    Change("masters", "model", lambda a: bool(a["lora_rank"]) and a["masters"] == "fp32"),
    Change("lora_targets", "attention", lambda a: bool(a["lora_rank"]) and _on_experts(a)),
)


def shrink(
    asked: Asked, limit: int, peak_of: Callable[[Asked], int], *, without: Collection[str] = ()
) -> Iterator[tuple[Change, int]]:
    """Yield the changes that lower the peak, each with the peak of all so far, until it fits.

    Options named in `without` stay as they are.
    """
    asked = dict(asked)
    peak = peak_of(asked)
    for change in CHANGES:
        if peak <= limit:
            return
        if change.name in without or not change.when(asked):
            continue
        changed = asked | {change.name: change.value}
        lower = peak_of(changed)
        if lower < peak:
            asked, peak = changed, lower
            yield change, peak


def _has_frozen_experts(asked: Asked) -> bool:
    return bool(asked["lora_rank"]) and asked["experts_dtype"] is None


def _on_experts(asked: Asked) -> bool:
    return bool(asked["lora_targets"] != "attention")
