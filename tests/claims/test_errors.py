"""An impossible request raises an error on every rank, with both numbers and the fix."""

import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.adapters import with_lora
from support.checks import Check, Found, on_ranks
from support.ranks import run_ranks
from support.tiny_models import batch, tiny
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from hf_moe_ep import ParallelConfig, apply_ep_fsdp2, describe, patch, unpatch
from hf_moe_ep.state import STATE

LAUNCH = r"distributed_type: FSDP.*fsdp_version: 2"
SHARDED = "pass the model as from_pretrained returns it"


def _build_llama() -> nn.Module:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "vocab_size": 11, "num_hidden_layers": 1}
    return LlamaForCausalLM(LlamaConfig(num_attention_heads=2, num_key_value_heads=2, **sizes))


def _build_with_tp() -> nn.Module:
    model = tiny()
    model._tp_size = 2
    return model


def _build_distributed() -> nn.Module:
    model = tiny()
    model._is_distributed_loading_by_transformers = True
    return model


def _build_without_experts() -> nn.Module:
    return tiny(mlp_only_layers=[0, 1])


def _build_without_experts_in_layer_1() -> nn.Module:
    model = tiny()
    model.model.layers[1].mlp.experts = nn.Identity()
    return model


def _build_without_layer_1() -> nn.Module:
    model = tiny()
    del model.model.layers[1]
    return model


# name: (a function that builds the model, options of patch, a match of the error)
REFUSED: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str]] = {
    "experts": (tiny, {"ep_size": 3}, r"ep_size \(3\).*num_experts \(8\).*try 1, 2, 4, 8$"),
    "more than experts": (tiny, {"ep_size": 16}, r"ep_size \(16\).*num_experts \(8\).*try 1, 2"),
    "architecture": (
        _build_llama,
        {},
        r"unknown architecture 'llama' \(Llama.*none of.*experts interface",
    ),
    "no transformers model": (
        lambda: nn.Linear(2, 2),
        {},
        r"unknown architecture None \(Linear\): none of.*experts interface",
    ),
    "eager": (tiny, {"ep_size": 2, "experts_backend": "eager"}, "'eager'.*ep_size=2.*ep_size=1"),
    "option": (
        tiny,
        {"expert_parallel": 2},
        "unknown option expert_parallel; options are: .*ep_size",
    ),
    "sp": (tiny, {"sp_size": 3}, r"sp_size \(3\) must divide the attention heads \(4\)"),
    "activation": (
        lambda: tiny(hidden_act="mish"),
        {},
        "gate of Qwen3MoeExperts of qwen3_moe is none of swish, gelu.*experts_backend='eager'",
    ),
    "no experts": (
        _build_without_experts,
        {},
        "unknown architecture 'qwen3_moe' .*none of its modules uses transformers",
    ),
    "a layer lost": (_build_without_layer_1, {}, "found 1 decoder layers.*expected 2"),
    "foreign experts": (
        _build_without_experts_in_layer_1,
        {},
        r"without transformers.*layers\.1\.mlp\.experts",
    ),
    "tp by transformers": (_build_with_tp, {}, f"transformers sharded this model.*{SHARDED}"),
}
if hasattr(PreTrainedModel, "is_distributed_loading_by_transformers"):
    match = f"transformers sharded this.*{SHARDED}"
    REFUSED["loaded distributed"] = (_build_distributed, {}, match)


@pytest.mark.parametrize("name", REFUSED)
def test_patch_refuses(name: str) -> None:
    make, options, match = REFUSED[name]
    model = make()
    before = [sorted(vars(module)) for module in model.modules()]
    with pytest.raises(ValueError, match=match):
        patch(model, **options)
    assert [sorted(vars(module)) for module in model.modules()] == before
    with pytest.raises(ValueError, match=match):
        apply_ep_fsdp2(make(), **options)


