"""hub_tensors yields the tensors of save_pretrained on every rank, with LoRA merged on request."""

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig, PromptTuningConfig, get_peft_model
from support.adapters import ATTENTION, EXPERTS, with_lora
from support.checks import Check, Found, on_ranks
from support.close import assert_close
from support.hub_files import assert_equal, hub_state, read_all
from support.needs import needs_add_adapter
from support.tiny_models import batch, tiny
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_moe_ep import apply_ep_fsdp2, hub_tensors, patch, save_pretrained

LAYOUTS: dict[str, dict[str, Any]] = {
    "ep 2, fsdp 2": {"ep_size": 2},
    "ep 2, fsdp 2, dim 1": {"ep_size": 2, "expert_shard_dim": 1},
    "ep 2, HSDP": {"ep_size": 2, "dp_replicate_size": 2},
    "ep 2 outside": {"ep_size": 2, "ep_outside": True},
    "ep 4": {"ep_size": 4},
    "ep 1, eager experts": {"experts_backend": "eager"},
}
SMALL = 40_000  # bytes, so that expert stacks and the embedding are gathered in many slabs


def merge_with_peft(model: nn.Module) -> dict[str, Tensor]:
    """Return the hub's tensors after PEFT has merged the adapters in one process."""
    merged = copy.deepcopy(model).merge_and_unload()
    return {key: tensor.detach() for key, tensor in hub_state(merged).items()}


def assert_merged(actual: dict[str, Tensor], expected: dict[str, Tensor], where: str = "") -> None:
    assert actual.keys() == expected.keys()
    for key, tensor in expected.items():
        assert_close(f"{where}{key}", actual[key], tensor, 1e-10)


def collect(model: nn.Module, **options: Any) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for key, tensor in hub_tensors(model, **options):
        assert key not in tensors and tensor.is_contiguous() and type(tensor) is Tensor
        tensors[key] = tensor.clone()
    return tensors


def equals_the_saved_files(name: str, layout: str, rank: int, world: int, folder: str) -> None:
    """Keys, dtypes and values equal those in the files of save_pretrained."""
    tied = name == "qwen3_moe"
    stock = tiny(name, dtype=torch.bfloat16, **({"tie_word_embeddings": True} if tied else {}))
    model = apply_ep_fsdp2(stock, **LAYOUTS[layout])
    save_pretrained(model, folder)
    saved = read_all(Path(folder))
    assert ("lm_head.weight" in saved) != tied
    for max_bytes in (SMALL, 2**30):
        assert_equal(collect(model, max_bytes=max_bytes), saved)
    masters = {key: tensor.float() for key, tensor in saved.items()}
    assert_equal(collect(model, dtype=torch.float32, max_bytes=SMALL), masters)


def add_three_adapters(model: nn.Module) -> nn.Module:
    """Add two active adapters of different ranks and scales (one is rsLoRA) and an idle one."""
    model = with_lora(model, r=4, seed=1, use_rslora=True, modules_to_save=["norm", "q_norm"])
    torch.manual_seed(2)
    for adapter in ("second", "idle"):
        config = copy.deepcopy(model.peft_config["default"])
        config.r, config.lora_alpha, config.use_rslora = 3, 5, False
        config.modules_to_save = None
        model.add_adapter(adapter, config)
    model.base_model.set_adapter(["default", "second"])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "modules_to_save" in name:
                parameter.add_(0.5)
    return model


def adapt_many_modules(model: nn.Module) -> nn.Module:
    modules = (*ATTENTION, "k_proj", "o_proj", "embed_tokens")
    return with_lora(model, r=3, seed=3, modules=modules)


ADAPTERS = {
    "experts and attention": partial(with_lora, seed=4),
    "several at once": add_three_adapters,
    "the embedding": adapt_many_modules,
    "the router": partial(with_lora, seed=5, parameters=(*EXPERTS, "mlp.gate.weight")),
}


