"""Tensors that a model's class ignores are in every checkpoint that is saved, byte for byte.

The tests load tiny checkpoints with layers for multi-token prediction (`support.extra_files`),
train on two ranks, and save in every way.
"""

import copy
import json
import os
import random
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
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
from hf_moe_ep.checkpoints.verify import verify
from hf_moe_ep.cli.main import main
from hf_moe_ep.ranks import all_ranks
from hf_moe_ep.state import find_state
from hf_moe_ep.upstream.models import persistent_buffers

WAYS = ("lean", "stock")
SHARD = "60KB"
SHARDED, FULL = "SHARDED_STATE_DICT", "FULL_STATE_DICT"


def load(way: str, folder: Path, **options: Any) -> nn.Module:
    """Load a checkpoint in shards, or whole with stock's from_pretrained."""
    if way == "lean":
        return from_pretrained(folder, **options)
    return apply_ep_fsdp2(patch(AutoModelForCausalLM.from_pretrained(folder), **options))


def train(model: Any, optimizer: torch.optim.Optimizer, rank: int, steps: int = 3) -> None:
    for step in range(steps):
        model(**batch(model, 2, 9, seed=2 * step + rank)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def write_on_first(rank: int, write: Callable[[], object]) -> None:
    if rank == 0:
        write()
    dist.barrier()


def every_save_has_them(model_type: str, way: str, rank: int, world: int, folder: str) -> None:
    """Load, train at ep 2, save in every way; resume at ep 1, and save again."""
    root = Path(folder)
    base = root / "base"
    write_on_first(rank, lambda: write_with_extra(base, model_type))
    before = read_files(base)
    own = AutoModelForCausalLM.from_pretrained(base).state_dict().keys()
    model = load(way, base, ep_size=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, rank)
    save_pretrained(model, root / "saved", max_shard_size=SHARD)
    model.save_pretrained(root / "method")
    save_checkpoint(root / "step", model, optimizer)
    stream = dict(hub_tensors(model, max_bytes=100_000))
    saved = read_files(root / "saved")
    assert saved.keys() == before.keys()
    changed = {key for key in saved if not torch.equal(saved[key].float(), before[key].float())}
    extra = {key: tensor for key, tensor in before.items() if key not in changed}
    assert len(extra) >= 10 and changed, "training changes the model's own tensors"
    from_first = load("lean", root / "saved", ep_size=2)
    names = {key for key in before if is_of_head(key, from_first)}
    assert names and names <= extra.keys() and not names & own
    assert_same_bytes(saved, {key: before[key] for key in names})
    assert_same_bytes(read_files(root / "method"), saved)
    assert_same_bytes(stream, saved)
    assert stream.keys() == saved.keys()
    if rank == 0:
        convert(root / "step", root / "converted", max_shard_size=SHARD)
        assert_same_bytes(read_files(root / "converted"), saved)
        AutoModelForCausalLM.from_pretrained(root / "saved")
    dist.barrier()
    for name in ("saved", "method", "converted"):
        config = json.loads((base / "config.json").read_text())
        assert json.loads((root / name / "config.json").read_text()) == config
        facts = verify(root / name).facts
        assert facts["ignored tensors"].startswith(f"{len(names)}, such as ")
    assert verify(root / "step").facts["ignored tensors"].startswith(f"{len(names)} in ")
    resumed = load(way, base, ep_size=1)
    new_optimizer = torch.optim.AdamW(resumed.parameters(), lr=1e-2)
    load_checkpoint(root / "step", resumed, new_optimizer)
    save_pretrained(resumed, root / "again")
    assert_same_bytes(read_files(root / "again"), saved)


MATRIX = {
    f"{model_type} {way}": partial(every_save_has_them, model_type, way)
    for model_type in TYPES
    for way in WAYS
}


@pytest.mark.parametrize("claim", on_ranks(2, MATRIX, slow=True))
def test_every_save_has_the_extra_tensors(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)


def source_that_changes(rank: int, world: int, folder: str) -> None:
    """Nothing is written if the files have changed or are gone, and the error says which."""
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


def saves_over_its_own_source(rank: int, world: int, folder: str) -> None:
    """A save that replaces the loaded files copies the tensors first, and refers to the copies."""
    root = Path(folder)
    write_on_first(rank, lambda: write_with_extra(root / "base", "qwen3_next"))
    before = read_files(root / "base")
    model = from_pretrained(root / "base", ep_size=2)
    for _ in range(3):
        save_pretrained(model, root / "base", max_shard_size=SHARD)
        dist.barrier()
        assert_same_bytes(read_files(root / "base"), before)


def undeclared_tensors_need_the_option(rank: int, world: int, folder: str) -> None:
    """Keys that the class does not declare as ignored are an error, or are carried on request."""
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


def one_name_twice(rank: int, world: int, folder: str) -> None:
    """A key of the model that is extra too, and two sources of one key, are errors."""
    root = Path(folder)

    def write() -> None:
        write_with_extra(root / "base", "qwen3_5_moe_text")
        write_with_extra(root / "other", "qwen3_5_moe_text", seed=1)
        other = {
            key: tensor + 1 for key, tensor in read_files(root / "other").items() if "mtp.fc" in key
        }
        edit_file(root / "other", other)

    write_on_first(rank, write)
    model = from_pretrained(root / "base", ep_size=2)
    save_checkpoint(root / "step", model, None)
    other = from_pretrained(root / "other", ep_size=2)
    words = rf"two tensors are called mtp.fc.weight: {root}/other/.* names {root}/base/"
    with pytest.raises(ValueError, match=words):
        load_checkpoint(root / "step", other, None)
    # An extra tensor whose key is one that the model writes.
    references = find_state(model).extra if rank == 0 else None
    if references is not None:
        tensors = references.tensors()
        tensors["lm_head.weight"] = tensors.pop("mtp.fc.weight")
        find_state(model).extra = FileReferences.of(root / "base", tensors)
    with pytest.raises(ValueError, match=rf"two tensors are called lm_head.weight: .*{root}/base/"):
        save_pretrained(model, root / "out")
    assert not (root / "out").exists()


def test_a_key_that_the_model_saves_and_that_is_extra_names_both_files(tmp_path: Path) -> None:
    """The model reads stacked experts and saves single ones; one single expert is ignored."""
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


def test_two_files_with_one_extra_tensor_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`hf-moe-ep run` knows the files that stock loads; the last of them has precedence."""
    write_with_extra(tmp_path, "qwen3_next")
    file, key = tmp_path / "extra.safetensors", "mtp.norm.weight"
    other = tmp_path / json.loads((tmp_path / INDEX).read_text())["weight_map"][key]
    save_file(load_file(file) | {key: torch.zeros(1)}, file, {"format": "pt"})
    words = f"two tensors are called {key}: one in {file}, and one in {other}"
    with hooked(monkeypatch), pytest.raises(ValueError, match=words):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def edit_file(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Replace tensors of a checkpoint."""
    index = json.loads((folder / INDEX).read_text())["weight_map"]
    state = read_files(folder)
    for name in {index[key] for key in tensors}:
        in_file = {key: state[key] for key, file in index.items() if file == name}
        save_file(in_file | {k: t for k, t in tensors.items() if k in in_file}, folder / name)


def train_adapters(rank: int, world: int, folder: str) -> list[str]:
    """Train LoRA on two ranks, save the adapter, and return the keys of a stream for an engine."""
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
def test_adapters_are_merged_into_a_base_with_them(model_type: str, tmp_path: Path) -> None:
    extra = write_with_extra(tmp_path / "base", model_type)
    before = read_files(tmp_path / "base")
    streams = run_ranks(train_adapters, 2, str(tmp_path))
    assert main(["merge-adapter", *(str(tmp_path / n) for n in ("base", "adapter", "merged"))]) == 0
    merged = read_files(tmp_path / "merged")
    assert merged.keys() == before.keys()
    assert [sorted(merged)] * 2 == streams
    assert_same_bytes(merged, extra)
    own = before.keys() - extra.keys()
    expert = next(key for key in sorted(own) if re.search(r"\.experts.*down_proj", key))
    assert not torch.equal(merged[expert], before[expert])


@contextmanager
def _hidden(rank: int, folder: Path) -> Iterator[None]:
    """Rename a folder on rank 0 inside the block, as if somebody had deleted it."""
    hidden = folder.with_name("hidden")
    write_on_first(rank, lambda: folder.rename(hidden))
    yield
    dist.barrier()
    write_on_first(rank, lambda: hidden.rename(folder))


def with_the_trainer(kind: str, rank: int, world: int, folder: str) -> None:
    """trainer.save_model, and a checkpoint of the Trainer: itself, converted, and resumed."""
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
        with _hidden(rank, root / "base"):
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


def tiny_trainer(folder: Path, model: nn.Module, callback: Any, **options: Any) -> Any:
    """Return a Trainer of a model that saves a checkpoint after each of two steps."""
    from transformers import Trainer, TrainingArguments

    args = TrainingArguments(
        str(folder), max_steps=2, save_steps=1, use_cpu=True, report_to="none",
        per_device_train_batch_size=1, disable_tqdm=True, **options,
    )  # fmt: skip
    rows = [{k: v[0] for k, v in batch(model, 1, 9, seed=i).items()} for i in range(8)]
    return Trainer(model, args, train_dataset=rows, callbacks=[callback])


class Hide(TrainerCallback):
    """Renames a folder after the first checkpoint, as if somebody had deleted it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 1 and int(os.environ.get("RANK", 0)) == 0:
            self.folder.rename(self.folder.with_name("hidden"))


def trained_without_its_source(rank: int, world: int, folder: str) -> None:
    """The Trainer's checkpoints with FULL_STATE_DICT."""
    root = Path(folder)
    write_on_first(rank, lambda: write_with_extra(root / "base", "qwen3_next"))
    with launched(FSDP_STATE_DICT_TYPE=FULL):
        model = patch(AutoModelForCausalLM.from_pretrained(root / "base"), ep_size=2)
        trainer = tiny_trainer(root / "run", model, Hide(root / "base"))
        warned = pytest.warns(UserWarning, match="is saved without the tensors of .*readable")
        with warned if rank == 0 else nullcontext():
            trainer.train()
    dist.barrier()
    before, after = (read_files(root / "run" / f"checkpoint-{step}") for step in (1, 2))
    assert after.keys() == {key for key in before if not is_of_head(key, model)} != before.keys()


def test_the_trainer_goes_on_without_its_source(tmp_path: Path) -> None:
    """In one process; trainer.save_model, too."""
    extra = write_with_extra(tmp_path / "base", "qwen3_next")
    model = patch(AutoModelForCausalLM.from_pretrained(tmp_path / "base"))
    trainer = tiny_trainer(tmp_path / "run", model, Hide(tmp_path / "base"))
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


def with_accelerate(rank: int, world: int, folder: str) -> None:
    """accelerator.save_state: converted, and loaded again by a model that is saved then."""
    root = Path(folder)
    write_on_first(rank, lambda: write_with_extra(root / "base", "glm4_moe"))
    before = read_files(root / "base")
    models = [AutoModelForCausalLM.from_pretrained(root / "base") for _ in range(2)]
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


ON_TWO_RANKS = (
    source_that_changes,
    saves_over_its_own_source,
    undeclared_tensors_need_the_option,
    one_name_twice,
)
IN_OTHER_WAYS = {
    "with the trainer": partial(with_the_trainer, SHARDED),
    "with the trainer, full state dict": partial(with_the_trainer, FULL),
    "with accelerate": with_accelerate,
    "with the trainer, without its source": trained_without_its_source,
}


@pytest.mark.parametrize(
    "claim", on_ranks(2, *ON_TWO_RANKS) + on_ranks(2, IN_OTHER_WAYS, slow=True)
)
def test_on_two_ranks(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)


def test_one_process_saves_them_by_the_method_of_the_model(tmp_path: Path) -> None:
    """A patched model that is not sharded; stock's save_pretrained would lose them."""
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


@pytest.mark.parametrize("given", [False, True])
def test_one_process_saves_stacked_experts_and_them(given: bool, tmp_path: Path) -> None:
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


def test_the_output_head_of_a_causal_lm_is_not_in_a_reward_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TRL lets reward models ignore this head, as other classes ignore what is not theirs."""
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


def test_a_model_that_was_not_loaded_has_none(tmp_path: Path) -> None:
    """The config names the folder, but the weights do not come from it."""
    write_with_extra(tmp_path / "base", "qwen3_next")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    model = patch(AutoModelForCausalLM.from_config(loaded.config))
    assert model.config._name_or_path == str(tmp_path / "base")
    assert find_state(model).extra is None


def test_a_source_that_cannot_be_found_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_with_extra(tmp_path / "base", "qwen3_next")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    shutil.move(tmp_path / "base", tmp_path / "moved")
    patch(model)
    assert f"{tmp_path}/base does not exist" in caplog.text
    assert "saved checkpoints will not have them" in caplog.text


def merged(folder: Path, target: Path, source: Path) -> None:
    """Write the weights of `source` to `target`, with other weights in one kind of matrix.

    So does a fine-tuning whose adapters are merged. `folder` has the other weights.
    """
    shutil.copytree(source, target)
    other = read_files(folder)
    edit_file(target, {k: other[k] for k in read_files(target) if "shared_expert.up" in k})


def test_a_folder_with_several_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The config names the folder only. Values tell which of its weights were loaded."""
    first, second = tmp_path / "first", tmp_path / "first" / "chat"
    write_with_extra(tmp_path / "other", "qwen3_next", seed=7)
    write_with_extra(first, "qwen3_next")
    merged(tmp_path / "other", second, first)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "other")
    model.save_pretrained(first, variant="ema")
    cases = {"": first, "chat": second}
    for subfolder, folder in cases.items():
        model = AutoModelForCausalLM.from_pretrained(first, subfolder=subfolder)
        assert find_state(patch(model)).extra.folder == folder
    assert (
        find_state(patch(AutoModelForCausalLM.from_pretrained(first, variant="ema"))).extra is None
    )
    assert not caplog.text, "the files of the variant have no such tensors"
    # Both models have the same embeddings, and the layers are not read: the files are known.
    monkeypatch.setenv("WORLD_SIZE", "2")
    with hooked(monkeypatch, ep_size=2):
        for subfolder, folder in cases.items():
            model = AutoModelForCausalLM.from_pretrained(first, subfolder=subfolder)
            assert model.model.layers[0].input_layernorm.weight.is_meta
            assert find_state(model).extra.folder == folder
    monkeypatch.undo()
    # Now the first model is as near as the second.
    model = change_one_kind(AutoModelForCausalLM.from_pretrained(first, subfolder="chat"))
    assert find_state(patch(model)).extra is None
    assert "may have been loaded with subfolder= or variant=" in caplog.text


