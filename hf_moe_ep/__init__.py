"""Expert parallelism + FSDP2 for stock Hugging Face Mixture-of-Experts models.

    from hf_moe_ep import patch

    model = AutoModelForCausalLM.from_pretrained(...)
    patch(model, ep_size=8)          # then Trainer(model=model) or accelerator.prepare(...)

Importing this package changes nothing; `patch` does.
"""

from hf_moe_ep.apply import apply_ep_fsdp2, from_pretrained
from hf_moe_ep.checkpoints.hub.save import save_pretrained
from hf_moe_ep.checkpoints.training.save import load_checkpoint, save_checkpoint
from hf_moe_ep.config import ParallelConfig
from hf_moe_ep.data_parallel import data_parallel_rank, data_parallel_size, global_token_count
from hf_moe_ep.describe import describe
from hf_moe_ep.patch import patch, unpatch
from hf_moe_ep.sharding.clip import clip_grad_norm_
from hf_moe_ep.vision.positions import PositionCollator

__all__ = [
    "ParallelConfig",
    "PositionCollator",
    "apply_ep_fsdp2",
    "clip_grad_norm_",
    "data_parallel_rank",
    "data_parallel_size",
    "describe",
    "from_pretrained",
    "global_token_count",
    "load_checkpoint",
    "patch",
    "save_checkpoint",
    "save_pretrained",
    "unpatch",
]