def test_a_wrong_environment_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_MOE_EP_EP_SIZE", "abc")
    with pytest.raises(ValueError, match=r"HF_MOE_EP_EP_SIZE='abc'.*HF_MOE_EP_EP_SIZE=8"):
        patch(tiny())


def test_calls_without_a_process_group_are_refused() -> None:
    model = patch(tiny(), ep_size=2)
    with pytest.raises(ValueError, match=r"needs a process group.*launch.*TrainingArguments"):
        apply_ep_fsdp2(model)
    with pytest.raises(ValueError, match=f"ep_size=2, sp_size=1, dp_replicate_size=1.*{LAUNCH}"):
        model(**batch(model, 2, 5))
    with pytest.raises(ValueError, match=f"ep_size=1, sp_size=1, dp_replicate_size=4.*{LAUNCH}"):
        patch(tiny(), dp_replicate_size=4)(**batch(model, 2, 5))
    inner = patch(tiny(), ep_size=2).model  # this call skips the root's hook
    with pytest.raises(ValueError, match=f"ep_size=2.*{LAUNCH}"):
        inner(input_ids=torch.tensor([[1, 2, 3]]))


def test_unpatch_and_describe_need_a_patched_model() -> None:
    for call in (unpatch, describe):
        with pytest.raises(ValueError, match="Qwen3MoeForCausalLM is not patched"):
            call(tiny())
    patched = patch(tiny())
    assert "not sharded yet" in describe(patched)


@pytest.fixture
def fake_ranks() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("fake_ranks")
def test_a_model_that_is_sharded_or_wrapped_already_is_refused() -> None:
    sharded, with_sharded_layer = tiny(), tiny()
    fully_shard(sharded)
    fully_shard(with_sharded_layer.model.layers[0])
    for model in (sharded, with_sharded_layer):
        with pytest.raises(ValueError, match=f"FSDP2 shards parts of this model.*{SHARDED}"):
            patch(model)
    ddp = DistributedDataParallel(tiny())
    with pytest.raises(ValueError, match=f"wrapped in DistributedDataParallel.*{SHARDED}"):
        patch(ddp)
    wrapped = FullyShardedDataParallel(tiny(), device_id=torch.device("cpu"), use_orig_params=True)
    with pytest.raises(ValueError, match=f"FSDP1 wraps parts of this model.*{SHARDED}"):
        patch(wrapped)


def _assert_raises_on_all(
    match: str, call: Callable[[], Any], kind: type[Exception] = ValueError
) -> None:
    """Check that `call` raises on every rank, and that ranks can run a collective afterwards."""
    with pytest.raises(kind, match=match):
        call()
    dist.barrier()


def impossible_world_sizes_and_a_second_sharding_are_refused(rank: int, world: int) -> None:
    text = r"ep_size \(4\).*2 / 1 = 2.*try 1, 2,.*multiple of 4"
    _assert_raises_on_all(text, lambda: apply_ep_fsdp2(tiny(), ep_size=4))
    six = {"num_experts": 6}
    text = r"ep_size \(3\).*2 / 1 = 2.*try 1, 2,.*multiple of 3"
    _assert_raises_on_all(text, lambda: apply_ep_fsdp2(tiny(**six), ep_size=3))
    text = r"dp_replicate_size \(3\).*world size \(2\); try 1, 2"
    _assert_raises_on_all(text, lambda: apply_ep_fsdp2(tiny(), dp_replicate_size=3))
    text = r"expert_shard_dim=1.*\(8, 33, 24\).*ep_fsdp \(2\).*'auto'"
    indivisible = {"hidden_size": 33, "head_dim": 4}  # down_proj (8, 33, 24) over ep_fsdp 2
    _assert_raises_on_all(text, lambda: apply_ep_fsdp2(tiny(**indivisible), expert_shard_dim=1))
    refused = patch(tiny(), ep_size=4)
    with pytest.raises(ValueError, match=r"ep_size \(4\)"):
        apply_ep_fsdp2(refused)
    apply_ep_fsdp2(refused, ep_size=2)  # the fix of the message works on the same model

    for call in (
        lambda: patch(refused, ep_size=2),
        lambda: patch(refused),
        lambda: apply_ep_fsdp2(refused),
        lambda: apply_ep_fsdp2(refused, ep_size=1),
    ):
        _assert_raises_on_all(f"sharded by hf_moe_ep already.*{SHARDED}", call)
    _assert_raises_on_all("sharded over 2 ranks; unpatch it before", lambda: unpatch(refused))


