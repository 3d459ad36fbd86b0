"""Name the experiment tracker (tensorboard, wandb, ..) and the rank if a tracker raises an error.

Accelerate calls trackers only on the main process. If a tracker raises an error, the other ranks
wait in the next collective until the launcher ends them. The error that `log` then raises on rank 0
names the tracker, and says that the other ranks wait.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from accelerate import Accelerator

from hf_moe_ep.ranks.all_ranks import format_in_one_line, this_rank
from hf_moe_ep.state import find_state
from hf_moe_ep.upstream.accelerate_and_trainer import list_prepared_models


def log(original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Wrap `Accelerator.log`: name a tracker that fails, because the other ranks then hang.

    Raises:
        RuntimeError: a tracker raised an error, and there are several ranks.
    """
    accelerator: Accelerator = args[0]
    models = list_prepared_models(accelerator)
    if accelerator.num_processes == 1 or not any(find_state(model) for model in models):
        return original(*args, **kwargs)
    trackers = accelerator.trackers
    try:
        for tracker in trackers:
            accelerator.trackers = [tracker]
            original(*args, **kwargs)
    # A tracker may raise an error of any class. The error becomes the cause of ours.
    except Exception as error:
        kind = type(tracker)
        raise RuntimeError(
            f"tracker {tracker.name!r} ({kind.__module__}.{kind.__qualname__}) failed on rank "
            f"{this_rank()}: {format_in_one_line(error)}; the other ranks now wait for this rank, "
            f"so catch inside the tracker all errors that should not end training"
        ) from error
    finally:
        accelerator.trackers = trackers
