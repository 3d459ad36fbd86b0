"""A checkpoint loads at another layout with the same bits, and the next step is the same."""

import errno
import json
import os
import re
import shutil
import threading
import warnings
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.close import assert_close
from support.jobs.resume import ORIGIN, Layout, Run, assert_equal, draws, everything, start, step
from support.ranks import run_ranks
from support.small_disk import small_disk
from support.tiny_models import tiny
from torch import Tensor

from hf_moe_ep import patch, save_pretrained
from hf_moe_ep.checkpoints.storage import manifest
from hf_moe_ep.checkpoints.training import folder as training_folder
from hf_moe_ep.checkpoints.training import save as training_save
from hf_moe_ep.checkpoints.training.load import load_checkpoint
from hf_moe_ep.checkpoints.training.save import save_checkpoint
from hf_moe_ep.ranks import all_ranks

BUDGET = 1e-10  # fp64; another layout sums in another order
SMALL_DISK = 2 * 2**20  # room for one checkpoint of 1.36 MB, not for two
PROGRESS = {"step": 2, "position": (3, 4), "seen": {5: [0.1, None, "x"]}}
LAYOUTS = {
    "full": [
        Layout("two", 2, {"ep_size": 2}),
        Layout("unsharded", 1),
    ],
    "lora": [
        Layout("sp2", 4, {"ep_size": 2, "sp_size": 2}),
        Layout("unsharded", 1),
    ],
}
MORE_LAYOUTS = {
    "full": [
        Layout("ep1", 4, {"ep_size": 1}),
        Layout("ep4", 4, {"ep_size": 4}),
        Layout("hsdp", 4, {"ep_size": 2, "dp_replicate_size": 2}),
        Layout("dim1", 4, {"ep_size": 1, "expert_shard_dim": 1}),
        Layout("sp2", 4, {"ep_size": 2, "sp_size": 2}),
        Layout("cp2", 4, {"ep_size": 2, "cp_size": 2}),
        Layout("one", 1, {"ep_size": 1}),
    ],
    "lora": [
        Layout("ep4", 4, {"ep_size": 4}),
        Layout("dim1", 4, {"ep_size": 1, "expert_shard_dim": 1}),
        Layout("two", 2, {"ep_size": 1}),
    ],
    "vision": [Layout("two", 2, {"ep_size": 1})],
}


def _check_next_step(where: str, run: Run, expected: dict[str, Any]) -> None:
    step(run, 2)
    state = everything(run)
    for name, value in expected.items():
        if isinstance(value, Tensor):
            assert_close(f"{where}: next step: {name}", state[name], value, BUDGET)
    assert state["scheduler"]["last_epoch"] == 3


def _save_at_origin(rank: int, world: int, folder: str, kind: str) -> list[float]:
    torch.manual_seed(rank)
    run = start(kind, ORIGIN)
    for number in range(2):
        step(run, number)
    with torch.no_grad():  # this forward leaves FSDP2 units unsharded
        run.model.eval()(input_ids=torch.tensor([[1, 2, 3]]))
        run.model.train()
    save_checkpoint(f"{folder}/origin", run.model, run.optimizer, run.scheduler, progress=PROGRESS)
    drawn, saved = draws(), everything(run)
    step(run, 2)
    after = everything(run)
    if rank == 0:
        torch.save((saved, after), f"{folder}/expected.pt")
    return drawn


def _load(
    rank: int, world: int, folder: str, kind: str, layouts: list[Layout], source: str, target: str
) -> list[Any]:
    """Load `source`, compare, save as `target` and take a step, at each layout.

    Returns random numbers, and warnings about random generators, of each layout.
    """
    saved, after = torch.load(f"{folder}/expected.pt", weights_only=False)
    results = []
    for layout in layouts:
        torch.manual_seed(100 + rank)
        run = start(kind, layout, seed=7)
        step(run, 9)  # the load has to replace this state
        with torch.no_grad():
            run.model.eval()(input_ids=torch.tensor([[1, 2, 3]]))
            run.model.train()
        where = f"{kind} {source.format(layout.name)} at {layout.name}"
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            progress = load_checkpoint(
                f"{folder}/{source.format(layout.name)}", run.model, run.optimizer, run.scheduler
            )
        messages = [str(w.message) for w in caught if "seeded anew" in str(w.message)]
        results.append((draws(), messages))
        assert progress == PROGRESS, progress
        assert_equal(where, everything(run), saved)
        if target:
            save_checkpoint(
                f"{folder}/{target.format(layout.name)}",
                run.model,
                run.optimizer,
                run.scheduler,
                progress=progress,
            )
        _check_next_step(where, run, after)
        if dist.is_initialized():
            dist.barrier()
    return results


