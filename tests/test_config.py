"""`ParallelConfig` refuses wrong values, and environment variables fill sizes that are None."""

import dataclasses
from typing import Any

import pytest

from hf_moe_ep import ParallelConfig
from hf_moe_ep.config import (
    get_launched_rank,
    get_launched_world_size,
    is_launched_with_fsdp,
    read_environment_settings,
    resolve_config,
    suggest_name,
)

NO_SIZES = [0, -1, 1.5, 2.0, True, "2", "auto", [2]]

BAD_VALUES = [
    *(
        ({name: size}, name)
        for name in ("ep_size", "sp_size", "dp_replicate_size", "cp_size", "etp_size")
        for size in NO_SIZES
    ),
    ({"experts_backend": "cuda"}, "experts_backend='cuda'.*'auto', 'eager', 'torch', 'triton'"),
    ({"experts_backend": None}, "experts_backend=None"),
    ({"experts_dtype": "int4"}, "experts_dtype='int4'.*use None, 'nf4', 'fp8'"),
    ({"experts_double_quant": 1}, "experts_double_quant=1.*use False, True"),
    (
        {"experts_dtype": "fp8", "experts_double_quant": True},
        "experts_double_quant=True.*experts_dtype is 'fp8'",
    ),
    (
        {"experts_dtype": "fp8", "experts_backend": "eager"},
        "experts_backend='eager'.*fp8.*experts_backend='auto'",
    ),
    ({"dispatcher": "nccl"}, "dispatcher='nccl'.*use 'all_to_all', 'hierarchical', 'deepep'"),
    ({"node_size": 4}, "node_size=4 is for dispatcher='hierarchical', .* is 'all_to_all'"),
    ({"dispatcher": "deepep", "node_size": 8}, "node_size=8 is for .*, .* is 'deepep'"),
    ({"dispatcher": "hierarchical", "node_size": 0}, "node_size must be .* >= 1, got 0"),
    ({"deepep_num_sms": 7}, "deepep_num_sms must be even.*got 7, try 8"),
    ({"deepep_num_sms": 0}, "deepep_num_sms must be None or a whole number >= 1, got 0"),
    ({"dispatch_chunks": 0}, "dispatch_chunks must be a whole number >= 1, got 0"),
    ({"dispatch_chunks": None}, "dispatch_chunks must be a whole number >= 1, got None"),
    ({"dispatch_chunks": True}, "dispatch_chunks must be a whole number >= 1, got True"),
    ({"max_tokens_per_rank": 0}, "max_tokens_per_rank must be .*whole number >= 1, got 0"),
    ({"recompute_activations": 1}, "recompute_activations=1.*use False, True"),
    ({"compile_layers": 1}, "compile_layers=1 is unknown.*False, True, the name of a backend"),
    ({"compile_layers": None}, "compile_layers=None is unknown"),
    ({"gather_logits": 1}, "gather_logits=1.*use False, True"),
    ({"mtp_layers": -1}, "mtp_layers must be a whole number >= 0, got -1; try mtp_layers=1"),
    ({"mtp_layers": True}, "mtp_layers must be a whole number >= 0, got True"),
    ({"mtp_layers": None}, "mtp_layers must be a whole number >= 0, got None"),
    ({"mtp_loss_weight": -0.1}, "mtp_loss_weight must be a number >= 0, got -0.1"),
    ({"mtp_loss_weight": float("inf")}, "mtp_loss_weight must be a number >= 0, got inf"),
    ({"mtp_from_scratch": True}, "mtp_from_scratch=True needs.*mtp_layers is 0; try mtp_layers=1"),
    ({"mtp_layers": 1, "pp_size": 2}, "mtp_layers=1 was not tested with pp_size=2; use pp_size=1"),
    ({"mtp_layers": 1, "cp_size": 4}, "mtp_layers=1 was not tested with cp_size=4; use cp_size=1"),
    ({"mtp_layers": 2, "experts_dtype": "nf4"}, "experts_dtype='nf4' is for LoRA.*2 layers"),
    ({"fused_loss": "on"}, "fused_loss='on'.*use 'auto', True, False"),
    ({"fused_loss": 1}, "fused_loss=1.*use 'auto', True, False"),
    ({"ep_outside": 1}, "ep_outside=1.*use False, True"),
    ({"reshard_after_forward": 2}, "reshard_after_forward=2.*use False, True"),
    ({"nccl_ub": "yes"}, "nccl_ub='yes'.*use False, True"),
    ({"reshard_after_forward": None}, "reshard_after_forward=None"),
    ({"expert_shard_dim": 2}, "expert_shard_dim=2.*use 'auto', 0, 1"),
    ({"expert_shard_dim": True}, "expert_shard_dim=True"),
    ({"expert_shard_dim": "0"}, "expert_shard_dim='0'"),
    ({"expert_shard_dim": -1}, "expert_shard_dim=-1"),
    ({"experts_backend": "eager", "ep_size": 2}, "'eager'.*ep_size=2.*'auto', or ep_size=1"),
]


