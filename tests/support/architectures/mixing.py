"""Find the modules that mix tokens along a sequence, without reading their code or names.

Each module of a decoder layer runs a second time on the inputs that it had in a forward, with the
values of one token changed. If outputs of other tokens change, the module mixes tokens:

    inputs               x0 x1 x2 x3          inputs               x0 y1 x2 x3
    outputs of a norm    n0 n1 n2 n3                               n0 m1 n2 n3
    outputs of a mixer   z0 z1 z2 z3                               z0 w1 w2 w3

Modules of transformers' attention interface and their ancestors are left out; modules inside of
an attention are not.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_moe_ep.derive import is_attention
from support.architectures.inputs import batch

# A prime number that divides no size of a tiny model.
_LENGTH = 17
# The positions of the tokens that are changed, one after the other.
_CHANGED = (3, 6, 9, 12)
# A difference above this limit is a change; rounding in fp32 stays below.
_CHANGE = 1e-5

# The arguments of a call: positional and named.
Call = tuple[tuple[Any, ...], dict[str, Any]]


def mixing(model: PreTrainedModel, layers: list[str]) -> set[tuple[str, str]]:
    """Return (name in its layer, class name) of the outermost modules that mix tokens."""
    calls = _record_calls(model, tuple(f"{layer}." for layer in layers))
    mixers = {name for name in calls if _mixes(model.get_submodule(name), calls[name])}
    outermost = {n for n in mixers if not any(n.startswith(f"{other}.") for other in mixers)}
    names_and_classes = set()
    for name in outermost:
        layer = next(layer for layer in layers if name.startswith(f"{layer}."))
        class_name = type(model.get_submodule(name)).__name__
        names_and_classes.add((name.removeprefix(f"{layer}."), class_name))
    return names_and_classes


def _record_calls(model: PreTrainedModel, prefixes: tuple[str, ...]) -> dict[str, Call]:
    """Run a forward, and return the arguments of each module whose name has one of the prefixes."""
    calls: dict[str, Call] = {}

    def recorder(name: str) -> Callable[..., None]:
        def record(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            calls.setdefault(name, (_copy(args), _copy(kwargs)))

        return record

    handles = [
        module.register_forward_pre_hook(recorder(name), with_kwargs=True)
        for name, module in model.named_modules()
        if name.startswith(prefixes) and not any(map(is_attention, module.modules()))
    ]
    inputs = batch(model, 1, _LENGTH)
    del inputs["labels"]
    with torch.no_grad():
        model(**inputs, use_cache=False)
    for handle in handles:
        handle.remove()
    return calls


def _mixes(module: nn.Module, call: Call) -> bool:
    want = _run(module, call)
    generator = torch.Generator().manual_seed(0)
    for position in _CHANGED:
        got = _run(module, _change_token(call, position, generator))
        if any(_differ_elsewhere(x, y, position) for x, y in zip(got, want, strict=True)):
            return True
    return False


def _run(module: nn.Module, call: Call) -> list[Tensor]:
    args, kwargs = _copy(call)
    torch.manual_seed(0)
    with torch.no_grad():
        return [x.clone() for x in _tensors(module(*args, **kwargs))]


def _differ_elsewhere(got: Tensor, want: Tensor, position: int) -> bool:
    """Return True if two outputs differ at another position than the given one.

    Outputs without a dimension of tokens, such as compressed tokens, may not differ anywhere.
    """
    if got.shape != want.shape:
        return True
    differs = (got.double() - want.double()).abs() > _CHANGE
    dim = _dim_of_tokens(want)
    if dim is not None:
        differs.unflatten(dim, (_LENGTH, -1)).select(dim, position).fill_(False)
    return bool(differs.any())


def _change_token(value: Any, position: int, generator: torch.Generator, name: str = "") -> Any:
    """Copy an argument with other values for one token. Masks are not changed."""
    if isinstance(value, dict):
        return {key: _change_token(x, position, generator, key) for key, x in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_change_token(x, position, generator, name) for x in value)
    if not isinstance(value, Tensor) or not value.is_floating_point() or name.endswith("mask"):
        return value
    dim = _dim_of_tokens(value)
    if dim is None:
        return value
    changed = value.clone()
    token = changed.unflatten(dim, (_LENGTH, -1)).select(dim, position)
    token += 3 * torch.randn(token.shape, generator=generator, dtype=torch.float64).to(token.dtype)
    return changed


def _dim_of_tokens(x: Tensor) -> int | None:
    """Return the first dimension whose size is a multiple of the number of tokens, or None."""
    return next((dim for dim, size in enumerate(x.shape) if size and size % _LENGTH == 0), None)


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copy(x) for key, x in value.items()}
    if type(value) in (tuple, list):
        return type(value)(map(_copy, value))
    return value.detach().clone() if isinstance(value, Tensor) else value


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, dict):
        yield from _tensors(list(output.values()))
    elif isinstance(output, tuple | list):
        for element in output:
            yield from _tensors(element)
