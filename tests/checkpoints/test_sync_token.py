"""`hub_tensors(since=token)` sends changed tensors, and `dtype="fp8"` sends blocks of E4M3."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from support import architectures
from support.adapters import with_lora
from support.checks import Check, Found, on_ranks
from support.extra_files import is_of_head, write_with_extra
from support.fp8_files import quantised, stock_product
from support.hub_files import assert_equal
from support.largest_tensor import LargestTensor
from support.tiny_models import batch, tiny
from torch import Tensor
from transformers import AutoModelForCausalLM

from hf_moe_ep import ExpertLoad, SyncToken, apply_ep_fsdp2, balance_experts, hub_tensors, patch
from hf_moe_ep.checkpoints.hub import sync_token
from hf_moe_ep.checkpoints.hub.sync_token import compute_checksums
from hf_moe_ep.ops.quantised import _encode_rows, encode_blocks

BF16 = torch.bfloat16


def train_one_step(model: Any, rank: int, seed: int) -> None:
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    model(**batch(model, 2, 9, seed=seed + rank)).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def received_changes_make_up_the_whole_model(rank: int, world: int) -> None:
    """After each sync the engine has all tensors with their current values."""
    model = apply_ep_fsdp2(tiny(dtype=BF16), ep_size=2)
    frozen = [model.lm_head.weight, model.model.layers[0].mlp.experts.down_proj]
    for parameter in frozen:
        parameter.requires_grad_(False)
    token, received, counts = SyncToken(), dict[str, Tensor](), []
    for number in range(3):
        delta = dict(hub_tensors(model, since=token, max_bytes=40_000))
        counts.append(len(delta))
        received |= delta
        assert_equal(received, dict(hub_tensors(model)))
        train_one_step(model, rank, seed=2 * number)
    assert counts[0] == len(received)
    left_out = received.keys() - delta.keys()
    assert len(left_out) == 9, sorted(left_out)  # the head, and 8 experts of a layer
    assert not list(hub_tensors(model, since=_fill(token, model)))


def _fill(token: SyncToken, model: Any) -> SyncToken:
    list(hub_tensors(model, since=token))
    return token


def only_adapted_weights_are_sent_again(rank: int, world: int) -> None:
    """With LoRA, the second sync sends the weights that have an adapter."""
    model = apply_ep_fsdp2(with_lora(tiny(dtype=torch.float32), seed=1), ep_size=2)
    token = SyncToken()
    everything = dict(hub_tensors(model, merge_adapters=True, since=token))
    assert not dict(hub_tensors(model, merge_adapters=True, since=token))
    train_one_step(model, rank, seed=0)
    delta = dict(hub_tensors(model, merge_adapters=True, since=token))
    now = dict(hub_tensors(model, merge_adapters=True))
    changed = {key for key in now if not torch.equal(now[key], everything[key])}
    assert changed <= delta.keys() < now.keys()
    assert not any("embed" in key or "norm" in key for key in delta)
    assert_equal(everything | delta, now)


def an_interrupted_sync_is_sent_whole(rank: int, world: int) -> None:
    """After a sync that stops early, the state of the engine is unknown."""
    model = apply_ep_fsdp2(tiny(dtype=BF16), ep_size=2)
    token = _fill(SyncToken(), model)
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    stream = hub_tensors(model, since=token)
    assert next(stream)[0] == "lm_head.weight"
    stream.close()
    assert not len(token)
    assert len(list(hub_tensors(model, since=token))) == len(list(hub_tensors(model)))


def moved_experts_have_not_changed(rank: int, world: int) -> None:
    """Experts that balance_experts moves keep their values, so nothing is sent again."""
    model = apply_ep_fsdp2(tiny(dtype=torch.float32), ep_size=2)
    token = _fill(SyncToken(), model)
    names = [n for n, m in model.named_modules() if n.endswith("mlp.experts")]
    load = ExpertLoad(torch.tensor([[900, 800, 700, 600, 4, 3, 2, 1]] * 2), tuple(names))
    assert balance_experts(model, None, load).slots is not None
    assert not list(hub_tensors(model, since=token))


def experts_that_move_after_the_list_are_refused(rank: int, world: int) -> None:
    """The keys in the list would belong to other experts."""
    model = apply_ep_fsdp2(tiny(dtype=torch.float32), ep_size=2)
    stream = hub_tensors(model)
    stream.metadata()
    names = [n for n, m in model.named_modules() if n.endswith("mlp.experts")]
    load = ExpertLoad(torch.tensor([[900, 800, 700, 600, 4, 3, 2, 1]] * 2), tuple(names))
    assert balance_experts(model, None, load).slots is not None
    with pytest.raises(RuntimeError, match="moved experts since hub_tensors listed"):
        next(stream)


def metadata_lists_what_the_stream_yields(rank: int, world: int) -> None:
    """Keys, dtypes, shapes and their order are equal, for slabs of two sizes, and in FP8."""
    model = apply_ep_fsdp2(tiny(dtype=BF16, **WIDE), ep_size=2)
    for options in ({}, {"max_bytes": 50_000}, {"dtype": torch.float16}, {"dtype": "fp8"}):
        stream = hub_tensors(model, **options)
        listed, own = stream.metadata(), stream.metadata_of_rank()
        got = [(key, tensor.dtype, tuple(tensor.shape)) for key, tensor in stream]
        assert [tuple(info) for info in listed] == got == [tuple(info) for info in own]


WIDE = {"hidden_size": 256, "moe_intermediate_size": 130, "head_dim": 64}


def fp8_blocks_do_not_depend_on_shards(rank: int, world: int) -> None:
    """A model on two ranks sends the same blocks as a model in one process."""
    stock = tiny(dtype=BF16, **WIDE)
    whole = dict(hub_tensors(patch(copy.deepcopy(stock)), dtype="fp8"))
    sent = dict(hub_tensors(apply_ep_fsdp2(stock, ep_size=2), dtype="fp8", max_bytes=60_000))
    assert whole.keys() == sent.keys()
    for key, tensor in whole.items():
        assert torch.equal(tensor.float(), sent[key].float()), key


CHECKS = (
    received_changes_make_up_the_whole_model,
    only_adapted_weights_are_sent_again,
    an_interrupted_sync_is_sent_whole,
    moved_experts_have_not_changed,
    experts_that_move_after_the_list_are_refused,
    metadata_lists_what_the_stream_yields,
    fp8_blocks_do_not_depend_on_shards,
)


@pytest.mark.parametrize("claim", on_ranks(2, *CHECKS))
def test_on_two_ranks(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)


def test_writes_that_autograd_does_not_see_are_sent() -> None:
    """Some code, such as weight averaging, writes through `.data`."""
    model = patch(tiny(dtype=BF16))
    token = _fill(SyncToken(), model)
    model.model.norm.weight.data.add_(1)
    assert [key for key, _ in hub_tensors(model, since=token)] == ["model.norm.weight"]
    model.model.norm.weight.data.sub_(1)
    list(hub_tensors(model, since=token))
    assert len(list(hub_tensors(model, since=token, dtype=torch.float32))) > 60, "another dtype"
    token.clear()
    assert len(list(hub_tensors(model, since=token))) > 60


@pytest.mark.parametrize("wrong", [3, "token"])
def test_other_values_than_tokens_are_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match=f"since={wrong!r} is not a SyncToken; make one"):
        hub_tensors(patch(tiny(dtype=BF16)), since=wrong)


def test_checksums_depend_on_bits_and_positions() -> None:
    tensor = torch.arange(24.0).view(4, 6)
    swapped = tensor.clone()
    swapped[[0, 1]] = tensor[[1, 0]]
    negative_zero = tensor.clone()
    negative_zero[0, 0] = -0.0
    others = [tensor, tensor.clone(), swapped, negative_zero, tensor.T.contiguous(), tensor[0, 1]]
    first, same, *different = compute_checksums([(other, None) for other in others])
    assert first == same and first not in different and len(set(different)) == len(different)
    slots = torch.tensor([1, 0, 2, 3])  # expert 0 is in row 1
    assert compute_checksums([(swapped, slots)]) == [first]


@pytest.mark.parametrize("shape", [(256, 384), (3, 128, 256), (192, 300), (130, 128)])
def test_blocks_equal_those_of_transformers(shape: tuple[int, ...]) -> None:
    weight = torch.randn(shape).to(BF16)
    weight[..., :128, :128] = 0
    values, scales = encode_blocks(weight)
    assert values.dtype == torch.float8_e4m3fn and values.shape == weight.shape
    assert scales.dtype == torch.float32
    if weight.ndim == 2:
        by_stock = quantised("x.weight", weight, (128, 128))
        assert torch.equal(values.float(), by_stock["x.weight"].float())
        assert torch.equal(scales, by_stock["x.weight_scale_inv"])
    else:
        for expert in range(len(weight)):
            one = encode_blocks(weight[expert])
            assert torch.equal(values[expert].float(), one[0].float())
            assert torch.equal(scales[expert], one[1])
    back = stock_product(values, scales, (128, 128))
    assert torch.equal(back[..., :128, :128], weight[..., :128, :128].float())
    # E4M3 has 3 bits of mantissa, so a value is off by at most half of 2**-3 of itself, or by half
    # of the smallest step, 2**-9, times its scale.
    bound = (weight.float().abs() * 2**-4).clamp(min=float(scales.max()) * 2**-10)
    assert ((back - weight.float()).abs() <= bound * (1 + 1e-6)).all()


def test_only_experts_and_linear_layers_are_encoded() -> None:
    # Head, embedding and router are at least as large as a block, too.
    sizes = WIDE | {"vocab_size": 130, "num_experts": 128, "num_hidden_layers": 1}
    model = patch(tiny(dtype=BF16, **sizes))
    stream = hub_tensors(model, dtype="fp8")
    config, sent = stream.quantization_config, dict(stream)
    in_fp8 = {key for key, tensor in sent.items() if tensor.dtype == torch.float8_e4m3fn}
    assert {f"{key}_scale_inv" for key in in_fp8} == {k for k in sent if k.endswith("_scale_inv")}
    layer = "model.layers.0."
    assert {key.removeprefix(layer) for key in in_fp8 if key.startswith(layer)} == {
        *(f"self_attn.{kind}_proj.weight" for kind in "qkvo"),
        *(
            f"mlp.experts.{e}.{kind}_proj.weight"
            for e in range(128)
            for kind in ("gate", "up", "down")
        ),
    }
    matrices = {key for key, t in sent.items() if t.ndim > 1 and not key.endswith("_scale_inv")}
    unencoded = {key.removesuffix(".weight") for key in matrices - in_fp8}
    assert config["modules_to_not_convert"] == sorted(unencoded)
    assert {"lm_head", "model.embed_tokens", f"{layer}mlp.gate"} <= unencoded
    with pytest.raises(ValueError, match="dtype=None yields no FP8; pass dtype='fp8'"):
        _ = hub_tensors(model).quantization_config
    for wrong in ("fp4", torch.float8_e4m3fn, torch.int8):
        with pytest.raises(ValueError, match="is not a floating point dtype; try"):
            hub_tensors(model, dtype=wrong)


def test_the_config_names_the_extra_tensors_that_are_not_in_fp8(tmp_path: Path) -> None:
    """The checkpoint of DeepSeek-V3 has an FP8 head, the checkpoint of Qwen3-Next a bf16 head."""
    write_with_extra(tmp_path / "bf16", "qwen3_next")
    write_with_extra(tmp_path / "fp8", "deepseek_v3")
    for name in ("bf16", "fp8"):
        model = patch(AutoModelForCausalLM.from_pretrained(tmp_path / name))
        stream = hub_tensors(model, dtype="fp8")
        config, sent = stream.quantization_config, dict(stream)
        later = hub_tensors(model, dtype="fp8", since=_fill(SyncToken(), model))
        assert not {info.key for info in later.metadata() if is_of_head(info.key, model)}
        assert later.quantization_config == stream.quantization_config == config
        head = {key: t for key, t in sent.items() if is_of_head(key, model) and t.ndim > 1}
        scaled = {key for key in head if f"{key}_scale_inv" in head}
        assert bool(scaled) == (name == "fp8") and len(head) - 2 * len(scaled) > 3
        unencoded = {k for k in head if k not in scaled and not k.endswith("_scale_inv")}
        named = {key for key in config["modules_to_not_convert"] if is_of_head(key, model)}
        assert named == {key.removesuffix(".weight") for key in unencoded}


def test_biases_of_128_experts_are_not_encoded() -> None:
    """gpt-oss-120b has biases [128, 5760], with as many dims as a matrix."""
    sizes = {"num_local_experts": 128, "hidden_size": 256, "intermediate_size": 128}
    model = patch(architectures.tiny("gpt_oss", dtype=BF16, **sizes))
    sent = dict(hub_tensors(model, dtype="fp8"))
    in_fp8 = {key for key, tensor in sent.items() if tensor.dtype == torch.float8_e4m3fn}
    assert {key for key in in_fp8 if "experts" in key} == {
        f"model.layers.{layer}.mlp.experts.{name}"
        for layer in range(model.config.num_hidden_layers)
        for name in ("gate_up_proj", "down_proj")
    }
    assert not [key for key in sent if "_bias" in key and key.endswith("_scale_inv")]


def test_large_tensors_are_summed_and_encoded_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(2, 2048, 2048, dtype=BF16)
    with LargestTensor([weight]) as largest:
        in_parts = compute_checksums([(weight, None)])
    assert largest.nbytes <= 8 * 2**20
    monkeypatch.setattr(sync_token, "_ELEMENTS_PER_STEP", weight.numel())
    assert compute_checksums([(weight, None)]) == in_parts
    weight = torch.randn(3, 300, 520, dtype=BF16)
    want = [_encode_rows(matrix) for matrix in weight]
    with LargestTensor([weight]) as largest:
        values, scales = encode_blocks(weight)
    assert largest.nbytes <= 2**20
    assert torch.equal(values.float(), torch.stack([v for v, _ in want]).float())
    assert torch.equal(scales, torch.stack([s for _, s in want]))
