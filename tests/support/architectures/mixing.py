"""Find modules that mix tokens along a sequence by changing one token, without reading code or
names.

Each module of a decoder layer runs again on what it was given in a forward, with other numbers at
one token's place. What then changes at the places of other tokens mixes:

    given        x0 x1 x2 x3          given        x0 y1 x2 x3
    a norm       n0 n1 n2 n3                       n0 m1 n2 n3
    a mixer      z0 z1 z2 z3                       z0 w1 w2 w3

Modules of transformers' attention interface, and what holds them, are left out, but not what is in
them.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_moe_ep.derive import is_attention
from support.architectures.inputs import batch

# No size of a tiny model, nor of a product of some, is one times it.
_LENGTH = 17
_CHANGED = (3, 6, 9, 12)
# Above what is rounded in fp32 on the way.
_CHANGE = 1e-5

Given = tuple[tuple[Any, ...], dict[str, Any]]


def mixing(model: PreTrainedModel, layers: list[str]) -> set[tuple[str, str]]:
    """Return place in its layer and class of the outermost modules that mix along the sequence."""
    given = _given_in_a_forward(model, tuple(f"{layer}." for layer in layers))
    mixers = {name for name in given if _mixes(model.get_submodule(name), given[name])}
    outermost = {n for n in mixers if not any(n.startswith(f"{other}.") for other in mixers)}
    found = set()
    for name in outermost:
        layer = next(layer for layer in layers if name.startswith(f"{layer}."))
        found.add((name.removeprefix(f"{layer}."), type(model.get_submodule(name)).__name__))
    return found


def _given_in_a_forward(model: PreTrainedModel, prefixes: tuple[str, ...]) -> dict[str, Given]:
    """Return the arguments of the named modules in a forward, by name."""
    found: dict[str, Given] = {}

    def keeps(name: str) -> Callable[..., None]:
        def keep(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            found.setdefault(name, (_copied(args), _copied(kwargs)))

        return keep

    handles = [
        module.register_forward_pre_hook(keeps(name), with_kwargs=True)
        for name, module in model.named_modules()
        if name.startswith(prefixes) and not any(map(is_attention, module.modules()))
    ]
    inputs = batch(model, 1, _LENGTH)
    del inputs["labels"]
    with torch.no_grad():
        model(**inputs, use_cache=False)
    for handle in handles:
        handle.remove()
    return found


def _mixes(module: nn.Module, given: Given) -> bool:
    want = _run(module, given)
    generator = torch.Generator().manual_seed(0)
    for place in _CHANGED:
        got = _run(module, _changed(given, place, generator))
        if any(_changed_elsewhere(one, other, place) for one, other in zip(got, want, strict=True)):
            return True
    return False


def _run(module: nn.Module, given: Given) -> list[Tensor]:
    args, kwargs = _copied(given)
    torch.manual_seed(0)
    with torch.no_grad():
        return [x.clone() for x in _tensors(module(*args, **kwargs))]


def _changed_elsewhere(got: Tensor, want: Tensor, place: int) -> bool:
    """Say whether two outputs differ at another place; anywhere, if they have no place per token.

    What tokens are compressed to has none.
    """
    if got.shape != want.shape:
        return True
    differs = (got.double() - want.double()).abs() > _CHANGE
    dim = _dim_of_tokens(want)
    if dim is not None:
        differs.unflatten(dim, (_LENGTH, -1)).select(dim, place).fill_(False)
    return bool(differs.any())


def _changed(given: Any, place: int, generator: torch.Generator, name: str = "") -> Any:
    """Give one token other numbers; masks stay."""
    if isinstance(given, dict):
        return {key: _changed(x, place, generator, key) for key, x in given.items()}
    if type(given) in (tuple, list):
        return type(given)(_changed(x, place, generator, name) for x in given)
    if not isinstance(given, Tensor) or not given.is_floating_point() or name.endswith("mask"):
        return given
    dim = _dim_of_tokens(given)
    if dim is None:
        return given
    changed = given.clone()
    token = changed.unflatten(dim, (_LENGTH, -1)).select(dim, place)
    token += 3 * torch.randn(token.shape, generator=generator, dtype=torch.float64).to(token.dtype)
    return changed


def _dim_of_tokens(x: Tensor) -> int | None:
    """The first that has a number for each token, or several, one token behind the other."""
    return next((dim for dim, size in enumerate(x.shape) if size and size % _LENGTH == 0), None)


def _copied(given: Any) -> Any:
    if isinstance(given, dict):
        return {key: _copied(x) for key, x in given.items()}
    if type(given) in (tuple, list):
        return type(given)(map(_copied, given))
    return given.detach().clone() if isinstance(given, Tensor) else given


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, dict):
        yield from _tensors(list(output.values()))
    elif isinstance(output, tuple | list):
        for one in output:
            yield from _tensors(one)
