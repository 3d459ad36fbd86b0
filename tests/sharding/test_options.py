"""Options of sharding: the device that each rank chooses, divisors and dtypes of gradients."""

import copy
from dataclasses import dataclass, field
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import architectures
from support.checks import Check, Found, on_ranks
from support.close import assert_close
from support.parity import full_tensor
from support.tiny_models import batch, tiny
from torch import Tensor, nn
from torch.distributed.distributed_c10d import Backend, BackendConfig
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor
from transformers import CONFIG_MAPPING
from transformers.modeling_outputs import CausalLMOutput

from hf_moe_ep import apply_ep_fsdp2, patch
from hf_moe_ep.sharding.options import ShardOptions, choose_default_device, choose_grad_divisors


@dataclass
class _Gpus:
    """A stand-in for torch.cuda on a machine with the GPUs `uuids`, as one process sees them."""

    uuids: list[str]
    current: int = 0
    initialized: bool = True
    set_to: list[int] = field(default_factory=list)

    def current_device(self) -> int:
        self.initialized = True
        return self.current

    def set_device(self, index: int) -> None:
        self.set_to.append(index)
        self.current = index

    def install(self, patches: pytest.MonkeyPatch, backend: str) -> None:
        """Patch torch.cuda, and make the default group look like one of `backend`."""
        patches.setattr(torch.cuda, "is_available", lambda: True)
        patches.setattr(torch.cuda, "is_initialized", lambda: self.initialized)
        patches.setattr(torch.cuda, "device_count", lambda: len(self.uuids))
        patches.setattr(torch.cuda, "current_device", self.current_device)
        patches.setattr(torch.cuda, "set_device", self.set_device)
        patches.setattr(
            torch.cuda, "get_device_properties", lambda i: SimpleNamespace(uuid=self.uuids[i])
        )
        with pytest.MonkeyPatch.context() as machine:
            machine.setattr(torch._C, "_get_accelerator", lambda *_: SimpleNamespace(type="cuda"))
            config = str(BackendConfig(Backend(backend)))
        patches.setattr(dist, "get_backend", lambda *_: backend)
        patches.setattr(dist, "get_backend_config", lambda *_: config)


MACHINE = ["GPU-a", "GPU-b", "GPU-c", "GPU-d"]


def _choose_device(backend: str, gpus: _Gpus, **environment: str) -> torch.device:
    with pytest.MonkeyPatch.context() as patches:
        patches.delenv("LOCAL_RANK")
        for name, value in environment.items():
            patches.setenv(name, value)
        gpus.install(patches, backend)
        return choose_default_device()


def the_backend_selects_gpu_or_cpu(rank: int, world: int) -> None:
    """Without a backend, or with NCCL in its name, the device is the GPU. With gloo alone it is the
    CPU, also on a machine with GPUs.
    """
    for backend in ("undefined", "nccl", "cpu:gloo,cuda:nccl"):
        gpus = _Gpus(MACHINE)
        device = _choose_device(backend, gpus, LOCAL_RANK=str(rank))
        assert device == torch.device("cuda", rank), (backend, device)
    for backend in ("gloo", "cpu:gloo"):
        assert _choose_device(backend, _Gpus(MACHINE), LOCAL_RANK=str(rank)) == torch.device("cpu")
    assert choose_default_device() == torch.device("cpu")


def without_set_device_local_rank_selects_the_gpu(rank: int, world: int) -> None:
    for initialized in (False, True):
        gpus = _Gpus(MACHINE, initialized=initialized)
        device = _choose_device("nccl", gpus, LOCAL_RANK=str(rank))
        assert device == torch.device("cuda", rank) and gpus.set_to == [rank]


def a_chosen_device_is_not_changed(rank: int, world: int) -> None:
    gpus = _Gpus(MACHINE, current=3 - rank)
    assert _choose_device("nccl", gpus, LOCAL_RANK=str(rank)) == torch.device("cuda", 3 - rank)
    with pytest.MonkeyPatch.context() as patches:
        bound = torch.device("cuda", 1 - rank)
        patches.setattr(
            dist, "group", SimpleNamespace(WORLD=SimpleNamespace(bound_device_id=bound))
        )
        gpus = _Gpus(["GPU-e", "GPU-f"])
        assert _choose_device("nccl", gpus, LOCAL_RANK=str(rank)) == bound


def each_rank_sees_only_its_own_gpu(rank: int, world: int) -> None:
    gpus = _Gpus([f"GPU-{rank}"])
    assert _choose_device("nccl", gpus, LOCAL_RANK=str(rank)) == torch.device("cuda", 0)


def one_gpu_for_two_ranks_is_refused(rank: int, world: int) -> None:
    """Without LOCAL_RANK both ranks choose GPU 0, and both raise before the first collective."""
    match = r"ranks \d and \d would both compute on GPU GPU-a .*set_device\(int\(os.environ"
    with pytest.raises(ValueError, match=match):
        _choose_device("nccl", _Gpus(MACHINE))


def fp16_gradients_are_rounded_before_they_are_divided(rank: int, world: int) -> None:
    """If a subnormal fp16 number were divided first, it would lose its last bits. The loss is made
    so small that the experts' gradients are subnormal. Both ranks have the same batch, so the mean
    of their gradients must equal the gradient of one process bit by bit.
    """
    stock = tiny(dtype=torch.float16, num_hidden_layers=1)
    inputs = batch(stock, 2, 7, seed=0)
    one_process = patch(copy.deepcopy(stock))
    (one_process(**inputs).loss * 2**-12).backward()
    want = one_process.model.layers[0].mlp.experts.down_proj.grad.float()
    assert 0 < want.abs().max() < 2**-14 and (want != 0).float().mean() > 0.2
    for replicas in (1, 2):
        model = apply_ep_fsdp2(copy.deepcopy(stock), dp_replicate_size=replicas)
        (model(**inputs).loss * 2**-12).backward()
        got = full_tensor(model.model.layers[0].mlp.experts.down_proj.grad)
        assert got.dtype == torch.float32 and torch.equal(got, want), replicas


