"""Find the weight file that config.json names instead of model.safetensors.

transformers reads the field `transformers_weights` in `_get_resolved_checkpoint_files`
(transformers/modeling_utils.py). Saved configs do not have the field.
"""

from __future__ import annotations

import json
from pathlib import Path, PurePosixPath

WEIGHTS_FIELD = "transformers_weights"
_SUFFIXES = (".safetensors", ".safetensors.index.json")


def find_named_weights(folder: Path) -> str | None:
    """Return the file that the config in a folder names, relative to the folder, or None.

    The file has the suffix .safetensors, or is an index with the suffix .safetensors.index.json.

    Raises:
        ValueError: config.json is damaged; the file has another suffix, or lies outside the folder.
    """
    path = folder / "config.json"
    if not path.is_file():
        return None
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged or not JSON: {error}") from error
    name = config.get(WEIGHTS_FIELD) if isinstance(config, dict) else None
    if name is None:
        return None
    is_inside = isinstance(name, str) and not PurePosixPath(name).is_absolute()
    if not is_inside or ".." in PurePosixPath(name).parts or not name.endswith(_SUFFIXES):
        raise ValueError(
            f"{path}: transformers_weights is {name!r}, but must be the name of a file in this "
            f"folder that ends with {' or '.join(_SUFFIXES)}; correct the field, or remove it to "
            f"load model.safetensors"
        )
    return str(name)
