"""`LargestTensor` measures the storages of new tensors, and not those of known ones."""

import torch
from support.largest_tensor import LargestTensor


def test_new_tensors_count_by_their_storage_and_known_ones_do_not() -> None:
    weight = torch.zeros(5, 7)
    with LargestTensor([weight]) as largest:
        weight.add_(1)
        weight.view(35)
        assert largest.elements == 0
        weight[:2] * 2  # 14 elements
        (weight.sum(0) + 1)[:3]
        assert largest.elements == 14
        weight.t().contiguous()
    assert largest.elements == 35
