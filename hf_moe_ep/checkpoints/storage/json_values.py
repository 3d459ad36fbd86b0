"""Encode Python values as JSON and decode them exactly, without pickle.

JSON has no tuples, bytes or tensors, and its keys are strings. `encode` turns such values into an
object with a reserved key:

    value                         encoded
    (0.9, 0.999)                  {"__tuple__": [0.9, 0.999]}
    {3: "a"}                      {"__items__": [[3, "a"]]}
    Counter({3: 1})               {"__counter__": [[3, 1]]}
    torch.tensor(3.0)             {"__tensor__": 3.0, "dtype": "float32"}
    torch.zeros(0, 3)             {"__tensor__": [], "dtype": "float32", "shape": [0, 3]}
    torch.tensor(2 + 1j)          {"__tensor__": [2.0, 1.0], "dtype": "complex64"}

The functions are meant for the small values of a training state: learning rates, schedulers,
positions in the data. If a value contains a function or another object, `encode` raises an error
that names the position of this object.
"""

from __future__ import annotations

import base64
from collections import Counter
from typing import Any

import torch
from torch import Tensor

_MAX_ELEMENTS = 1 << 16  # of a tensor; the state of the CPU's random generator has 5056 elements


def encode(value: Any, where: str) -> Any:
    """Encode `value` as JSON values. `where` is the position of `value`, which errors name.

    Raises:
        ValueError: `value` is, or contains, an object that cannot be encoded.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [encode(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, tuple):
        return {"__tuple__": [encode(item, f"{where}[{i}]") for i, item in enumerate(value)]}
    if isinstance(value, bytes):
        return {"__bytes__": base64.b64encode(value).decode()}
    if isinstance(value, dict):
        return _encode_dict(value, where)
    if isinstance(value, Tensor) and value.numel() <= _MAX_ELEMENTS:
        return _encode_tensor(value, where)
    if type(value).__module__ == "numpy" and getattr(value, "ndim", 1) == 0:
        return encode(value.item(), where)
    if isinstance(value, Tensor):
        raise ValueError(
            f"{where} is a tensor of {value.numel()} elements; a tensor outside of model and "
            f"optimizer may have up to {_MAX_ELEMENTS} elements: save this tensor in another file"
        )
    raise ValueError(
        f"{where} is a {type(value).__name__}, which a checkpoint without pickle cannot hold; use "
        f"numbers, strings, lists, tuples and dicts"
    )


def decode(value: Any) -> Any:
    """Decode the result of `encode`; tensors are in host memory."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    match value:
        case {"__tuple__": items}:
            return tuple(decode(item) for item in items)
        case {"__bytes__": text}:
            return base64.b64decode(text)
        case {"__items__": items}:
            return {decode(key): decode(item) for key, item in items}
        case {"__counter__": items}:
            return Counter({decode(key): item for key, item in items})
        case {"__tensor__": numbers, "dtype": name}:
            return _decode_tensor(numbers, getattr(torch, name), value.get("shape"))
    return {key: decode(item) for key, item in value.items()}


def _encode_tensor(tensor: Tensor, where: str) -> dict[str, Any]:
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        raise ValueError(
            f"{where} is a tensor without plain values ({tensor.layout}, {tensor.dtype}, on "
            f"{tensor.device}); make it a dense tensor that is neither quantised nor on meta"
        )
    encoded: dict[str, Any] = {"dtype": str(tensor.dtype).removeprefix("torch.")}
    if not tensor.numel():  # the shape cannot be read from empty lists
        encoded["shape"] = list(tensor.shape)
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return {"__tensor__": tensor.tolist(), **encoded}


def _decode_tensor(numbers: Any, dtype: torch.dtype, shape: list[int] | None) -> Tensor:
    """Make the tensor in host memory, even if torch.set_default_device names another device."""
    if shape is not None:
        return torch.empty(shape, dtype=dtype, device="cpu")
    if dtype.is_complex:
        return torch.view_as_complex(torch.tensor(numbers, dtype=dtype.to_real(), device="cpu"))
    return torch.tensor(numbers, dtype=dtype, device="cpu")


def _encode_dict(value: dict[Any, Any], where: str) -> dict[str, Any]:
    items = [
        (encode(key, f"{where}: a key"), encode(item, f"{where}[{key!r}]"))
        for key, item in value.items()
    ]
    if isinstance(value, Counter):
        return {"__counter__": items}
    if all(isinstance(key, str) and not key.startswith("__") for key in value):
        return dict(items)
    return {"__items__": items}
