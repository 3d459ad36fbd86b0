"""Verify or describe a checkpoint in the hub's layout or of a training run; nothing is written.

`verify` reads every file and compares it with hashes, headers and the config. `describe_checkpoint`
reads only the headers of the files and the manifest.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hf_moe_ep.checkpoints.hub.configs import CONFIG
from hf_moe_ep.checkpoints.hub.extra import check_patterns, find_to_copy
from hf_moe_ep.checkpoints.hub.read import build_model_from_config, find_weights
from hf_moe_ep.checkpoints.hub.write import HASHES, HASHES_OF_COPIES
from hf_moe_ep.checkpoints.storage import manifest
from hf_moe_ep.checkpoints.storage.atomic import compute_sha256
from hf_moe_ep.checkpoints.storage.safetensors_file import INDEX, read_index, sha256_of_tensors
from hf_moe_ep.checkpoints.training.extra import EXTRA, read_extra
from hf_moe_ep.lora.adapter_config import CONFIG as ADAPTER_CONFIG
from hf_moe_ep.upstream.hub import make_progress_bar


@dataclass(frozen=True)
class Found:
    """A summary of a checkpoint in a few words, and facts: the result of both functions."""

    summary: str
    facts: dict[str, str]


def verify(
    folder: str | os.PathLike[str],
    *,
    ignore_unexpected: Sequence[str] = (),
    trust_remote_code: bool = False,
) -> Found:
    """Read every file of a checkpoint and compare it with its hash, header and config.

    If a training checkpoint refers to tensors in other files, because the model's class ignores
    them, these tensors are read and compared, too.

    Args:
        ignore_unexpected: regular expressions. Tensors that do not belong to the model are an error
            unless the model's class ignores them or a pattern is found in their keys.
        trust_remote_code: run the Python files of the folder if its config names a class in them.

    Raises:
        ValueError: files or tensors are missing, truncated, changed or misshapen; the error names
            them.
    """
    patterns = check_patterns(ignore_unexpected)
    path = _check_folder(folder)
    if manifest.is_ours(path):
        return _verify_manifest(path)
    tensors = read_index(path)
    facts = {"tensors": f"{len(tensors)}, files as long as their headers say"}
    if (path / CONFIG).is_file():
        model, plan = build_model_from_config(path, trust_remote_code=trust_remote_code)
        names = [name for name, _ in model.named_parameters()]
        weights = find_weights(model, path, plan, names, patterns)
        facts["shapes"] = f"those of {type(model).__name__}"
        if weights.extra:
            facts["ignored tensors"] = f"{len(weights.extra)}, such as {min(weights.extra)}"
    num_hashes = _compare_hashes(path, {tensor.file.name for tensor in tensors.values()})
    if not num_hashes:
        facts["hashes"] = "none are known"
        return Found("headers only, contents were not checked", facts)
    facts["hashes"] = f"{num_hashes} files, all right"
    return Found("whole", facts)


def _verify_manifest(path: Path) -> Found:
    """Compare the files of a training checkpoint, and its tensors in other files, with hashes."""
    files = manifest.read(path)["files"]
    size = sum(entry["size"] for entry in files.values())
    with make_progress_bar(size, f"reading {path}", True) as progress:
        manifest.check(path, on_read=progress.update)
    facts = {"files": f"{len(files)}, all hashes right", "bytes": f"{size:,}"}
    if (extra := read_extra(path / EXTRA)) is not None:
        find_to_copy(extra, ())
        facts["ignored tensors"] = f"{len(extra)} in {extra.folder}, all hashes right"
    return Found("complete", facts)


def _compare_hashes(path: Path, used: set[str]) -> int:
    """Compare the files `used` with their hashes in the index; return the number of hashes.

    If there is a model.safetensors, it has precedence over an index, whose files are then not used.
    """
    hashes: dict[str, tuple[str, Callable[..., str]]] = {}
    if (path / INDEX).is_file():
        try:
            metadata = json.loads((path / INDEX).read_text("utf-8")).get("metadata", {})
        except (ValueError, AttributeError) as error:
            raise ValueError(f"{path / INDEX} is not a JSON object: {error}") from error
        for kind, hash_file in ((HASHES, compute_sha256), (HASHES_OF_COPIES, sha256_of_tensors)):
            in_index = metadata.get(kind, {})
            hashes |= {name: (in_index[name], hash_file) for name in in_index if name in used}
    size = sum((path / name).stat().st_size for name in hashes)
    with make_progress_bar(size, f"reading {path}", bool(hashes)) as progress:
        for name, (digest, hash_file) in hashes.items():
            actual = hash_file(path / name, progress.update)
            if actual != digest:
                raise ValueError(
                    f"{path / name} has changed since it was written: sha256 {actual}, {INDEX} "
                    f"says {digest}"
                )
    return len(hashes)


def _check_folder(folder: str | os.PathLike[str]) -> Path:
    """Return the path of a checkpoint; raise ValueError if `folder` cannot be one."""
    path = Path(folder)
    if not path.is_dir():
        problem = "is a file" if path.exists() else "does not exist"
        raise ValueError(f"{path} {problem}; name the folder of a checkpoint")
    is_adapter = (path / ADAPTER_CONFIG).is_file() and not (path / CONFIG).is_file()
    if is_adapter and not manifest.is_ours(path):
        raise ValueError(
            f"{path} holds only an adapter; name the folder of a model, which hf-moe-ep "
            f"merge-adapter makes from a base and an adapter"
        )
    return path


def describe_checkpoint(folder: str | os.PathLike[str]) -> Found:
    """Describe a checkpoint by its versions and layout, or by its tensors; read only headers."""
    path = _check_folder(folder)
    if manifest.is_ours(path):
        content = manifest.read(path)
        facts = {name: str(value) for name, value in content["layout"].items()}
        facts |= {name: str(value) for name, value in content["written"].items()}
        facts["bytes"] = f"{sum(entry['size'] for entry in content['files'].values()):,}"
        return Found("a training checkpoint with a manifest", facts)
    tensors = read_index(path).values()
    facts = {
        "tensors": str(len(tensors)),
        "files": str(len({tensor.file for tensor in tensors})),
        "dtypes": ", ".join(sorted({str(tensor.dtype) for tensor in tensors})),
        "bytes": f"{sum(tensor.nbytes for tensor in tensors):,}",
    }
    return Found("a model in safetensors files", facts)
