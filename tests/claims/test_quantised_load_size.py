"""Quantising experts during a load needs memory for one additional expert matrix at a time.

The limit is the memory of a load that quantises nothing, plus one matrix, its quantised bytes and
scales, and the buffers for quantising some of its rows.

The test measures the peak of resident memory of two ranks (ep 2). A matrix of an expert has 8 MiB
in bf16, and the matrices of one layer on a rank have 32 MiB. Two worse implementations exceed the
limit: the first keeps the previous matrix while it reads the next, the second reads all matrices of
a layer at once.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig
from support.adapters import ATTENTION
from support.checks import Check, Found, on_ranks
from support.fp8_files import write_fp8
from support.hub_files import write_hub
from support.resident import Resident, return_what_is_freed
from support.tiny_models import tiny
from torch import Tensor, nn

from hf_moe_ep import from_pretrained
from hf_moe_ep.checkpoints.hub.quantised import HeldAsBytes
from hf_moe_ep.checkpoints.hub.stored_parameter import StoredParameter
from hf_moe_ep.checkpoints.storage.safetensors_file import Reader
from hf_moe_ep.ops.quantised import _VALUES_AT_A_TIME, Quantisation, allocate_stack, quantise_stack
from hf_moe_ep.ranks.boxes import get_local_tensor

MIB = 2**20
SIZES = {
    "hidden_size": 2048,
    "moe_intermediate_size": 1024,
    "num_experts": 8,
    "num_hidden_layers": 2,
    "head_dim": 16,
}
MATRIX = 2 * 1024 * 2048 * 2
# quantise_stack processes _VALUES_AT_A_TIME values at a time, with buffers of 20 bytes per value.
ROW_BUFFERS = 20 * _VALUES_AT_A_TIME
KINDS: dict[str, dict[str, Any]] = {
    "nf4": {"experts_dtype": "nf4"},
    "nested": {"experts_dtype": "nf4", "experts_double_quant": True},
    "fp8": {"experts_dtype": "fp8"},
    "as they are": {},
}


def _write(folder: Path) -> None:
    with mock.patch.object(nn.init, "normal_", _fill_with_ramp):
        model = tiny(dtype=torch.bfloat16, **SIZES)
    write_hub(folder / "bf16", model)
    write_fp8(folder / "fp8", model)


def _fill_with_ramp(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Replace nn.init.normal_, because random values are slow and are not needed here."""
    with torch.no_grad():
        return tensor.copy_(torch.linspace(-0.1, 0.1, tensor.shape[-1]).expand_as(tensor))


def _measure_temporary_bytes(files: Path, kind: str) -> int:
    """Return the peak of a load's memory, without the bytes of the loaded parameters."""
    dist.barrier()
    lora = LoraConfig(r=2, target_modules=list(ATTENTION))
    with Resident() as resident:
        model = from_pretrained(files, ep_size=2, peft_config=lora, **KINDS[kind])
    held = [get_local_tensor(t).untyped_storage().nbytes() for t in model.parameters()]
    return resident.grown - sum(held)


def _count_bytes_of_quantised_matrix(kind: str) -> int:
    """Return the bytes of the quantised values and scales of one matrix."""
    held = Quantisation("fp8" if kind == "fp8" else "nf4")
    tensors = allocate_stack((1, 2048, 2048), held, "meta").by_name("").values()
    return sum(tensor.nbytes for tensor in tensors)


@contextmanager
def _keep_previous_matrix() -> Iterator[None]:
    previous: list[Tensor] = []
    read = StoredParameter.read_into

    def read_into(self: StoredParameter, target: Tensor, box: Any, reader: Reader) -> None:
        previous.append(target.clone())
        del previous[:-1]
        read(self, target, box, reader)

    with mock.patch.object(StoredParameter, "read_into", read_into):
        yield


def _read_layer_at_once(
    self: HeldAsBytes, stored: StoredParameter, reader: Reader, device: torch.device
) -> None:
    box = (self.boxes[0][0], (0, self.shape_OI[0]), (0, self.shape_OI[1]))
    layer = torch.empty([stop - start for start, stop in box], dtype=stored.dtype)
    stored.read_into(layer, box, reader)
    quantise_stack(layer, self.quantisation).copy_into(self.local)


def peak_memory_of_loads(rank: int, world: int, folder: str) -> None:
    """Load bf16 and FP8 files in all formats. From FP8 to FP8, no matrix is needed at all."""
    return_what_is_freed()
    if rank == 0:
        _write(Path(folder))
    dist.barrier()
    cases = [(files, kind) for files in ("bf16", "fp8") for kind in KINDS]
    # The minimum of three loads is taken, because the first load also imports modules, and a busy
    # machine reclaims freed memory late.
    peaks: dict[tuple[str, str], int] = {}
    for files, kind in 3 * cases:
        peak = _measure_temporary_bytes(Path(folder, files), kind)
        peaks[files, kind] = min(peak, peaks.get((files, kind), peak))
    with _keep_previous_matrix():
        two_matrices = _measure_temporary_bytes(Path(folder, "bf16"), "nf4")
    with mock.patch.object(HeldAsBytes, "read", _read_layer_at_once):
        layer = _measure_temporary_bytes(Path(folder, "bf16"), "nf4")
    in_mib = {str(case): f"{peak / MIB:.1f}" for case, peak in peaks.items()}
    in_mib |= {"two matrices": f"{two_matrices / MIB:.1f}", "layer": f"{layer / MIB:.1f}"}
    # Every load needs memory for the part of a file that is read at a time, headers of files,
    # objects of Python, buffers of gloo, and blocks below 1 MiB that glibc does not return.
    plain = {files: peaks.pop((files, "as they are")) for files in ("bf16", "fp8")}
    assert peaks.pop(("fp8", "fp8")) < MATRIX, in_mib
    limits = {
        (files, kind): plain[files] + MATRIX + _count_bytes_of_quantised_matrix(kind) + ROW_BUFFERS
        for files, kind in peaks
    }
    over = {case: limits[case] / MIB for case, peak in peaks.items() if peak > limits[case]}
    assert not over, (over, in_mib)
    assert limits["bf16", "nf4"] < two_matrices < layer, (over, in_mib)


@pytest.mark.parametrize("claim", on_ranks(2, peak_memory_of_loads, slow=True))
def test_on_two_ranks(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)
