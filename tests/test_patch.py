"""`patch` keeps the numbers of stock and changes one model only; `unpatch` removes every trace."""

import copy
import os
import pickle
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.architectures import tiny as tiny_of_type
from support.close import assert_close, max_error
from support.ranks import run_ranks
from support.scripts import ROOT
from support.tiny_models import batch, tiny
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen3MoeForCausalLM, Qwen3MoeForSequenceClassification, Qwen3MoeModel

from hf_moe_ep import (
    ModelPlan,
    ParallelConfig,
    apply_ep_fsdp2,
    describe,
    expert_load,
    from_pretrained,
    patch,
    unpatch,
)
from hf_moe_ep.config import resolve_config
from hf_moe_ep.sequence.mixers import LayerSlice
from hf_moe_ep.sequence.slice_arguments import read_layer_arguments
from hf_moe_ep.sequence.slices import SLICE, Slice
from hf_moe_ep.sequence.split import TakeSlice
from hf_moe_ep.state import STATE, PackageHook


def _is_ours(value: object) -> bool:
    """Return True if hf_moe_ep defines the value, or an object in its containers or closures."""
    visited_ids: set[int] = set()
    stack = [value]
    while stack:
        item = stack.pop()
        if id(item) in visited_ids:
            continue
        visited_ids.add(id(item))
        module = getattr(item, "__module__", None) or type(item).__module__
        if str(module).partition(".")[0] == "hf_moe_ep":
            return True
        if isinstance(item, dict):
            stack.extend([*item.keys(), *item.values()])
        elif isinstance(item, list | tuple | set):
            stack.extend(item)
        elif hasattr(item, "__closure__") and item.__closure__:
            stack.extend(cell.cell_contents for cell in item.__closure__)
    return False


def _list_traces(model: nn.Module) -> list[str]:
    """List the attributes in the module tree that hold objects of hf_moe_ep."""
    names = []
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if key == "_modules":
                continue
            config = vars(value) if hasattr(value, "to_dict") else {}
            if key == STATE or _is_ours(value) or "hf_moe_ep" in repr(config):
                names.append(f"{name}.{key}")
    return names


