"""In one process, the head for multi-token prediction computes what `mtp_reference` computes."""

import copy
import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import ParallelismConfig
from peft import LoraConfig, get_peft_model
from support.close import FP64_MODEL, assert_close, max_error
from support.extra_files import assert_same_bytes, read_files
from support.fp64 import FP64
from support.mtp_reference import ReferenceHead, load_stock, write_base
from support.tiny_models import batch, tiny
from torch import Tensor
from transformers import AutoModelForCausalLM, modeling_layers

from hf_moe_ep import describe, expert_load, hub_tensors, mtp_loss, patch, save_pretrained, unpatch
from hf_moe_ep.integrations.prepare import take_over_sizes
from hf_moe_ep.mtp_head import find_head
from hf_moe_ep.state import patched_state

WEIGHT = 0.3
TYPES = [
    "qwen3_next",
    "glm4_moe",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3_5_moe_text", "deepseek_v3")),
]


@pytest.fixture(scope="module", params=TYPES)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def base(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(kind) / "base"
    write_base(folder, kind, layers=2)
    return folder


@pytest.fixture(scope="module")
def glm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("glm") / "base"
    write_base(folder, "glm4_moe")
    return folder


def load(folder: Path, layers: int = 1, **options: Any) -> Any:
    return patch(load_stock(folder), mtp_layers=layers, **({"mtp_loss_weight": WEIGHT} | options))


def find_name_in_model(reference: ReferenceHead, key: str) -> str:
    """Return the name of a parameter of the head in a patched model, for a key of a checkpoint."""
    if reference.is_shared:
        return key
    in_depth = re.sub(r"(layers\.\d+\.)(?!enorm|hnorm|eh_proj|shared_head)", r"\1mtp_block.", key)
    return f"mtp.{in_depth}"


def collect_gradients(reference: ReferenceHead) -> dict[str, Tensor]:
    """Return all gradients of the reference, by the names of a patched model."""
    found = {name: p.grad for name, p in reference.stock.named_parameters()}
    found |= {find_name_in_model(reference, k): t.grad for k, t in reference.tensors.items()}
    for depth, block in enumerate(reference.blocks):
        prefix = reference.prefix(depth)
        for name, parameter in block.named_parameters():
            found[find_name_in_model(reference, prefix + name)] = parameter.grad
    return {name: grad for name, grad in found.items() if grad is not None}


@pytest.mark.parametrize("layers", [1, 2])
def test_loss_and_every_gradient_equal_the_reference(base: Path, layers: int) -> None:
    with FP64():
        stock, model = load_stock(base), load(base, layers)
        data = batch(model, 3, 11, pad=4)
        data["attention_mask"][0, :3] = 0  # padding on the left, where positions do not count
        data["labels"][0, :3] = -100
        data["labels"][0, 3:5] = data["input_ids"][0, 3:5]
        reference = ReferenceHead(stock, base, layers)
        losses = reference.losses(*(data[n] for n in ("input_ids", "labels", "attention_mask")))
        main = stock(**data).loss
        want = main + WEIGHT / layers * sum(losses)
        want.backward()
        got = model(**data).loss
        got.backward()
    assert_close("loss", got, want, FP64_MODEL)
    assert all(loss > 0.1 for loss in losses)
    expected = collect_gradients(reference)
    own = {name: p.grad for name, p in model.named_parameters()}
    assert own.keys() == expected.keys()
    for name, grad in expected.items():
        assert own[name] is not None, name
        assert_close(name, own[name], grad, FP64_MODEL)
    targets = [data["labels"][:, depth + 1 :] for depth in range(1, layers + 1)]
    masks = [data["attention_mask"][:, : t.shape[1]] for t in targets]
    counts = [((t != -100) & (m != 0)).sum() for t, m in zip(targets, masks, strict=True)]
    count = (data["labels"][:, 1:] != -100).sum()
    mean = sum(loss * count for loss in losses) / sum(counts)
    assert max_error(torch.tensor(mtp_loss(model), dtype=torch.float64), mean) < FP64_MODEL
    assert mtp_loss(model) is None


def test_with_weight_0_the_head_is_only_measured(base: Path) -> None:
    with FP64():
        plain = patch(load_stock(base))
        model = load(base, mtp_loss_weight=0)
        data = batch(model, 2, 9)
        want, got = plain(**data), model(**data)
        want.loss.backward()
        got.loss.backward()
        assert torch.equal(got.loss, want.loss) and torch.equal(got.logits, want.logits)
        reference = ReferenceHead(load_stock(base), base)
        (loss,) = reference.losses(data["input_ids"], data["labels"])
    grads = {name: p.grad for name, p in plain.named_parameters()}
    for name, parameter in model.named_parameters():
        if name.startswith("mtp."):
            assert parameter.grad is None
        else:
            assert torch.equal(parameter.grad, grads[name]), name
    count, head_count = ((data["labels"][:, n:] != -100).sum() for n in (1, 2))
    assert (
        max_error(torch.tensor(mtp_loss(model), dtype=torch.float64), loss * count / head_count)
        < FP64_MODEL
    )
    assert expert_load(model).counts[-1].sum() == 0


@pytest.mark.parametrize("layers", [1, 2])
def test_the_head_is_saved_under_the_keys_of_the_checkpoint(
    base: Path, layers: int, tmp_path: Path
) -> None:
    """Before training all values equal the source. Training changes the head, not extra tensors."""
    before = read_files(base)
    model = load(base, layers)
    save_pretrained(model, tmp_path / "first")
    first = read_files(tmp_path / "first")
    assert first.keys() == before.keys()
    copies = {key for key in before if re.search(r"(embed_tokens|shared_head\.head)\.weight$", key)}
    copies = {key for key in copies if ".layers." in key}
    head = {key for key in before if is_head_key(key, model, layers)}
    trained = dict(model.named_parameters())
    for key in before.keys() - copies:
        # The source has the head in bf16, and the model has it in fp64.
        assert torch.equal(first[key].double(), before[key].double()), key
    assert head and (copies & head or "qwen" in model.config.model_type)
    for key in copies & head:
        main_name = "lm_head.weight" if "shared_head" in key else "model.embed_tokens.weight"
        assert torch.equal(first[key], trained[main_name])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with FP64():
        model(**batch(model, 2, 9)).loss.backward()
    optimizer.step()
    for name in ("second", "method"):
        save = partial(save_pretrained, model) if name == "second" else model.save_pretrained
        save(tmp_path / name)
    second = read_files(tmp_path / "second")
    assert_same_bytes(read_files(tmp_path / "method"), second)
    assert_same_bytes(dict(hub_tensors(model)), second)
    biases = {key for key in head if key.endswith("correction_bias")}
    for key in head - biases:
        assert not torch.equal(second[key], first[key]), key
    for key in before.keys() - head:
        if is_head_key(key, model, 2):
            assert_same_bytes({key: second[key]}, {key: before[key]})  # an extra tensor
    again = load(tmp_path / "second", layers)
    for name, parameter in again.named_parameters():
        assert torch.equal(parameter, trained[name]), name
    assert json.loads((base / "config.json").read_text()) == json.loads(
        (tmp_path / "second" / "config.json").read_text()
    )


def is_head_key(key: str, model: Any, layers: int) -> bool:
    first = model.config.num_hidden_layers
    if key.startswith("mtp."):
        return not re.match(rf"mtp\.layers\.(?!{'|'.join(map(str, range(layers)))})\d+\.", key)
    return any(key.startswith(f"model.layers.{first + depth}.") for depth in range(layers))


@pytest.mark.skipif(
    not hasattr(getattr(modeling_layers, "MtpModel", None), "forward_layer"),
    reason="transformers has no MtpModel.forward_layer before 5.24",
)
@pytest.mark.parametrize("model_type", ["deepseek_v3", "glm4_moe"])
def test_stock_transformers_computes_the_same_draft_logits(model_type: str, tmp_path: Path) -> None:
    """Stock's MtpModel loads our saved model, and has the logits of the reference."""
    write_base(tmp_path / "base", model_type)
    model = load(tmp_path / "base")
    with FP64():
        model(**batch(model, 2, 9)).loss.backward()
    torch.optim.AdamW(model.parameters(), lr=1e-2).step()
    save_pretrained(model, tmp_path / "saved")
    stock = load_stock(tmp_path / "saved").eval()
    # The class names the layer of the published model, but the tiny model has fewer layers.
    stock._keys_to_ignore_on_load_unexpected = [r"model\.layers\.4\."]
    assert stock.config.num_hidden_layers == 4
    mtp = modeling_layers.MtpModel.from_pretrained(stock).double().eval()
    ids = batch(model, 1, 9)["input_ids"]
    reference = ReferenceHead(stock, tmp_path / "saved")
    with FP64(), torch.no_grad():
        hidden = stock.model(ids).last_hidden_state
        (ours,) = reference.logits(ids, hidden)
        positions = torch.arange(1, 9)[None]
        last = mtp.forward_layer(0, hidden[:, :-1], positions, None, input_ids=ids[:, 1:])
    assert_close("logits", stock.lm_head(last), ours, FP64_MODEL)


def test_packed_documents_have_the_loss_of_single_documents(base: Path) -> None:
    """No label of a document is predicted from tokens of another document."""
    with FP64():
        model = load(base, 2)
        data = batch(model, 1, 12)
        lengths, losses = (5, 4, 3), []
        positions = torch.cat([torch.arange(n) for n in lengths])[None]
        labels = data["labels"].clone()
        starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0)[:-1]])
        labels[:, starts] = -100
        count = (labels != -100).sum()
        # With a cache stock does not look for documents. The aux loss depends on the whole batch.
        options = {"use_cache": False, "num_items_in_batch": count}
        if "qwen" in model.config.model_type:
            options["output_router_logits"] = False
        ids = data["input_ids"]
        packed = model(input_ids=ids, labels=labels, position_ids=positions, **options).loss
        if model.config.model_type == "qwen3_5_moe_text":  # the text, and time, row and column
            axes = positions.expand(4, -1, -1)
            again = model(input_ids=ids, labels=labels, position_ids=axes, **options).loss
            assert_close("positions of four axes", again, packed, FP64_MODEL)
        options["num_items_in_batch"] = count.reshape(1)  # callers also pass a tensor [1]
        for start, length in zip(starts.tolist(), lengths, strict=True):
            part = slice(start, start + length)
            alone = {"input_ids": ids[:, part], "labels": labels[:, part]}
            losses.append(model(**alone, **options).loss.squeeze())
    assert_close("loss", packed, sum(losses), FP64_MODEL)


