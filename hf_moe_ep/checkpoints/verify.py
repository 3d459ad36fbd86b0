"""Is a checkpoint whole, and what is it? Of the hub or of training; nothing is written.

verify   reads every file, against hashes, headers and the config
look     reads headers and the manifest alone
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from hf_moe_ep.checkpoints.hub.configs import CONFIG
from hf_moe_ep.checkpoints.hub.read import described_model, find_weights
from hf_moe_ep.checkpoints.hub.write import HASHES
from hf_moe_ep.checkpoints.storage import manifest
from hf_moe_ep.checkpoints.storage.atomic import sha256_of
from hf_moe_ep.checkpoints.storage.safetensors_file import INDEX, read_index
from hf_moe_ep.lora.adapter_config import CONFIG as ADAPTER_CONFIG
from hf_moe_ep.upstream.hub import progress_bar


@dataclass(frozen=True)
class Found:
    """What a folder holds: a sentence, then facts by name."""

    what: str
    facts: dict[str, str]


def verify(folder: str | os.PathLike[str]) -> Found:
    """Read every file of a checkpoint of either kind, and check it against all that is known of it.

    Raises:
        ValueError: it names the file or the tensors: missing, truncated, changed, misshapen.
    """
    path = _existing(folder)
    if manifest.is_ours(path):
        files = manifest.read(path)["files"]
        size = sum(entry["size"] for entry in files.values())
        with progress_bar(size, f"reading {path}", True) as progress:
            manifest.check(path, on_read=progress.update)
        return Found("complete", {"files": f"{len(files)}, all hashes right", "bytes": f"{size:,}"})
    entries = read_index(path)
    facts = {"tensors": f"{len(entries)}, files as long as their headers say"}
    if (path / CONFIG).is_file():
        model, plan = described_model(path)
        find_weights(model, path, plan, [name for name, _ in model.named_parameters()])
        facts["shapes"] = f"those of {type(model).__name__}"
    hashes: dict[str, str] = {}
    if (path / INDEX).is_file():
        index = json.loads((path / INDEX).read_text("utf-8"))
        # Of files that are read: a model.safetensors of stock hides the index that it leaves.
        read = {entry.file.name for entry in entries.values()}
        known = index.get("metadata", {}).get(HASHES, {})
        hashes = {name: digest for name, digest in known.items() if name in read}
    size = sum((path / name).stat().st_size for name in hashes)
    with progress_bar(size, f"reading {path}", bool(hashes)) as progress:
        for name, digest in hashes.items():
            found = sha256_of(path / name, progress.update)
            if found != digest:
                raise ValueError(
                    f"{path / name} has changed since it was written: sha256 {found}, {INDEX} says "
                    f"{digest}"
                )
    facts["hashes"] = f"{len(hashes)} files, all right" if hashes else "none are known"
    return Found("whole", facts)


def _existing(folder: str | os.PathLike[str]) -> Path:
    path = Path(folder)
    if not path.is_dir():
        what = "is a file" if path.exists() else "does not exist"
        raise ValueError(f"{path} {what}; name the folder of a checkpoint")
    is_adapter = (path / ADAPTER_CONFIG).is_file() and not (path / CONFIG).is_file()
    if is_adapter and not manifest.is_ours(path):
        raise ValueError(
            f"{path} holds an adapter alone; name the folder of a model, hf-moe-ep merge-adapter "
            f"makes one of both"
        )
    return path


def look(folder: str | os.PathLike[str]) -> Found:
    """Tell what wrote a checkpoint, and at which layout; nothing but headers is read."""
    path = _existing(folder)
    if manifest.is_ours(path):
        found = manifest.read(path)
        facts = {name: str(value) for name, value in found["layout"].items()}
        facts |= {name: str(value) for name, value in found["written"].items()}
        facts["bytes"] = f"{sum(entry['size'] for entry in found['files'].values()):,}"
        return Found("a training checkpoint, complete as far as sizes tell", facts)
    entries = read_index(path)
    size = sum(e.dtype.itemsize * torch.Size(e.shape).numel() for e in entries.values())
    facts = {
        "tensors": str(len(entries)),
        "files": str(len({entry.file for entry in entries.values()})),
        "dtypes": ", ".join(sorted({str(entry.dtype) for entry in entries.values()})),
        "bytes": f"{size:,}",
    }
    return Found("a model in safetensors files", facts)
