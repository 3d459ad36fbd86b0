"""Test that engines get from TRL the tensors of `save_pretrained`, with adapters merged.

TRL has two modes: "colocate" (an engine on every rank), and "server" (one engine, to which rank 0
sends).
"""

import copy
import functools
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.adapters import with_lora
from support.checks import Check, Found, on_ranks
from support.close import assert_close
from support.engine import Engine
from support.extra_files import write_with_extra
from support.hub_files import hub_state, read_all
from support.needs import ARCHITECTURES
from support.tiny_models import tiny
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from hf_moe_ep import apply_ep_fsdp2, hub_tensors, patch, save_pretrained
from hf_moe_ep.integrations import engines

trl = pytest.importorskip("trl", minversion="1.15")


class Client:
    """A client with the methods that a sync calls. It checks the metadata that TRL sends first."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.resets = engine, 0

    def update_named_params(self, metadata: Any, named_params: Any) -> None:
        announced = iter(metadata)
        for key, tensor in named_params:
            dtype = str(tensor.dtype).removeprefix("torch.")
            assert next(announced) == (key, dtype, list(tensor.shape))
            self.engine.load_weights([(key, tensor)])
        assert next(announced, None) is None

    def update_named_param(self, key: str, tensor: Tensor) -> None:
        self.engine.load_weights([(key, tensor)])

    @contextmanager
    def weight_update(self) -> Iterator[None]:
        yield

    def reset_prefix_cache(self) -> None:
        self.resets += 1


def build_generation(model: nn.Module, mode: str, engine: Engine, rank: int) -> Any:
    """Build TRL's VLLMGeneration without its constructor, which needs vLLM."""
    from trl.generation.vllm_generation import VLLMGeneration

    client = Client(engine)
    runner = SimpleNamespace(model_runner=SimpleNamespace(model=engine))
    executor = SimpleNamespace(driver_worker=runner)
    llm_engine = SimpleNamespace(model_executor=executor)
    sync: Any = VLLMGeneration.__new__(VLLMGeneration)
    sync.model, sync.mode, sync.enable_sleep_mode = model, mode, False
    sync._weight_metadata = None
    sync.accelerator = SimpleNamespace(is_main_process=rank == 0, device=torch.device("cpu"))
    sync._dist = SimpleNamespace(fsdp_version=2, is_fsdp=True)
    sync.vllm_client = client
    reset = client.reset_prefix_cache
    sync.llm = SimpleNamespace(llm_engine=llm_engine, reset_prefix_cache=reset)
    return sync


