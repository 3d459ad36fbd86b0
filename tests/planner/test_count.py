"""`count_tensors` equals a count by hand for views, freed tensors and resized storages."""

import pytest
import torch
from torch import nn

from hf_moe_ep.planner.count import BEFORE, RESIZED, count_tensors
from hf_moe_ep.upstream.dispatch_modes import make_fake_mode

KIB = 256  # fp32 numbers in one KiB


def _count_two_phases() -> tuple[dict[str, int], dict[str, int], int]:
    """Count two phases: `one` frees 8 KiB after it creates 16 KiB, and `two` leaves 1 KiB alive.

    4 KiB exist before the count. The view needs no memory. A storage is resized to 6 KiB and then
    freed.
    """
    before = torch.empty(4 * KIB)
    with count_tensors([before]) as memory:
        memory.begin("one")
        b = torch.ones(8 * KIB)
        view = b.view(2, -1)[1]
        c = torch.cat([b, view, view])
        del b, view
        memory.begin("two")
        del c
        d = torch.zeros(KIB)
        remaining = d + d
        d.untyped_storage().resize_(6 * 1024)
        del d
        alive = memory.sum_at_peaks(lambda record: record.made_by)["two"]
        now = memory.now
    del remaining
    return memory.peaks, alive, now


@pytest.mark.parametrize("fake", [False, True])
def test_bytes_of_two_phases_equal_a_count_by_hand(fake: bool) -> None:
    if fake:
        with make_fake_mode():
            peaks, alive, now = _count_two_phases()
    else:
        peaks, alive, now = _count_two_phases()
    peaks = {name: size // 1024 for name, size in peaks.items()}
    assert peaks == {BEFORE: 4, "one": 4 + 8 + 16, "two": 4 + 16}
    assert now == (4 + 1) * 1024
    assert alive == {BEFORE: 4 * 1024, "aten.cat.default": 16 * 1024}


def test_host_and_device_are_counted_separately() -> None:
    """The result of an operator on host tensors is on the host until it is copied."""
    values = torch.ones(4 * KIB)
    with count_tensors() as memory:
        memory.watch([values], on_host=True)
        memory.begin("step")
        twice = values * 2
        assert (memory.now, memory.on_host) == (0, 2 * values.nbytes)
        fetched = memory.copy(twice, to_host=False)
        rows = fetched[:KIB] + 1
        assert (memory.now, memory.is_on_host(rows)) == (values.nbytes + rows.nbytes, False)
        stored = memory.copy(rows, to_host=True)
        del twice
        assert memory.is_on_host([stored]) and memory.on_host == values.nbytes + rows.nbytes
    assert memory.host_peak == 2 * values.nbytes + rows.nbytes


def test_torchs_resize_is_restored_after_an_error() -> None:
    stock = torch.UntypedStorage.resize_
    with pytest.raises(ZeroDivisionError), count_tensors() as memory:
        assert torch.UntypedStorage.resize_ is not stock
        x = torch.zeros(1)
        x.untyped_storage().resize_(4096)
        memory.begin("resized")
        assert memory.now == 4096
        assert memory.sum_at_peaks(lambda record: record.made_by)["resized"] == {RESIZED: 4096}
        _ = 1 / 0
    assert torch.UntypedStorage.resize_ is stock


def test_tensors_that_autograd_saves_are_counted() -> None:
    """relu saves its result for backward."""
    layer = nn.Linear(KIB, KIB, bias=False)
    x = torch.zeros(2, KIB)
    with count_tensors([x, layer.weight]) as memory:
        loss = layer(x).relu().sum()
        saved = memory.now - (KIB * KIB + 2 * KIB) * 4
        assert saved == 2 * KIB * 4 + 4, "relu's result and the loss, not the product"
        loss.backward()
        assert memory.find_record(layer.weight.grad) is not None