def equals_the_merge_of_peft(name: str, adapters: str, rank: int, world: int) -> None:
    """LoRA is merged as PEFT merges it in one process; the model's parameters stay unchanged."""
    stock = ADAPTERS[adapters](tiny(name))
    expected = merge_with_peft(stock)
    base = hub_state(tiny(name))
    assert expected.keys() == base.keys()
    assert any(not torch.equal(expected[k], base[k]) for k in expected)
    for layout in ("ep 2, fsdp 2", "ep 2, fsdp 2, dim 1", "ep 2, HSDP", "ep 1, eager experts"):
        model = apply_ep_fsdp2(copy.deepcopy(stock), **LAYOUTS[layout])
        before = {n: p.to_local().clone() for n, p in model.named_parameters()}
        for max_bytes in (SMALL, 2**30):
            tensors = collect(model, merge_adapters=True, max_bytes=max_bytes)
            assert_merged(tensors, expected, f"{layout}: ")
        for n, p in model.named_parameters():
            assert torch.equal(p.to_local(), before[n]), n


def a_rank_that_stops_early_is_named(rank: int, world: int) -> None:
    """If one rank stops iterating, the others raise an error that names it; if all stop, none."""
    model = apply_ep_fsdp2(tiny(dtype=torch.float32), ep_size=2)
    total = len(list(hub_tensors(model, max_bytes=SMALL)))
    for leaver, after in ((2, 1), (0, 7), (3, total - 1)):
        tensors = hub_tensors(model, max_bytes=SMALL)
        taken = 0
        try:
            for _ in tensors:
                taken += 1
                if rank == leaver and taken == after:
                    tensors.close()
        except RuntimeError as error:
            words = f"rank {leaver} stopped iterating over hub_tensors early; every rank has to"
            assert words in str(error) and rank != leaver
        else:
            assert rank == leaver and taken == after
        for taken, _ in enumerate(hub_tensors(model, max_bytes=SMALL), start=1):
            if taken == after:
                break
    # A rank that stops after the last tensor has missed nothing, so no rank raises.
    tensors = hub_tensors(model, max_bytes=SMALL)
    for _ in range(total):
        next(tensors)
    if rank == 1:
        tensors.close()
    else:
        assert next(tensors, None) is None
    with pytest.raises(ValueError, match="called hub_tensors with different values of max_bytes"):
        next(hub_tensors(model, max_bytes=SMALL + rank))


def a_stream_does_not_change_a_step(rank: int, world: int) -> None:
    """Between forward and backward the stream is the same, and gradients do not change."""
    stock = with_lora(tiny(), seed=1)
    expected = merge_with_peft(stock)
    inputs = batch(tiny(), 2, 9, seed=rank)
    gradients = []
    for modes in ((), (torch.enable_grad, torch.no_grad, torch.inference_mode)):
        model = apply_ep_fsdp2(copy.deepcopy(stock), ep_size=2)
        loss = model(**inputs).loss
        for mode in modes:
            with mode():
                tensors = dict(hub_tensors(model, merge_adapters=True, max_bytes=SMALL))
            assert not any(tensor.requires_grad for tensor in tensors.values())
            assert_merged(tensors, expected)
        loss.backward()
        gradients.append(
            {n: p.grad.to_local() for n, p in model.named_parameters() if p.grad is not None}
        )
    assert gradients[0]
    assert_equal(*gradients)


def merged_weights_are_not_merged_again(rank: int, world: int) -> None:
    """Merged weights are yielded unchanged. An unmerge would fail half way, so it is refused."""
    stock: Any = with_lora(tiny(), seed=1)
    expected = merge_with_peft(stock)
    stock.merge_adapter()
    model: Any = apply_ep_fsdp2(stock, ep_size=2)
    with pytest.raises(ValueError, match=r"q_proj were merged into its weights before"):
        model.unmerge_adapter()
    tensors = collect(model, merge_adapters=True)
    assert_merged(tensors, expected)
    model = apply_ep_fsdp2(with_lora(tiny(), seed=1), ep_size=2)
    with pytest.warns(UserWarning, match="Already unmerged"):
        model.unmerge_adapter()


def ranks_that_differ_are_named(rank: int, world: int) -> None:
    """Every rank raises an error if ranks differ in the active adapter or in the model."""
    model: Any = apply_ep_fsdp2(add_three_adapters(tiny()), ep_size=2)
    model.set_adapter("second" if rank == 1 else "default")
    for _ in range(2):
        with pytest.raises(ValueError, match=r"active_adapters: rank 0 with .*'default'.* rank 1"):
            next(hub_tensors(model, merge_adapters=True))
    model.set_adapter("default")
    assert collect(model, merge_adapters=True)
    stream = hub_tensors(model, merge_adapters=True)
    assert list(stream.by_module() if rank == 0 else stream), "lists on one rank change no tensor"
    other = apply_ep_fsdp2(tiny(num_hidden_layers=1), ep_size=2)
    with pytest.raises(
        ValueError, match=r"values of model: rank 0 with 'PeftModel.* of \d+ values"
    ):
        next(hub_tensors(other if rank == 3 else model, merge_adapters=True))


