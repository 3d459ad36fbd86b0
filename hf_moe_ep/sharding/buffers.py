"""Let FSDP2 gather and reduce in fixed buffers (`fsdp_double_buffer`, `nccl_ub`).

FSDP2 gathers the shards of a unit in one flat tensor, copies the parameters out of it, and frees
it. In backward it copies the gradients of a unit into a flat tensor, which it reduces and frees. By
default torch allocates memory for each of these tensors. With `fsdp_double_buffer` units of the
same size share two fixed buffers instead, which they use in turn:

    unit             layer 0   layer 1   layer 2   layer 3
    buffer           A         B         A         B

Two buffers suffice, because FSDP2 gathers one unit while it computes another one, and releases a
buffer when the parameters are copied out of it. If a third unit of the size is gathered meanwhile,
an error is raised instead of overwriting a buffer that is still in use. Gradients need one buffer
of each size: FSDP2 waits for a reduction before it copies the next gradients.

The parameters themselves are not in these buffers: FSDP2 gives each of them memory of its own,
which it frees and allocates again, and no public function of torch changes this.

A fixed buffer has a fixed address, so NCCL can register it once (`nccl_ub`, "user buffers"). The
options have the names that Megatron-Core uses.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from hf_moe_ep.config import ParallelConfig
from hf_moe_ep.ranks.mesh import Meshes
from hf_moe_ep.upstream.process_groups import all_gather_single as _all_gather
from hf_moe_ep.upstream.process_groups import reduce_scatter_single as _reduce_scatter
from hf_moe_ep.upstream.sharded_models import allocate_for_group

_NUM_BUFFERS = 2


@dataclass
class _Buffer:
    """A fixed tensor, and a weak reference to the tensor through which FSDP2 uses it, if any."""

    memory: Tensor
    used_as: weakref.ReferenceType[Tensor] | None = None

    @property
    def is_free(self) -> bool:
        return self.used_as is None or self.used_as() is None

    def use(self) -> Tensor:
        # FSDP2 keeps this tensor object as long as a copy or a transfer needs the buffer.
        tensor = self.memory.view(-1)
        self.used_as = weakref.ref(tensor)
        return tensor


@dataclass
class FixedBuffers:
    """The buffers of all units of a model: at most two per use, group, size, dtype and device.

    Attributes:
        register: take the memory from the allocator of a group's NCCL communicator.
    """

    register: bool = False
    _buffers: dict[Any, list[_Buffer]] = field(default_factory=lambda: defaultdict(list))

    def take(
        self, use: str, group: dist.ProcessGroup, size: int, dtype: torch.dtype, device: Any
    ) -> Tensor:
        """Return a buffer [size] that nobody uses; its values are arbitrary.

        Raises:
            RuntimeError: both buffers of this size are in use.
        """
        buffers = self._buffers[use, group, size, dtype, torch.device(device)]
        for buffer in buffers:
            if buffer.is_free:
                return buffer.use()
        if len(buffers) == _NUM_BUFFERS:
            raise RuntimeError(
                f"fsdp_double_buffer: a third FSDP2 unit of {size:,} elements ({dtype}) cannot be "
                f"{use} while both buffers of this size are in use; gather one unit ahead at most "
                f"(set_modules_to_forward_prefetch and set_modules_to_backward_prefetch), or leave "
                f"fsdp_double_buffer out"
            )
        if self.register:
            memory = allocate_for_group(group, size, dtype, device)
        else:
            memory = torch.empty(size, dtype=dtype, device=device)
        buffers.append(_Buffer(memory))
        return buffers[-1].use()

    @property
    def num_buffers(self) -> int:
        return sum(map(len, self._buffers.values()))

    @property
    def num_bytes(self) -> int:
        return sum(b.memory.nbytes for buffers in self._buffers.values() for b in buffers)


class _AllGather:
    """FSDP2's all-gather (`FSDPModule.set_custom_all_gather`) into a fixed buffer."""

    def __init__(self, buffers: FixedBuffers, group: dist.ProcessGroup) -> None:
        self._buffers, self._group = buffers, group

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        (numel,) = size
        return self._buffers.take("gathered", self._group, int(numel), dtype, device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        return _all_gather(output_tensor, input_tensor, group=group, async_op=async_op)


class _ReduceScatter:
    """FSDP2's reduce-scatter (`FSDPModule.set_custom_reduce_scatter`) of a fixed buffer.

    For each reduce-scatter FSDP2 allocates two tensors: first the input, which it frees, and then
    the output, which becomes the gradients and therefore cannot be a fixed buffer. In a group of 4
    ranks, the input has 4 times as many elements as the output. If an error has occurred between
    the two calls, FSDP2 does not hold the input any more, and the next tensor is an input again.
    """

    def __init__(self, buffers: FixedBuffers, group: dist.ProcessGroup) -> None:
        self._buffers, self._group = buffers, group
        # An input whose output is not allocated yet.
        self._input: weakref.ReferenceType[Tensor] | None = None

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        (numel,) = size
        previous = None if self._input is None else self._input()
        if previous is not None and previous.numel() == numel * self._group.size():
            self._input = None
            return torch.empty(numel, dtype=dtype, device=device)
        tensor = self._buffers.take("reduced", self._group, int(numel), dtype, device)
        self._input = weakref.ref(tensor)
        return tensor

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        return _reduce_scatter(output_tensor, input_tensor, op=op, group=group, async_op=async_op)


def use_buffers(
    model: nn.Module, experts: Collection[nn.Module], config: ParallelConfig, meshes: Meshes
) -> FixedBuffers | None:
    """Give the FSDP2 units of a sharded model the buffers that `config` asks for.

    Args:
        experts: the experts modules, which are sharded over `meshes.ep_fsdp` if they are units.

    Raises:
        ValueError: `nccl_ub` is set, and the ranks do not communicate with NCCL.
    """
    if config.nccl_ub and meshes.device.type != "cuda":
        raise ValueError(
            f"nccl_ub=True registers buffers with NCCL, but these ranks communicate on "
            f"{meshes.device.type}; leave nccl_ub out, or run on NVIDIA GPUs"
        )
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not config.fsdp_double_buffer:
        for unit in units if config.nccl_ub else ():
            unit.set_allocate_memory_from_process_group_for_comm(True)
        return None
    buffers = FixedBuffers(register=config.nccl_ub)
    for unit in units:
        mesh = meshes.ep_fsdp if unit in experts else meshes.dense
        group = mesh.get_group(mesh.ndim - 1)  # FSDP2 shards over the last axis
        # Only a private module of torch names the abstract classes of these two.
        unit.set_custom_all_gather(_AllGather(buffers, group))  # type: ignore[arg-type]
        unit.set_custom_reduce_scatter(_ReduceScatter(buffers, group))  # type: ignore[arg-type]
    return buffers
