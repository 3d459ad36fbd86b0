"""Patch axolotl's models by a plugin, so that a YAML file needs no `hf-moe-ep run`.

    plugins:
      - hf_moe_ep.integrations.axolotl.ExpertParallel
    hf_moe_ep:
      ep_size: 8
      sp_size: 2

Only axolotl imports this module, if the YAML file names the plugin. The plugin calls this package
by its public names, as a user does.
"""

from __future__ import annotations

from typing import Any

import transformers
from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel, field_validator
from torch import nn

import hf_moe_ep
from hf_moe_ep.config import resolve_config
from hf_moe_ep.integrations.run_report import RunReport
from hf_moe_ep.state import find_state

_REPORT = "report"


class Arguments(BaseModel):
    """The key that the plugin adds to axolotl's configuration.

    `hf_moe_ep` has fields of ParallelConfig, and `report`, an option of `hf-moe-ep run`.
    """

    hf_moe_ep: dict[str, Any] | None = None

    @field_validator("hf_moe_ep")
    @classmethod
    def _check(cls, settings: dict[str, Any] | None) -> dict[str, Any] | None:
        report = _split_settings(settings)[1]
        if not isinstance(report, bool):
            raise ValueError(f"{_REPORT} must be true or false, got {report!r}")
        resolve_config(None, _split_settings(settings)[0])
        return settings


class ExpertParallel(BasePlugin):
    """Patch the model that axolotl trains, and its reference model.

    hf_moe_ep computes the experts instead of axolotl's own kernels, so leave out `use_scattermoe`,
    `use_sonicmoe`, `expert_backend` and `experts_implementation`. Liger's other kernels and
    axolotl's cross-entropies are still used. Set `cpu_ram_efficient_loading: true` in fsdp_config,
    so that one process per machine reads the weights.
    """

    def get_input_args(self) -> str:
        """Return the name of the class with the plugin's key."""
        return f"{__name__}.{Arguments.__name__}"

    def pre_model_load(self, cfg: Any) -> None:
        """Refuse options with which axolotl would compute, split or store the experts itself.

        Raises:
            ValueError: such an option is set; the message names it.
        """
        if (cfg.expert_parallel_size or 1) > 1:
            raise ValueError(
                f"expert_parallel_size: {cfg.expert_parallel_size} is axolotl's own expert "
                f"parallelism; leave it out, and write hf_moe_ep: {{ep_size: "
                f"{cfg.expert_parallel_size}}}"
            )
        # axolotl's configuration sets use_scattermoe or use_sonicmoe if expert_backend names them.
        for key in ("use_scattermoe", "use_sonicmoe", "experts_implementation"):
            if getattr(cfg, key) not in (None, False, "eager"):
                raise ValueError(
                    f"{key}: {getattr(cfg, key)} would replace the experts of hf_moe_ep; leave out "
                    f"experts_implementation, expert_backend, use_scattermoe and use_sonicmoe"
                )
        if cfg.quantize_moe_experts:
            raise ValueError(
                "quantize_moe_experts: true stores the experts in a layout that hf_moe_ep cannot "
                "split over ranks; leave it out, and write hf_moe_ep: {experts_dtype: nf4}"
            )
        # axolotl's kernel plugin sets "eager" if none of its kernels is used.
        cfg.experts_implementation = None

    def post_model_build(self, cfg: Any, model: nn.Module) -> None:
        """Patch the model after its weights are loaded, before adapters are attached.

        Raises:
            ValueError: the model cannot be patched; or `hf-moe-ep run` has patched it with other
                settings.
        """
        settings, state = _split_settings(cfg.hf_moe_ep)[0], find_state(model)
        if state is None:
            hf_moe_ep.patch(model, **settings)
        elif resolve_config(None, settings) != state.config:
            raise ValueError(
                f"hf-moe-ep run has patched the model with {state.config}, but the YAML file says "
                f"hf_moe_ep: {settings}; give the settings in one of the two places"
            )

    def add_callbacks_pre_trainer(
        self, cfg: Any, model: nn.Module
    ) -> list[transformers.TrainerCallback]:
        """Return the callback that reports tokens per second and the expert load."""
        return [RunReport()] if _split_settings(cfg.hf_moe_ep)[1] else []


def _split_settings(settings: dict[str, Any] | None) -> tuple[dict[str, Any], Any]:
    """Return the fields of ParallelConfig, and the value of `report`."""
    fields = dict(settings or {})
    report = fields.pop(_REPORT, True)
    return fields, report
