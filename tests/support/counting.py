"""How often a function is called: collectives, and reads of a tensor by the host."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hf_moe_ep.ranks import collectives

# Name -> what has the function, and its name there. Of the MoE layers:
EXCHANGES = {
    "all_gather": (collectives, "_all_gather"),
    "all_to_all": (dist, "all_to_all_single"),
    "read": (Tensor, "tolist"),
}


@contextmanager
def counting(watched: Mapping[str, tuple[Any, str]]) -> Iterator[Counter[str]]:
    """Count the calls of each function of `watched` within the block."""
    calls: Counter[str] = Counter()
    originals = {name: getattr(*place) for name, place in watched.items()}

    def counted(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            # The torch path's own offsets live on the host, int32; what a GPU would hold is int64.
            if name != "read" or args[0].dtype == torch.int64:
                calls[name] += 1
            return originals[name](*args, **kwargs)

        return call

    for name, (owner, attribute) in watched.items():
        setattr(owner, attribute, counted(name))
    try:
        yield calls
    finally:
        for name, (owner, attribute) in watched.items():
            setattr(owner, attribute, originals[name])
