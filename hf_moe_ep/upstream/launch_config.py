"""The config file that `accelerate launch` takes by itself (accelerate/commands/config/)."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def default_launch_config() -> tuple[Path, dict[str, Any]] | None:
    """Return path and content of the file that `accelerate config` wrote; None if there is none.

    Raises:
        ValueError: the file has keys that the installed Accelerate does not know.
    """
    from accelerate.commands.config.config_args import default_config_file, load_config_from_file

    path = Path(default_config_file)
    if not path.is_file():
        return None
    found: dict[str, Any] = load_config_from_file(None).to_dict()
    return path, found
