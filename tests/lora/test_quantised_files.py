"""Test quantised experts of a sharded model: memory, all-gathers, hashes, resuming and files."""

import importlib.util
import json
import shutil
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import peft
import pytest
import torch
import torch.distributed as dist
from support.adapters import with_lora
from support.checks import Check, Found, on_ranks
from support.close import FP64_MODEL, assert_close
from support.gathers import count_gathered_bytes
from support.parity import full_tensor
from support.quantised import SIZES, dequantise_experts
from support.tiny_models import batch, tiny
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_moe_ep import (
    apply_ep_fsdp2,
    describe,
    from_pretrained,
    hub_tensors,
    load_checkpoint,
    patch,
    save_checkpoint,
    save_pretrained,
    unpatch,
)
from hf_moe_ep.checkpoints.convert import convert
from hf_moe_ep.checkpoints.training.base import BASE, describe_base
from hf_moe_ep.lora.factors import pack_factors
from hf_moe_ep.state import iterate_quantised_matrices

NF4: dict[str, Any] = {"experts_dtype": "nf4"}
HELD: dict[str, dict[str, Any]] = {
    "nf4": NF4,
    "nested": NF4 | {"experts_double_quant": True},
    "fp8": {"experts_dtype": "fp8"},
}
MAX_BYTES = {"nf4": 0.57, "nested": 0.52, "fp8": 1.01}
# The scales of one expert's matrix fill whole blocks of 256, which share a nested scale.
LARGE = {"hidden_size": 128, "moe_intermediate_size": 256, "initializer_range": 0.09}


def shard(kind: str, seed: int = 0, model: Any = None, **config: Any) -> nn.Module:
    model = model or with_lora(tiny(seed=seed, **LARGE), r=3, seed=5)
    return apply_ep_fsdp2(model, **(HELD[kind] | config))


def bytes_per_parameter(rank: int, world: int) -> None:
    """The bytes per parameter on a rank are within MAX_BYTES, and `describe` prints them."""
    plain_text = describe(plain := apply_ep_fsdp2(with_lora(tiny(**LARGE)), ep_size=2))
    counts = plain_text[plain_text.index("parameters") : plain_text.index("\n  precision")]
    del plain
    for kind, limit in MAX_BYTES.items():
        model = shard(kind, model=with_lora(tiny(**LARGE)), ep_size=2)
        num_bytes = num_values = 0
        for name, stack, quantisation in iterate_quantised_matrices(model):
            local = {n: _to_local(tensor) for n, tensor in stack.by_name(name).items()}
            num_bytes += sum(tensor.untyped_storage().nbytes() for tensor in local.values())
            num_values += quantisation.num_values(local[name])
        assert num_values == 2 * 8 // 2 * 3 * 128 * 256
        assert 0 < num_bytes / num_values <= limit, kind
        text = describe(model)
        nested = ", double quantisation" if kind == "nested" else ""
        format_ = HELD[kind]["experts_dtype"]
        line = f"held in {format_}{nested}, {num_bytes / num_values:.4f} bytes per parameter"
        assert line in text and "no triton: no CUDA GPU" in text, text
        assert counts in text, (counts, text)


def _to_local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def gathered_bytes_of_experts(rank: int, world: int) -> None:
    """Compare all-gathered bytes of experts in a step with bf16; only attention has LoRA."""
    sums = {}
    for kind in ("", *HELD):
        model = with_lora(tiny(dtype=torch.bfloat16, **LARGE), parameters=())
        apply_ep_fsdp2(model, ep_size=1, **HELD.get(kind, {}))
        with count_gathered_bytes() as gathered:
            model(**batch(model, 2, 9)).loss.backward()
        sums[kind] = sum(count for name, count in gathered.items() if name.endswith("experts"))
    assert sums[""] > 0
    for kind, limit in MAX_BYTES.items():
        assert 0 < sums[kind] / sums[""] <= limit / 2, (kind, sums)


