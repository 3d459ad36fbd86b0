"""A load that quantises experts needs one matrix of one expert more memory than one that does not.

The limit is the memory of a load that quantises nothing, plus one matrix, its bytes and scales, and
the buffers for quantising some of its rows.

Measured is the peak of resident memory of each of two ranks (ep 2). A matrix of an expert has 8 MiB
in bf16, and those of a layer on a rank have 32 MiB. The test also shows that worse code takes more:
keeping the previous matrix while the next is read, and reading a layer's matrices together.
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
from hf_moe_ep.checkpoints.hub.in_files import InFiles
from hf_moe_ep.checkpoints.hub.quantised import HeldAsBytes
from hf_moe_ep.checkpoints.storage.boxes import local_tensor
from hf_moe_ep.checkpoints.storage.safetensors_file import Reader
from hf_moe_ep.ops.quantised import _VALUES, Quantisation, empty_stack, quantise_stack

MIB = 2**20
SIZES = {
    "hidden_size": 2048,
    "moe_intermediate_size": 1024,
    "num_experts": 8,
    "num_hidden_layers": 2,
    "head_dim": 16,
}
MATRIX = 2 * 1024 * 2048 * 2
# Some rows are quantised at a time, and take 20 bytes for each of their values meanwhile.
SOME_ROWS = 20 * _VALUES
KINDS: dict[str, dict[str, Any]] = {
    "nf4": {"experts_dtype": "nf4"},
    "nested": {"experts_dtype": "nf4", "experts_double_quant": True},
    "fp8": {"experts_dtype": "fp8"},
    "as they are": {},
}


def _write(folder: Path) -> None:
    with mock.patch.object(nn.init, "normal_", _repeated):
        model = tiny(dtype=torch.bfloat16, **SIZES)
    write_hub(folder / "bf16", model)
    write_fp8(folder / "fp8", model)


def _repeated(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Values are of little matter here, and random ones take long."""
    with torch.no_grad():
        return tensor.copy_(torch.linspace(-0.1, 0.1, tensor.shape[-1]).expand_as(tensor))


def _beyond_what_is_held(files: Path, kind: str) -> int:
    """Bytes that a load takes at its peak, less those that stay."""
    dist.barrier()
    lora = LoraConfig(r=2, target_modules=list(ATTENTION))
    with Resident() as resident:
        model = from_pretrained(files, ep_size=2, peft_config=lora, **KINDS[kind])
    held = [local_tensor(t).untyped_storage().nbytes() for t in model.parameters()]
    return resident.grown - sum(held)


def _one_matrix(kind: str) -> int:
    """Bytes and scales of one matrix, before they are copied to their place."""
    held = Quantisation("fp8" if kind == "fp8" else "nf4")
    tensors = empty_stack((1, 2048, 2048), held, "meta").by_name("").values()
    return sum(tensor.nbytes for tensor in tensors)


@contextmanager
def _the_matrix_before_is_alive() -> Iterator[None]:
    kept: list[Tensor] = []
    read = InFiles.read_into

    def read_into(self: InFiles, target: Tensor, box: Any, reader: Reader) -> None:
        kept.append(target.clone())
        del kept[:-1]
        read(self, target, box, reader)

    with mock.patch.object(InFiles, "read_into", read_into):
        yield


def _at_once(self: HeldAsBytes, stored: InFiles, reader: Reader, device: torch.device) -> None:
    box = (self.boxes[0][0], (0, self.shape_OI[0]), (0, self.shape_OI[1]))
    layer = torch.empty([stop - start for start, stop in box], dtype=stored.dtype)
    stored.read_into(layer, box, reader)
    quantise_stack(layer, self.quantisation).copy_into(self.local)


def loads(rank: int, world: int, folder: str) -> None:
    """bf16 and FP8 files into all formats; FP8 into FP8 without any matrix."""
    return_what_is_freed()
    if rank == 0:
        _write(Path(folder))
    dist.barrier()
    cases = [(files, kind) for files in ("bf16", "fp8") for kind in KINDS]
    # The least of three: the first pays for imports, and on a busy machine the system takes back
    # late what is freed.
    takes: dict[tuple[str, str], int] = {}
    for files, kind in 3 * cases:
        taken = _beyond_what_is_held(Path(folder, files), kind)
        takes[files, kind] = min(taken, takes.get((files, kind), taken))
    with _the_matrix_before_is_alive():
        two = _beyond_what_is_held(Path(folder, "bf16"), "nf4")
    with mock.patch.object(HeldAsBytes, "read", _at_once):
        layer = _beyond_what_is_held(Path(folder, "bf16"), "nf4")
    seen = {str(case): f"{taken / MIB:.1f}" for case, taken in takes.items()}
    seen |= {"matrix before": f"{two / MIB:.1f}", "layer": f"{layer / MIB:.1f}"}
    # What is read of a file at a time, objects of Python, buffers of gloo, headers of files, and
    # what glibc's heap keeps of blocks below 1 MiB: a load takes these that quantises nothing.
    plain = {files: takes.pop((files, "as they are")) for files in ("bf16", "fp8")}
    assert takes.pop(("fp8", "fp8")) < MATRIX, seen
    limits = {
        (files, kind): plain[files] + MATRIX + _one_matrix(kind) + SOME_ROWS
        for files, kind in takes
    }
    over = {case: limits[case] / MIB for case, taken in takes.items() if taken > limits[case]}
    assert not over, (over, seen)
    assert limits["bf16", "nf4"] < two < layer, (over, seen)


@pytest.mark.parametrize("claim", on_ranks(2, loads, slow=True))
def test_on_two_ranks(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)