def _take_snapshot(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Map each module to its class, the sizes of its dicts (hooks) and ids of its attributes."""
    return {
        name: {
            "class": type(module),
            **{
                key: len(value) if isinstance(value, dict) else id(value)
                for key, value in vars(module).items()
            },
        }
        for name, module in model.named_modules()
    }


def _list_hooks(model: nn.Module) -> list[tuple[str, int, int]]:
    return [
        (name, len(module._forward_pre_hooks), len(module._forward_hooks))
        for name, module in model.named_modules()
        if module._forward_pre_hooks or module._forward_hooks
    ]


def _run_backward(model: nn.Module, inputs: dict[str, Tensor]) -> tuple[Any, dict[str, Tensor]]:
    model.zero_grad()
    out = model(**inputs)
    out.loss.backward()
    return out, {name: p.grad for name, p in model.named_parameters()}


def _compare(patched: nn.Module, stock: nn.Module, inputs: dict[str, Tensor]) -> None:
    actual, actual_grads = _run_backward(patched, inputs)
    expected, expected_grads = _run_backward(stock, inputs)
    assert_close("logits", actual.logits, expected.logits, 1e-12)
    assert_close("loss", actual.loss, expected.loss, 1e-6)  # transformers casts logits to fp32
    assert actual_grads.keys() == expected_grads.keys()
    for name, grad in actual_grads.items():
        assert_close(name, grad, expected_grads[name], 1e-12)


def _make_inputs(seed: int = 1) -> dict[str, Tensor]:
    return batch(tiny(), 3, 11, seed=seed, pad=3)


SIZES: dict[str, dict[str, Any]] = {
    "plain": {},
    "no norm_topk_prob": {"norm_topk_prob": False},
    "top-1 of 3": {"num_experts": 3, "num_experts_per_tok": 1},
    "top-5 of 5": {"num_experts": 5, "num_experts_per_tok": 5},
    "dense layers between": {"num_hidden_layers": 3, "mlp_only_layers": [1]},
    "aux loss": {"output_router_logits": True, "router_aux_loss_coef": 2.0},
}


@pytest.mark.parametrize("backend", ["auto", "torch", "eager"])
@pytest.mark.parametrize("name", SIZES)
def test_patched_equals_stock(name: str, backend: str) -> None:
    patched, stock = tiny(**SIZES[name]), tiny(**SIZES[name])
    assert patch(patched, experts_backend=backend) is patched
    _compare(patched, stock, _make_inputs())
    patched.eval()
    stock.eval()
    with torch.no_grad():
        actual, expected = patched(**_make_inputs(2)), stock(**_make_inputs(2))
    assert_close("evaluation", actual.logits, expected.logits, 1e-12)
    patched.train()
    stock.train()
    _compare(patched, stock, _make_inputs(3))


@pytest.mark.parametrize("name", ["plain", "aux loss"])
def test_patched_equals_stock_in_fp32(name: str) -> None:
    """A user who trains on a CPU uses fp32 and experts of about this size."""
    size = {"hidden_size": 256, "num_experts": 16, "num_experts_per_tok": 4} | SIZES[name]
    patched, stock = tiny(**size).float(), tiny(**size).float()
    patch(patched)
    inputs = batch(tiny(), 4, 128, seed=1, pad=9)
    actual, actual_grads = _run_backward(patched, inputs)
    expected, expected_grads = _run_backward(stock, inputs)
    assert_close("loss", actual.loss, expected.loss, 1e-5)
    for key, grad in actual_grads.items():
        assert_close(key, grad, expected_grads[key], 1e-5)


class _CountExpertMLP(TorchDispatchMode):
    """Count the calls of the operator `hf_moe_ep::expert_mlp`."""

    calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += func is torch.ops.hf_moe_ep.expert_mlp.default
        return func(*args, **(kwargs or {}))


def test_our_operator_runs_only_where_it_is_requested() -> None:
    """If it never ran, the comparisons above would compare the stock model with itself."""
    for backend, expected in (("auto", 2), ("eager", 0)):
        with _CountExpertMLP() as mode:
            patch(tiny(), experts_backend=backend)(**_make_inputs())
        assert mode.calls == expected, backend


def test_recomputed_activations_change_no_number_and_are_not_saved() -> None:
    """Autograd then saves no tensor of an MoE layer as wide as the gate/up pre-activations."""
    pre_size = 2 * tiny().config.moe_intermediate_size
    num_saved = {}
    for recompute in (False, True):
        model = patch(tiny(), recompute_activations=recompute)
        _compare(model, tiny(), _make_inputs())
        shapes: list[tuple[int, ...]] = []

        def pack(x: Tensor, shapes: list[tuple[int, ...]] = shapes) -> Tensor:
            shapes.append(tuple(x.shape))
            return x

        layer = model.model.layers[0].mlp
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            layer(torch.randn(2, 7, model.config.hidden_size, dtype=torch.float64))
        pairs = 2 * 7 * model.config.num_experts_per_tok
        num_saved[recompute] = shapes.count((pairs, pre_size))
        assert ("recomputed" in describe(model)) == recompute
    assert num_saved == {False: 1, True: 0}


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="with a GPU, describe gives another backend and reason"
)
def test_describe_says_which_backend_and_why() -> None:
    sizes = {"hidden_size": 32, "moe_intermediate_size": 16}
    assert "backend torch (no triton: no CUDA GPU)" in describe(patch(tiny(**sizes)))
    by_name = patch(tiny(**sizes), experts_backend="torch")
    assert "backend torch (no triton: torch was requested)" in describe(by_name)
    by_name = patch(tiny(**sizes), experts_backend="triton")
    assert "backend triton (requested)" in describe(by_name)
    assert "backend eager" in describe(patch(tiny(), experts_backend="eager"))


def test_describe_says_what_balances() -> None:
    assert "balance" not in describe(patch(tiny(**SIZES["aux loss"])))
    by_loss = describe(patch(tiny(**SIZES["aux loss"]), aux_loss_per_layer=True))
    expected = "balance    mean of the layers' aux losses times "
    assert f"{expected}router_aux_loss_coef, trains only routers" in by_loss
    by_bias = describe(patch(tiny_of_type("deepseek_v3"), bias_update_rate=0.001))
    assert "balance    biases of 3 routers move by 0.001 after each optimizer step" in by_bias


def test_unpatch_leaves_the_model_as_it_was() -> None:
    model = tiny(**SIZES["aux loss"])
    expected, expected_grads = _run_backward(
        model, _make_inputs()
    )  # transformers adds its recorders
    before, config, hooks_before = _take_snapshot(model), model.config, _list_hooks(model)
    patch(model)
    assert any(
        trace.endswith(STATE) for trace in _list_traces(model)
    )  # _list_traces finds a patched model
    _run_backward(model, _make_inputs())
    assert unpatch(model) is model
    assert (
        _take_snapshot(model) == before
        and _list_traces(model) == []
        and _list_hooks(model) == hooks_before
    )
    assert model.config is config
    assert all(m.config is config for m in model.modules() if hasattr(m, "config"))
    actual, actual_grads = _run_backward(model, _make_inputs())
    assert torch.equal(actual.logits, expected.logits) and torch.equal(actual.loss, expected.loss)
    assert all(torch.equal(actual_grads[name], grad) for name, grad in expected_grads.items())
    patch(model)
    _compare(model, tiny(**SIZES["aux loss"]), _make_inputs())


@pytest.mark.parametrize("copied", [False, True], ids=["itself", "copied"])
def test_unpatch_restores_none_and_removes_what_was_absent(copied: bool) -> None:
    model = tiny()
    model.was_none = None
    patch(model)
    for name in ("was_none", "was_absent"):
        getattr(model, STATE).replace(model, name, 1)
    model = unpatch(copy.deepcopy(model) if copied else model)
    assert vars(model)["was_none"] is None and "was_absent" not in vars(model)


def test_another_experts_implementation_is_refused_until_unpatch() -> None:
    """A name would have no effect. A dict, which `generate` passes, is given to stock's method."""
    model = copy.deepcopy(patch(tiny()))
    for module in (model, model.model):
        with pytest.raises(
            ValueError, match=r"set_experts_implementation\('batched_mm'\) would have no"
        ):
            module.set_experts_implementation("batched_mm")
    model.set_experts_implementation(model.get_experts_implementation())
    unpatch(model).set_experts_implementation("batched_mm")
    assert model.model.layers[0].mlp.experts.config._experts_implementation == "batched_mm"


def test_hooks_that_users_register_stay_after_unpatch() -> None:
    model, calls = tiny(), []
    model.register_forward_pre_hook(lambda *_: calls.append("before"))
    patch(model)
    model.register_forward_hook(lambda *_: calls.append("after"))
    unpatch(model)
    model(**_make_inputs())
    assert calls == ["before", "after"]


def test_config_and_its_file_are_stock(tmp_path: Path) -> None:
    model = tiny()
    model.save_pretrained(tmp_path / "stock")
    before, as_dict = copy.deepcopy(vars(model.config)), model.config.to_dict()
    patch(model)
    model(**_make_inputs())
    assert vars(model.config) == before and model.config.to_dict() == as_dict
    model.save_pretrained(tmp_path / "patched")
    written = [
        {path.name: path.read_bytes() for path in (tmp_path / kind).iterdir()}
        for kind in ("stock", "patched")
    ]
    assert written[0].keys() == written[1].keys() >= {"config.json", "model.safetensors"}
    assert all(written[0][name] == written[1][name] for name in written[0])
    assert b"hf_moe_ep" not in written[1]["config.json"]
    loaded = Qwen3MoeForCausalLM.from_pretrained(tmp_path / "patched", dtype=torch.float64)
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name


def test_models_from_one_config_object_are_independent() -> None:
    source = tiny()
    first, second, third = (Qwen3MoeForCausalLM(source.config).double() for _ in range(3))
    assert first.config is second.config
    for model in (first, second, third):
        model.load_state_dict(source.state_dict())
    patch(first, ep_size=2)
    patch(second, expert_shard_dim=0)
    assert getattr(first, STATE).config.ep_size == 2
    assert getattr(second, STATE).config == resolve_config(None, {"expert_shard_dim": 0})
    assert _list_traces(third) == []
    with pytest.raises(ValueError, match="ep_size=2"):
        first(**_make_inputs())
    _compare(second, source, _make_inputs())
    assert torch.equal(third(**_make_inputs()).logits, source(**_make_inputs()).logits)
    unpatch(first)
    assert torch.equal(first(**_make_inputs()).logits, source(**_make_inputs()).logits)
    assert getattr(second, STATE) is not None and _list_traces(first) == []


def test_every_hook_of_ours_is_marked() -> None:
    """`unpatch` removes the hooks of type `PackageHook`. A hook without this type would stay."""
    model = tiny(**SIZES["aux loss"])
    model(**_make_inputs())
    patch(model, sp_size=2)
    hooks = [
        hook
        for module in model.modules()
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        if _is_ours(hook)
    ]
    kinds = {type(hook).__name__ for hook in hooks}
    assert kinds >= {"ForwardGuard", "GlobalAuxLoss", "SplitSequence", "TakeSlice"}, kinds
    assert all(isinstance(hook, PackageHook) for hook in hooks), kinds


def test_patching_twice_is_patching_once() -> None:
    model = tiny(**SIZES["aux loss"])
    model(**_make_inputs())
    plain = _list_hooks(model)
    patch(model, expert_shard_dim=0)
    hooks, state, snapshot = _list_hooks(model), getattr(model, STATE), _take_snapshot(model)
    assert len(hooks) >= 1 and hooks != plain
    patch(model, ParallelConfig(expert_shard_dim=0))
    assert getattr(model, STATE) is state and _take_snapshot(model) == snapshot
    patch(model, ep_size=4)
    assert getattr(model, STATE).config == resolve_config(None, {"ep_size": 4})
    assert _list_hooks(model) == hooks
    patch(model, sp_size=2)
    assert _list_hooks(model) != hooks
    patch(model)
    assert _list_hooks(model) == hooks
    _compare(model, tiny(**SIZES["aux loss"]), _make_inputs())
    unpatch(model)
    assert _list_hooks(model) == plain and _list_traces(model) == []


def test_a_refused_repatch_changes_nothing() -> None:
    """If the caller catches the error, the options of the first `patch` must still hold."""
    model = patch(tiny(), ep_size=2)
    state, snapshot = getattr(model, STATE), _take_snapshot(model)
    with pytest.raises(ValueError, match=r"ep_size \(3\) must divide num_experts \(8\)"):
        patch(model, ep_size=3)
    assert getattr(model, STATE, None) is state and _take_snapshot(model) == snapshot


def test_a_refused_patch_changes_nothing() -> None:
    model = tiny()
    model.model.layers[1].mlp.experts.act_fn = nn.Mish()
    snapshot = _take_snapshot(model)
    with pytest.raises(ValueError, match=r"ep_size \(16\)"):
        patch(model, ep_size=16)
    with pytest.raises(
        ValueError, match=r"gate of Qwen3MoeExperts of qwen3_moe is none of swish.*'eager'"
    ):
        patch(model)
    with pytest.raises(ValueError, match=r"'triton' cannot run Qwen3MoeExperts.*multiples of 16"):
        patch(tiny(), experts_backend="triton")
    assert _take_snapshot(model) == snapshot and _list_traces(model) == []


@pytest.mark.parametrize(
    ("wrong", "got"),
    [
        ("Qwen/Qwen3-30B-A3B", r"got str 'Qwen/Qwen3-30B-A3B'; load"),
        (Path("out/model"), r"got PosixPath 'out/model'; load"),
        (None, r"got NoneType; load"),
        (Qwen3MoeForCausalLM, r"got the class Qwen3MoeForCausalLM; load"),
        ([], r"got list; load the model first: model = AutoModelForCausalLM\.from_pretrained"),
    ],
)
def test_an_object_that_is_not_a_model_is_refused(wrong: Any, got: str) -> None:
    for call in (patch, unpatch, describe, apply_ep_fsdp2, expert_load):
        with pytest.raises(ValueError, match=f"a model is needed, .*{got}"):
            call(wrong)


def test_models_that_are_spread_over_devices_are_refused(tmp_path: Path) -> None:
    """The whole model on one device, as `device_map={"": "cpu"}` places it, is accepted."""
    tiny(dtype=torch.float32).save_pretrained(tmp_path)
    spread = {"model.embed_tokens": "cpu", "model.layers": "disk", "model.norm": "cpu"}
    spread |= {"model.rotary_emb": "cpu", "lm_head": "cpu"}
    kwargs: dict[str, Any] = {"device_map": spread, "offload_folder": tmp_path / "offload"}
    model = Qwen3MoeForCausalLM.from_pretrained(tmp_path, **kwargs)
    with pytest.raises(ValueError, match=r"parts of this model on cpu, disk.*without device_map="):
        patch(model, ep_size=2)
    patch(Qwen3MoeForCausalLM.from_pretrained(tmp_path, device_map={"": "cpu"}), ep_size=2)
    with pytest.raises(ValueError, match="the model is wrapped in DataParallel; pass the model"):
        patch(nn.DataParallel(tiny()))


def test_attention_that_cannot_be_split_is_refused_before_anything_changes() -> None:
    model = tiny(attn_implementation="eager")
    snapshot = _take_snapshot(model)
    with pytest.raises(ValueError, match="attn_implementation='eager'"):
        patch(model, sp_size=2)
    assert _take_snapshot(model) == snapshot and _list_traces(model) == []
    patch(model)
    with pytest.raises(ValueError, match="attn_implementation='eager'"):
        patch(model, sp_size=2)
    assert getattr(model, STATE).config == resolve_config(None, {})


def test_swapped_expert_ids_and_weights_raise_an_error_with_the_order() -> None:
    experts: Any = patch(tiny()).model.layers[0].mlp.experts
    rows = torch.ones(3, 32, dtype=torch.float64)
    chosen = torch.tensor([[0, 1]] * 3)
    experts(rows, chosen, rows[:, :2])
    with pytest.raises(ValueError, match=r"ids of dtype torch.float64.*top_k_index, top_k_w"):
        experts(rows, rows[:, :2], chosen)


def test_models_that_sp_cannot_split_raise_an_error_with_the_reason() -> None:
    """The first has no attention module that sp can split, although its plan claims that it has.
    The layers of the second are called with keyword arguments alone.
    """
    plan = ModelPlan("qwen3_moe", attention="", sequence_parallel=True)
    with pytest.raises(ValueError, match=r"sp_size \(2\).*no module in the layers of Qwen3Moe"):
        patch(tiny(), plan=plan, sp_size=2)
    part = Slice(cast(Any, None), 0, 2, length=8)
    with pytest.raises(ValueError, match=r"Linear, .*keywords only.*layer\(hidden_states"):
        take_slice = TakeSlice(
            read_layer_arguments(nn.Linear(2, 2), "sp_size (2)"), LayerSlice(), gets_whole=True
        )
        take_slice(nn.Linear(2, 2), (), {SLICE: part})


def test_patching_a_part_of_a_patched_model() -> None:
    """Either `patch` refuses the part, or the whole model works after `unpatch` of the part.

    The experts belong to the state of the whole model.
    """
    model = patch(tiny())
    try:
        patch(model.model)
    except ValueError as error:
        assert "patch" in str(error)
    else:
        unpatch(model.model)
    _compare(model, tiny(), _make_inputs())


@pytest.mark.slow
def test_a_pickled_model_has_our_methods_and_runs_in_a_new_process(tmp_path: Path) -> None:
    file = tmp_path / "model.pkl"
    config = LoraConfig(r=2, target_parameters=["mlp.experts.down_proj"])
    for model in (patch(tiny()), get_peft_model(patch(tiny()), config)):
        file.write_bytes(pickle.dumps(model))
        names = _list_wrapped_methods(model)
        assert names and _list_wrapped_methods(pickle.loads(file.read_bytes())) == names
    script = """
import contextlib, os, pickle, sys, hf_moe_ep
from support.tiny_models import batch
for prepare in (hf_moe_ep.patch, hf_moe_ep.apply_ep_fsdp2):
    with open(sys.argv[1], "rb") as file:
        model = pickle.load(file)
    model(**batch(model, 2, 7))
    with contextlib.suppress(ValueError):  # there is no process group
        prepare(model)
    assert model._hf_moe_ep.process == os.getpid()
from accelerate.accelerator import Accelerator
assert hasattr(Accelerator.prepare, "_hf_moe_ep_wrapper")
"""
    path = os.pathsep.join(map(os.fspath, (ROOT, ROOT / "tests")))
    environment = os.environ | {"PYTHONPATH": path}
    subprocess.run([sys.executable, "-c", script, file], check=True, env=environment)


def _list_wrapped_methods(model: nn.Module) -> list[tuple[str, str]]:
    return [
        (name, key)
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if hasattr(value, "_hf_moe_ep_wrapper") and value.__self__ is module
    ]


@pytest.mark.parametrize("sizes", [{}, SIZES["aux loss"]], ids=["plain", "aux loss"])
def test_a_deep_copy_is_patched_and_independent(sizes: dict[str, Any]) -> None:
    model = patch(tiny(**sizes))
    twin = copy.deepcopy(model)
    state, twin_state = getattr(model, STATE), getattr(twin, STATE)
    assert (
        twin_state is not state
        and twin_state.config == state.config
        and _list_hooks(twin) == _list_hooks(model)
    )
    experts = [m for m in twin.modules() if STATE in vars(m) and m is not twin]
    assert len(experts) == 2 and all(getattr(m, STATE).model is twin_state for m in experts)
    with torch.no_grad():
        twin.lm_head.weight.zero_()
    _compare(model, tiny(**sizes), _make_inputs())
    twin.load_state_dict(model.state_dict())
    _compare(twin, tiny(**sizes), _make_inputs())
    unpatch(twin)
    assert _list_traces(twin) == [] and all(
        m.config is twin.config for m in twin.modules() if hasattr(m, "config")
    )
    assert torch.equal(twin(**_make_inputs()).logits, tiny(**sizes)(**_make_inputs()).logits)
    _compare(model, tiny(**sizes), _make_inputs())


def test_state_dict_and_whole_model_are_saved_like_stock(tmp_path: Path) -> None:
    model, stock = patch(tiny()), tiny()
    torch.save(model.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    assert list(state) == list(stock.state_dict())
    stock.load_state_dict(state)
    torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    assert getattr(loaded, STATE).config == getattr(model, STATE).config
    _compare(loaded, stock, _make_inputs())


def test_a_base_model_equals_stock() -> None:
    source = tiny()
    base, stock = Qwen3MoeModel(source.config).double(), source.model
    base.load_state_dict(stock.state_dict())
    patch(base)
    inputs = {k: v for k, v in _make_inputs().items() if k != "labels"}
    actual, expected = base(**inputs).last_hidden_state, stock(**inputs).last_hidden_state
    assert_close("hidden", actual, expected, 1e-12)
    (actual * expected.detach()).sum().backward()
    (expected * expected.detach()).sum().backward()
    for (name, ours), theirs in zip(base.named_parameters(), stock.parameters()):
        assert_close(name, ours.grad, theirs.grad, 1e-12)
    assert _list_traces(unpatch(base)) == []


def test_a_sequence_classifier_equals_stock() -> None:
    config = tiny().config
    config.num_labels, config.pad_token_id = 3, 0
    torch.manual_seed(4)
    stock = Qwen3MoeForSequenceClassification(config).double()
    patched = copy.deepcopy(stock)
    patch(patched)
    inputs = {**_make_inputs(), "labels": torch.tensor([0, 2, 1])}
    _compare(patched, stock, inputs)


def test_autocast_is_no_worse_than_stock_under_autocast() -> None:
    truth, truth_grads = _run_backward(tiny(dtype=torch.float64), _make_inputs())
    errors = {}
    for kind in ("stock", "patched"):
        model = tiny(dtype=torch.float32)
        if kind == "patched":
            patch(model)
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            out = model(**_make_inputs())
        out.loss.backward()
        assert out.logits.dtype == torch.bfloat16
        grads = {name: p.grad for name, p in model.named_parameters()}
        assert all(grad.dtype == torch.float32 for grad in grads.values())
        errors[kind] = {name: max_error(grad, truth_grads[name]) for name, grad in grads.items()}
        errors[kind]["logits"] = max_error(out.logits, truth.logits)
    for name, stock in errors["stock"].items():
        # Both round the same operations to bf16, but sum in another order: allow twice the error.
        assert errors["patched"][name] <= 2 * stock, (name, errors["patched"][name], stock)


def test_peft_wrapped_models_get_each_hook_once() -> None:
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    wrapped = peft.get_peft_model(tiny(**SIZES["aux loss"]), lora)
    wrapped(**_make_inputs())
    stock, plain = copy.deepcopy(wrapped), _list_hooks(wrapped)
    patch(wrapped)
    ours = [
        type(hook).__name__
        for module in wrapped.modules()
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        if _is_ours(hook)
    ]
    before = ["BeginCounting", "ForwardGuard", "GlobalAuxLoss", "KeepForwards"]
    after = ["FinishAuxLoss", "EndCounting", "MarkLogits"]
    around = ["BeginFusedLoss", "EndFusedLoss", "FindPadding", "ForgetPadding"]
    counted = ["FindCounted", "ForgetCounted"]
    of_decoder = ["FindCountedOfDecoder", "ForgetCountedOfDecoder"]
    assert sorted(ours) == sorted([*before, *after, *around, *counted, *of_decoder])
    actual, expected = wrapped(**_make_inputs()), stock(**_make_inputs())
    assert_close("logits", actual.logits, expected.logits, 1e-12)
    unpatch(wrapped)
    assert _list_hooks(wrapped) == plain and _list_traces(wrapped) == []


_NO_SIDE_EFFECTS = """
import accelerate.accelerator, transformers
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from transformers import PreTrainedModel, Trainer
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
import os, random, torch

def global_state():
    return (
        accelerate.accelerator.fsdp2_prepare_model, Accelerator.prepare, AcceleratorState.__init__,
        Trainer.save_model, PreTrainedModel.save_pretrained, sorted(ALL_EXPERTS_FUNCTIONS.keys()),
        torch.nn.Module.__call__, torch.empty, torch.get_default_dtype(), dict(os.environ),
        torch.distributed.is_initialized(), torch.random.get_rng_state().tolist(),
        random.getstate(), torch.distributed.all_to_all_single,
    )

before = global_state()
import hf_moe_ep, hf_moe_ep.integrations.install
assert global_state() == before, "import changed something"
import sys
assert "hf_moe_ep.model_patches.qwen3_moe" not in sys.modules
sys.path.insert(0, "tests")
from support.tiny_models import tiny
hf_moe_ep.patch(tiny())
assert "hf_moe_ep" in ALL_EXPERTS_FUNCTIONS.keys() and global_state()[:6] != before[:6]
after_first_patch = global_state()[:5]
hf_moe_ep.patch(tiny())
assert global_state()[:5] == after_first_patch, "a second model wrapped the functions again"
"""


def _build_12_gib_model() -> Qwen3MoeForCausalLM:
    """Build a tiny model with a parameter of 12 GiB that is expanded from a single number."""
    model = tiny()
    model.register_parameter("large", nn.Parameter(torch.zeros(1).expand(3 * 2**30)))
    return model


def _set_launch_variables(patches: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name, value in variables.items():
        patches.setenv(name, value)


TWO_RANKS = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "RANK": "1"}


def test_patch_warns_of_a_large_model_on_each_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The warning names the GiB per process, the number of processes and `from_pretrained`."""
    _set_launch_variables(monkeypatch, TWO_RANKS)
    with pytest.warns(UserWarning, match="every process holds the whole") as warned:
        model = patch(_build_12_gib_model(), ep_size=2)
    patch(model, ep_size=2)
    (warning,) = warned
    assert "12.0 GiB x 2 processes on this host = 24.0 GiB" in str(warning.message)
    assert "hf_moe_ep.from_pretrained(...)" in str(warning.message)
    assert warning.filename == __file__
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    with pytest.warns(UserWarning, match=r"12\.0 GiB x 4 processes on this host = 48\.0 GiB"):
        patch(_build_12_gib_model())
    _set_launch_variables(monkeypatch, {"LOCAL_WORLD_SIZE": "1", "RANK": "0"})
    with pytest.warns(UserWarning, match=r"12\.0 GiB x 1 processes on this host = 12\.0 GiB"):
        patch(_build_12_gib_model())


# Environment variables of the launch; True if the large parameter is on the meta device.
NO_WARNING: dict[str, tuple[dict[str, str], bool]] = {
    "one process": ({}, False),
    "first process of a host": (TWO_RANKS | {"RANK": "0"}, False),
    "another host": (TWO_RANKS | {"RANK": "3"}, False),
    "on meta": (TWO_RANKS, True),
}


@pytest.mark.parametrize("case", NO_WARNING)
def test_no_warning_of_a_large_model(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    variables, on_meta = NO_WARNING[case]
    _set_launch_variables(monkeypatch, variables)
    model = _build_12_gib_model()
    if on_meta:
        model.large = nn.Parameter(torch.empty(3 * 2**30, device="meta"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        patch(model)


def test_no_warning_of_a_small_model_on_each_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of exactly LARGE_MODEL_BYTES is small. A model with one more byte is large."""
    _set_launch_variables(monkeypatch, TWO_RANKS)
    num_bytes = sum(parameter.nbytes for parameter in tiny().parameters())
    module = sys.modules["hf_moe_ep.patch"]
    assert vars(module)["LARGE_MODEL_BYTES"] == 8 * 2**30
    monkeypatch.setattr(module, "LARGE_MODEL_BYTES", num_bytes)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        patch(tiny())
    monkeypatch.setattr(module, "LARGE_MODEL_BYTES", num_bytes - 1)
    with pytest.warns(UserWarning, match="every process holds the whole"):
        patch(tiny())


def _collect_load_warnings(rank: int, world: int, folder: str) -> list[list[str]]:
    """Return the warnings of four ways to load a model, with a limit of 0 bytes.

    They are stock's `from_pretrained`, the same with Accelerate's `cpu_ram_efficient_loading`,
    ours, and a loader that reads weights only on rank 0.
    """
    warnings_by_load = []
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(sys.modules["hf_moe_ep.patch"], "LARGE_MODEL_BYTES", 0)
        for load in (
            lambda: patch(Qwen3MoeForCausalLM.from_pretrained(folder), ep_size=2),
            lambda: patch(_load_ram_efficiently(patches, folder), ep_size=2),
            lambda: from_pretrained(folder, ep_size=2),
            lambda: patch(_load_on_rank_0(rank, folder), ep_size=2),
        ):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                load()
            warnings_by_load.append(
                [w for w in map(str, (c.message for c in caught)) if "holds the" in w]
            )
    return warnings_by_load


def _load_ram_efficiently(patches: pytest.MonkeyPatch, folder: str) -> nn.Module:
    with patches.context() as inner:
        _set_launch_variables(
            inner, {"ACCELERATE_USE_FSDP": "true", "FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}
        )
        return Qwen3MoeForCausalLM.from_pretrained(folder)


def _load_on_rank_0(rank: int, folder: str) -> nn.Module:
    model = Qwen3MoeForCausalLM.from_pretrained(folder)
    return model if rank == 0 else model.to("meta")


def test_loads_that_leave_whole_models_get_one_warning(tmp_path: Path) -> None:
    """With Accelerate's `cpu_ram_efficient_loading`, stock reads all weights in each process."""
    tiny().save_pretrained(tmp_path)
    on_rank_0, on_rank_1 = run_ranks(_collect_load_warnings, 2, str(tmp_path))
    assert on_rank_0 == [[], [], [], []]
    *stock, ours, on_one_rank = on_rank_1
    for warned in stock:
        assert len(warned) == 1 and "GiB x 2 processes on this host" in warned[0]
    assert (ours, on_one_rank) == ([], [])


def test_import_has_no_side_effects() -> None:
    root = Path(__file__).parent.parent
    result = subprocess.run(
        [sys.executable, "-c", _NO_SIDE_EFFECTS],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
