"""GPUs with their links, by name; every number with its source."""

from __future__ import annotations

from hf_moe_ep.tools.hardware import Hardware

HARDWARE: tuple[Hardware, ...] = ()