def _load_again_at_origin(rank: int, world: int, folder: str, kind: str, names: list[str]) -> None:
    for name in names:
        _load(rank, world, folder, kind, [ORIGIN], name, "")


def test_a_checkpoint_loads_at_other_layouts(tmp_path: Path) -> None:
    _load_at_other_layouts(str(tmp_path), "full", LAYOUTS["full"])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["full", "lora", "vision"])
def test_a_checkpoint_of_any_layout_loads_at_any_other_and_back(tmp_path: Path, kind: str) -> None:
    table = LAYOUTS.get(kind, []) + MORE_LAYOUTS[kind]
    _load_at_other_layouts(str(tmp_path), kind, table)
    run_ranks(
        _load_again_at_origin, 4, str(tmp_path), kind, [f"from-{layout.name}" for layout in table]
    )


def _load_at_other_layouts(folder: str, kind: str, table: list[Layout]) -> None:
    """Save at ORIGIN, then call `_load` for each layout of the table, and check random numbers."""
    drawn = run_ranks(_save_at_origin, 4, folder, kind)
    for world in (4, 2, 1):
        layouts = [layout for layout in table if layout.world == world and layout.config]
        if not layouts:
            continue
        ranks = run_ranks(_load, world, folder, kind, layouts, "origin", "from-{}")
        for index, layout in enumerate(layouts):
            numbers = [results[index][0] for results in ranks]
            texts = [text for results in ranks for text in results[index][1]]
            if layout.data_ranks == ORIGIN.data_ranks:
                assert numbers == drawn and not texts, layout
            else:
                per_data_rank = numbers[:: world // layout.data_ranks]
                assert len({tuple(n) for n in [*per_data_rank, *drawn]}) == layout.data_ranks + 4
                assert {tuple(n) for n in numbers} == {tuple(n) for n in per_data_rank}
                assert len(texts) == 1 and "by 4 data ranks" in texts[0], texts
                assert f"this run has {layout.data_ranks} on cpu" in texts[0]
    for layout in table:
        if not layout.config:
            _load(0, 1, folder, kind, [layout], "origin", "from-{}")


TWO = Layout("two", 2, {"ep_size": 2})


def _save_run(run: Run, folder: str, **options: Any) -> Any:
    return save_checkpoint(folder, run.model, run.optimizer, run.scheduler, **options)


def _load_run(run: Run, folder: str) -> dict[str, Any]:
    return load_checkpoint(folder, run.model, run.optimizer, run.scheduler)


def _save_in_background(rank: int, world: int, folder: str) -> None:
    """Steps after the call do not change the files, and a second save waits for the first."""
    run = start("full", TWO)
    step(run, 0)
    first_state, stepped = everything(run), threading.Event()
    stock_write = training_folder.write_tensors

    def delayed_write(*args: Any) -> None:
        assert stepped.wait(30)
        stock_write(*args)

    with mock.patch.object(training_folder, "write_tensors", delayed_write):
        handle = _save_run(run, f"{folder}/one", asynchronous=True, progress={"step": 1})
        step(run, 1)  # its collectives and the collectives of the save overlap in time
        stepped.set()
        step(run, 2)
        second_save = _save_run(run, f"{folder}/two", asynchronous=True)
        manifest.check_sizes(f"{folder}/one")  # complete, because the second save waited for it
    handle.wait()
    second_state = everything(run)
    step(run, 3)
    second_save.wait()
    other = start("full", TWO, seed=5)
    assert _load_run(other, f"{folder}/one") == {"step": 1}
    assert_equal("first", everything(other), first_state)
    assert _load_run(other, folder) == {}  # the newest
    assert_equal("second", everything(other), second_state)


def test_a_save_in_the_background_has_the_state_at_its_call(tmp_path: Path) -> None:
    run_ranks(_save_in_background, 2, str(tmp_path))


def _save_to_full_disk(rank: int, world: int, folder: str, real: bool) -> list[str]:
    """Every rank raises an error with the failed rank and the cause. The older checkpoint loads."""
    run = start("full", TWO)
    step(run, 0)
    _save_run(run, f"{folder}/one")
    saved, messages = everything(run), []
    step(run, 1)

    def raise_no_space(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    write = raise_no_space if rank == 1 and not real else training_folder.write_json
    with mock.patch.object(training_folder, "write_json", write):
        for raised_by in ("at once", "wait", "next save"):
            with pytest.raises(RuntimeError) as caught:
                handle = _save_run(run, f"{folder}/two", asynchronous=raised_by != "at once")
                step(run, 2)
                if raised_by == "wait":
                    handle.wait()
                _save_run(run, f"{folder}/three")
            messages.append(str(caught.value))
    step(run, 3)
    assert not Path(folder, "three").exists()
    other = start("full", TWO, seed=5)
    _load_run(other, folder)
    assert_equal("the checkpoint before", everything(other), saved)
    if rank == 0:
        shutil.rmtree(f"{folder}/two")
    dist.barrier()
    if not real:
        _save_run(run, f"{folder}/two")
        _load_run(other, folder)
        assert_equal("another try", everything(other), everything(run))
    return messages


@pytest.mark.slow
def test_an_error_of_one_rank_reaches_all_ranks(tmp_path: Path) -> None:
    ranks = run_ranks(_save_to_full_disk, 2, str(tmp_path), False)
    for message in (text for texts in ranks for text in texts):
        assert "/two failed on rank 1: OSError: [Errno 28] No space left on device" in message


def test_a_full_disk_is_an_error_on_every_rank(tmp_path: Path) -> None:
    with small_disk(tmp_path, SMALL_DISK):
        ranks = run_ranks(_save_to_full_disk, 2, str(tmp_path), True)
    for message in (text for texts in ranks for text in texts):
        assert re.search(r"/two failed on rank [01]: .*No space left on device", message), message


def _check_optimizers(folder: str) -> None:
    """A loaded optimizer takes the same next step, also if it was saved before its first step."""
    kinds: dict[str, Any] = {
        "sgd": partial(torch.optim.SGD, lr=0.1),
        "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        "adamw": partial(torch.optim.AdamW, lr=0.01),
    }
    for name, optimizer in kinds.items():
        for steps in (0, 1):
            run = start("full", TWO, optimizer=optimizer)
            for number in range(steps):
                step(run, number)
            where = f"{folder}/{name}-{steps}"
            _save_run(run, where)
            other = start("full", TWO, seed=5, optimizer=optimizer)
            step(other, 9)
            _load_run(other, where)
            assert_equal(where, everything(other), everything(run))
            assert len(other.optimizer.state) == (0 if not steps else len(run.optimizer.state))
            step(run, 2), step(other, 2)
            assert_equal(f"{where}, next step", everything(other), everything(run))
            if name == "adamw":
                sgd = torch.optim.SGD(run.optimizer.param_groups[0]["params"], lr=0.5)
                with pytest.raises(ValueError, match=r"saved with AdamW, this optimizer is SGD"):
                    load_checkpoint(where, run.model, sgd)


def _check_masters_and_ties(folder: str) -> None:
    """The fp32 masters of a bf16 model are saved in fp32, and a tied weight is saved once."""
    options = {"dtype": torch.bfloat16, "tie_word_embeddings": True}
    run = start("full", TWO, **options)
    with torch.no_grad():
        for p in run.model.parameters():
            p.mul_(1 + 1e-4)  # bf16 cannot represent the result
    run.model.generation_config.temperature = 0.6  # GenerationConfig.save_pretrained refuses it
    _save_run(run, f"{folder}/bf16")
    assert '"temperature": 0.6' in Path(folder, "bf16", "generation_config.json").read_text()
    saved = json.loads(Path(folder, "bf16", "state.json").read_text())["tensors"]
    assert {entry["dtype"] for entry in saved.values()} == {"float32"}
    assert "model.model.embed_tokens.weight" in saved and "model.lm_head.weight" not in saved
    other = start("full", TWO, seed=5, **options)
    _load_run(other, f"{folder}/bf16")
    assert_equal("masters", everything(other), everything(run))
    wide = start("full", TWO, dtype=torch.float64, tie_word_embeddings=True)
    with pytest.raises(ValueError, match=r"saved with 1 groups of parameters, this .* has 2"):
        ungrouped = torch.optim.AdamW(run.model.parameters())
        save_checkpoint(f"{folder}/one-group", run.model, ungrouped)
        _load_run(other, f"{folder}/one-group")
    _load_run(wide, f"{folder}/bf16")  # fp64 represents every fp32 value
    low = start("full", Layout("alone", 2), **options)
    with pytest.raises(ValueError, match=r"is torch.float32, which the model's torch.bfloat16"):
        _load_run(low, f"{folder}/bf16")


def _check_refusals(rank: int, folder: str) -> None:
    """Another model, damage or a folder in use is an error on every rank, and nothing changes."""
    run = start("full", TWO)
    step(run, 0)
    path = Path(folder, "good")
    _save_run(run, str(path))
    with pytest.raises(ValueError, match=r"good holds a complete checkpoint"):
        _save_run(run, str(path))
    if rank == 0:
        Path(folder, "mine").mkdir()
        Path(folder, "mine", "notes.txt").write_text("!")
    dist.barrier()
    with pytest.raises(ValueError, match=r"mine holds .* not part of a checkpoint: notes.txt;"):
        _save_run(run, f"{folder}/mine")
    if rank == 0:
        for name in ("tensors/mine.npy", "state.json", "config.json"):
            Path(folder, "named-so", name).parent.mkdir(parents=True, exist_ok=True)
            Path(folder, "named-so", name).write_text("!")
    dist.barrier()
    with pytest.raises(ValueError, match=r"named-so holds .*: config.json, state.json, tensors;"):
        _save_run(run, f"{folder}/named-so")
    assert len(list(Path(folder, "named-so").rglob("*"))) == 4
    with pytest.raises(ValueError, match=r"progress\['f'\] is a function"):
        _save_run(run, f"{folder}/other", progress={"f": _check_refusals})
    with pytest.raises(ValueError, match=r"progress is 7; make it a dict, like \{'step': 100\}"):
        _save_run(run, f"{folder}/other", progress=7)
    others = {
        r"the model lacks .*model\.layers\.1\..* and \d+ more": {"num_hidden_layers": 1},
        r"it lacks .*model\.layers\.2\.": {"num_hidden_layers": 3},
        r"mlp.experts.gate_up_proj has shape \[8, 48, 32\], the model's \[4, 48, 32\]": {
            "num_experts": 4
        },
    }
    for message, options in others.items():
        other = start("full", TWO, seed=5, **options)
        before = everything(other)
        with pytest.raises(ValueError, match=message):
            _load_run(other, str(path))
        assert_equal("untouched", everything(other), before)
    for damage in ("flip", "truncate", "more", "remove"):
        if rank == 0:
            shutil.copytree(path, Path(folder, damage))
            _damage_shard(Path(folder, damage, "tensors"), damage)
        dist.barrier()
        other = start("full", TWO, seed=5)
        before = everything(other)
        names = (
            r"stranger.safetensors is not in" if damage == "more" else r"shard-00002-model-00001"
        )
        with pytest.raises(ValueError, match=names):
            _load_run(other, f"{folder}/{damage}")
        assert_equal("untouched", everything(other), before)
    with mock.patch.object(all_ranks, "PATIENCE", timedelta(seconds=2)):
        if rank == 0:
            with pytest.raises(RuntimeError, match="save_checkpoint was called on only 1 of 2"):
                _save_run(run, f"{folder}/alone")
    dist.barrier()


def _check_state_without_a_group(folder: str) -> None:
    run = start("full", TWO)
    step(run, 0)
    run.optimizer.param_groups[0]["params"].pop(0)
    with pytest.raises(ValueError, match=r"keeps state of model.embed_tokens.weight, which is in"):
        _save_run(run, f"{folder}/left")


def test_a_checkpoint_of_one_process_has_the_random_state_of_its_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that is not sharded has no mesh that names its device."""
    model, devices = patch(tiny()), []
    captured = training_save.random_state.capture(torch.device("cpu"))
    monkeypatch.setattr(training_save, "get_computing_device", lambda _: torch.device("cuda", 0))
    monkeypatch.setattr(
        training_save.random_state, "capture", lambda device: devices.append(device) or captured
    )
    save_checkpoint(tmp_path / "step-1", model, None)
    assert devices == [torch.device("cuda", 0)]


def _check_disagreements(rank: int, folder: str) -> None:
    """If arguments differ between ranks, every rank raises, and the checkpoint stays complete."""
    run, path = start("full", TWO), f"{folder}/good"
    with pytest.raises(ValueError, match=r"of directory: rank 0 with '.*/new', rank 1 .*good"):
        _save_run(run, f"{folder}/good" if rank else f"{folder}/new")
    with pytest.raises(ValueError, match=r"of asynchronous: rank 0 with True, rank 1 with F"):
        _save_run(run, f"{folder}/new", asynchronous=not rank)
    with pytest.raises(ValueError, match=r"of verify: rank 0 with True, rank 1 with False"):
        load_checkpoint(path, run.model, run.optimizer, verify=not rank)
    manifest.check(path)


def _load_from_own_folder(rank: int, world: int, folder: str) -> None:
    """Two runs save step-1. Then each rank is in the folder of another run."""
    run = start("full", TWO)
    for name in ("first", "second"):
        step(run, 0)
        _save_run(run, f"{folder}/{name}/step-1")
    step(run, 1)
    before = everything(run)
    os.chdir(f"{folder}/{'second' if rank else 'first'}")
    for verify in (True, False):
        with pytest.raises(ValueError, match=r"ranks \[1\] see another checkpoint in step-1 than"):
            load_checkpoint("step-1", run.model, run.optimizer, verify=verify)
    assert_equal("untouched", everything(run), before)


def test_ranks_that_see_different_checkpoints_load_none(tmp_path: Path) -> None:
    """Nodes may have folders of the same name on their own disks. No mixture is loaded."""
    run_ranks(_load_from_own_folder, 2, str(tmp_path))


def _damage_shard(tensors: Path, how: str) -> None:
    shard = next(tensors.glob("shard-00002*"))
    data = bytearray(shard.read_bytes())
    if how == "remove":
        shard.unlink()
    elif how == "more":
        (tensors / "stranger.safetensors").write_bytes(data)
    else:
        data[-100] ^= how == "flip"
        shard.write_bytes(data if how == "flip" else data[:-1])


def _run_checks(rank: int, world: int, folder: str) -> None:
    _check_optimizers(folder)
    _check_masters_and_ties(folder)
    _check_refusals(rank, folder)
    _check_disagreements(rank, folder)
    _check_state_without_a_group(folder)
    kinds = {path.suffix for path in Path(folder).rglob("*") if path.is_file()}
    assert kinds == {".json", ".safetensors", ".txt", ".npy"}, "no pickles"


def test_a_file_or_none_instead_of_a_folder_is_refused(tmp_path: Path) -> None:
    """A script may pass on the None that newest_checkpoint returns in its first run."""
    model = patch(tiny(dtype=torch.float32))
    optimizer = torch.optim.SGD(model.parameters())
    file = tmp_path / "notes.txt"
    file.write_text("x")
    for target, problem in ((file, "is a file"), (file / "a" / "b", f"lies in {file}, which is")):
        for save in (
            lambda to: save_checkpoint(to, model, optimizer),
            partial(save_pretrained, model),
        ):
            with pytest.raises(ValueError, match=f"^target {target} {problem}.*another folder$"):
                save(target)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    with pytest.raises(ValueError, match=r"no complete checkpoint in .*txt:\n  it is a file"):
        load_checkpoint(file, model, optimizer)
    with pytest.raises(ValueError, match=r"None, which newest_checkpoint returns in the first run"):
        load_checkpoint(None, model, optimizer)  # type: ignore[arg-type]


@pytest.mark.slow
def test_optimizers_and_masters_resume_and_other_runs_are_refused(tmp_path: Path) -> None:
    run_ranks(_run_checks, 2, str(tmp_path))
