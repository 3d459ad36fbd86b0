"""`print_found` prints a checkpoint for `hf-moe-ep inspect` and `hf-moe-ep verify`."""

from __future__ import annotations

from datetime import datetime, timezone

from hf_moe_ep.checkpoints.verify import Found


def print_found(folder: str, found: Found) -> None:
    """Print what kind of checkpoint a folder holds, then one fact per line."""
    print(f"{folder}: {found.what}")
    width = max(map(len, found.facts), default=0)
    for name, value in found.facts.items():
        if name == "time":
            written = datetime.fromtimestamp(float(value), timezone.utc)
            value = f"{written:%Y-%m-%d %H:%M:%S} UTC"
        print(f"  {name:<{width}}  {value}")
