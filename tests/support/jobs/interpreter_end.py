"""Two ranks build their groups, sum a list of tensors and leave, RUNS times; prints exit codes.

    python -m support.jobs.interpreter_end RUNS [stock]

When the sums are back, gloo's thread still lets go of 10,000 tensors, and here Python's lock goes
to it only where the main thread waits: what happens now and then elsewhere happens each time.
`stock` builds no groups of ours, and stops with the first run that is aborted.
"""

import os
import signal
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

from hf_moe_ep import ParallelConfig
from hf_moe_ep.ranks.mesh import build_meshes

WORLD = 2


def _be_a_rank(rank: int, folder: Path, stock: bool) -> None:
    store = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=WORLD)
    if not stock:
        build_meshes(ParallelConfig(ep_size=2), torch.device("cpu"))
    sys.setswitchinterval(100)  # seconds
    many = [torch.ones(1) for _ in range(10_000)]
    dist.all_reduce_coalesced(many)


def main(runs: int, stock: bool) -> None:
    for _ in range(runs):
        folder, ranks = Path(tempfile.mkdtemp()), []
        for rank in range(WORLD):
            child = os.fork()
            if child == 0:
                _be_a_rank(rank, folder, stock)
                sys.exit(0)
            ranks.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks]
        print(*codes, flush=True)
        if stock and -signal.SIGABRT in codes:
            return


if __name__ == "__main__":
    main(int(sys.argv[1]), "stock" in sys.argv[2:])