def test_a_fused_loss_is_the_same(base: Path) -> None:
    with FP64():
        model, fused = load(base), load(base, fused_loss=True)
        data = batch(model, 2, 9)
        want, got = model(**data), fused(**data)
        assert got.logits is None and want.logits is not None
        want.loss.backward()
        got.loss.backward()
    assert_close("loss", got.loss, want.loss, FP64_MODEL)
    grads = {name: p.grad for name, p in fused.named_parameters()}
    for name, parameter in model.named_parameters():
        assert_close(name, grads[name], parameter.grad, FP64_MODEL)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_layers_give_the_same_gradients(base: Path, use_reentrant: bool) -> None:
    """Checkpointing that is enabled before or after `patch` also checkpoints the head."""
    options = {"use_reentrant": use_reentrant}
    if use_reentrant and "linear_att" in (base / "config.json").read_text():
        pytest.skip("stock's delta nets have other gradients under reentrant checkpointing")
    with FP64():
        model, before = load(base), load_stock(base)
        before.gradient_checkpointing_enable(options)
        before = patch(before, mtp_layers=1, mtp_loss_weight=WEIGHT)
        after = load(base)
        after.gradient_checkpointing_enable(options)
        data = batch(model, 2, 9)
        want = model(**data).loss
        want.backward()
        for checkpointed in (before, after):
            head = find_head(checkpointed)
            assert head is not None and all(block.gradient_checkpointing for block in head.blocks)
            got = checkpointed(**data).loss
            got.backward()
            assert_close("loss", got, want, FP64_MODEL)
            grads = {name: p.grad for name, p in checkpointed.named_parameters()}
            for name, parameter in model.named_parameters():
                assert_close(name, grads[name], parameter.grad, FP64_MODEL)