@pytest.mark.parametrize(("fields", "match"), BAD_VALUES, ids=str)
def test_bad_values_are_refused_by_name(fields: dict[str, object], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        ParallelConfig(**fields)  # type: ignore[arg-type]


def test_defaults_are_the_public_contract() -> None:
    assert dataclasses.asdict(ParallelConfig()) == {
        "ep_size": None,
        "sp_size": None,
        "dp_replicate_size": None,
        "cp_size": None,
        "etp_size": None,
        "experts_backend": "auto",
        "dispatcher": "all_to_all",
        "node_size": None,
        "dispatch_chunks": 1,
        "deepep_num_sms": None,
        "max_tokens_per_rank": None,
        "recompute_activations": False,
        "compile_layers": False,
        "fused_loss": "auto",
        "mtp_layers": 0,
        "mtp_loss_weight": 0.1,
        "mtp_from_scratch": False,
        "gather_logits": False,
        "ep_outside": False,
        "expert_shard_dim": "auto",
        "reshard_after_forward": True,
        "fsdp_double_buffer": False,
        "nccl_ub": False,
        "bias_update_rate": None,
        "aux_loss_per_layer": False,
        "experts_dtype": None,
        "experts_double_quant": False,
        "pp_size": None,
        "pp_microbatches": None,
        "pp_schedule": "1f1b",
        "pp_layers": None,
    }
    with pytest.raises(dataclasses.FrozenInstanceError):
        ParallelConfig().ep_size = 2  # type: ignore[misc]


# The values of sizes that were None, after `resolve_config`.
ONES = {"sp_size": 1, "cp_size": 1, "dp_replicate_size": 1, "etp_size": 1, "pp_size": 1}


def test_resolving_fills_none_with_one_and_keeps_the_rest() -> None:
    assert resolve_config(None, {}) == ParallelConfig(ep_size=1, **ONES)
    asked = ParallelConfig(ep_size=4, ep_outside=True)
    assert resolve_config(asked, {}) == dataclasses.replace(asked, **ONES)
    assert asked.sp_size is None  # the user's object is not touched
    assert resolve_config(asked, {"ep_size": 2, "expert_shard_dim": 0}) == ParallelConfig(
        ep_size=2, ep_outside=True, expert_shard_dim=0, **ONES
    )


def test_options_of_a_call_are_checked_like_fields() -> None:
    with pytest.raises(
        ValueError, match=r"unknown option epsize \(did you mean ep_size\?\)"
    ) as error:
        resolve_config(None, {"epsize": 2, "ep_size": 2})
    assert "; options are: aux_loss_per_layer, " in str(error.value)
    with pytest.raises(ValueError, match="ep_size must be None or a whole number >= 1, got 0"):
        resolve_config(ParallelConfig(ep_size=2), {"ep_size": 0})
    with pytest.raises(ValueError, match=r"'eager'.*ep_size=2"):
        resolve_config(ParallelConfig(ep_size=2), {"experts_backend": "eager"})
    for wrong in (8, {"ep_size": 8}, "ep_size=8", ParallelConfig):
        with pytest.raises(ValueError, match=r"must be a ParallelConfig.*ep_size=\.\.\."):
            resolve_config(wrong, {})  # type: ignore[arg-type]


def test_the_most_similar_name_is_suggested() -> None:
    names = [field.name for field in dataclasses.fields(ParallelConfig)]
    similar = {"ep": "ep_size", "ep_sise": "ep_size", "expert_backend": "experts_backend"}
    for name, meant in similar.items():
        assert suggest_name(name, names) == f" (did you mean {meant}?)"
    assert suggest_name("expert_parallel_degree", names) == suggest_name("dtype", names) == ""
    # The prefix does not make names similar.
    known = ["--gpu-memory", "--batch"]
    assert suggest_name("--gpu-memori", known, "--") == " (did you mean --gpu-memory?)"
    assert suggest_name("--xyz", known, "--") == suggest_name("HF_X", ["HF_Y"], "HF_") == ""


@pytest.mark.parametrize(("size", "meant"), [("8", 8), (2.0, 2), ("two", 1), (0, 1), (True, 1)])
def test_the_error_of_a_wrong_size_suggests_a_size(size: object, meant: int) -> None:
    with pytest.raises(ValueError, match=f"got {size!r}; try ep_size={meant}$"):
        ParallelConfig(ep_size=size)  # type: ignore[arg-type]


def test_the_environment_fills_missing_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_MOE_EP_EP_SIZE", " 8 ")
    monkeypatch.setenv("HF_MOE_EP_SP_SIZE", "1")
    assert resolve_config(None, {}) == ParallelConfig(ep_size=8, **ONES)
    assert resolve_config(None, {"ep_size": 2}).ep_size == 2  # an option of the script wins
    assert resolve_config(ParallelConfig(ep_size=1), {}).ep_size == 1
    assert ParallelConfig().ep_size is None  # the variable is read by resolve_config, not here
    monkeypatch.setenv("HF_MOE_EP_EP_SIZE", "")
    assert resolve_config(None, {}).ep_size == 1


def test_the_environment_fills_settings_that_a_script_does_not_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`examples/slurm/stages.sbatch` sets the micro-batches of scripts that call patch(model)."""
    monkeypatch.setenv("HF_MOE_EP_PP_SIZE", "2")
    monkeypatch.setenv("HF_MOE_EP_PP_MICROBATCHES", "8")
    monkeypatch.setenv("HF_MOE_EP_RECOMPUTE_ACTIVATIONS", "true")
    got = resolve_config(None, {"ep_size": 4})
    assert (got.ep_size, got.pp_size, got.pp_microbatches) == (4, 2, 8)
    assert got.recompute_activations is True
    got = resolve_config(None, {"pp_microbatches": 2, "recompute_activations": False})
    assert (got.pp_microbatches, got.recompute_activations) == (2, False)
    # With a ParallelConfig, only the fields that it leaves at None are read from variables.
    assert resolve_config(ParallelConfig(), {}) == ParallelConfig(
        **{**ONES, "pp_size": 2, "pp_microbatches": 8, "ep_size": 1}
    )
    assert resolve_config(ParallelConfig(pp_microbatches=2), {}).pp_microbatches == 2


def test_a_variable_with_an_unknown_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_MOE_EP_EPSIZE", "8")
    match = r"HF_MOE_EP_EPSIZE is set \(did you mean HF_MOE_EP_EP_SIZE\?\), but only .*correct"
    for config in (None, ParallelConfig(ep_size=2)):
        with pytest.raises(ValueError, match=match):
            resolve_config(config, {})


def test_node_size_is_the_launchers_local_world_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the hierarchical dispatcher reads the variable, and an option of the script wins."""
    by_nodes = ParallelConfig(dispatcher="hierarchical")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert resolve_config(by_nodes, {}).node_size == 4
    assert resolve_config(by_nodes, {"node_size": 2}).node_size == 2
    assert resolve_config(None, {}).node_size is None
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "four")
    with pytest.raises(ValueError, match="LOCAL_WORLD_SIZE='four' is not a positive whole number"):
        resolve_config(by_nodes, {})
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert resolve_config(by_nodes, {}).node_size is None  # sharding raises the error


