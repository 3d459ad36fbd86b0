"""Read the default config file of `accelerate launch` (accelerate/commands/config/)."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def read_default_launch_config() -> tuple[Path, dict[str, Any]] | None:
    """Return the path and content of the file of `accelerate config`, or None without this file.

    Raises:
        ValueError: the file has keys that the installed Accelerate does not know.
    """
    from accelerate.commands.config.config_args import default_config_file, load_config_from_file

    path = Path(default_config_file)
    if not path.is_file():
        return None
    content: dict[str, Any] = load_config_from_file(None).to_dict()
    return path, content