def hashes_are_equal_at_every_layout(rank: int, world: int) -> None:
    layouts = [
        {"ep_size": 2},
        {"ep_size": 1},
        {"ep_size": 1, "expert_shard_dim": 1},
        {"ep_size": 1, "dp_replicate_size": 2},
    ]
    for kind in HELD:
        if kind == "fp8":  # a block of fp8 has all rows of down_proj
            layouts = [layout for layout in layouts if "expert_shard_dim" not in layout]
        bases = [describe_base(shard(kind, **layout)) for layout in layouts]
        assert all(base == bases[0] for base in bases), kind
        other = describe_base(shard(kind, seed=1, ep_size=2))
        assert bases[0] is not None and other is not None
        assert bases[0]["hashes"].keys() == other["hashes"].keys()
        tensors = 3 if kind == "nested" else 2
        assert len(bases[0]["hashes"]) == 2 * 2 * tensors, bases[0]
        assert not set(bases[0]["hashes"].values()) & set(other["hashes"].values())
    assert describe_base(apply_ep_fsdp2(with_lora(tiny()), ep_size=2)) is None


def a_changed_byte_or_swapped_experts_change_a_hash(rank: int, world: int) -> None:
    model = shard("nf4", ep_size=2)
    before = describe_base(model)
    assert before is not None
    _, stack, _ = next(iterate_quantised_matrices(model))
    local = _to_local(stack.values)
    if rank == 1:
        local[0, 3, 5] ^= 1
    flipped = describe_base(model)
    if rank == 1:
        local[0, 3, 5] ^= 1
    assert describe_base(model) == before
    first, second = local[0].clone(), local[1].clone()
    local[0], local[1] = second, first
    exchanged = describe_base(model)
    for after in (flipped, exchanged):
        assert after is not None
        changed = [n for n, h in before["hashes"].items() if after["hashes"][n] != h]
        assert len(changed) == 1 and changed[0].endswith("layers.0.mlp.experts.gate_up_proj")


