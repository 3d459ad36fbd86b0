"""Record which FSDP2 units are gathered inside a block: names, bytes or parts of the model."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from unittest import mock

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from hf_moe_ep.upstream.module_names import get_stock_name


@contextmanager
def record_gathered_units() -> Iterator[list[str]]:
    """List the units in the order in which they are gathered.

    A unit has its name in the stock model, without the text before `layers.`.
    """
    names: list[str] = []
    original = FSDPParamGroup.unshard

    def unshard(self: FSDPParamGroup, *args: object, **kwargs: object) -> None:
        before = self._all_gather_result
        original(self, *args, **kwargs)
        if before is None and self._all_gather_result is not None:
            name = get_stock_name(self._module_fqn or "root")
            names.append(name[name.find("layers.") :] if "layers." in name else name)

    with mock.patch.object(FSDPParamGroup, "unshard", unshard):
        yield names


@contextmanager
def count_gathered_bytes() -> Iterator[dict[str, int]]:
    """Count the bytes that each unit gathers, by its full name in the stock model."""
    num_bytes: dict[str, int] = {}
    original = FSDPParamGroup.unshard

    def unshard(self: FSDPParamGroup, *args: object, **kwargs: object) -> None:
        before = self._all_gather_result
        original(self, *args, **kwargs)
        result = self._all_gather_result
        if before is None and result is not None:
            name = get_stock_name(self._module_fqn or "root")
            num_bytes[name] = num_bytes.get(name, 0) + result.all_gather_output.nbytes

    with mock.patch.object(FSDPParamGroup, "unshard", unshard):
        yield num_bytes


@contextmanager
def record_gathered_parts(model: nn.Module) -> Iterator[dict[int, set[str | int]]]:
    """When a decoder layer starts, record all parts that are gathered or being gathered.

    Yields layer index -> parts. A part is "embedding", "head" (with the norm), or the index of a
    layer (with its experts).
    """
    parts_by_layer: dict[int, set[str | int]] = {}
    units = [
        (_name_part(get_stock_name(name)), module)
        for name, module in model.named_modules()
        if isinstance(module, FSDPModule)
    ]

    def record(layer: int, *_: object) -> None:
        parts = parts_by_layer.setdefault(layer, set())
        for part, unit in units:
            group = unit._get_fsdp_state()._fsdp_param_group
            if group is not None and (group.is_unsharded or group._all_gather_result is not None):
                parts.add(part)

    handles = [
        unit.register_forward_pre_hook(partial(record, part))
        for part, unit in units
        if isinstance(part, int)
    ]
    try:
        yield parts_by_layer
    finally:
        for handle in handles:
            handle.remove()


def _name_part(name: str) -> str | int:
    parts = name.split(".")
    if "layers" in parts:
        return int(parts[parts.index("layers") + 1])
    if "embed_tokens" in parts:
        return "embedding"
    return "head" if {"norm", "lm_head"} & {*parts} else "root"
