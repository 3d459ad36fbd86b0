"""Store in a training checkpoint in which files the extra tensors are, instead of the tensors.

    extra_tensors.json    {"format": 1, "folder": "/models/Qwen3-Next", "source": "Qwen/Qwen3-Next",
                           "files": {"model-00041-of-00041.safetensors": 3992912},
                           "tensors": {"mtp.fc.weight": {"file": .., "dtype": "BF16",
                                       "shape": [2048, 4096], "start": 1024, "sha256": "03f2.."}}}

"files" has the size of each file in bytes. Extra tensors are tensors that a hub checkpoint has and
the model's class ignores (`hub/extra.py`). Training never changes them, so a training checkpoint
need not contain them. `hf-moe-ep convert` copies them from these files and compares the hashes. If
a resumed run has loaded its model from another folder, it compares the hashes of both folders.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from hf_moe_ep.checkpoints.storage.references import FileReferences
from hf_moe_ep.state import ModelState

EXTRA = "extra_tensors.json"
_logger = logging.getLogger("hf_moe_ep")


def describe_extra(state: ModelState) -> dict[str, Any] | None:
    """Return the content of extra_tensors.json; None for a model without extra tensors.

    The first call reads the tensors for their hashes. If their files are gone or have changed, the
    content describes the problem, because a training run does not need these tensors.
    """
    extra: FileReferences | None = state.extra
    if extra is None:
        return None
    try:
        return extra.to_json()
    except (ValueError, OSError) as error:
        _logger.warning(
            "checkpoints cannot refer to the tensors of %s that the model's class ignores: %s",
            extra.source,
            error,
        )
        return {"folder": str(extra.folder), "problem": str(error)}


def read_extra(path: Path) -> FileReferences | None:
    """Read extra_tensors.json; return None if the checkpoint has no such file.

    Raises:
        ValueError: the file is damaged, or the tensors were lost before the checkpoint was saved.
    """
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        problem = content.get("problem")
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{path} is damaged ({error}); load an older checkpoint") from error
    if problem is not None:
        raise ValueError(
            f"the tensors in {content.get('folder')} that the model's class ignores were lost "
            f"before {path} was saved: {problem}; do without them: hf-moe-ep convert "
            f"--no-extra-tensors"
        )
    return FileReferences.from_json(content, path)


def restore_extra(state: ModelState, path: Path) -> None:
    """Let a resumed model refer to the extra tensors that its training checkpoint names.

    A model that was loaded from another folder keeps its own references if they include all of
    these tensors. Rank 0 calls this function.

    Raises:
        ValueError: the model was loaded from a checkpoint with other extra tensors.
    """
    try:
        saved = read_extra(path)
    except ValueError as error:
        _logger.warning("%s", error)
        return
    if saved is None:
        return
    own: FileReferences | None = state.extra
    # The saved hashes show later if the files have changed since the first run.
    if own is None or own.tensors() == saved.tensors():
        state.extra = saved
        return
    own_tensors, saved_tensors = own.tensors(), saved.tensors()
    own_hashes, saved_hashes = own.hashes(), saved.hashes()
    for key in own_hashes.keys() & saved_hashes.keys():
        if own_hashes[key] != saved_hashes[key]:
            raise ValueError(
                f"two tensors are called {key}: {own_tensors[key].file}, from which this model was "
                f"loaded, has sha256 {own_hashes[key]}, and {path} names "
                f"{saved_tensors[key].file} with sha256 {saved_hashes[key]}; load the model from "
                f"the checkpoint from which the saved run had loaded it"
            )
    if own_hashes.keys() < saved_hashes.keys():
        state.extra = saved
    elif not saved_hashes.keys() <= own_hashes.keys():
        only = min(saved_hashes.keys() - own_hashes.keys())
        other = min(own_hashes.keys() - saved_hashes.keys())
        raise ValueError(
            f"{path} names {only} in {saved_tensors[only].file}, which the checkpoint of this "
            f"model lacks, and {own_tensors[other].file} has {other}, which the saved run lacked; "
            f"load the model from the checkpoint from which the saved run had loaded it"
        )
