"""Expert parallelism + FSDP2 for stock Hugging Face Mixture-of-Experts models.

    from hf_moe_ep import patch

    model = AutoModelForCausalLM.from_pretrained(...)
    patch(model, ep_size=8)          # then Trainer(model=model) or accelerator.prepare(...)

The import of this package changes nothing and imports no other package. A public name is imported
when it is first used, so `hf-moe-ep --help` does not wait for torch. If the import of a required
package fails, the first use of a public name raises an ImportError, but the command `hf-moe-ep
doctor` still starts and examines the installation.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from hf_moe_ep.version import __version__

if TYPE_CHECKING:
    from hf_moe_ep.apply import apply_ep_fsdp2 as apply_ep_fsdp2
    from hf_moe_ep.apply import from_pretrained as from_pretrained
    from hf_moe_ep.checkpoints.hub.save import save_pretrained as save_pretrained
    from hf_moe_ep.checkpoints.hub.sync_token import SyncToken as SyncToken
    from hf_moe_ep.checkpoints.hub.tensors import hub_tensors as hub_tensors
    from hf_moe_ep.checkpoints.newest import newest_checkpoint as newest_checkpoint
    from hf_moe_ep.checkpoints.training.load import load_checkpoint as load_checkpoint
    from hf_moe_ep.checkpoints.training.save import save_checkpoint as save_checkpoint
    from hf_moe_ep.compiled.layers import compile_layers as compile_layers
    from hf_moe_ep.config import ParallelConfig as ParallelConfig
    from hf_moe_ep.data_parallel import data_parallel_rank as data_parallel_rank
    from hf_moe_ep.data_parallel import data_parallel_size as data_parallel_size
    from hf_moe_ep.data_parallel import global_token_count as global_token_count
    from hf_moe_ep.describe import describe as describe
    from hf_moe_ep.integrations.expert_load import ExpertLoadCallback as ExpertLoadCallback
    from hf_moe_ep.mtp.attach import mtp_loss as mtp_loss
    from hf_moe_ep.optim.muon import Muon as Muon
    from hf_moe_ep.patch import patch as patch
    from hf_moe_ep.patch import unpatch as unpatch
    from hf_moe_ep.placement.balance import balance_experts as balance_experts
    from hf_moe_ep.placement.hub_order import experts_in_hub_order as experts_in_hub_order
    from hf_moe_ep.plan import ModelPlan as ModelPlan
    from hf_moe_ep.plan import MoEBlock as MoEBlock
    from hf_moe_ep.plan import WeightSource as WeightSource
    from hf_moe_ep.routing.bias import update_router_bias as update_router_bias
    from hf_moe_ep.routing.load import ExpertLoad as ExpertLoad
    from hf_moe_ep.routing.load import expert_load as expert_load
    from hf_moe_ep.routing.replay import RoutingReplay as RoutingReplay
    from hf_moe_ep.routing.report import ReplayReport as ReplayReport
    from hf_moe_ep.routing.routes import Routes as Routes
    from hf_moe_ep.sharding.clip import clip_grad_norm_ as clip_grad_norm_
    from hf_moe_ep.vision.positions import PositionCollator as PositionCollator

# The module that defines each public name. Type checkers read the imports above, in which `as`
# marks a name as public.
_DEFINED_IN = {
    "ExpertLoad": "routing.load",
    "ExpertLoadCallback": "integrations.expert_load",
    "MoEBlock": "plan",
    "ModelPlan": "plan",
    "Muon": "optim.muon",
    "ParallelConfig": "config",
    "PositionCollator": "vision.positions",
    "ReplayReport": "routing.report",
    "Routes": "routing.routes",
    "RoutingReplay": "routing.replay",
    "SyncToken": "checkpoints.hub.sync_token",
    "WeightSource": "plan",
    "apply_ep_fsdp2": "apply",
    "balance_experts": "placement.balance",
    "clip_grad_norm_": "sharding.clip",
    "compile_layers": "compiled.layers",
    "data_parallel_rank": "data_parallel",
    "data_parallel_size": "data_parallel",
    "describe": "describe",
    "expert_load": "routing.load",
    "experts_in_hub_order": "placement.hub_order",
    "from_pretrained": "apply",
    "global_token_count": "data_parallel",
    "hub_tensors": "checkpoints.hub.tensors",
    "load_checkpoint": "checkpoints.training.load",
    "mtp_loss": "mtp.attach",
    "newest_checkpoint": "checkpoints.newest",
    "patch": "patch",
    "save_checkpoint": "checkpoints.training.save",
    "save_pretrained": "checkpoints.hub.save",
    "unpatch": "patch",
    "update_router_bias": "routing.bias",
}

__all__ = ["__version__", *_DEFINED_IN]


class _Package(ModuleType):
    """The class of this package, which imports a public name when it is first used.

    A module-level __getattr__ would not be enough. `patch` and `describe` are functions and also
    names of submodules, and Python sets an imported submodule as an attribute of its package. After
    an import of the submodule, `from hf_moe_ep import patch` would return the module.
    """

    def __getattr__(self, name: str) -> Any:
        if name not in _DEFINED_IN:
            raise AttributeError(f"module 'hf_moe_ep' has no attribute {name!r}")
        try:
            value = getattr(import_module(f"hf_moe_ep.{_DEFINED_IN[name]}"), name)
        except Exception as error:  # a broken package may raise anything at import
            raise ImportError(
                f"hf_moe_ep cannot be used: {type(error).__name__}: {error}; "
                f"`hf-moe-ep doctor` shows which package is broken or has a wrong version"
            ) from error
        setattr(self, name, value)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute, but never replace a public name with the submodule of that name."""
        if not (name in _DEFINED_IN and isinstance(value, ModuleType)):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *__all__})


sys.modules[__name__].__class__ = _Package
