"""Measure how fast a save copies extra tensors, compared with `cp`.

    python benchmarks/extra_tensors.py                  prints seconds and ratios
    python benchmarks/extra_tensors.py --mib 4096       size of the extra tensors

Extra tensors are tensors of a checkpoint that the model's class ignores (layers for multi-token
prediction). The benchmark writes a file of extra tensors, and then copies it in turn

    cp      with `cp`, and `sync` of the new file
    first   with the code of `save_pretrained`, which also hashes each tensor, and syncs the file
            to disk
    next    with the same code, as in the second and every later save of a run, which knows the
            hashes already

The source is in the page cache in all three cases. hf_moe_ep promises that a save which knows the
hashes has at least 0.8 times the speed of `cp`. The first save cannot leave the hashes out, because
the index of each saved checkpoint has a hash of every file, and `hf-moe-ep verify` would call a
checkpoint whole without having checked the copies. Up to four threads hash beside the copy, so this
save is slower than `cp` only where the idle cores hash more slowly than the disk writes. The
benchmark prints how fast one core hashes.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import tempfile
import time
from pathlib import Path

import torch
from benchmark_text import describe_machine, spread
from safetensors.torch import save_file

from hf_moe_ep.checkpoints.hub.extra import copy_groups
from hf_moe_ep.checkpoints.hub.write import write_checkpoint
from hf_moe_ep.checkpoints.storage.references import FileReferences
from hf_moe_ep.checkpoints.storage.safetensors_file import read_index

MIB = 2**20
FILE = "model-00001-of-00001.safetensors"


def main() -> None:
    """Parse the command line, measure, and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--mib", type=int, default=1024, help="size of the extra tensors in MiB")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", help="a folder on the disk to measure")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        measure(Path(folder), options.mib, options.repeats)


def measure(folder: Path, mib: int, repeats: int) -> None:
    """Copy the tensors in turn, and print the seconds and their ratios."""
    load_before = os.getloadavg()[0]
    rows = 4 * MIB // 2 // 4096
    tensors = {
        f"mtp.layers.0.mlp.experts.{index}.down_proj.weight": torch.randn(rows, 4096).bfloat16()
        for index in range(mib // 4)
    }
    source = folder / "source"
    source.mkdir()
    save_file(tensors, source / FILE)
    found = read_index(source, FILE)
    shapes = {key: tensor.shape for key, tensor in found.items()}
    references = FileReferences.of(source, found)
    started = time.monotonic()
    references.hashes()
    hashing = time.monotonic() - started
    known = references.get_known_digests()
    seconds: dict[str, list[float]] = {"cp": [], "first": [], "next": []}
    for number in range(repeats):
        copied = folder / "copied"
        started = time.monotonic()
        subprocess.run(["cp", source / FILE, copied], check=True)
        subprocess.run(["sync", copied], check=True)
        seconds["cp"].append(time.monotonic() - started)
        copied.unlink()
        for name, digests in (("first", None), ("next", known)):
            target = folder / f"{name}{number}"
            target.mkdir()
            started = time.monotonic()
            write_checkpoint(target, [copy_groups(references.tensors(), digests)])
            seconds[name].append(time.monotonic() - started)
            assert {k: t.shape for k, t in read_index(target).items()} == shapes
            for path in target.iterdir():
                path.unlink()
    print("\n".join(describe_machine("benchmarks/extra_tensors.py", load_before, 1)))
    for name, values in seconds.items():
        rate = mib / sorted(values)[len(values) // 2]
        print(f"{name:5} {spread(values)} s, {rate:,.0f} MiB/s")
    print(f"sha256 of one core: {mib / hashing:,.0f} MiB/s")
    for name, promise in (("first", ""), ("next", "; promised: at least 0.8")):
        ratios = [cp / save for cp, save in zip(seconds["cp"], seconds[name], strict=True)]
        print(f"{name} save / cp in speed: {spread(ratios)}{promise}")


if __name__ == "__main__":
    main()
