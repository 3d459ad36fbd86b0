"""The largest tensor that is made while something runs."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class LargestTensor(TorchDispatchMode):
    """`elements` of the largest storage that is none of `known` (its own unit: each dtype's).

    `nbytes` are those of the largest storage.

    A custom operator hides what it does from this watch: measure below it.
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self._known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self.elements = self.nbytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for made in out if isinstance(out, (tuple, list)) else [out]:
            if not isinstance(made, Tensor) or made.is_meta:
                continue
            if made.untyped_storage().data_ptr() not in self._known:
                nbytes = made.untyped_storage().nbytes()
                self.elements = max(self.elements, nbytes // made.itemsize)
                self.nbytes = max(self.nbytes, nbytes)
        return out
