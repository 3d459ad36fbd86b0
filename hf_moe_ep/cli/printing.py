"""`print_found` prints a checkpoint for `hf-moe-ep inspect` and `hf-moe-ep verify`."""

from __future__ import annotations

from datetime import datetime, timezone

from hf_moe_ep.checkpoints.verify import Found


def print_found(folder: str, checkpoint: Found) -> None:
    """Print what kind of checkpoint a folder holds, then one fact per line."""
    print(f"{folder}: {checkpoint.what}")
    width = max(map(len, checkpoint.facts), default=0)
    for name, value in checkpoint.facts.items():
        if name == "time":
            written = datetime.fromtimestamp(float(value), timezone.utc)
            value = f"{written:%Y-%m-%d %H:%M:%S} UTC"
        print(f"  {name:<{width}}  {value}")
