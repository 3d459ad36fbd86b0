"""Which FSDP2 units are gathered while something runs."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from hf_moe_ep.upstream.module_names import stock_name


@contextmanager
def gathered_units() -> Iterator[list[str]]:
    """Names of units as in the stock model, from `layers.` on, in the order of their gathers."""
    names: list[str] = []
    original = FSDPParamGroup.unshard

    def unshard(self: FSDPParamGroup, *args: object, **kwargs: object) -> None:
        before = self._all_gather_result
        original(self, *args, **kwargs)
        if before is None and self._all_gather_result is not None:
            name = stock_name(self._module_fqn or "root")
            names.append(name[name.find("layers.") :] if "layers." in name else name)

    with mock.patch.object(FSDPParamGroup, "unshard", unshard):
        yield names