def a_model_inside_ddp_is_refused(rank: int, world: int) -> None:
    model = DistributedDataParallel(patch(tiny()))
    inputs = batch(tiny(), 2, 5, seed=rank)
    _assert_raises_on_all(f"wrapped in DistributedDataParallel.*{LAUNCH}", lambda: model(**inputs))
    model.module(**inputs)  # without DDP's forward, the model runs on one process


def weights_on_meta_are_refused(rank: int, world: int) -> None:
    text = r"of rank 0 are on the meta device.*from_pretrained"
    _assert_raises_on_all(text, lambda: apply_ep_fsdp2(tiny().to("meta"), ep_size=2))
    half = tiny()
    half.lm_head = half.lm_head.to("meta")
    _assert_raises_on_all("1 of .* of rank 0.*meta", lambda: apply_ep_fsdp2(half))
    model = tiny(seed=rank) if rank == 0 else tiny(seed=rank).to("meta")
    apply_ep_fsdp2(model, ep_size=2)
    want = tiny(seed=0)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.full_tensor(), want.get_parameter(name)), name
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, want.get_buffer(name)), name
    model(**batch(want, 2, 5, seed=rank)).loss.backward()


def ranks_that_disagree_are_refused(rank: int, world: int) -> None:
    def differ(match: str, *options: dict[str, Any], **sizes: list[Any]) -> None:
        own_sizes = {name: values[rank] for name, values in sizes.items()}
        text = f"ranks disagree about {match}"
        call = lambda: apply_ep_fsdp2(tiny(**own_sizes), **(options[rank] if options else {}))  # noqa: E731
        _assert_raises_on_all(text, call)

    differ("config: rank 0 has .*ep_size=1,.* rank 1 has .*ep_size=2,", {}, {"ep_size": 2})
    differ("config: .*ep_outside", {"ep_outside": True}, {})
    by_nodes = {"ep_size": 2, "dispatcher": "hierarchical"}
    differ("config: .*node_size=1,", by_nodes | {"node_size": 1}, by_nodes | {"node_size": 2})
    differ("config: .*expert_shard_dim", {"expert_shard_dim": 0}, {"expert_shard_dim": 1})
    differ("config: .*dp_replicate_size=2", {"dp_replicate_size": 2}, {})
    differ("MoE layers: rank 0 has 2: .* rank 1 has 1: ", mlp_only_layers=[[], [1]])
    differ("MoE layers: rank 0 has 2: .* rank 1 has 3: ", num_hidden_layers=[2, 3])
    differ("parameters", num_experts=[8, 4])
    differ("precision|parameters", dtype=[torch.float64, torch.float32])
    differ("parameters", tie_word_embeddings=[False, True])
    frozen = tiny()
    frozen.lm_head.weight.requires_grad_(rank == 0)
    _assert_raises_on_all("ranks disagree about parameters", lambda: apply_ep_fsdp2(frozen))
    os.environ["HF_MOE_EP_EP_SIZE"] = str(rank + 1)
    _assert_raises_on_all("ranks disagree about config.*ep_size=2", lambda: apply_ep_fsdp2(tiny()))
    del os.environ["HF_MOE_EP_EP_SIZE"]