def change_one_kind(model: Any) -> Any:
    """Change one kind of matrix in all layers, and the embeddings."""
    model.resize_token_embeddings(model.config.vocab_size + 3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "shared_expert.up" in name:
                parameter.mul_(2)
    return model


def cast_twice(model: Any) -> Any:
    return model.to(torch.bfloat16).to(torch.float32)


def adapt(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(target_modules=["q_proj"], target_parameters=list(EXPERTS))
    return get_peft_model(model, config)


@pytest.mark.parametrize("change", [change_one_kind, cast_twice, adapt])
def test_a_model_that_was_changed_a_little(change: Callable[[Any], Any], tmp_path: Path) -> None:
    extra = write_with_extra(tmp_path, "qwen3_next")
    model = patch(change(AutoModelForCausalLM.from_pretrained(tmp_path)))
    assert find_state(model).extra.tensors().keys() == extra.keys()


def test_quantised_tensors_are_not_compared(tmp_path: Path) -> None:
    """A model that stock has decoded from FP8 is found by its routers."""
    extra = write_with_extra(tmp_path, "deepseek_v3")
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    own = {k: t for k, t in read_files(tmp_path).items() if ".layers." in k and k not in extra}
    quantised = [k for k in own if k.endswith("_proj.weight")]
    edit_file(tmp_path, {key: own[key].to(torch.float8_e4m3fn) for key in quantised})
    assert len(quantised) > 10
    assert find_state(patch(model)).extra.tensors().keys() == extra.keys()


def test_a_model_that_stock_decoded_from_fp8_has_them(tmp_path: Path) -> None:
    """transformers then deletes `_weight_conversions`, which other loaded models have."""
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


def test_a_folder_that_was_overwritten(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The embeddings and norms are the same, as in two fine-tunings of one model."""
    write_with_extra(tmp_path / "base", "qwen3_next")
    write_with_extra(tmp_path / "other", "qwen3_next", seed=1)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    other = read_files(tmp_path / "other")
    changed = [
        k for k, t in read_files(tmp_path / "base").items() if ".layers." in k and t.ndim > 1
    ]
    edit_file(tmp_path / "base", {key: other[key] for key in changed})
    assert find_state(patch(model)).extra is None
    assert f"the weights in {tmp_path}/base are not those of this model" in caplog.text
    assert "saved checkpoints will not have them" in caplog.text


def test_a_lost_source_is_an_error_of_the_conversion(tmp_path: Path) -> None:
    """A training checkpoint is saved all the same, and says what is missing."""
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


def test_a_name_of_the_hub_is_found_in_its_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The commit that was loaded is found by its values, whatever the branch is now."""
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
    of_loaded = find_state(patch(copy.deepcopy(model))).extra
    assert of_loaded.source == "owner/model" and of_loaded.folder == loaded
    assert of_loaded.tensors().keys() == extra.keys()
    shutil.copytree(loaded, copied)
    if getattr(model.config, "_commit_hash", None) == loaded.name:  # Transformers before 5.24
        assert find_state(patch(model)).extra.folder == loaded
        return
    assert find_state(patch(model)).extra is None
    assert f"2 of 3 folders in the cache have the weights of this model: {loaded}" in caplog.text


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
            for tensor in (*model.parameters(), *dict(persistent_buffers(model)).values()):
                tensor.fill_(version)
        save_pretrained(model, target, max_shard_size=SHARD)


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [20])
def test_after_a_kill_the_folder_has_one_version_and_them(rounds: int, tmp_path: Path) -> None:
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
