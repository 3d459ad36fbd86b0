"""Replace the gloo process group of `run_ranks` by an NCCL group of one rank on the first GPU."""

import torch
import torch.distributed as dist


def join_nccl(folder: str) -> None:
    """Make a process group of one rank: NCCL for the GPU and gloo for tensors of the host."""
    dist.destroy_process_group()
    torch.cuda.set_device(0)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl",
        store=dist.FileStore(f"{folder}/store", 1),
        rank=0,
        world_size=1,
        device_id=torch.device("cuda", 0),
    )