def an_error_of_one_rank_in_patch_is_raised_on_all(rank: int, world: int) -> None:
    """Rank 1 has another ep_size, or lacks a package. Rank 0 also raises, instead of waiting."""
    config = ParallelConfig(ep_size=2 + rank)
    text = r"ep_size \(3\).*num_experts \(8\)"
    _assert_raises_on_all(text, lambda: apply_ep_fsdp2(tiny(), config))
    model = with_lora(tiny(hidden_size=64, moe_intermediate_size=64))
    lacks = mock.patch("importlib.util.find_spec", return_value=None)
    with lacks if rank == 1 else nullcontext():
        text = r"apply_ep_fsdp2 failed on rank 1: ImportError: .*bitsandbytes"
        call = lambda: apply_ep_fsdp2(model, ep_size=2, experts_dtype="nf4")  # noqa: E731
        _assert_raises_on_all(text, call, RuntimeError)


def ranks_at_different_positions_raise(rank: int, world: int) -> None:
    """If ranks run different layers or modes, both raise an error that names both positions."""
    model = apply_ep_fsdp2(tiny(), ep_size=2)
    inputs = batch(tiny(), 2, 5, seed=rank)
    model(**inputs)
    experts = [layer.mlp.experts for layer in model.model.layers]
    args = (
        torch.ones(1, 32, dtype=torch.float64),
        torch.tensor([[0, 7]]),
        torch.ones(1, 2, dtype=torch.float64),
    )
    names = r"(?s)rank 0: MoE layer 0 of forward 1.*rank 1: MoE layer 1 of forward 1"
    _assert_raises_on_all(names, lambda: experts[rank](*args), RuntimeError)
    for mode, text in (("eval", "evaluation"), ("no_grad", "training, no_grad")):
        model = apply_ep_fsdp2(tiny(), ep_size=2)
        if rank == 1 and mode == "eval":
            model.eval()
        names = rf"(?s)rank 0: .*forward 1 \(training;.*rank 1: .*forward 1 \({text};"
        with torch.set_grad_enabled(not (rank == 1 and mode == "no_grad")):
            _assert_raises_on_all(names, lambda model=model: model(**inputs), RuntimeError)


def the_fix_of_a_refused_sharding_works_on_the_same_model(rank: int, world: int) -> None:
    model = patch(tiny(hidden_size=33, head_dim=4), expert_shard_dim=1)
    with pytest.raises(ValueError, match=r"expert_shard_dim=1.*'auto'"):
        apply_ep_fsdp2(model)
    apply_ep_fsdp2(model, expert_shard_dim="auto")


def calls_that_a_sharded_model_cannot_run_are_refused(rank: int, world: int) -> None:
    """Continuous batching would hang, because the ranks need different numbers of forwards.

    A new size of the embedding and whole tensors do not fit DTensors.
    """
    model: Any = apply_ep_fsdp2(tiny(), ep_size=2).eval()
    ids = batch(model, 1 + rank, 5)["input_ids"]
    options = {"max_new_tokens": 2 + 6 * rank}
    for name, call in {
        "generate_batch": partial(model.generate_batch, ids.tolist(), **options),
        "init_continuous_batching": model.init_continuous_batching,
        "continuous_batching_context_manager": model.continuous_batching_context_manager,
    }.items():
        _assert_raises_on_all(f"^{name}: .* 2 ranks .* use generate", call)
    paged = partial(model.generate, ids, cache_implementation="paged", **options)
    _assert_raises_on_all("without cache_implementation='paged'", paged)

    for size, multiple in ((105, 1), (64, None), (None, 8)):
        text = rf"resize_token_embeddings\({size or 104}\) .* 97 tokens; .* resize it, and shard"
        _assert_raises_on_all(text, partial(model.resize_token_embeddings, size, multiple))
    embedding = model.get_input_embeddings()
    assert model.resize_token_embeddings(97) is embedding
    assert model.model.resize_token_embeddings() is embedding

    whole, sharded = tiny().state_dict(), model.state_dict()
    for assign in (False, True):
        text = "load_state_dict got a plain tensor for model.embed_tokens.weight, .*from_pre"
        _assert_raises_on_all(text, partial(model.load_state_dict, whole, assign=assign))
    model.load_state_dict(sharded)


