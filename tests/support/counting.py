"""Count calls of functions, such as collectives and the host's reads of a tensor."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hf_moe_ep.moe.dispatch import counts

# Name -> (owner, attribute) of the function. These are the collectives and reads of MoE layers. The
# exchange of counts is an all-to-all as well.
EXCHANGES = {
    "counts": (counts, "start_counts"),
    "all_to_all": (dist, "all_to_all_single"),
    "read": (Tensor, "tolist"),
}


@contextmanager
def counting(watched: Mapping[str, tuple[Any, str]]) -> Iterator[Counter[str]]:
    """Count the calls of each function of `watched` within the block."""
    calls: Counter[str] = Counter()
    originals = {name: getattr(*function) for name, function in watched.items()}

    def counted(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            # int32 tensors are offsets of the torch path, which are on the host. Reads of int64
            # tensors would be host syncs on a GPU.
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