@pytest.mark.parametrize(
    ("dtypes", "ep_size", "world_size", "want"),
    [
        ((torch.float32, torch.float32), 8, 64, (64, 1)),
        ((torch.bfloat16, torch.float32), 8, 64, (64, 1)),
        ((torch.float16, torch.float32), 8, 64, (8, 8)),
        ((torch.float16, torch.float32), 64, 64, (64, 1)),
        # For a sum in fp16, FSDP2 splits the divisor 8 into 4 before and 2 after the sum.
        ((torch.float16, torch.float16), 8, 64, (32, 2)),
        ((torch.float16, torch.float16), 1, 6, (2, 3)),
    ],
)
def test_grad_divisors(
    dtypes: tuple[torch.dtype, torch.dtype], ep_size: int, world_size: int, want: tuple[int, int]
) -> None:
    assert choose_grad_divisors(*dtypes, ep_size=ep_size, world_size=world_size) == want


ON_TWO_RANKS = on_ranks(
    2,
    fp16_gradients_are_rounded_before_they_are_divided,
    the_backend_selects_gpu_or_cpu,
    without_set_device_local_rank_selects_the_gpu,
    a_chosen_device_is_not_changed,
    each_rank_sees_only_its_own_gpu,
    one_gpu_for_two_ranks_is_refused,
)


@pytest.mark.parametrize("claim", ON_TWO_RANKS)
def test_on_two_ranks(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)


BF16, FP32 = torch.bfloat16, torch.float32
NEEDS_HY_V4 = pytest.mark.skipif(
    "hy_v4" not in CONFIG_MAPPING, reason="this transformers has no HY-V4, whose head stays in fp32"
)


@pytest.mark.parametrize(
    ("param_dtype", "reduce_dtype", "expected"),
    [(BF16, None, BF16), (BF16, FP32, FP32), (None, FP32, FP32), (None, None, None)],
)
def test_gradients_are_reduced_in_the_same_dtype_by_every_torch(
    param_dtype: torch.dtype | None,
    reduce_dtype: torch.dtype | None,
    expected: torch.dtype | None,
) -> None:
    """A `reduce_dtype` of None means `param_dtype`, and since torch 2.15 the dtype of masters."""
    policy = MixedPrecisionPolicy(param_dtype, reduce_dtype, output_dtype=FP32)
    options = ShardOptions(policy, OffloadPolicy(), fp32_masters=True, reshard_after_forward=True)
    passed = options.fully_shard_kwargs()["mp_policy"]
    assert passed == MixedPrecisionPolicy(param_dtype, expected, output_dtype=FP32)
    assert options.mp_policy == passed


def _cast_head_like_trl(model: Any) -> None:
    """Do what TRL's GRPO does with `cast_lm_head_to_fp32=True`."""
    lm_head = model.lm_head.float()

    def cast_forward_to_fp32(hidden_states: Tensor) -> Tensor:
        return nn.functional.linear(hidden_states.float(), lm_head.weight.float())

    lm_head.forward = cast_forward_to_fp32


@pytest.mark.parametrize(
    ("name", "tied", "casts_head"),
    [
        pytest.param("qwen3_moe", False, False, id="untied"),
        pytest.param("qwen3_moe", True, False, id="tied"),
        pytest.param("qwen3_moe", False, True, id="a head that TRL casts"),
        pytest.param("hy_v4", False, False, id="a head in fp32", marks=NEEDS_HY_V4),
    ],
)
def test_a_forward_may_read_the_weight_of_the_head_instead_of_calling_it(
    name: str, tied: bool, casts_head: bool
) -> None:
    """Such forwards are TRL's fused head and Liger's fused loss.

    The `output_dtype`, which Accelerate sets, must not round what the model returns. The weight
    must not be a shard, whose gradient nothing would average over the ranks.
    """
    computed: list[Tensor] = []

    def read_head(self: Any, input_ids: Tensor, calls_head: bool) -> Any:
        if calls_head:
            return super(type(self), self).forward(input_ids=input_ids)
        hidden = self.model(input_ids=input_ids).last_hidden_state
        assert not isinstance(self.lm_head.weight, DTensor)
        assert self.lm_head.weight.dtype == head_dtype
        logits = nn.functional.linear(hidden.float(), self.lm_head.weight.float())
        computed.append(logits.detach())
        return CausalLMOutput(logits=logits)

    model = architectures.tiny(name, dtype=BF16, tie_word_embeddings=tied)
    if casts_head:
        _cast_head_like_trl(model)
    head_dtype = FP32 if name == "hy_v4" or casts_head else BF16
    input_ids = batch(model, 2, 9)["input_ids"]
    model.forward = MethodType(read_head, model)
    policy = MixedPrecisionPolicy(BF16, FP32, output_dtype=BF16)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        apply_ep_fsdp2(model, mp_policy=policy)
        called = model(input_ids, calls_head=True).logits
        assert called.dtype == head_dtype
        called.float().sum().backward()
        want = model.lm_head.weight.grad.full_tensor()
        model.zero_grad()
        logits = model(input_ids, calls_head=False).logits
        assert logits.dtype == FP32 and torch.equal(logits, computed[0])
        if head_dtype == FP32:
            with torch.no_grad():  # the forward of a reference, which reshards the model
                model(input_ids, calls_head=False)
        logits.sum().backward()
        assert_close("gradient", model.lm_head.weight.grad.full_tensor(), want, 2**-6)
    finally:
        dist.destroy_process_group()