def test_the_head_runs_only_in_training(glm: Path) -> None:
    with FP64():
        model, stock = load(glm), load_stock(glm).eval()
        data = batch(model, 2, 9)
        model.eval()
        assert torch.equal(model(**data).loss, patch(stock)(**data).loss)
        model.train()
        with torch.no_grad():
            model(input_ids=data["input_ids"])
        assert mtp_loss(model) is None
        counts = expert_load(model, reset=False).counts
        assert not counts.any()
        model(**data)
    assert (expert_load(model).counts.sum(1) > 0).all(), "the head's experts are counted, too"
    assert "mtp        1 layer, loss weight 0.3" in describe(model)
    ids = data["input_ids"][:1, :3]
    model.eval()
    assert model.generate(ids, max_new_tokens=2, do_sample=False).shape == (1, 5)


def test_a_batch_without_labels_does_not_change_the_measured_loss(glm: Path) -> None:
    """The loss of such a batch is nan, like the loss of the main model."""
    with FP64():
        model = load(glm)
        data = batch(model, 2, 9)
        model(**data)
        want = mtp_loss(model, reset=False)
        assert model(**data | {"labels": torch.full_like(data["labels"], -100)}).loss.isnan()
        assert mtp_loss(model) == want
        assert want is not None and want > 0


