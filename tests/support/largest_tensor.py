"""Measure the largest tensor that is made inside a block (`LargestTensor`)."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class LargestTensor(TorchDispatchMode):
    """Context manager that measures the storages of all tensors that operators return.

    Storages of the tensors `known` do not count. Tensors inside of a custom operator are not seen;
    call the operator's implementation instead.

    Attributes:
        elements: the largest number of elements of a storage, in the dtype of its tensor.
        nbytes: the largest number of bytes of a storage.
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self._known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self.elements = self.nbytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for result in out if isinstance(out, (tuple, list)) else [out]:
            if not isinstance(result, Tensor) or result.is_meta:
                continue
            if result.untyped_storage().data_ptr() not in self._known:
                nbytes = result.untyped_storage().nbytes()
                self.elements = max(self.elements, nbytes // result.itemsize)
                self.nbytes = max(self.nbytes, nbytes)
        return out
