"""Errors of experiment trackers (tensorboard, wandb, ..): they name the tracker and the rank.

Accelerate calls trackers on the main process alone. If a tracker fails there, the other ranks wait
in the next collective until the launcher ends them, so the error on rank 0 has to say this.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from accelerate import Accelerator

from hf_moe_ep.ranks.together import one_line, this_rank
from hf_moe_ep.state import find_state
from hf_moe_ep.upstream.training_frameworks import prepared_models


def log(original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Wrap `Accelerator.log`: an error names the tracker.

    Raises:
        RuntimeError: a tracker failed.
    """
    accelerator: Accelerator = args[0]
    models = prepared_models(accelerator)
    if accelerator.num_processes == 1 or not any(find_state(model) for model in models):
        return original(*args, **kwargs)
    trackers = accelerator.trackers
    try:
        for tracker in trackers:
            accelerator.trackers = [tracker]
            original(*args, **kwargs)
    # A tracker may raise anything; its error becomes the cause of ours.
    except Exception as error:
        kind = type(tracker)
        raise RuntimeError(
            f"tracker {tracker.name!r} ({kind.__module__}.{kind.__qualname__}) failed on rank "
            f"{this_rank()}: {one_line(error)}; the other ranks wait for this one from now on, so "
            f"catch inside of a tracker what training shall survive"
        ) from error
    finally:
        accelerator.trackers = trackers