class AliveBytes(TorchDispatchMode):
    """Measures new storages: `most` is the largest number of bytes that were alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[StorageWeakRef, int] = {}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor then calls operators on plain tensors, which come here
        given = {StorageWeakRef(t.untyped_storage()) for t in _plain_tensors((args, kwargs))}
        out = func(*args, **(kwargs or {}))
        for tensor in _plain_tensors(out):
            made = StorageWeakRef(tensor.untyped_storage())
            if made not in given:
                self._made[made] = tensor.untyped_storage().nbytes()
        self._made = {made: size for made, size in self._made.items() if not made.expired()}
        self.most = max(self.most, sum(self._made.values()))
        return out


def _plain_tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if type(leaf) is Tensor]


def memory_stays_within_max_bytes(adapters: bool, rank: int, world: int) -> int:
    """At most max_bytes are alive besides the shards, with the tensor that was yielded last."""
    stock = tiny(dtype=torch.bfloat16, hidden_size=64, moe_intermediate_size=64, num_experts=16)
    if adapters:
        stock = with_lora(stock, r=1)
    model = apply_ep_fsdp2(stock, ep_size=2)
    # The weights of one expert take an eighth of the budget, and a stack has 16 experts.
    budget = 8 * 128 * 64 * 2
    with AliveBytes() as alive:
        for _, tensor in hub_tensors(model, merge_adapters=adapters, max_bytes=budget):
            assert tensor.nbytes <= budget
    del tensor
    assert budget / 10 < alive.most <= budget, alive.most
    return alive.most


FAST = {
    "as saved, ep 2, fsdp 2": partial(equals_the_saved_files, "qwen3_moe", "ep 2, fsdp 2"),
    "a rank that stops early is named": a_rank_that_stops_early_is_named,
    "ranks that differ are named": ranks_that_differ_are_named,
    "merged weights are not merged again": merged_weights_are_not_merged_again,
}
SLOW = {
    "a stream does not change a step": a_stream_does_not_change_a_step,
    **{
        f"as saved, {layout}": partial(equals_the_saved_files, "qwen3_moe", layout)
        for layout in LAYOUTS
    },
    **{
        f"merged, {kind}": partial(equals_the_merge_of_peft, "qwen3_moe", kind) for kind in ADAPTERS
    },
    "memory stays within max_bytes": partial(memory_stays_within_max_bytes, False),
    "memory stays within max_bytes, adapters": partial(memory_stays_within_max_bytes, True),
    "vision as saved": partial(equals_the_saved_files, "qwen3_vl_moe", "ep 2, fsdp 2"),
    "vision as saved, dim 1": partial(
        equals_the_saved_files, "qwen3_vl_moe", "ep 2, fsdp 2, dim 1"
    ),
    "vision merged": partial(equals_the_merge_of_peft, "qwen3_vl_moe", "experts and attention"),
}
ON_FOUR_RANKS = [
    *on_ranks(4, FAST),
    *on_ranks(4, {name: run for name, run in SLOW.items() if name not in FAST}, slow=True),
]


@pytest.mark.parametrize("claim", ON_FOUR_RANKS)
def test_on_four_ranks(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)


@pytest.mark.parametrize("max_bytes", [SMALL, 2**30])
def test_one_process_yields_the_saved_and_merged_tensors(max_bytes: int) -> None:
    model = patch(tiny(dtype=torch.float32))
    assert_equal(collect(model, max_bytes=max_bytes), hub_state(model))
    stock = with_lora(tiny(), seed=1)
    expected = merge_with_peft(stock)
    tensors = collect(patch(stock), merge_adapters=True, max_bytes=max_bytes)
    assert_merged(tensors, expected)


def test_a_merged_adapter_is_not_added_twice() -> None:
    model = with_lora(tiny(), seed=1, modules=())
    expected = merge_with_peft(model)
    model.merge_adapter()
    tensors = collect(patch(model), merge_adapters=True)
    assert_merged(tensors, expected)


@needs_add_adapter
def test_adapters_that_transformers_attached_are_merged() -> None:
    config = LoraConfig(r=3, target_parameters=list(EXPERTS), target_modules=["q_proj"])
    stock = get_peft_model(tiny(), copy.deepcopy(config))
    model = tiny()
    model.add_adapter(config)
    torch.manual_seed(0)
    pairs = [[p for n, p in m.named_parameters() if "lora_" in n] for m in (stock, model)]
    with torch.no_grad():
        for stock_factor, factor in zip(*pairs, strict=True):
            factor.copy_(stock_factor.normal_())
    expected = merge_with_peft(stock)
    tensors = collect(patch(model), merge_adapters=True)
    assert_merged(tensors, expected)


@pytest.mark.parametrize("module", ["lm_head", "embed_tokens"])
def test_a_trained_copy_of_a_tied_weight_does_not_replace_the_other_weight(module: str) -> None:
    """The trained copy is yielded, and the other weight is yielded unchanged."""
    stock = with_lora(tiny(tie_word_embeddings=True), seed=1, modules_to_save=[module])
    with torch.no_grad():
        for name, parameter in stock.named_parameters():
            if "modules_to_save" in name:
                parameter.add_(1)
    expected = merge_with_peft(stock)
    assert not torch.equal(expected["lm_head.weight"], expected["model.embed_tokens.weight"])
    tensors = collect(patch(stock), merge_adapters=True)
    assert_merged(tensors, expected)


def test_yielded_tensors_are_copies() -> None:
    model = patch(tiny(dtype=torch.float32))
    yielded = dict(hub_tensors(model))
    copies = {key: tensor.clone() for key, tensor in yielded.items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert_equal(yielded, copies)


def _add_dora(model: nn.Module) -> nn.Module:
    return with_lora(model, parameters=(), use_dora=True)


def _add_ia3(model: nn.Module) -> nn.Module:
    return get_peft_model(model, IA3Config(target_modules=["k_proj"], feedforward_modules=[]))


def _add_prompt(model: nn.Module) -> nn.Module:
    return get_peft_model(model, PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"))


@pytest.mark.parametrize(
    ("wrap", "options", "words"),
    [
        (lambda m: m, {"max_bytes": 0}, "max_bytes 0 is not a number of bytes"),
        (lambda m: m, {"max_bytes": 1e9}, r"max_bytes 1000000000.0 is not a number of bytes"),
        (lambda m: m, {"dtype": torch.int8}, "dtype torch.int8 is not a floating point dtype"),
        (with_lora, {}, "has adapters, .*pass merge_adapters=True"),
        (
            _add_dora,
            {"merge_adapters": True},
            "q_proj has an adapter .*DoraLinearVariant; only LoRA",
        ),
        (_add_ia3, {"merge_adapters": True}, "k_proj has an adapter .*ia3.*; only LoRA on"),
        (_add_prompt, {"merge_adapters": True}, "adapter default trains a prompt"),
    ],
)
def test_wrong_arguments_and_other_adapters_are_refused(
    wrap: Any, options: dict[str, Any], words: str
) -> None:
    model = patch(wrap(tiny(dtype=torch.float32)))
    with pytest.raises(ValueError, match=words):
        hub_tensors(model, **options)


def test_disabled_adapters_are_not_merged() -> None:
    """The model computes without a disabled adapter, so a merge would yield other weights."""
    model: Any = patch(with_lora(tiny(), seed=1))
    before = collect(model, merge_adapters=True)
    with model.disable_adapter():
        with pytest.raises(ValueError, match=r"adapter of .*q_proj is disabled .*disable_adapt"):
            hub_tensors(model, merge_adapters=True)
    assert_equal(collect(model, merge_adapters=True), before)


def test_the_caller_may_overwrite_yielded_tensors() -> None:
    """Tensors that follow may come from the same slab; the caller's writes do not change them."""
    model = patch(tiny(dtype=torch.float32))
    expected = hub_state(model)
    copies: dict[str, Tensor] = {}
    for max_bytes in (SMALL, 2**30):
        for key, tensor in hub_tensors(model, max_bytes=max_bytes):
            assert torch.equal(tensor, expected[key]), key
            copies[key] = tensor.clone()
            tensor.fill_(7)
        assert_equal(copies, expected)


def test_a_model_without_values_is_refused() -> None:
    with torch.device("meta"):
        model = type(tiny())(tiny().config)
    with pytest.raises(ValueError, match="meta device, without values"):
        hub_tensors(patch(model))


def test_a_stock_model_is_refused() -> None:
    with pytest.raises(ValueError, match="this model is not patched"):
        hub_tensors(tiny())