@pytest.mark.parametrize("text", ["abc", "0", "-2", "1.5", "8,", "0x8", "None"])
def test_a_variable_that_is_not_a_size_is_refused(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("HF_MOE_EP_EP_SIZE", text)
    with pytest.raises(ValueError, match=f"HF_MOE_EP_EP_SIZE='{text}'.*HF_MOE_EP_EP_SIZE=8"):
        resolve_config(None, {})
    assert resolve_config(None, {"ep_size": 2}).ep_size == 2  # the variable is not read


def test_sizes_of_the_environment_are_checked_like_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_MOE_EP_EP_SIZE", "4")
    with pytest.raises(ValueError, match=r"'eager'.*ep_size=4"):
        resolve_config(ParallelConfig(experts_backend="eager"), {})


@pytest.mark.parametrize("name", ["ep_size", "sp_size", "dp_replicate_size", "cp_size", "etp_size"])
def test_a_size_above_1_needs_sharding(name: str) -> None:
    assert not ParallelConfig().needs_sharding and not ParallelConfig(1, 1, 1, 1, 1).needs_sharding
    assert ParallelConfig(**{name: 2}).needs_sharding  # type: ignore[arg-type]


def test_world_size_and_rank_are_read_from_the_launchers_variables(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("WORLD_SIZE", "RANK", "ACCELERATE_USE_FSDP"):
        monkeypatch.delenv(name, raising=False)
    assert (get_launched_world_size(), get_launched_rank(), is_launched_with_fsdp()) == (
        1,
        0,
        False,
    )
    for name, value in {"WORLD_SIZE": "8", "RANK": "5", "ACCELERATE_USE_FSDP": "TRUE"}.items():
        monkeypatch.setenv(name, value)
    assert (get_launched_world_size(), get_launched_rank(), is_launched_with_fsdp()) == (8, 5, True)


def test_layers_of_stages_are_read_from_a_list_and_from_a_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert ParallelConfig(pp_layers=[3, 1]).pp_layers == (3, 1)
    assert resolve_config(None, {"pp_layers": [3, 1]}).pp_size == 2
    monkeypatch.setenv("HF_MOE_EP_PP_LAYERS", "2,1,1")
    assert read_environment_settings(ParallelConfig).pp_layers == (2, 1, 1)
    monkeypatch.setenv("HF_MOE_EP_PP_LAYERS", "2,x")
    with pytest.raises(ValueError, match=r"PP_LAYERS=2,x is no whole number; try .*13,11"):
        read_environment_settings(ParallelConfig)


@pytest.mark.parametrize(
    ("name", "text", "given"),
    [
        ("node_size", "8", {"dispatcher": "hierarchical"}),
        ("experts_double_quant", "true", {"experts_dtype": "nf4"}),
        ("mtp_from_scratch", "true", {"mtp_layers": 1}),
    ],
)
def test_a_variable_is_checked_together_with_the_call(
    name: str, text: str, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of these variables is allowed only with the setting that the call passes."""
    monkeypatch.setenv(f"HF_MOE_EP_{name.upper()}", text)
    config = resolve_config(None, given)
    assert getattr(config, name) in (8, True)
    assert all(getattr(config, field) == value for field, value in given.items())
