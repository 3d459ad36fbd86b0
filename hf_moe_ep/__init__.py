"""Expert parallelism + FSDP2 for stock Hugging Face Mixture-of-Experts models.

    from hf_moe_ep import patch

    model = AutoModelForCausalLM.from_pretrained(...)
    patch(model, ep_size=8)          # then Trainer(model=model) or accelerator.prepare(...)

Importing this package changes nothing; `patch` does. Where another package is broken, or of a
version that lacks what we need, it is the first use of a name that raises: `hf-moe-ep doctor` is in
this package too, and has to start.
"""

from typing import NoReturn

try:
    from hf_moe_ep.apply import apply_ep_fsdp2, from_pretrained
    from hf_moe_ep.checkpoints.hub.save import save_pretrained
    from hf_moe_ep.checkpoints.hub.tensors import hub_tensors
    from hf_moe_ep.checkpoints.newest import newest_checkpoint
    from hf_moe_ep.checkpoints.training.load import load_checkpoint
    from hf_moe_ep.checkpoints.training.save import save_checkpoint
    from hf_moe_ep.config import ParallelConfig
    from hf_moe_ep.data_parallel import data_parallel_rank, data_parallel_size, global_token_count
    from hf_moe_ep.describe import describe
    from hf_moe_ep.integrations.expert_load import ExpertLoadCallback
    from hf_moe_ep.patch import patch, unpatch
    from hf_moe_ep.placement.balance import balance_experts
    from hf_moe_ep.placement.hub_order import experts_in_hub_order
    from hf_moe_ep.plan import ModelPlan
    from hf_moe_ep.routing.bias import update_router_bias
    from hf_moe_ep.routing.load import ExpertLoad, expert_load
    from hf_moe_ep.routing.replay import RoutingReplay
    from hf_moe_ep.routing.report import ReplayReport
    from hf_moe_ep.routing.routes import Routes
    from hf_moe_ep.sharding.clip import clip_grad_norm_
    from hf_moe_ep.vision.positions import PositionCollator
except Exception as error:  # noqa: BLE001  a broken package may raise anything at import
    _broken = error

    def _refuse(name: str) -> NoReturn:
        """Raise the error of the import wherever one of the public names is asked for."""
        if name not in __all__:
            raise AttributeError(f"module 'hf_moe_ep' has no attribute {name!r}")
        raise ImportError(
            f"hf_moe_ep cannot be used: {type(_broken).__name__}: {_broken}; "
            f"`hf-moe-ep doctor` says which versions are wrong, or which package is broken"
        ) from _broken

    # A function that is called __getattr__ would make type checkers accept every name.
    globals()["__getattr__"] = _refuse


__all__ = [
    "ExpertLoad",
    "ExpertLoadCallback",
    "ModelPlan",
    "ParallelConfig",
    "PositionCollator",
    "ReplayReport",
    "Routes",
    "RoutingReplay",
    "apply_ep_fsdp2",
    "balance_experts",
    "clip_grad_norm_",
    "data_parallel_rank",
    "data_parallel_size",
    "describe",
    "expert_load",
    "experts_in_hub_order",
    "from_pretrained",
    "global_token_count",
    "hub_tensors",
    "load_checkpoint",
    "newest_checkpoint",
    "patch",
    "save_checkpoint",
    "save_pretrained",
    "unpatch",
    "update_router_bias",
]

if "_broken" in globals():
    # Some were imported before another failed, and some are names of modules: all are refused.
    for _name in __all__:
        globals().pop(_name, None)
