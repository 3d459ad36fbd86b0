"""Every saved checkpoint has the tensors that the model's class ignores, byte for byte.

The tests load tiny checkpoints with layers for multi-token prediction (`support.extra_files`),
train on two ranks, and save in every way.
"""

import copy
import json
import os
import random
import re
import shutil
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file, save_file
from support.adapters import EXPERTS
from support.architectures.models import tiny
from support.checks import Check, Found, on_ranks
from support.extra_files import (
    INDEX,
    TYPES,
    add_tensors,
    assert_same_bytes,
    extra_of,
    is_of_head,
    load_stock,
    read_files,
    write_with_extra,
)
from support.fp8_files import write_fp8
from support.hooked import hooked
from support.killing import kill_later
from support.launched import launched, prepared
from support.ranks import run_ranks
from support.tiny_models import batch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    FineGrainedFP8Config,
    Qwen3NextForSequenceClassification,
    TrainerCallback,
)

from hf_moe_ep import (
    apply_ep_fsdp2,
    from_pretrained,
    hub_tensors,
    load_checkpoint,
    patch,
    save_checkpoint,
    save_pretrained,
    unpatch,
)
from hf_moe_ep.checkpoints.convert import convert
from hf_moe_ep.checkpoints.storage import manifest
from hf_moe_ep.checkpoints.storage.references import FileReferences
from hf_moe_ep.checkpoints.storage.safetensors_file import FileTensor
from hf_moe_ep.checkpoints.training import conversions
from hf_moe_ep.checkpoints.verify import verify
from hf_moe_ep.cli.main import main
from hf_moe_ep.integrations.saving import write_extra_and_conversions
from hf_moe_ep.ranks import all_ranks
from hf_moe_ep.state import find_state
from hf_moe_ep.upstream.models import iterate_persistent_buffers

LOADERS = ("ours", "stock")
SHARD_SIZE = "60KB"
SHARDED, FULL = "SHARDED_STATE_DICT", "FULL_STATE_DICT"


def load(loader: str, folder: Path, **options: Any) -> nn.Module:
    """Load a checkpoint in shards, or whole with stock's from_pretrained."""
    if loader == "ours":
        return from_pretrained(folder, **options)
    return apply_ep_fsdp2(patch(load_stock(folder), **options))


