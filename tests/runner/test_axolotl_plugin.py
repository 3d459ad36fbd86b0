"""The axolotl plugin checks its settings, patches the model, and adds a callback.

If axolotl is not installed, a stand-in replaces the base class of plugins. `make test-trainers`
trains with axolotl itself.
"""

import importlib
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import BaseModel, ValidationError
from support.tiny_models import tiny

from hf_moe_ep import patch
from hf_moe_ep.integrations.run_report import RunReport
from hf_moe_ep.state import find_state

NAME = "hf_moe_ep.integrations.axolotl"
CALLED_BY_AXOLOTL = (
    "get_input_args",
    "pre_model_load",
    "post_model_build",
    "add_callbacks_pre_trainer",
)


class StandIn:
    """The base class of plugins, with the methods that axolotl calls."""

    def get_input_args(self) -> None: ...

    def pre_model_load(self, cfg: Any) -> None: ...

    def post_model_build(self, cfg: Any, model: Any) -> None: ...

    def add_callbacks_pre_trainer(self, cfg: Any, model: Any) -> None: ...


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import the module of the plugin by its name, as axolotl does."""
    try:
        importlib.import_module("axolotl.integrations.base")
    except ImportError:
        for name in ("axolotl", "axolotl.integrations", "axolotl.integrations.base"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        sys.modules["axolotl.integrations.base"].BasePlugin = StandIn  # type: ignore[attr-defined]
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    return importlib.import_module(NAME)


def make_configuration(**fields: Any) -> SimpleNamespace:
    names = (
        "hf_moe_ep",
        "expert_parallel_size",
        "experts_implementation",
        "quantize_moe_experts",
        "use_scattermoe",
        "use_sonicmoe",
    )
    return SimpleNamespace(**(dict.fromkeys(names) | fields))


def test_the_plugin_overrides_methods_of_axolotls_base_class(plugin: Any) -> None:
    (base,) = plugin.ExpertParallel.__bases__
    for name in CALLED_BY_AXOLOTL:
        assert callable(getattr(base, name))
        assert name in vars(plugin.ExpertParallel)


def test_settings_are_validated_with_axolotls_configuration(plugin: Any) -> None:
    """axolotl makes a class with its own keys and the keys that the plugin names."""
    module, _, name = plugin.ExpertParallel().get_input_args().rpartition(".")

    class Base(BaseModel):
        sequence_len: int = 512

    arguments = getattr(importlib.import_module(module), name)
    schema = type("AxolotlInputConfig", (Base, arguments), {})
    good = {"ep_size": 8, "sp_size": 2, "report": False}
    assert schema(hf_moe_ep=good).model_dump() == {"sequence_len": 512, "hf_moe_ep": good}
    assert schema().hf_moe_ep is None
    for settings, match in (
        ({"ep_size": 0}, r"ep_size must be None or a whole number >= 1, got 0"),
        ({"ep_sise": 8}, r"unknown option ep_sise \(did you mean ep_size\?\); options are: "),
        ({"report": "yes"}, r"report must be true or false, got 'yes'"),
    ):
        with pytest.raises(ValidationError, match=match):
            schema(hf_moe_ep=settings)


def test_the_model_is_patched_and_reported(plugin: Any) -> None:
    expert_parallel, model = plugin.ExpertParallel(), tiny(dtype=torch.float32)
    settings = {"ep_size": 2, "dispatch_chunks": 3, "report": True}
    cfg = make_configuration(hf_moe_ep=settings, experts_implementation="eager")
    expert_parallel.pre_model_load(cfg)
    assert cfg.experts_implementation is None  # axolotl would set it after the patch
    expert_parallel.post_model_build(cfg, model)
    state = find_state(model)
    assert state is not None
    assert (state.config.ep_size, state.config.dispatch_chunks) == (2, 3)
    (callback,) = expert_parallel.add_callbacks_pre_trainer(cfg, model)
    assert isinstance(callback, RunReport)
    cfg.hf_moe_ep = {"report": False}
    assert expert_parallel.add_callbacks_pre_trainer(cfg, model) == []


def test_options_that_contradict_the_plugin_are_named(plugin: Any) -> None:
    expert_parallel = plugin.ExpertParallel()
    with pytest.raises(ValueError, match=r"expert_parallel_size: 4 is .* hf_moe_ep: \{ep_size: 4"):
        expert_parallel.pre_model_load(make_configuration(expert_parallel_size=4))
    for name in ("scattermoe", "sonicmoe"):
        with pytest.raises(ValueError, match=rf"experts_implementation: {name} would .* leave out"):
            expert_parallel.pre_model_load(make_configuration(experts_implementation=name))
        # axolotl's kernels plugin replaces "eager" with the name of a kernel if it runs later.
        flag = f"use_{name}"
        with pytest.raises(ValueError, match=rf"{flag}: True would replace .* and use_sonicmoe"):
            expert_parallel.pre_model_load(
                make_configuration(experts_implementation="eager", **{flag: True})
            )
    with pytest.raises(ValueError, match=r"quantize_moe_experts: true .* \{experts_dtype: nf4\}"):
        expert_parallel.pre_model_load(make_configuration(quantize_moe_experts=True))


def test_other_settings_than_the_runners_are_refused(plugin: Any) -> None:
    """If the runner has patched the model, only the same settings are accepted."""
    model = patch(tiny(dtype=torch.float32), ep_size=2)
    state = find_state(model)
    plugin.ExpertParallel().post_model_build(make_configuration(hf_moe_ep={"ep_size": 2}), model)
    assert find_state(model) is state
    with pytest.raises(ValueError, match=r"hf-moe-ep run has patched .* hf_moe_ep: .*'ep_size': 4"):
        plugin.ExpertParallel().post_model_build(
            make_configuration(hf_moe_ep={"ep_size": 4}), model
        )
