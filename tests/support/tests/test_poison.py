"""Only uninitialised floating-point tensors made by our own packages are poisoned."""

import torch
from support.poison import poison_empty

CASES = {
    "empty": "torch.empty(2, 3)",
    "empty with grad": "torch.empty(2, 3, requires_grad=True)",
    "empty_like": "torch.empty_like(torch.zeros(2, 3, dtype=torch.bfloat16))",
    "empty_strided": "torch.empty_strided((2, 3), (3, 1), dtype=torch.float64)",
    "new_empty": "torch.zeros(1).new_empty(2, 3)",
    "new_empty_strided": "torch.zeros(1).new_empty_strided((2, 3), (3, 1))",
}


def _evaluate(source: str, module: str) -> torch.Tensor:
    return eval(source, {"__name__": module, "torch": torch})


def test_our_floating_point_tensors_are_nan() -> None:
    for module in ("hf_moe_ep.ops.permute", "hf_moe_ep", "hf_moe_ep.model_patches.some_arch"):
        for name, source in CASES.items():
            assert _evaluate(source, module).isnan().all(), f"{name} in {module}"


def test_integers_and_tensors_of_other_callers_are_not_changed() -> None:
    integers = _evaluate("torch.empty(4, dtype=torch.int64)", "hf_moe_ep.moe.dispatch.all_to_all")
    assert integers.dtype == torch.int64
    for name, source in CASES.items():
        # A freed block of memory could hold NaN by accident, but hardly in eight tensors.
        results = [_evaluate(source, "hf_moe_ep_other.module") for _ in range(8)]
        assert not all(result.isnan().all() for result in results), name


def test_a_second_patch_changes_nothing_and_device_contexts_still_work() -> None:
    before = torch.empty, torch.Tensor.new_empty
    poison_empty()
    assert (torch.empty, torch.Tensor.new_empty) == before
    with torch.device("meta"):
        assert torch.empty(3).is_meta
        assert _evaluate("torch.empty(3)", "hf_moe_ep.sharding.shard").is_meta