ON_TWO_RANKS = [
    calls_that_a_sharded_model_cannot_run_are_refused,
    a_model_inside_ddp_is_refused,
    weights_on_meta_are_refused,
    ranks_that_disagree_are_refused,
    an_error_of_one_rank_in_patch_is_raised_on_all,
    ranks_at_different_positions_raise,
    impossible_world_sizes_and_a_second_sharding_are_refused,
    the_fix_of_a_refused_sharding_works_on_the_same_model,
]


@pytest.mark.parametrize("claim", on_ranks(2, *ON_TWO_RANKS))
def test_errors_on_every_rank(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)


def _set_timeouts(seconds: float) -> None:
    """Set the timeout of all groups after the first collectives, which need more time."""
    for group in list(dist.distributed_c10d._world.pg_map):
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)


def _run_one_layer(rank: int, world: int) -> None:
    """Rank 0 calls only the experts of layer 1, which rank 1 never reaches. Then rank 0's dispatch
    waits for rank 1, and no all-gather of FSDP2 waits.
    """
    model = apply_ep_fsdp2(tiny(), ep_size=2)
    model(**batch(tiny(), 2, 5, seed=rank))
    experts = model.model.layers[1].mlp.experts
    assert getattr(experts, STATE).index == 1
    _set_timeouts(3)
    if rank == 1:
        time.sleep(8)
        return
    weights = torch.ones(1, 2, dtype=torch.float64)
    experts(torch.ones(1, 32, dtype=torch.float64), torch.tensor([[0, 7]]), weights)


def _skip_forward(rank: int, world: int) -> None:
    model = apply_ep_fsdp2(tiny(), ep_size=2)
    model(**batch(tiny(), 2, 5, seed=rank))
    _set_timeouts(3)
    if rank == 1:
        time.sleep(8)
        return
    model(**batch(tiny(), 2, 5, seed=rank))


def _run_other_top_k(rank: int, world: int) -> None:
    """The ranks have equal parameters, but a row of routing has 2 or 3 columns."""
    model = apply_ep_fsdp2(tiny(num_experts_per_tok=2 + rank), ep_size=2)
    model(**batch(tiny(), 2, 5, seed=rank))


def _shard_buffers_on_meta(rank: int, world: int) -> None:
    """After load_state_dict(assign=True), buffers that are not in the state_dict are on meta."""
    state = tiny().state_dict()
    model = tiny().to("meta")
    model.load_state_dict(state, assign=True)
    apply_ep_fsdp2(model, ep_size=2)


# name: (a job that breaks its process group, so that it has its own spawn; a match of each rank's
# error). None stands for a rank that may end with or without an error.
BROKEN_STEPS: dict[str, tuple[Callable[..., None], list[str | None]]] = {
    "a layer not reached": (_run_one_layer, ["MoE layer 1 of forward 1 .*never reached", None]),
    # Rank 0 waits in FSDP2's first all-gather, whose error does not name a layer.
    "a forward skipped": (_skip_forward, ["[Tt]ime(d )?out", None]),
    "another top-k": (_run_other_top_k, ["disagree|different places"] * 2),
    "buffers on meta": (_shard_buffers_on_meta, ["on the meta device"] * 2),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow) if name == "a forward skipped" else name
        for name in BROKEN_STEPS
    ],
)
def test_a_broken_step_ends_with_an_error(name: str) -> None:
    job, matches = BROKEN_STEPS[name]
    outcomes = run_ranks(job, 2, expect_errors=True)
    for rank, (match, outcome) in enumerate(zip(matches, outcomes, strict=True)):
        if match is not None:
            assert outcome[0] == "error", (rank, outcome)
            assert re.search(match, outcome[2]), f"rank {rank}: {outcome[2]!r} lacks {match!r}"
