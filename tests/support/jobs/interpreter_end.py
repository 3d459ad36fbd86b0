"""Two ranks build their process groups, sum a list of tensors and exit, RUNS times.

    python -m support.jobs.interpreter_end RUNS [stock]

Each run prints the exit codes of both ranks. After the sums, gloo's thread still has to free 10,000
tensors, for which it needs Python's lock. With the long switch interval of this script, the main
thread releases the lock only when it waits, so gloo's thread always runs while the interpreter
exits. With the default interval that happens rarely. With `stock`, groups of hf_moe_ep are not
built, and the first aborted run ends the script.
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


def _run_rank(rank: int, folder: Path, stock: bool) -> None:
    store = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=WORLD)
    if not stock:
        build_meshes(ParallelConfig(ep_size=2), torch.device("cpu"))
    sys.setswitchinterval(100)  # seconds
    tensors = [torch.ones(1) for _ in range(10_000)]
    dist.all_reduce_coalesced(tensors)


def main(runs: int, stock: bool) -> None:
    for _ in range(runs):
        folder, ranks = Path(tempfile.mkdtemp()), []
        for rank in range(WORLD):
            child = os.fork()
            if child == 0:
                _run_rank(rank, folder, stock)
                sys.exit(0)
            ranks.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks]
        print(*codes, flush=True)
        if stock and -signal.SIGABRT in codes:
            return


if __name__ == "__main__":
    main(int(sys.argv[1]), "stock" in sys.argv[2:])