class BytesRead(TorchDispatchMode):
    """Count in `num` the bytes of `tensors` that operations read. A view reads nothing."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        self._watched = {_to_local(tensor).untyped_storage().data_ptr() for tensor in tensors}
        self.num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # operations on plain tensors are dispatched here too
        out = func(*args, **(kwargs or {}))
        made = {x.untyped_storage().data_ptr() for x in tree_leaves(out) if isinstance(x, Tensor)}
        for taken in tree_leaves((args, kwargs)):
            if isinstance(taken, Tensor):
                storage = taken.untyped_storage().data_ptr()
                self.num += taken.nbytes if storage in self._watched - made else 0
        return out


def base_is_read_once(kind: str, rank: int, world: int, folder: str) -> None:
    """The first save and a load read all bytes. A save after LoRA training reads none."""
    model = shard(kind, ep_size=2)
    optimizer = _create_adamw(model)
    tensors = [
        t for n, stack, _ in iterate_quantised_matrices(model) for t in stack.by_name(n).values()
    ]
    whole = sum(_to_local(tensor).nbytes for tensor in tensors)

    def read(run: Callable[..., Any], name: str) -> int:
        with BytesRead(tensors) as bytes_read:
            run(Path(folder, name), model, optimizer)
        return bytes_read.num

    assert read(save_checkpoint, "first") >= whole
    for number in range(2):
        _take_step(model, optimizer, number)
    assert read(save_checkpoint, "second") == 0
    hashes = [json.loads(Path(folder, name, BASE).read_text()) for name in ("first", "second")]
    assert hashes[0] == hashes[1] == describe_base(model)
    assert read(load_checkpoint, "second") >= whole
    _take_step(model, optimizer, 2)
    assert read(save_checkpoint, "third") == 0
    with torch.no_grad():
        tensors[0].zero_()  # changes the DTensor, not its local tensor
    assert 0 < read(save_checkpoint, "fourth") < whole
    after = json.loads(Path(folder, "fourth", BASE).read_text())
    (changed,) = {name for name, _ in hashes[0]["hashes"].items() ^ after["hashes"].items()}
    assert changed.endswith("layers.0.mlp.experts.gate_up_proj")


def _take_step(model: nn.Module, optimizer: Any, number: int) -> None:
    model(**batch(model, 2, 9, seed=number)).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def _create_adamw(model: nn.Module) -> Any:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def _gather_trained(model: nn.Module) -> dict[str, Tensor]:
    factors = {n: full_tensor(p.detach()) for n, p in model.named_parameters() if p.requires_grad}
    return pack_factors(model, factors)


def resuming_needs_the_same_base_not_the_same_layout(rank: int, world: int, folder: str) -> None:
    """A resumed run takes the same steps. The base is not saved, and another base is refused."""
    for kind in ("nf4", "fp8"):
        where = Path(folder, kind)
        model = shard(kind, ep_size=2)
        optimizer = _create_adamw(model)
        for number in range(2):
            _take_step(model, optimizer, number)
        save_checkpoint(where, model, optimizer)
        _take_step(model, optimizer, 2)
        saved = json.loads((where / "state.json").read_text())["tensors"]
        assert saved and not [name for name in saved if "proj" in name and "lora_" not in name]
        resumed_model = shard(kind, ep_size=1)
        resumed = _create_adamw(resumed_model)
        load_checkpoint(where, resumed_model, resumed)
        _take_step(resumed_model, resumed, 2)
        trained = _gather_trained(model)
        for name, tensor in _gather_trained(resumed_model).items():
            assert_close(name, tensor, trained[name], FP64_MODEL)
    base = json.loads(Path(folder, "nf4", BASE).read_text())
    assert base["experts_dtype"] == "nf4" and len(base["hashes"]) == 8
    others: list[tuple[nn.Module, str]] = [
        (
            shard("nf4", seed=1, ep_size=2),
            r"this is a model with [0-9a-f]{32} .*: this is another base",
        ),
        (shard("nested", ep_size=2), r"quantised \(experts_dtype='nf4'\), .*double_quant"),
        (
            apply_ep_fsdp2(with_lora(tiny(**LARGE), r=3, seed=5), ep_size=2),
            r"experts_dtype='nf4'\), but the experts of this model are not quantised",
        ),
    ]
    for other, words in others:
        before = _gather_trained(other)
        with pytest.raises(ValueError, match=words):
            load_checkpoint(Path(folder, "nf4"), other, _create_adamw(other))
        for name, tensor in _gather_trained(other).items():
            assert torch.equal(tensor, before[name])
    dist.barrier()
    if rank == 0:
        Path(folder, "nf4", BASE).write_text("{")
    dist.barrier()
    with pytest.raises(ValueError, match=BASE):
        load_checkpoint(Path(folder, "nf4"), shard("nf4", ep_size=2), None)


def frozen_quantised_experts_without_peft(rank: int, world: int, folder: str) -> None:
    """Trained attention is saved without PEFT. Calls that need values of experts are refused."""

    def frozen(seed: int) -> nn.Module:
        model = tiny(seed=seed, **LARGE)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("self_attn" in name)
        return shard("nf4", model=model, ep_size=2)

    model = frozen(0)
    optimizer = _create_adamw(model)
    _take_step(model, optimizer, 0)
    save_checkpoint(Path(folder, "one"), model, optimizer)
    loaded = frozen(0)
    load_checkpoint(Path(folder, "one"), loaded, _create_adamw(loaded))
    for name, tensor in _gather_trained(model).items():
        assert torch.equal(_gather_trained(loaded)[name], tensor)
    if rank == 0:
        with pytest.raises(
            ValueError, match="holds no experts, because its run held them quantised"
        ):
            convert(Path(folder, "one"), Path(folder, "hub"))
    for call in (lambda: save_pretrained(model, folder), lambda: list(hub_tensors(model))):
        with pytest.raises(ValueError, match="hf-moe-ep merge-adapter BASE ADAPTER OUT"):
            call()


def the_adapter_opens_in_stock_peft(rank: int, world: int, folder: str) -> None:
    model = shard("nf4", ep_size=2)
    _take_step(model, _create_adamw(model), 0)
    for save in (save_pretrained, lambda model, to: model.save_pretrained(to)):
        if rank == 0:
            shutil.rmtree(folder)
        dist.barrier()
        save(model, folder)
        stock = tiny(**LARGE)
        dequantise_experts(stock, "nf4")
        opened = peft.PeftModel.from_pretrained(stock, folder)
        with torch.no_grad():
            inputs = batch(stock, 2, 9)
            logits, peft_logits = model(**inputs).logits, opened(**inputs).logits
        # PEFT's file stores the factors in the model's dtype, fp64.
        assert_close("logits", logits, peft_logits, FP64_MODEL)


def unsupported_cases_are_refused(rank: int, world: int) -> None:
    trained = with_lora(tiny(**LARGE))
    for name, parameter in trained.named_parameters():
        parameter.requires_grad_(parameter.requires_grad or name.endswith("down_proj"))
    refused: list[tuple[nn.Module, dict[str, Any], str]] = [
        (trained, NF4, r"down_proj is trainable; .*get_peft_model"),
        (tiny(**LARGE), NF4, r"gate_up_proj is trainable"),
        (with_lora(tiny()), NF4, r"blocks of 64 .*gate_up_proj of .*in 32\] has 32"),
        (with_lora(tiny(**SIZES["nf4"])), HELD["fp8"], r'blocks of 128 .*use experts_dtype="nf4"'),
        (
            with_lora(tiny(**SIZES["fp8"])),
            HELD["fp8"] | {"expert_shard_dim": 1},
            r"expert_shard_dim=1 shards the 128 rows of down_proj .*over ep_fsdp \(2\)",
        ),
        (
            with_lora(tiny(**SIZES["nf4"])),
            HELD["nested"] | {"expert_shard_dim": 1},
            r"shards the 256 rows of gate_up_proj .*or 256 scales that share a nested scale",
        ),
    ]
    for model, config, words in refused:
        with pytest.raises(ValueError, match=words):
            apply_ep_fsdp2(model, ep_size=1, **config)
    model = shard("nf4", ep_size=2)
    with pytest.raises(ValueError, match="sharded over 2 ranks"):
        model.merge_and_unload()
    with pytest.raises(ValueError, match=r"hub_tensors cannot export .*hf-moe-ep merge-adapter"):
        hub_tensors(model, merge_adapters=True)
    with pytest.raises(ValueError, match="sharded over 2 ranks; unpatch it before"):
        unpatch(model)


def missing_bitsandbytes_and_gptq_are_refused(rank: int, world: int, folder: str) -> None:
    """Both ranks raise before a collective starts, so the process group works afterwards."""
    find_spec = importlib.util.find_spec

    def find_no_bitsandbytes(name: str, *args: Any) -> Any:
        return None if name == "bitsandbytes" else find_spec(name, *args)

    missing = r"bitsandbytes, which is not installed: pip install .*\"fp8\" needs only torch"
    base = Path(folder, "base")
    if rank == 0:
        tiny(**LARGE).save_pretrained(base)
        config = json.loads((base / "config.json").read_text())
        config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
        shutil.copytree(base, base / "gptq")
        (base / "gptq/config.json").write_text(json.dumps(config))
    dist.barrier()
    for kind in ("nf4", "nested"):
        with mock.patch.object(importlib.util, "find_spec", find_no_bitsandbytes):
            with pytest.raises(ImportError, match=missing):
                shard(kind, ep_size=2)
            with pytest.raises(ImportError, match=missing):
                from_pretrained(base, ep_size=2, **HELD[kind])
    words = "quantized by gptq, which cannot be trained here; .*bf16 checkpoint.*mxfp4 or fp8"
    for config in HELD.values():
        with pytest.raises(ValueError, match=words):
            from_pretrained(base / "gptq", ep_size=2, **config)
    ranks = torch.ones(1)
    dist.all_reduce(ranks)
    assert ranks.item() == world
    with mock.patch.object(importlib.util, "find_spec", find_no_bitsandbytes):
        shard("fp8", ep_size=2)


CHECKS = [
    missing_bitsandbytes_and_gptq_are_refused,
    bytes_per_parameter,
    gathered_bytes_of_experts,
    hashes_are_equal_at_every_layout,
    a_changed_byte_or_swapped_experts_change_a_hash,
    {f"base is read once, {kind}": partial(base_is_read_once, kind) for kind in HELD},
    resuming_needs_the_same_base_not_the_same_layout,
    frozen_quantised_experts_without_peft,
    the_adapter_opens_in_stock_peft,
    unsupported_cases_are_refused,
]


@pytest.mark.parametrize("claim", on_ranks(2, *CHECKS, slow=True))
def test_on_two_ranks(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)


def test_a_forward_without_sharding_is_refused() -> None:
    """`patch` quantises nothing, so a stock forward would run in another precision."""
    model = patch(with_lora(tiny(**SIZES["nf4"])), **NF4)
    assert "to be held in nf4 when the model is sharded" in describe(model)
    with pytest.raises(
        ValueError, match=r"experts_dtype='nf4' but never sharded.*would not be quantised"
    ):
        model(**batch(model, 1, 5))
    assert unpatch(model) is model
