"""Test that masks of FlexAttention equal torch's, and need no tensor of all queries x all keys."""

from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from torch.utils._python_dispatch import TorchDispatchMode

from hf_moe_ep.sequence import block_masks
from hf_moe_ep.sequence.block_masks import build_block_mask

CPU = torch.device("cpu")
DOCUMENTS = torch.tensor([[0] * 100 + [1] * 300 + [2] * 37, [0] * 437])
LISTS = [f"{kind}{part}" for kind in ("", "full_") for part in ("kv_num_blocks", "kv_indices")]
LISTS += [name.replace("kv", "q") for name in LISTS]


def see(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Let each query see earlier keys of its document, in a window that depends on the head."""
    same = DOCUMENTS[row, query] == DOCUMENTS[row, key]
    return same & (query >= key) & (query - key < 200 + 50 * head)


# The numbers of pairs that are computed at a time: all, one block of queries, a few blocks.
@pytest.mark.parametrize("pairs", [2**25, 1, 4 * 64 * 437 * 6])
@pytest.mark.parametrize("block_size", [(128, 128), (64, 32)])
def test_masks_equal_those_of_torch(pairs: int, block_size: tuple[int, int]) -> None:
    want = create_block_mask(see, 2, 3, 437, 430, device="cpu", BLOCK_SIZE=block_size)
    with mock.patch.object(block_masks, "_PAIRS", pairs):
        got = build_block_mask(see, (2, 3, 437, 430), CPU, block_size)
    assert (got.shape, got.BLOCK_SIZE) == (want.shape, want.BLOCK_SIZE)
    assert got.mask_mod is see
    for name in LISTS:
        assert torch.equal(getattr(got, name), getattr(want, name)), name
        assert getattr(got, name).dtype == getattr(want, name).dtype, name


class _LargestTensor(TorchDispatchMode):
    """Records the number of elements of the largest tensor that an operator returns."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self.largest = max(self.largest, out.numel())
        return out


def test_no_tensor_has_an_element_per_query_and_key() -> None:
    def build() -> BlockMask:
        return build_block_mask(lambda b, h, q, k: q >= k, (1, 1, 1024, 2048), CPU)

    with mock.patch.object(block_masks, "_PAIRS", 2**18), _LargestTensor() as tensors:
        build()
    assert tensors.largest == 2**18