def test_a_copy_has_its_own_head_and_an_unpatched_model_none(glm: Path) -> None:
    with FP64():
        model = load(glm)
        data = batch(model, 2, 9)
        other = copy.deepcopy(model)
        assert find_head(other) is not find_head(model)
        with torch.no_grad():
            find_head(other).model["layers"]["4"].eh_proj.weight.zero_()
        want = model(**data).loss
        assert not torch.equal(other(**data).loss, want)
        assert torch.equal(model(**data).loss, want)
        unpatch(model)
        assert find_head(model) is None and not hasattr(model, "mtp")
        assert torch.equal(model(**data).loss, load_stock(glm)(**data).loss)
        again = patch(patch(model), mtp_layers=1, mtp_loss_weight=WEIGHT)
        assert torch.equal(again(**data).loss, want)


def test_a_second_patch_by_accelerate_keeps_the_head(glm: Path) -> None:
    """The model is patched a second time, with the size of Accelerate's ParallelismConfig."""
    model = load(glm)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    take_over_sizes(ParallelismConfig(sp_size=2), [model])
    state = patched_state(model)
    assert (state.config.sp_size, state.config.mtp_layers) == (2, 1)
    after = model.state_dict()
    assert find_head(model) is not None and before.keys() == after.keys()
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_a_new_head_needs_an_option_and_is_named_in_the_config(glm: Path, tmp_path: Path) -> None:
    """The config has the number of its layers, and a later load reads the head."""
    save_pretrained(patch(load_stock(glm)), tmp_path / "none", extra_tensors=False)
    with pytest.raises(ValueError, match=r"none has 0 layers for .*mtp_from_scratch=True"):
        load(tmp_path / "none")
    torch.manual_seed(0)
    model = load(tmp_path / "none", 2, mtp_from_scratch=True)
    assert model.config.num_nextn_predict_layers == 2
    head = find_head(model)
    assert all(parameter.isfinite().all() for parameter in head.parameters())
    std = head.model["layers"]["5"].eh_proj.weight.std().item()
    assert abs(std / model.config.initializer_range - 1) < 0.2
    save_pretrained(model, tmp_path / "new")
    again = load(tmp_path / "new", 2)
    for name, parameter in again.named_parameters():
        assert torch.equal(parameter, dict(model.named_parameters())[name])
    fresh = AutoModelForCausalLM.from_config(model.config).double().train()
    with pytest.raises(ValueError, match=r"not loaded by from_pretrained.*mtp_from_scratch=True"):
        patch(fresh, mtp_layers=1)
    with FP64():
        fresh = patch(fresh, mtp_layers=1, mtp_from_scratch=True, experts_backend="torch")
        assert fresh(**batch(fresh, 2, 9)).loss.isfinite()


def test_heads_that_cannot_be_trained_are_refused(glm: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"mtp_layers=2, but .* has 1 layers .*try mtp_layers=1"):
        load(glm, 2)
    model = load(glm)
    with pytest.raises(ValueError, match=r"patched with mtp_layers=1, .*with mtp_layers=0"):
        patch(model, mtp_layers=0)
    data = batch(model, 2, 9)
    without = {name: data[name] for name in ("input_ids", "attention_mask")}
    with pytest.raises(ValueError, match="mtp_layers=1 trains a head from the labels"):
        model(**without)
    with pytest.raises(ValueError, match="return_dict=False makes a tuple"):
        model(**data, return_dict=False)
    lora = LoraConfig(target_modules=["o_proj"])
    with pytest.raises(ValueError, match=r"mtp_layers=1 .*adapters, which are saved without"):
        get_peft_model(model, lora)(**data)
    with pytest.raises(ValueError, match=r"mtp_layers=1 .*adapters, which are saved without"):
        patch(get_peft_model(load_stock(glm), lora), mtp_layers=1)
    with pytest.raises(ValueError, match="patched with mtp_layers=0; patch it with mtp_layers=1"):
        mtp_loss(patch(load_stock(glm)))
    for model_type in ("qwen3_moe", "qwen3_5_moe"):
        with pytest.raises(ValueError, match=f"tested on deepseek_v3, .*not on {model_type};") as e:
            patch(tiny(model_type), mtp_layers=1)
        assert ("load its text model" in str(e.value)) == (model_type == "qwen3_5_moe")