def load_into_copy(engine: Engine, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the parameters of a copy of the engine after it has loaded `weights`."""
    loader = copy.deepcopy(engine)
    loader.begin()
    loader.load_weights(weights.items())
    assert not loader.missing()
    return loader.parameters


def synced_tensors_equal_saved_files(name: str, rank: int, world: int, folder: str) -> None:
    """After two syncs in each mode, the engine equals one that loads files of save_pretrained."""
    import trl.generation.vllm_generation  # noqa: F401  must be imported for `patch` to wrap it

    stock = tiny(name, dtype=torch.float32)
    engine = Engine.of(stock)
    model = apply_ep_fsdp2(stock, ep_size=2)
    for mode in ("colocate", "server"):
        sync = build_generation(model, mode, engine, rank)
        for step in range(2):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.5)
            engine.begin()
            sync.sync_weights()
            save_pretrained(model, f"{folder}/{mode}{step}")
            if mode == "colocate" or rank == 0:
                assert not engine.missing() and sync.vllm_client.resets == step + 1
                expected = load_into_copy(engine, read_all(Path(f"{folder}/{mode}{step}")))
                assert all(torch.equal(engine.parameters[k], expected[k]) for k in expected)
            else:
                assert len(engine.missing()) == len(engine.keys), "only rank 0 sends to a server"


def adapters_are_merged_into_synced_tensors(name: str, rank: int, world: int) -> None:
    """Adapters are merged into the synced tensors only; PEFT's merge_adapter is refused."""
    import trl.generation.vllm_generation  # noqa: F401

    stock = with_lora(tiny(name), seed=1)
    engine = Engine.of(tiny(name))
    expected = load_into_copy(engine, hub_state(copy.deepcopy(stock).merge_and_unload()))
    model = apply_ep_fsdp2(stock, ep_size=2)
    for mode in ("colocate", "server"):
        engine.begin()
        build_generation(model, mode, engine, rank).sync_weights()
        if mode == "colocate" or rank == 0:
            assert not engine.missing()
            for key, tensor in expected.items():
                assert_close(key, engine.parameters[key], tensor, 1e-10)
    with pytest.raises(ValueError, match="merge"):
        model.merge_adapter()


def online_dpo_sends_the_same_tensors(rank: int, world: int) -> None:
    """OnlineDPOTrainer has its own code for both modes. It is tested with and without LoRA."""
    from trl.experimental.online_dpo.online_dpo_trainer import OnlineDPOTrainer

    for stock in (tiny(), with_lora(tiny(), seed=1)):
        engine = Engine.of(tiny())
        merged = copy.deepcopy(stock)
        merged = merged.merge_and_unload() if hasattr(merged, "merge_and_unload") else merged
        expected = load_into_copy(engine, hub_state(merged))
        model = apply_ep_fsdp2(stock, ep_size=2)
        for mode in ("colocate", "server"):
            engine.begin()
            sync = build_generation(model, mode, engine, rank)
            trainer: Any = OnlineDPOTrainer.__new__(OnlineDPOTrainer)
            trainer.model, trainer.vllm_mode, trainer.llm = model, mode, sync.llm
            trainer.vllm_client = sync.vllm_client
            trainer.args = SimpleNamespace(vllm_enable_sleep_mode=False)
            trainer.accelerator = sync.accelerator
            trainer.accelerator.unwrap_model = lambda module: module
            trainer._move_model_to_vllm()
            if mode == "colocate" or rank == 0:
                assert not engine.missing() and sync.vllm_client.resets == 1
                for key, tensor in expected.items():
                    assert_close(key, engine.parameters[key], tensor, 1e-10)


def an_unknown_name_is_an_error(rank: int, world: int) -> None:
    """If rank 0's engine does not know a name, rank 0 raises the error and other ranks stop."""
    import trl.generation.vllm_generation  # noqa: F401

    stock = tiny(dtype=torch.float32)
    engine = Engine.of(stock)
    if rank == 0:
        del engine._places["model.layers.1.mlp.experts.3.up_proj.weight"]
    model = apply_ep_fsdp2(stock, ep_size=2)
    for mode in ("server", "colocate"):
        error: type[Exception] = ValueError if rank == 0 else RuntimeError
        words = "no parameter takes model.layers.1.mlp.experts.3.up_proj.weight; .*: .*; loaded: "
        others = "rank 0 stopped iterating over hub_tensors early"
        with pytest.raises(error, match=words if rank == 0 else others):
            build_generation(model, mode, engine, rank).sync_weights()
    assert len(list(hub_tensors(model))) > 50, "ranks are still in step"


def refused_keys_are_listed(rank: int, world: int) -> None:
    """If rank 0's engine refuses some keys and skips others, every rank gets the whole list."""
    stock = tiny(dtype=torch.float32)
    engine = Engine.of(stock)
    model = apply_ep_fsdp2(stock, ep_size=2)
    hub_tensors(model).check_engine(engine.load_weights if rank == 0 else None)
    assert rank or not engine.missing()
    for layer in range(2):
        del engine._places[f"model.layers.{layer}.self_attn.q_norm.weight"]

    def load_weights(weights: list[tuple[str, Tensor]]) -> set[str]:
        return set() if weights[0][0] == "model.norm.weight" else engine.load_weights(weights)

    words = r"take 3 keys: model.layers.\*.self_attn.q_norm.weight \(2\), model.norm.weight \(1\); "
    words += r"model.layers.0.self_attn.q_norm.weight: no parameter takes model.layers.0"
    with pytest.raises(ValueError, match=words):
        hub_tensors(model).check_engine(load_weights if rank == 0 else None)


def a_key_that_another_rank_of_the_engine_takes_is_not_skipped(rank: int, world: int) -> None:
    model = apply_ep_fsdp2(tiny(dtype=torch.float32), ep_size=2)
    last: list[str] = []

    def load_weights(weights: list[tuple[str, Tensor]]) -> list[str]:
        last[:] = [weights[0][0]]
        is_others = ".experts." in last[0] and f".experts.{rank}." not in last[0]
        return [] if is_others or last[0] == "model.norm.weight" else last

    with pytest.raises(
        ValueError, match=r"not take 25 keys: .*gate_proj.weight \(8\), .*norm.weight \(1\).*skip"
    ):
        hub_tensors(model).check_engine(load_weights if rank < 4 else None)


def an_engine_that_is_gone_stops_the_check(rank: int, world: int) -> None:
    model = apply_ep_fsdp2(tiny(dtype=torch.float32), ep_size=2)

    def load_weights(weights: list[tuple[str, Tensor]]) -> None:
        raise ConnectionResetError("the server has closed the connection")

    error: type[Exception] = ConnectionResetError if rank == 0 else RuntimeError
    with pytest.raises(error, match="closed the conn" if rank == 0 else "rank 0 stopped iterating"):
        hub_tensors(model).check_engine(load_weights if rank == 0 else None)


CHECKS = {
    "full": partial(synced_tensors_equal_saved_files, "qwen3_moe"),
    "lora": partial(adapters_are_merged_into_synced_tensors, "qwen3_moe"),
    "listed": refused_keys_are_listed,
    "skipped by one rank": a_key_that_another_rank_of_the_engine_takes_is_not_skipped,
    "gone": an_engine_that_is_gone_stops_the_check,
    "refused": an_unknown_name_is_an_error,
    "pictures": partial(synced_tensors_equal_saved_files, "qwen3_vl_moe"),
    "online DPO": online_dpo_sends_the_same_tensors,
    "pictures, lora": partial(adapters_are_merged_into_synced_tensors, "qwen3_vl_moe"),
}


@pytest.mark.slow
@pytest.mark.parametrize("claim", on_ranks(4, CHECKS))
def test_on_four_ranks(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)


def test_refused_keys_are_listed_in_one_process() -> None:
    model = patch(tiny(dtype=torch.float32))
    hub_tensors(model).check_engine(lambda weights: None)
    with pytest.raises(
        ValueError, match=r"\.q_norm.weight \(2\), .*lm_head.*: skipped without an e"
    ):
        hub_tensors(model).check_engine(lambda weights: [])


def _raise_with_a_cause(sync: Any, iterators: list[Any]) -> None:
    """Raise an error with a cause, as engines do. The cause refers to the frames of the loop."""

    def inside() -> None:
        tensors = engines.iter_named_params(pytest.fail, sync)
        iterators.append(weakref.ref(tensors))
        for _ in tensors:
            raise KeyError("no such parameter")

    try:
        inside()
    except KeyError as error:
        raise RuntimeError("the worker died") from error


def test_a_stored_error_does_not_keep_the_iterator_alive() -> None:
    """While the iterator is alive, the other ranks wait for the next tensor."""
    model = patch(tiny(dtype=torch.float32))
    sync = SimpleNamespace(model=model, mode="colocate", enable_sleep_mode=False)
    iterators: list[Any] = []
    with pytest.raises(RuntimeError, match="the worker died") as raised:
        engines.sync_weights(lambda self: _raise_with_a_cause(self, iterators), sync)
    assert raised.value.__cause__ is not None
    assert [iterator() for iterator in iterators] == [None]


@pytest.mark.parametrize("sleeps", [False, True])
def test_an_engine_that_sleeps_gets_the_extra_tensors_again(sleeps: bool, tmp_path: Path) -> None:
    """TRL's sleep mode discards all weights of the engine after each generation."""
    import trl.generation.vllm_generation  # noqa: F401

    extra = write_with_extra(tmp_path, "qwen3_next").keys()
    model = patch(AutoModelForCausalLM.from_pretrained(tmp_path))
    keys: list[str] = []
    engine: Any = SimpleNamespace(load_weights=lambda pairs: keys.extend(key for key, _ in pairs))
    sync = build_generation(model, "colocate", engine, 0)
    sync.enable_sleep_mode, sync.llm.wake_up = sleeps, lambda tags: None
    for is_first in (True, False):
        keys.clear()
        sync.sync_weights()
        assert len(keys) > len(extra) > 10
        assert extra & set(keys) == (extra if is_first or sleeps else set())


def test_a_stock_model_is_synced_as_before() -> None:
    import trl.generation.vllm_generation  # noqa: F401

    patch(tiny())
    model = tiny(dtype=torch.float32)
    sync = build_generation(model, "colocate", Engine.of(model), 0)
    sync._dist = SimpleNamespace(is_fsdp=False, gather_params=lambda _: nullcontext())
    names = [name for name, _ in sync._iter_named_params()]
    assert names == [name for name, _ in model.named_parameters()]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_fake_engine_takes_only_hub_keys(name: str) -> None:
    model = tiny(name, dtype=torch.float32)
    engine = Engine.of(model)
    weights = hub_state(model)
    assert engine.missing() == sorted(weights)
    engine.load_weights(hub_tensors(patch(model)))
    assert not engine.missing()
    assert all(tensor.isfinite().all() for tensor in engine.parameters.values())
    text = "language_model.model." if name == "qwen3_vl_moe" else "model."
    owner = "model.language_model" if name == "qwen3_vl_moe" else "model"
    state = model.state_dict()
    experts = state[f"{owner}.layers.1.mlp.experts.gate_up_proj"]
    assert torch.equal(engine.parameters[f"{text}layers.1.mlp.experts.w13_weight"], experts)
    attention = [state[f"{owner}.layers.1.self_attn.{kind}_proj.weight"] for kind in "qkv"]
    fused = engine.parameters[f"{text}layers.1.self_attn.qkv_proj.weight"]
    assert torch.equal(fused, torch.cat(attention))
    load_unknown = functools.partial(engine.load_weights, [("model.norm.bias", torch.ones(2))])
    with pytest.raises(ValueError, match=r"no parameter takes model.norm.bias; .*\[\]; loaded: "):
        load_unknown()
    key = next(iter(weights))
    with pytest.raises(ValueError, match=f"{key} is .*expected"):
        engine.load_weights([(key, torch.ones(2))])