def train(model: Any, optimizer: torch.optim.Optimizer, rank: int, steps: int = 3) -> None:
    for step in range(steps):
        model(**batch(model, 2, 9, seed=2 * step + rank)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def write_on_first(rank: int, write: Callable[[], object]) -> None:
    if rank == 0:
        write()
    dist.barrier()


def _save_in_every_way(model_type: str, loader: str, rank: int, world: int, folder: str) -> None:
    """Train with ep 2 and save with every function, then resume with ep 1 and save again."""
    root = Path(folder)
    base = root / "base"
    write_on_first(rank, lambda: write_with_extra(base, model_type))
    before = read_files(base)
    own = load_stock(base).state_dict().keys()
    model = load(loader, base, ep_size=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, rank)
    save_pretrained(model, root / "saved", max_shard_size=SHARD_SIZE)
    model.save_pretrained(root / "method")
    save_checkpoint(root / "step", model, optimizer)
    stream = dict(hub_tensors(model, max_bytes=100_000))
    saved = read_files(root / "saved")
    assert saved.keys() == before.keys()
    changed = {key for key in saved if not torch.equal(saved[key].float(), before[key].float())}
    extra = {key: tensor for key, tensor in before.items() if key not in changed}
    assert len(extra) >= 10 and changed, "training changes the model's own tensors"
    from_first = load("ours", root / "saved", ep_size=2)
    names = {key for key in before if is_of_head(key, from_first)}
    assert names and names <= extra.keys() and not names & own
    assert_same_bytes(saved, {key: before[key] for key in names})
    assert_same_bytes(read_files(root / "method"), saved)
    assert_same_bytes(stream, saved)
    assert stream.keys() == saved.keys()
    if rank == 0:
        convert(root / "step", root / "converted", max_shard_size=SHARD_SIZE)
        assert_same_bytes(read_files(root / "converted"), saved)
        for name in ("saved", "method", "converted"):
            _load_with_stock(root / name, model_type, changed)
    dist.barrier()
    for name in ("saved", "method", "converted"):
        config = json.loads((base / "config.json").read_text())
        assert json.loads((root / name / "config.json").read_text()) == config
        facts = verify(root / name).facts
        assert facts["ignored tensors"].startswith(f"{len(names)}, such as ")
    assert verify(root / "step").facts["ignored tensors"].startswith(f"{len(names)} in ")
    resumed = load(loader, base, ep_size=1)
    new_optimizer = torch.optim.AdamW(resumed.parameters(), lr=1e-2)
    load_checkpoint(root / "step", resumed, new_optimizer)
    save_pretrained(resumed, root / "again")
    assert_same_bytes(read_files(root / "again"), saved)


def _load_with_stock(folder: Path, model_type: str, trained: set[str]) -> None:
    """Stock finds all tensors of its class, and ignores the extra ones."""
    stock, report = load_stock(folder, output_loading_info=True)
    assert not report["missing_keys"] and not report["mismatched_keys"]
    assert not report["error_msgs"] and not trained & set(report["unexpected_keys"])
    stock.save_pretrained(folder / "stock")
    saved, again = read_files(folder), read_files(folder / "stock")
    assert trained <= again.keys()
    assert_same_bytes(again, {key: saved[key] for key in again})
    shutil.rmtree(folder / "stock")


MATRIX = {
    f"{model_type} {loader}": partial(_save_in_every_way, model_type, loader)
    for model_type in TYPES
    for loader in LOADERS
}


@pytest.mark.parametrize("claim", on_ranks(2, MATRIX, slow=True))
def test_every_save_has_the_extra_tensors(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)


def a_changed_source_is_refused(rank: int, world: int, folder: str) -> None:
    """If the files have changed or are gone, nothing is written, and the error names the file."""
    root = Path(folder)
    write_on_first(rank, lambda: write_with_extra(root / "base", "glm4_moe"))
    before = read_files(root / "base")
    model = from_pretrained(root / "base", ep_size=2)
    file = root / "base" / "extra.safetensors"
    content = file.read_bytes()
    dist.barrier()

    def refuses(words: str) -> None:
        dist.barrier()
        with pytest.raises(ValueError, match=words):
            save_pretrained(model, root / "out")
        with pytest.raises(ValueError, match=words):
            list(hub_tensors(model))
        assert not (root / "out").exists()
        dist.barrier()

    write_on_first(rank, lambda: file.write_bytes(content + b" "))
    refuses(f"extra.safetensors has {len(content) + 1} bytes, and had {len(content)} when")
    write_on_first(rank, lambda: file.write_bytes(content[:-1] + bytes([content[-1] ^ 1])))
    refuses("extra.safetensors was written to after it was looked at first")
    write_on_first(rank, lambda: shutil.move(root / "base", root / "moved"))
    refuses(r"holds 41 tensors: model.layers.4.*base has no readable .*extra_tensors=False")
    save_pretrained(model, root / "without", extra_tensors=False)
    left_out = before.keys() - read_files(root / "without").keys()
    assert len(left_out) == 41 and all(key.startswith("model.layers.4.") for key in left_out)
    assert {key for key, _ in hub_tensors(model, extra_tensors=False)} == before.keys() - left_out


def a_save_may_replace_its_own_source(rank: int, world: int, folder: str) -> None:
    """A save copies the tensors before it removes the loaded files, and refers to the copies."""
    root = Path(folder)
    write_on_first(rank, lambda: write_with_extra(root / "base", "qwen3_next"))
    before = read_files(root / "base")
    model = from_pretrained(root / "base", ep_size=2)
    for _ in range(3):
        save_pretrained(model, root / "base", max_shard_size=SHARD_SIZE)
        dist.barrier()
        assert_same_bytes(read_files(root / "base"), before)


def a_base_in_fp8_keeps_its_head_in_fp8(rank: int, world: int, folder: str) -> None:
    """Everything is published in FP8. The model is trained and saved in bf16, its head is copied.

    The saved checkpoint has no quantization_config, and loads again.
    """
    root = Path(folder)
    stock = tiny("deepseek_v3", dtype=torch.bfloat16)

    def write() -> None:
        stock.config.num_nextn_predict_layers = 1
        write_fp8(root / "base", stock)
        own = AutoModelForCausalLM.from_config(stock.config)
        own.save_pretrained(root / "shapes")
        add_tensors(root / "base", extra_of("deepseek_v3", stock, read_files(root / "shapes")))

    write_on_first(rank, write)
    before = read_files(root / "base")
    of_head = {key: t for key, t in before.items() if is_of_head(key, stock)}
    in_fp8 = {key for key in of_head if key.endswith("_scale_inv")}
    assert len(in_fp8) > 10 and (before.keys() - of_head.keys()) & {
        key for key in before if key.endswith("_scale_inv")
    }
    model = from_pretrained(root / "base", ep_size=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, rank)
    save_pretrained(model, root / "saved")
    save_checkpoint(root / "step", model, optimizer)
    write_on_first(rank, lambda: convert(root / "step", root / "converted"))
    for name in ("saved", "converted"):
        saved = read_files(root / name)
        assert_same_bytes(saved, of_head)
        assert {saved[key].dtype for key in saved.keys() - of_head.keys()} <= {
            torch.bfloat16,
            torch.float32,
        }
        assert "quantization_config" not in json.loads((root / name / "config.json").read_text())
    again = from_pretrained(root / "saved", ep_size=1)
    save_pretrained(again, root / "again")
    assert_same_bytes(read_files(root / "again"), read_files(root / "saved"))


def undeclared_tensors_need_the_option(rank: int, world: int, folder: str) -> None:
    """Keys that the class does not ignore raise an error without ignore_unexpected."""
    root = Path(folder)
    named = {"head.of.mine.weight": torch.arange(6.0), "head.of.mine.steps": torch.tensor(3)}

    def write() -> None:
        write_with_extra(root / "base", "qwen3_next")
        add_tensors(root / "base", named, "mine")

    write_on_first(rank, write)
    with pytest.raises(ValueError, match=r"unexpected 2 tensors: head.*ignore_unexpected=\[regex"):
        from_pretrained(root / "base", ep_size=2)
    for wrong, words in (("mine", r"pass a list of.*\['mine'\]"), (["("], "not a regular")):
        with pytest.raises(ValueError, match=words):
            from_pretrained(root / "base", ep_size=2, ignore_unexpected=wrong)
    model = from_pretrained(root / "base", ep_size=2, ignore_unexpected=[r"^head\.of\.mine\."])
    save_pretrained(model, root / "out")
    assert_same_bytes(read_files(root / "out"), read_files(root / "base"))
    with pytest.raises(ValueError, match="unexpected 2 tensors: head"):
        verify(root / "out")
    facts = verify(root / "out", ignore_unexpected=["^head"]).facts
    count = sum(is_of_head(key, model) for key in read_files(root / "out")) + 2
    assert facts["ignored tensors"].startswith(f"{count}, such as ")
    assert main(["verify", str(root / "out"), "--ignore-unexpected", "^head"]) == 0


def two_tensors_with_one_key_are_refused(rank: int, world: int, folder: str) -> None:
    """Two sources of one key raise an error, or an extra tensor that has a key of the model."""
    root = Path(folder)

    def write() -> None:
        write_with_extra(root / "base", "qwen3_5_moe_text")
        write_with_extra(root / "other", "qwen3_5_moe_text", seed=1)
        other = {
            key: tensor + 1 for key, tensor in read_files(root / "other").items() if "mtp.fc" in key
        }
        replace_tensors(root / "other", other)

    write_on_first(rank, write)
    model = from_pretrained(root / "base", ep_size=2)
    save_checkpoint(root / "step", model, None)
    other = from_pretrained(root / "other", ep_size=2)
    words = rf"two tensors are called mtp.fc.weight: {root}/other/.* names {root}/base/"
    with pytest.raises(ValueError, match=words):
        load_checkpoint(root / "step", other, None)
    # Now an extra tensor has a key that the model writes.
    references = find_state(model).extra if rank == 0 else None
    if references is not None:
        tensors = references.tensors()
        tensors["lm_head.weight"] = tensors.pop("mtp.fc.weight")
        find_state(model).extra = FileReferences.of(root / "base", tensors)
    with pytest.raises(ValueError, match=rf"two tensors are called lm_head.weight: .*{root}/base/"):
        save_pretrained(model, root / "out")
    assert not (root / "out").exists()


def test_a_key_that_the_model_saves_and_that_is_extra_names_both_files(tmp_path: Path) -> None:
    """The model reads stacked experts and saves single experts, but one of those is ignored."""
    write_with_extra(tmp_path, "qwen3_next")
    experts = "model.layers.1.mlp.experts"
    single = {key: t for key, t in read_files(tmp_path).items() if key.startswith(f"{experts}.")}
    kinds = {
        kind: torch.stack([single[f"{experts}.{e}.{kind}_proj.weight"] for e in range(8)])
        for kind in ("gate", "up", "down")
    }
    stacked = {
        f"{experts}.gate_up_proj": torch.cat([kinds["gate"], kinds["up"]], dim=1),
        f"{experts}.down_proj": kinds["down"],
    }
    index = json.loads((tmp_path / INDEX).read_text())
    index["weight_map"] = {k: f for k, f in index["weight_map"].items() if k not in single}
    (tmp_path / INDEX).write_text(json.dumps(index))
    add_tensors(tmp_path, stacked, "stacked")
    assert "ignored tensors" in verify(tmp_path).facts
    key = f"{experts}.3.down_proj.weight"
    add_tensors(tmp_path, {f"{key}.0": torch.zeros(1), key: single[key]}, "mine")
    index = json.loads((tmp_path / INDEX).read_text())["weight_map"]
    files = [tmp_path / index[name] for name in (key, f"{experts}.down_proj")]
    assert files[0] != files[1]
    words = "called {}: one in {}, which is not .* from {};".format(key, *files)
    with pytest.raises(ValueError, match=words):
        verify(tmp_path, ignore_unexpected=[r"\.experts\.3\.down_proj"])


def _write_one_key_twice(folder: Path) -> str:
    """Write a checkpoint with one key in two files, and return what the error must say."""
    write_with_extra(folder, "qwen3_next")
    file, key = folder / "extra.safetensors", "mtp.norm.weight"
    other = folder / json.loads((folder / INDEX).read_text())["weight_map"][key]
    save_file(load_file(file) | {key: torch.zeros(1)}, file, {"format": "pt"})
    return f"two tensors are called {key}: one in {file}, and one in {other}"


def two_files_with_one_extra_tensor_are_an_error(rank: int, world: int, folder: str) -> None:
    write_on_first(rank, lambda: _write_one_key_twice(Path(folder)))
    with pytest.raises(ValueError, match=r"two tensors are called mtp\.norm\.weight: one in "):
        from_pretrained(folder, ep_size=2)


def test_two_files_with_one_extra_tensor_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The index names one of the files. For stock, the file that it loads last has precedence."""
    words = _write_one_key_twice(tmp_path)
    with pytest.raises(ValueError, match=words):
        patch(AutoModelForCausalLM.from_pretrained(tmp_path))
    with hooked(monkeypatch), pytest.raises(ValueError, match=words):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def replace_tensors(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Replace tensors of a checkpoint."""
    index = json.loads((folder / INDEX).read_text())["weight_map"]
    state = read_files(folder)
    for name in {index[key] for key in tensors}:
        in_file = {key: state[key] for key, file in index.items() if file == name}
        save_file(in_file | {k: t for k, t in tensors.items() if k in in_file}, folder / name)


def _train_and_save_adapters(rank: int, world: int, folder: str) -> list[str]:
    """Train LoRA on two ranks, save the adapter, and return the keys of `hub_tensors`."""
    from peft import LoraConfig

    root = Path(folder)
    lora = LoraConfig(r=4, target_modules=["o_proj"], target_parameters=list(EXPERTS))
    model = from_pretrained(root / "base", ep_size=2, peft_config=lora)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    train(model, optimizer, rank)
    save_pretrained(model, root / "adapter")
    stream = dict(hub_tensors(model, merge_adapters=True))
    before = read_files(root / "base")
    assert_same_bytes(stream, {key: t for key, t in before.items() if is_of_head(key, model)})
    return sorted(stream)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", TYPES)
def test_a_merged_adapter_has_the_extra_tensors_of_its_base(
    model_type: str, tmp_path: Path
) -> None:
    extra = write_with_extra(tmp_path / "base", model_type)
    before = read_files(tmp_path / "base")
    streams = run_ranks(_train_and_save_adapters, 2, str(tmp_path))
    assert main(["merge-adapter", *(str(tmp_path / n) for n in ("base", "adapter", "merged"))]) == 0
    merged = read_files(tmp_path / "merged")
    assert merged.keys() == before.keys()
    assert [sorted(merged)] * 2 == streams
    assert_same_bytes(merged, extra)
    own = before.keys() - extra.keys()
    expert = next(key for key in sorted(own) if re.search(r"\.experts.*down_proj", key))
    assert not torch.equal(merged[expert], before[expert])


@contextmanager
def _hide_folder(rank: int, folder: Path) -> Iterator[None]:
    """Rename a folder inside this context, as if somebody had deleted it."""
    hidden = folder.with_name("hidden")
    write_on_first(rank, lambda: folder.rename(hidden))
    yield
    dist.barrier()
    write_on_first(rank, lambda: hidden.rename(folder))


def checkpoints_of_the_trainer_have_extra_tensors(
    kind: str, rank: int, world: int, folder: str
) -> None:
    """Test trainer.save_model, and a checkpoint of the Trainer that is converted or resumed."""
    from transformers import Trainer, TrainingArguments

    root = Path(folder)
    write_on_first(rank, lambda: write_with_extra(root / "base", "deepseek_v3"))
    before = read_files(root / "base")

    def trainer(steps: int) -> Trainer:
        args = TrainingArguments(
            str(root / "run"), max_steps=steps, save_steps=2, use_cpu=True, report_to="none",
            per_device_train_batch_size=1, disable_tqdm=True, learning_rate=1e-2,
        )  # fmt: skip
        model = patch(AutoModelForCausalLM.from_pretrained(root / "base"), ep_size=2)
        rows = [{k: v[0] for k, v in batch(model, 1, 9, seed=i).items()} for i in range(8)]
        return Trainer(model, args, train_dataset=rows)

    with launched(FSDP_STATE_DICT_TYPE=kind):
        first = trainer(2)
        first.train()
        first.save_model(str(root / "saved"))
        with _hide_folder(rank, root / "base"):
            warned = pytest.warns(UserWarning, match="is saved without the tensors of .*readable")
            with warned if rank == 0 else nullcontext():
                first.save_model(str(root / "without"))
    dist.barrier()
    saved = read_files(root / "saved")
    extra = {key: t for key, t in before.items() if is_of_head(key, first.model)}
    assert saved.keys() == before.keys() and len(extra) > 40
    assert_same_bytes(saved, extra)
    assert {t.dtype for t in extra.values()} >= {torch.float8_e4m3fn, torch.float32}
    if kind == FULL:
        assert_same_bytes(read_files(root / "run" / "checkpoint-2"), saved)
        with launched(FSDP_STATE_DICT_TYPE=kind):
            resumed = trainer(3)
            resumed.train(resume_from_checkpoint=str(root / "run" / "checkpoint-2"))
            resumed.save_model(str(root / "resumed"))
        dist.barrier()
        assert_same_bytes(read_files(root / "resumed"), extra)
    elif rank == 0:
        convert(root / "run" / "checkpoint-2", root / "converted", config=root / "base")
        assert_same_bytes(read_files(root / "converted"), saved)
    dist.barrier()
    assert read_files(root / "without").keys() == saved.keys() - extra.keys()


def _make_trainer(folder: Path, model: nn.Module, callback: Any, **options: Any) -> Any:
    """Make a Trainer that saves a checkpoint after each of two steps."""
    from transformers import Trainer, TrainingArguments

    args = TrainingArguments(
        str(folder), max_steps=2, save_steps=1, use_cpu=True, report_to="none",
        per_device_train_batch_size=1, disable_tqdm=True, **options,
    )  # fmt: skip
    rows = [{k: v[0] for k, v in batch(model, 1, 9, seed=i).items()} for i in range(8)]
    return Trainer(model, args, train_dataset=rows, callbacks=[callback])


class HideAfterFirstSave(TrainerCallback):
    """Renames a folder after the first checkpoint, as if somebody had deleted it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 1 and int(os.environ.get("RANK", 0)) == 0:
            self.folder.rename(self.folder.with_name("hidden"))


def full_checkpoints_without_a_source_are_saved(rank: int, world: int, folder: str) -> None:
    """After the source is lost, the Trainer warns, and saves without the extra tensors."""
    root = Path(folder)
    write_on_first(rank, lambda: write_with_extra(root / "base", "qwen3_next"))
    with launched(FSDP_STATE_DICT_TYPE=FULL):
        model = patch(AutoModelForCausalLM.from_pretrained(root / "base"), ep_size=2)
        trainer = _make_trainer(root / "run", model, HideAfterFirstSave(root / "base"))
        warned = pytest.warns(UserWarning, match="is saved without the tensors of .*readable")
        with warned if rank == 0 else nullcontext():
            trainer.train()
    dist.barrier()
    before, after = (read_files(root / "run" / f"checkpoint-{step}") for step in (1, 2))
    assert after.keys() == {key for key in before if not is_of_head(key, model)} != before.keys()


def test_the_trainer_saves_checkpoints_without_a_lost_source(tmp_path: Path) -> None:
    """One process saves a checkpoint and calls trainer.save_model."""
    extra = write_with_extra(tmp_path / "base", "qwen3_next")
    model = patch(AutoModelForCausalLM.from_pretrained(tmp_path / "base"))
    trainer = _make_trainer(tmp_path / "run", model, HideAfterFirstSave(tmp_path / "base"))
    with pytest.warns(UserWarning, match="checkpoint-2 is saved without the tensors of .*readabl"):
        trainer.train()
    with pytest.warns(UserWarning, match="last is saved without the tensors of .*readable"):
        trainer.save_model(str(tmp_path / "last"))
    steps = [read_files(tmp_path / "run" / f"checkpoint-{step}") for step in (1, 2)]
    assert extra.keys() < steps[0].keys()
    assert steps[1].keys() == read_files(tmp_path / "last").keys() == steps[0].keys() - extra.keys()
    manifest.check(tmp_path / "run" / "checkpoint-2")
    with pytest.raises(ValueError, match=r"has no readable .* any more"):
        model.save_pretrained(tmp_path / "own")


def states_of_accelerate_have_extra_tensors(
    model_type: str, rank: int, world: int, folder: str
) -> None:
    """A state of Accelerate is converted, and loaded by another model that is saved then."""
    root = Path(folder)
    write_on_first(rank, lambda: write_with_extra(root / "base", model_type))
    before = read_files(root / "base")
    models = [load_stock(root / "base") for _ in range(2)]
    for model in models:
        # Text trains no tower, and a state of Accelerate needs optimizer states of all parameters.
        tower = getattr(model.model, "visual", nn.Module())
        tower.requires_grad_(False)
    with launched(FSDP_STATE_DICT_TYPE=SHARDED):
        accelerator, model, optimizer = prepared(models[0], ep_size=2)
        train(model, optimizer, rank)
        accelerator.save_state(str(root / "state"))
        save_pretrained(model, root / "saved")
    saved = read_files(root / "saved")
    assert_same_bytes(saved, {key: t for key, t in before.items() if is_of_head(key, model)})
    assert saved.keys() == before.keys()
    with launched(FSDP_STATE_DICT_TYPE=SHARDED):
        accelerator, model, _ = prepared(models[1], ep_size=2)
        accelerator.load_state(str(root / "state"))
        save_pretrained(model, root / "again")
    assert_same_bytes(read_files(root / "again"), saved)
    if rank == 0:
        convert(root / "state", root / "converted", config=root / "base")
        assert_same_bytes(read_files(root / "converted"), saved)
        assert (root / "state" / "extra_tensors.json").is_file()
        # Only the experts of the second type were loaded without the conversion of their class.
        has_file = (root / "state" / "conversions.json").is_file()
        assert has_file == (model_type == "qwen3_5_moe")


ON_TWO_RANKS = (
    a_changed_source_is_refused,
    a_save_may_replace_its_own_source,
    a_base_in_fp8_keeps_its_head_in_fp8,
    undeclared_tensors_need_the_option,
    two_files_with_one_extra_tensor_are_an_error,
    two_tensors_with_one_key_are_refused,
)
WITH_LIBRARIES = {
    "checkpoints of the trainer": partial(checkpoints_of_the_trainer_have_extra_tensors, SHARDED),
    "full checkpoints of the trainer": partial(checkpoints_of_the_trainer_have_extra_tensors, FULL),
    "states of accelerate": partial(states_of_accelerate_have_extra_tensors, "glm4_moe"),
    "states of accelerate, stacked": partial(
        states_of_accelerate_have_extra_tensors, "qwen3_5_moe"
    ),
    "full checkpoints without a source are saved": full_checkpoints_without_a_source_are_saved,
}


@pytest.mark.parametrize(
    "claim", on_ranks(2, *ON_TWO_RANKS) + on_ranks(2, WITH_LIBRARIES, slow=True)
)
def test_on_two_ranks(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)


def test_one_process_saves_extra_tensors(tmp_path: Path) -> None:
    """Without a patch, save_pretrained loses the extra tensors."""
    extra = write_with_extra(tmp_path / "base", "qwen3_next")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    model.save_pretrained(tmp_path / "stock")
    assert not extra.keys() & read_files(tmp_path / "stock").keys()
    patch(model)
    copied = copy.deepcopy(model)
    for number, saved in enumerate((model, copied, patch(model, experts_backend="torch"))):
        saved.save_pretrained(tmp_path / str(number))
        assert_same_bytes(read_files(tmp_path / str(number)), read_files(tmp_path / "base"))
    with pytest.raises(ValueError, match="does not take push_to_hub"):
        model.save_pretrained(tmp_path / "pushed", push_to_hub=True)
    model.save_pretrained(tmp_path / "without", extra_tensors=False)
    assert not extra.keys() & read_files(tmp_path / "without").keys()
    assert not hasattr(find_state(unpatch(model)), "extra")


@pytest.mark.parametrize("mtp_is_stacked", [True, False], ids=["Qwen3.6", "Qwen3.5"])
@pytest.mark.parametrize("loads", [AutoModelForImageTextToText, AutoModelForCausalLM])
def test_a_class_for_pictures_or_text_saves_what_stock_saves(
    loads: Any, mtp_is_stacked: bool, tmp_path: Path
) -> None:
    """The class for text ignores the tower, too, and Qwen3.5 has single experts in its head only.

    A save has the keys and values of stock's save, and the tensors that the class ignores. So has
    a training checkpoint that is converted.
    """
    base = tmp_path / "base"
    write_with_extra(base, "qwen3_5_moe", dtype=torch.bfloat16)
    if not mtp_is_stacked:
        _unstack_experts(base, "mtp.layers.0.mlp.experts")
    before = read_files(base)
    loads.from_pretrained(base).save_pretrained(tmp_path / "stock")
    stock = read_files(tmp_path / "stock")
    model = patch(loads.from_pretrained(base))
    model.save_pretrained(tmp_path / "saved")
    save_checkpoint(tmp_path / "step", model, None)
    convert(tmp_path / "step", tmp_path / "converted")
    ignored = {key for key in before if key.startswith("mtp.")}
    if loads is AutoModelForCausalLM:
        ignored |= {key for key in before if key.startswith("model.visual.")}
    for name in ("saved", "converted"):
        saved = read_files(tmp_path / name)
        assert saved.keys() == stock.keys() | ignored
        assert_same_bytes(saved, stock)
        assert_same_bytes(saved, {key: before[key] for key in ignored})
        stream = dict(hub_tensors(model))
        assert stream.keys() == saved.keys()
        assert_same_bytes(stream, saved)
    if loads is AutoModelForCausalLM:  # a head that may be trained is saved under the same keys
        patch(loads.from_pretrained(base), mtp_layers=1).save_pretrained(tmp_path / "head")
        assert_same_bytes(read_files(tmp_path / "head"), read_files(tmp_path / "saved"))


def test_a_conversion_for_the_whole_model_is_not_one_for_a_submodule(tmp_path: Path) -> None:
    """Published Qwen3-Omni thinkers have "thinker." before all keys.

    Two conversions of transformers 5.24 remove this prefix: one from the keys of the whole model,
    which this model needs, and one from the keys of its submodule "model".
    """
    whole = tiny("qwen3_omni_moe_thinker", dtype=torch.float32)
    whole.save_pretrained(tmp_path / "base")
    file = tmp_path / "base" / "model.safetensors"
    save_file({f"thinker.{key}": t for key, t in load_file(file).items()}, file, {"format": "pt"})
    model = type(whole).from_pretrained(tmp_path / "base")
    model.save_pretrained(tmp_path / "stock")
    patch(model)
    model.save_pretrained(tmp_path / "saved")
    save_checkpoint(tmp_path / "step", model, None)
    convert(tmp_path / "step", tmp_path / "converted")
    stock = read_files(tmp_path / "stock")
    for name in ("saved", "converted"):
        files = read_files(tmp_path / name)
        assert files.keys() == stock.keys()
        assert_same_bytes(files, stock)


def test_unknown_conversions_are_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another version of transformers may have other conversions than the one that saved."""
    write_with_extra(tmp_path / "base", "qwen3_5_moe", dtype=torch.float32)
    model = patch(load_stock(tmp_path / "base"))
    unknown = [[None, "of.another.version"]]
    monkeypatch.setattr(conversions, "describe_conversions", lambda model: unknown)
    save_checkpoint(tmp_path / "step", model, None)
    convert(tmp_path / "step", tmp_path / "converted")
    version = transformers.__version__
    assert f"written with transformers {version}, whose conversions" in caplog.text
    converted = read_files(tmp_path / "converted")
    assert any(key.endswith("experts.0.up_proj.weight") for key in converted)
    (tmp_path / "damaged.json").write_text("{}")
    with pytest.raises(ValueError, match=r"damaged\.json is damaged \('transformers'\)"):
        conversions.read_conversions(model, tmp_path / "damaged.json")


def test_a_second_run_removes_what_the_first_run_wrote(tmp_path: Path) -> None:
    """Both runs save to the same folder, and the second model was not loaded."""
    write_with_extra(tmp_path / "base", "qwen3_5_moe", dtype=torch.float32)
    names = {"conversions.json", "extra_tensors.json"}
    write_extra_and_conversions([patch(load_stock(tmp_path / "base"))], tmp_path)
    assert names <= {file.name for file in tmp_path.iterdir()}
    write_extra_and_conversions([patch(tiny("qwen3_5_moe"))], tmp_path)
    assert not names & {file.name for file in tmp_path.iterdir()}


def _unstack_experts(folder: Path, module: str) -> None:
    """Replace the stacked experts of a module by one tensor for each matrix of each expert."""
    state = read_files(folder)
    gate_up, down = (state.pop(f"{module}.{name}") for name in ("gate_up_proj", "down_proj"))
    for expert, (matrices, out) in enumerate(zip(gate_up, down, strict=True)):
        gate, up = matrices.chunk(2)
        for name, matrix in (("gate", gate), ("up", up), ("down", out)):
            state[f"{module}.{expert}.{name}_proj.weight"] = matrix.clone()
    for file in (*folder.glob("*.safetensors"), folder / INDEX):
        file.unlink()
    save_file(state, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("given", [False, True])
def test_one_process_saves_stacked_experts_and_extra_tensors(given: bool, tmp_path: Path) -> None:
    """LongCat-Flash also has weights of experts that no token uses."""
    stock = tiny("longcat_flash", dtype=torch.float32)
    stock.save_pretrained(tmp_path / "base")
    add_tensors(tmp_path / "base", {f"model.mtp.{i}": torch.randn(7) for i in range(2)})
    model = patch(AutoModelForCausalLM.from_pretrained(tmp_path / "base"))
    options = {"state_dict": model.state_dict()} if given else {}
    model.save_pretrained(tmp_path / "saved", **options)
    base = read_files(tmp_path / "base")
    assert read_files(tmp_path / "saved").keys() == base.keys()
    assert_same_bytes(read_files(tmp_path / "saved"), base)


def test_a_reward_model_does_not_save_the_head_of_a_causal_lm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TRL lets reward models ignore the output head, which their checkpoints do not have."""
    extra = write_with_extra(tmp_path / "base", "qwen3_next")
    kind = Qwen3NextForSequenceClassification
    monkeypatch.setattr(
        kind, "_keys_to_ignore_on_load_unexpected", [r"^mtp.*", r"^lm_head\."], raising=False
    )
    model = patch(kind.from_pretrained(tmp_path / "base", num_labels=2))
    model.save_pretrained(tmp_path / "saved")
    saved = read_files(tmp_path / "saved").keys()
    assert "lm_head.weight" in read_files(tmp_path / "base").keys() - saved
    assert extra.keys() < saved and "score.weight" in saved


def test_a_model_that_was_not_loaded_has_no_extra_tensors(tmp_path: Path) -> None:
    """The config names the folder, but the weights do not come from this folder."""
    write_with_extra(tmp_path / "base", "qwen3_next")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    model = patch(AutoModelForCausalLM.from_config(loaded.config))
    assert model.config._name_or_path == str(tmp_path / "base")
    assert find_state(model).extra is None


def test_a_source_that_is_gone_is_named_in_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_with_extra(tmp_path / "base", "qwen3_next")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    shutil.move(tmp_path / "base", tmp_path / "moved")
    patch(model)
    assert f"{tmp_path}/base does not exist" in caplog.text
    assert "saved checkpoints will not have them" in caplog.text


def _write_fine_tuned(folder: Path, target: Path, source: Path) -> None:
    """Write the weights of `source` to `target`, but one kind of matrix from `folder`.

    The result is like a model into which an adapter of this kind of matrix was merged.
    """
    shutil.copytree(source, target)
    other = read_files(folder)
    replace_tensors(target, {k: other[k] for k in read_files(target) if "shared_expert.up" in k})


def test_values_tell_which_model_of_a_folder_was_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The config names only the folder, so values are compared with all weights in it."""
    first, second = tmp_path / "first", tmp_path / "first" / "chat"
    write_with_extra(tmp_path / "other", "qwen3_next", seed=7)
    write_with_extra(first, "qwen3_next")
    _write_fine_tuned(tmp_path / "other", second, first)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "other")
    model.save_pretrained(first, variant="ema")
    cases = {"": first, "chat": second}
    for subfolder, folder in cases.items():
        model = AutoModelForCausalLM.from_pretrained(first, subfolder=subfolder)
        assert find_state(patch(model)).extra.folder == folder
    assert (
        find_state(patch(AutoModelForCausalLM.from_pretrained(first, variant="ema"))).extra is None
    )
    assert not caplog.text, "the files of the variant have no extra tensors"
    # Both models have the same embeddings, and layers are not read, but the files are known.
    monkeypatch.setenv("WORLD_SIZE", "2")
    with hooked(monkeypatch, ep_size=2):
        for subfolder, folder in cases.items():
            model = AutoModelForCausalLM.from_pretrained(first, subfolder=subfolder)
            assert model.model.layers[0].input_layernorm.weight.is_meta
            assert find_state(model).extra.folder == folder
    monkeypatch.undo()
    # Now the model has as many equal tensors in the first folder as in the second.
    model = _change_one_kind(AutoModelForCausalLM.from_pretrained(first, subfolder="chat"))
    assert find_state(patch(model)).extra is None
    assert "may have been loaded with subfolder= or variant=" in caplog.text


def _change_one_kind(model: Any) -> Any:
    """Change one kind of matrix in all layers, and the embeddings."""
    model.resize_token_embeddings(model.config.vocab_size + 3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "shared_expert.up" in name:
                parameter.mul_(2)
    return model


def _cast_twice(model: Any) -> Any:
    return model.to(torch.bfloat16).to(torch.float32)


def _adapt(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(target_modules=["q_proj"], target_parameters=list(EXPERTS))
    return get_peft_model(model, config)


@pytest.mark.parametrize("change", [_change_one_kind, _cast_twice, _adapt])
def test_the_source_of_a_model_with_a_few_changes_is_found(
    change: Callable[[Any], Any], tmp_path: Path
) -> None:
    extra = write_with_extra(tmp_path, "qwen3_next")
    model = patch(change(AutoModelForCausalLM.from_pretrained(tmp_path)))
    assert find_state(model).extra.tensors().keys() == extra.keys()


def test_tensors_that_stock_decoded_from_fp8_are_not_compared(tmp_path: Path) -> None:
    """The source of a model that stock has decoded from FP8 is found by the routers."""
    extra = write_with_extra(tmp_path, "deepseek_v3")
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    own = {k: t for k, t in read_files(tmp_path).items() if ".layers." in k and k not in extra}
    quantised = [k for k in own if k.endswith("_proj.weight")]
    replace_tensors(tmp_path, {key: own[key].to(torch.float8_e4m3fn) for key in quantised})
    assert len(quantised) > 10
    assert find_state(patch(model)).extra.tensors().keys() == extra.keys()


def test_a_model_that_stock_decoded_from_fp8_has_extra_tensors(tmp_path: Path) -> None:
    """From such a model transformers deletes `_weight_conversions`, which other models have."""
    stock = tiny("deepseek_v3", dtype=torch.bfloat16)
    stock.config.num_nextn_predict_layers = 1
    write_fp8(tmp_path, stock, block=(2, 2))
    made = extra_of("deepseek_v3", stock, read_files(tmp_path), in_fp8=False)
    extra = add_tensors(tmp_path, made)
    decoded = FineGrainedFP8Config(dequantize=True)

    def load_decoded() -> Any:
        return AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=decoded)

    assert find_state(patch(load_decoded())).extra.tensors().keys() == extra.keys()
    with_head = patch(load_decoded(), mtp_layers=1)
    enorm = with_head.state_dict()["mtp.model.layers.4.enorm.weight"]
    assert torch.equal(enorm, extra["model.layers.4.enorm.weight"])


def test_an_overwritten_folder_is_named_in_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The other model has the same embeddings and norms, like another fine-tuned version."""
    write_with_extra(tmp_path / "base", "qwen3_next")
    write_with_extra(tmp_path / "other", "qwen3_next", seed=1)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    other = read_files(tmp_path / "other")
    changed = [
        k for k, t in read_files(tmp_path / "base").items() if ".layers." in k and t.ndim > 1
    ]
    replace_tensors(tmp_path / "base", {key: other[key] for key in changed})
    assert find_state(patch(model)).extra is None
    assert f"the weights in {tmp_path}/base are not those of this model" in caplog.text
    assert "saved checkpoints will not have them" in caplog.text


def test_a_source_that_was_lost_before_a_save_ends_the_conversion(tmp_path: Path) -> None:
    """The training checkpoint is saved without the tensors, and names the missing source."""
    extra = write_with_extra(tmp_path / "base", "qwen3_next")
    model = patch(AutoModelForCausalLM.from_pretrained(tmp_path / "base"))
    shutil.move(tmp_path / "base", tmp_path / "moved")
    save_checkpoint(tmp_path / "step", model, None)
    with pytest.raises(ValueError, match=rf"{tmp_path}/base .* were lost before .*--no-extra-te"):
        convert(tmp_path / "step", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    arguments = ["convert", str(tmp_path / "step"), str(tmp_path / "out"), "--no-extra-tensors"]
    assert main(arguments) == 0
    assert not extra.keys() & read_files(tmp_path / "out").keys()


def test_a_conversion_compares_hashes(tmp_path: Path) -> None:
    write_with_extra(tmp_path / "base", "qwen3_next")
    model = patch(AutoModelForCausalLM.from_pretrained(tmp_path / "base"))
    save_checkpoint(tmp_path / "step", model, None)
    file = tmp_path / "base" / "extra.safetensors"
    content = file.read_bytes()
    file.write_bytes(content)  # the same bytes at another time
    convert(tmp_path / "step", tmp_path / "same")
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(ValueError, match=r"extra.safetensors: mtp.* has changed: sha256 [0-9a-f]+"):
        convert(tmp_path / "step", tmp_path / "out")
    with pytest.raises(ValueError, match=r"extra.safetensors: mtp.* has changed: sha256 [0-9a-f]+"):
        verify(tmp_path / "step")
    assert not (tmp_path / "out").exists()


def test_damaged_references_are_an_error(tmp_path: Path) -> None:
    file = FileTensor(tmp_path / "a.safetensors", torch.float32, (2,), 0)
    file.file.write_bytes(bytes(8))
    content = FileReferences.of(tmp_path, {"a": file}).to_json()
    assert FileReferences.from_json(content, tmp_path / "extra.json").tensors() == {"a": file}
    for damage in (
        {"tensors": {"a": {"file": "b"}}},
        {"format": 7},
        {"files": None},
        {"tensors": {"a": content["tensors"]["a"] | {"sha256": "00"}}},
        {"tensors": {"a": content["tensors"]["a"] | {"dtype": "F3"}}},
    ):
        with pytest.raises(ValueError, match=r"extra.json is damaged \(.*\); load an older"):
            FileReferences.from_json(content | damage, tmp_path / "extra.json")


def _list_expert_tensors(folder: Path, count: int) -> dict[str, FileTensor]:
    """List FP8 matrices of experts and their scales, as the head of DeepSeek-V3 has them."""
    tensors: dict[str, FileTensor] = {}
    kinds = (
        ("gate_proj.weight", torch.float8_e4m3fn, (2048, 7168)),
        ("gate_proj.weight_scale_inv", torch.float32, (16, 56)),
    )
    for expert in range(count // len(kinds)):
        file, start = folder / f"model-{expert % 4}.safetensors", 2**33 + expert * 14_683_648
        for name, dtype, shape in kinds:
            key = f"model.layers.61.mlp.experts.{expert}.{name}"
            tensors[key] = FileTensor(file, dtype, shape, start)
            start += tensors[key].nbytes
    return tensors


def test_references_take_less_than_a_mebibyte_for_10_000_tensors(tmp_path: Path) -> None:
    """Keys, positions and hashes are counted."""
    for number in range(4):
        (tmp_path / f"model-{number}.safetensors").touch()

    def draw_hashes(keys: Iterable[str]) -> dict[str, bytes]:
        draw = random.Random(0)
        return {key: draw.randbytes(32) for key in keys}

    tracemalloc.start()
    try:
        tensors = _list_expert_tensors(tmp_path, 10_000)
        references = FileReferences.of(tmp_path, tensors, digests=draw_hashes(tensors))
        del tensors
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert taken <= 2**20
    assert references.tensors() == _list_expert_tensors(tmp_path, 10_000)
    assert references.get_known_digests() == draw_hashes(references.tensors())


def test_a_name_of_the_hub_is_found_in_its_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Values tell which commit was loaded, also if the branch has another commit now."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    cache = tmp_path / "models--owner--model"
    loaded, newer, copied = (cache / "snapshots" / (letter * 40) for letter in "abc")
    extra = write_with_extra(loaded, "qwen3_next")
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text(loaded.name)
    options = {"cache_dir": str(tmp_path), "local_files_only": True}
    model = AutoModelForCausalLM.from_pretrained("owner/model", **options)
    assert find_state(patch(copy.deepcopy(model))).extra.folder == loaded
    write_with_extra(newer, "qwen3_next", seed=1)
    (cache / "refs" / "main").write_text(newer.name)
    references = find_state(patch(copy.deepcopy(model))).extra
    assert references.source == "owner/model" and references.folder == loaded
    assert references.tensors().keys() == extra.keys()
    shutil.copytree(loaded, copied)
    if getattr(model.config, "_commit_hash", None) == loaded.name:  # Transformers before 5.24
        assert find_state(patch(model)).extra.folder == loaded
        return
    assert find_state(patch(model)).extra is None
    assert f"2 of 3 folders in the cache have the weights of this model: {loaded}" in caplog.text


def test_commits_without_weights_or_with_the_same_files_are_no_other_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The hub's client links a file that a new commit has not changed to the file in the cache."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    cache = tmp_path / "models--owner--model"
    config, loaded, readme, partial_download = (
        cache / "snapshots" / (letter * 40) for letter in "abcd"
    )
    extra = write_with_extra(cache / "blobs", "qwen3_next")
    for folder in (loaded, readme):
        folder.mkdir(parents=True)
        for path in (cache / "blobs").iterdir():
            (folder / path.name).symlink_to(Path("..", "..", "blobs", path.name))
    (readme / "README.md").write_text("This commit has the same weights.")
    for folder, name in ((config, "config.json"), (partial_download, INDEX)):
        folder.mkdir()
        shutil.copy(cache / "blobs" / name, folder)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text(loaded.name)
    options = {"cache_dir": str(tmp_path), "local_files_only": True}
    model = AutoModelForCausalLM.from_pretrained("owner/model", **options)
    monkeypatch.setattr(model.config, "_commit_hash", None, raising=False)  # as Transformers 5.24
    with_head = patch(copy.deepcopy(model), mtp_layers=1)
    assert torch.equal(with_head.state_dict()["mtp.fc.weight"].bfloat16(), extra["mtp.fc.weight"])
    patch(model).save_pretrained(tmp_path / "saved")
    assert_same_bytes(read_files(tmp_path / "saved"), read_files(loaded))
    assert not caplog.text


def save_until_killed(
    rank: int, world: int, folder: str, target: str, victim: int, after: float
) -> None:
    """Save versions 0, 1, 2, .. of the model's own weights until rank `victim` is killed."""
    all_ranks.PATIENCE = timedelta(seconds=5)  # instead of 5 minutes for the killed rank
    model = from_pretrained(Path(folder), ep_size=2)
    if rank == victim:
        kill_later(after)
    for version in range(1000):
        with torch.no_grad():
            for tensor in (*model.parameters(), *dict(iterate_persistent_buffers(model)).values()):
                tensor.fill_(version)
        save_pretrained(model, target, max_shard_size=SHARD_SIZE)


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [20])
def test_after_a_kill_a_folder_has_one_version_and_the_extra_tensors(
    rounds: int, tmp_path: Path
) -> None:
    """Every second round saves over the files from which the model was loaded.

    A round that is killed before its first commit does not count.
    """
    draw, versions, checked, number = random.Random(rounds), set(), 0, 0
    extra = write_with_extra(tmp_path / "base", "glm4_moe")
    before = read_files(tmp_path / "base")
    loaded = {float(t.float().mean()) for key, t in before.items() if key not in extra}
    while checked < rounds:
        number += 1
        assert number <= 2 * rounds, "most kills come before the first commit"
        source, in_place = tmp_path / f"base{number}", checked % 2 == 1
        shutil.copytree(tmp_path / "base", source)
        target = source if in_place else tmp_path / f"out{number}"
        victim, after = draw.randrange(2), draw.uniform(0.3, 1.5)
        arguments = (str(source), str(target), victim, after)
        outcomes = run_ranks_until_death(*arguments)
        assert outcomes[victim] == "ProcessDied", outcomes
        if not (target / INDEX).is_file():
            continue
        checked += 1
        state = read_files(target)
        assert_same_bytes(state, extra)
        own = {key: tensor for key, tensor in state.items() if key not in extra}
        values = {float(tensor.float().mean()) for tensor in own.values()}
        # Before the first commit, the source of the round has the weights that were loaded.
        assert len(values) == 1 or (in_place and values == loaded), f"a mixture: {values}"
        versions |= values if len(values) == 1 else set()
        AutoModelForCausalLM.from_pretrained(target)
    assert len(versions) > 1, "all kills came at the same version"


def run_ranks_until_death(folder: str, target: str, victim: int, after: float) -> list[str]:
    outcomes = run_ranks(
        save_until_killed, 2, folder, target, victim, after,
        expect_errors=True, group_timeout=20.0,
    )  # fmt: skip
    return [outcome[1] for outcome in outcomes]
