"""With fsdp_double_buffer training gives the same bits, and allocates buffers in step 1 only."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast
from unittest import mock

import pytest
import torch
from mixers import PeakBytes
from support.adapters import with_lora
from support.checks import Check, Found
from support.needs import GATHERS_THREE_UNITS
from support.parity import checkpointing
from support.quantised import SIZES
from support.tiny_models import batch, tiny, vision_batch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy

from hf_moe_ep import (
    Muon,
    apply_ep_fsdp2,
    clip_grad_norm_,
    data_parallel_rank,
    describe,
    patch,
)
from hf_moe_ep.sharding import buffers as buffers_of_units
from hf_moe_ep.sharding.buffers import FixedBuffers, _ReduceScatter
from hf_moe_ep.state import patched_state

STEPS, LAYERS = 3, 3
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def _build(config: dict[str, Any], lora: bool, kind: str, **sizes: Any) -> nn.Module:
    if kind == "qwen3_vl_moe":
        return patch(tiny("qwen3_vl_moe", dtype=torch.float32), **config)
    sizes = {"num_hidden_layers": LAYERS, "dtype": torch.float32} | sizes
    model = patch(tiny(**sizes), **config)
    return with_lora(model, r=2, seed=0) if lora else model


def _train(
    rank: int,
    config: dict[str, Any],
    *,
    lora: bool = False,
    kind: str = "qwen3_moe",
    sizes: dict[str, Any] | None = None,
    reentrant: bool | None = None,
    micro_batches: int = 1,
    muon: bool = False,
    **options: Any,
) -> tuple[nn.Module, list[Tensor], list[int]]:
    """Return the model, all numbers of some steps, and the number of buffers after each step."""
    model = _build(config, lora, kind, **(sizes or {}))
    apply_ep_fsdp2(model, **options)
    if reentrant is not None:
        checkpointing(model, reentrant)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    adamw = torch.optim.AdamW(trained, lr=1e-2)
    optimizer: torch.optim.Optimizer = Muon(model, lr=1e-2) if muon else adamw
    numbers: list[Tensor] = []
    num_buffers = []
    for step in range(STEPS):
        for part in range(micro_batches):
            seed = 10 * step + part
            if kind == "qwen3_vl_moe":
                inputs = vision_batch(model, [[5, (4, 4), 3]] if rank else [[9]], seed=seed)
            else:
                own = data_parallel_rank(model)
                inputs = batch(model, 2, 9 + own, seed=seed + 100 * own)
            loss = model(**inputs).loss
            loss.backward()
            numbers.append(loss.detach())
        numbers.append(clip_grad_norm_(model, 0.5))
        numbers += [p.grad.to_local().clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            numbers.append(model.eval()(**inputs).loss)
        model.train()
        buffers = patched_state(model).buffers
        num_buffers.append(0 if buffers is None else buffers.num_buffers)
    return model, numbers, num_buffers


def _check_same_bits(config: dict[str, Any], options: dict[str, Any], rank: int, _: int) -> None:
    _, want, _ = _train(rank, config, **options)
    model, got, counts = _train(rank, config | {"fsdp_double_buffer": True}, **options)
    assert len(got) == len(want)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert counts == counts[:1] * STEPS and counts[0] > 2, counts
    assert all(len(both) <= 2 for both in patched_state(model).buffers._buffers.values())
    assert f"{counts[0]} buffers" in describe(model)


# name: (number of ranks, ParallelConfig, options of `_train`)
CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "ep 2 x ep_fsdp 2": (4, {"ep_size": 2}, {}),
    "ep 1, shard dim 1": (2, {"expert_shard_dim": 1}, {"micro_batches": 2}),
    "HSDP": (4, {"ep_size": 1, "dp_replicate_size": 2}, {"micro_batches": 2}),
    "sp 2": (4, {"ep_size": 2, "sp_size": 2}, {}),
    "bf16": (4, {"ep_size": 2}, {"mp_policy": BF16, "reentrant": False}),
    "reentrant checkpoints": (4, {"ep_size": 2}, {"reentrant": True}),
    "offload": (4, {"ep_size": 2}, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
    "not resharded": (4, {"ep_size": 2, "reshard_after_forward": False}, {}),
    "LoRA": (4, {"ep_size": 2}, {"lora": True}),
    "LoRA, nf4": (4, {"experts_dtype": "nf4"}, {"lora": True, "sizes": SIZES["nf4"]}),
    "ep 2 x etp 2": (4, {"ep_size": 2, "etp_size": 2}, {}),
    "compiled": (4, {"ep_size": 2, "compile_layers": "eager"}, {}),
    "ep 2 x cp 2": (4, {"ep_size": 2, "cp_size": 2}, {}),
    "pp 2 x ep 2": (4, {"ep_size": 2, "pp_size": 2}, {}),
    "hierarchical": (4, {"ep_size": 4, "dispatcher": "hierarchical", "node_size": 2}, {}),
    "chunks": (4, {"ep_size": 2, "dispatch_chunks": 2}, {}),
    "Muon": (4, {"ep_size": 2, "expert_shard_dim": 1}, {"muon": True}),
    "tied embeddings": (4, {"ep_size": 2}, {"sizes": {"tie_word_embeddings": True}}),
    "pictures on one rank": (2, {"ep_size": 2}, {"kind": "qwen3_vl_moe"}),
}
FAST = ("ep 1, shard dim 1",)
CHECKS = [
    Check(
        name,
        world,
        partial(_check_same_bits, config, options),
        slow=name not in FAST,
        skip=GATHERS_THREE_UNITS if name == "reentrant checkpoints" else "",
    ).as_parameter()
    for name, (world, config, options) in CASES.items()
]


@pytest.mark.parametrize("claim", CHECKS)
def test_training_has_the_same_bits(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)


def _a_step_allocates_no_buffer(rank: int, world: int) -> None:
    """In a later step FSDP2 transfers between the buffers of the first step, and the tensors that
    the step creates have no larger peak than without buffers.
    """
    peaks = []
    for double in (False, True):
        model = apply_ep_fsdp2(_build({"ep_size": 2, "fsdp_double_buffer": double}, False, ""))
        inputs = batch(model, 2, 9, seed=rank)
        for _ in range(2):
            model(**inputs).loss.backward()
            model.zero_grad()
        with _record_addresses() as addresses, PeakBytes() as tensors:
            model(**inputs).loss.backward()
        peaks.append(tensors.peak)
    fixed = patched_state(model).buffers
    own = {b.memory.data_ptr() for both in fixed._buffers.values() for b in both}
    assert set(addresses) == own and len(addresses) > 2 * len(own)
    assert peaks[1] <= peaks[0], "the buffers exist already, so a step creates fewer tensors"
    print(
        f"tensors of a step: {peaks[0] / 2**20:.2f} MiB at the peak, {peaks[1] / 2**20:.2f} MiB "
        f"besides {len(own)} fixed buffers of {fixed.num_bytes / 2**20:.2f} MiB; "
        f"{len(addresses)} transfers"
    )


@contextmanager
def _record_addresses() -> Iterator[list[int]]:
    """Record the addresses of the tensors that units gather into, and of those that they reduce."""
    addresses: list[int] = []
    gather, reduce = buffers_of_units._all_gather, buffers_of_units._reduce_scatter

    def all_gather(output: Tensor, *args: Any, **kwargs: Any) -> Any:
        addresses.append(output.data_ptr())
        return gather(output, *args, **kwargs)

    def reduce_scatter(output: Tensor, tensor: Tensor, **kwargs: Any) -> Any:
        addresses.append(tensor.data_ptr())
        return reduce(output, tensor, **kwargs)

    changed = {"_all_gather": all_gather, "_reduce_scatter": reduce_scatter}
    with mock.patch.multiple(buffers_of_units, **changed):
        yield addresses


@pytest.mark.parametrize(
    "claim", [Check("4 ranks", 4, _a_step_allocates_no_buffer, slow=True).as_parameter()]
)
def test_a_step_allocates_no_buffer(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)


def _a_third_unit_raises(rank: int, world: int) -> None:
    model = apply_ep_fsdp2(_build({"fsdp_double_buffer": True}, False, "", num_hidden_layers=4))
    layers = [layer for layer in model.model.layers if isinstance(layer, FSDPModule)]
    layers[0].set_modules_to_forward_prefetch(layers[1:])
    with pytest.raises(RuntimeError, match=r"a third FSDP2 unit of .* while both"):
        model(**batch(model, 2, 9))


@pytest.mark.parametrize("claim", [Check("2 ranks", 2, _a_third_unit_raises).as_parameter()])
def test_a_third_unit_raises_instead_of_overwriting(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)


def test_a_buffer_is_used_again_when_nobody_holds_it() -> None:
    buffers = FixedBuffers()
    take = partial(buffers.take, "gathered", None, 8, torch.float32, "cpu")
    first, second = take(), take()
    assert first.data_ptr() != second.data_ptr()
    with pytest.raises(RuntimeError, match="a third FSDP2 unit of 8 elements"):
        take()
    address = first.data_ptr()
    del first
    assert take().data_ptr() == address
    assert (buffers.num_buffers, buffers.num_bytes) == (2, 64)


class _Backend:
    """A backend with an allocator, as ProcessGroupNCCL has it."""

    def __init__(self, can_allocate: bool) -> None:
        self.can_allocate, self.allocated = can_allocate, 0

    def _get_backend(self, device: torch.device) -> "_Backend":
        return self

    def name(self) -> str:
        return "nccl"

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return self.can_allocate

    def allocate_tensor(self, size: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        self.allocated += 1
        return torch.zeros(size, dtype=dtype, device=device)


def test_registered_buffers_come_from_the_backend_of_their_group() -> None:
    group: Any = _Backend(can_allocate=True)
    buffers = FixedBuffers(register=True)
    for _ in range(3):
        assert buffers.take("reduced", group, 8, torch.float32, "cpu").shape == (8,)
    assert group.allocated == buffers.num_buffers == 1
    without: Any = _Backend(can_allocate=False)
    with pytest.raises(RuntimeError, match="backend 'nccl' of this group cannot allocate memory"):
        buffers.take("reduced", without, 8, torch.float32, "cpu")


@dataclass(frozen=True)
class _Group:
    num_ranks: int

    def size(self) -> int:
        return self.num_ranks


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_an_input_without_output_does_not_become_gradients(num_ranks: int) -> None:
    """An error between two allocations, such as a lack of memory, leaves an input unused."""
    buffers, group = FixedBuffers(), cast(Any, _Group(num_ranks))
    allocate = partial(
        _ReduceScatter(buffers, group).allocate, dtype=torch.float32, device=torch.device("cpu")
    )
    first = allocate([8])
    address = first.data_ptr()
    del first  # the error
    again = allocate([8])
    assert again.data_ptr() == address
    gradients = allocate([8 // num_ranks])
    assert gradients.data_ptr() != address and buffers.num_buffers == 1
    other = allocate([8])
    assert other.data_ptr() != address and buffers.num_buffers == 2


def _check_nccl_is_needed(rank: int, world: int) -> None:
    for double in (False, True):
        with pytest.raises(ValueError, match=r"nccl_ub=True .* communicate on cpu"):
            apply_ep_fsdp2(tiny(), nccl_ub=True, fsdp_double_buffer=double)


@pytest.mark.parametrize("claim", [Check("2 ranks", 2, _check_nccl_is_needed).as_parameter()])
def test_nccl_is_needed(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)
