"""`from_pretrained`: the dtype, the download and the refusals that depend on configs.

`checkpoints/test_hub.py` tests that the weights are loaded.
"""

import json
import os
import shutil
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
from huggingface_hub.errors import LocalEntryNotFoundError
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file, save_file
from support.hub_files import write_hub
from support.parity import full_tensor
from support.ranks import run_ranks
from support.tiny_models import tiny
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from hf_moe_ep import apply, from_pretrained, save_pretrained
from hf_moe_ep.upstream import hub


def _load_dtype(rank: int, world: int, folder: str) -> torch.dtype:
    return from_pretrained(folder).config.dtype


def test_the_dtype_of_a_checkpoint_with_two_dtypes(tmp_path: Path) -> None:
    """The config names no dtype. As in stock, a few fp32 tensors do not make an fp32 model."""
    folder = tmp_path / "hub"
    write_hub(folder, tiny(dtype=torch.bfloat16), files=1)
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        routers = {k: t.float() for k, t in tensors.items() if k.endswith("mlp.gate.weight")}
        save_file(tensors | routers, path, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config.pop("dtype", None)
    (folder / "config.json").write_text(json.dumps(config))
    assert AutoModelForCausalLM.from_pretrained(folder).dtype == torch.bfloat16
    assert run_ranks(_load_dtype, 1, str(folder)) == [torch.bfloat16]


def _load_by_name(rank: int, world: int, folder: str) -> tuple[str, str]:
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(hub, "snapshot_download", lambda *_, **__: folder)
        model = from_pretrained("owner/model", dtype="bfloat16")
    assert model.config.dtype == torch.bfloat16
    with pytest.raises(ValueError, match=r"torch has no dtype 'bf16'; use 'bfloat16'"):
        from_pretrained(folder, dtype="bf16")
    with pytest.raises(
        ValueError, match=r"quantized by gptq, which cannot be trained here; use a bf16"
    ):
        from_pretrained(f"{folder}/../gptq")
    return model.name_or_path, model.config.name_or_path


def test_the_name_on_the_hub_stays_and_unusable_dtypes_are_refused(tmp_path: Path) -> None:
    """PEFT writes the name into an adapter's config, where a path in a local cache is useless."""
    for folder, method in ((tmp_path / "hub", {}), (tmp_path / "gptq", {"quant_method": "gptq"})):
        write_hub(folder, tiny(dtype=torch.float32), files=1)
        config = json.loads((folder / "config.json").read_text())
        config |= {"quantization_config": method} if method else {}
        (folder / "config.json").write_text(json.dumps(config))
    assert run_ranks(_load_by_name, 1, str(tmp_path / "hub")) == [("owner/model", "owner/model")]


class FakeHub:
    """Replaces `snapshot_download`: it copies files from one folder to another."""

    def __init__(self, repository: Path, cache: Path) -> None:
        self.repository, self.cache = repository, cache
        self.calls: list[dict[str, Any]] = []

    def __call__(
        self,
        name: str,
        allow_patterns: list[str],
        ignore_patterns: list[str] | None = None,
        local_files_only: bool = False,
        revision: str = "main",
    ) -> str:
        self.calls.append({"local_files_only": local_files_only, "revision": revision})
        source = self.cache if local_files_only else self.repository
        if not source.is_dir():
            raise LocalEntryNotFoundError("nothing is cached")
        if not local_files_only:
            files = [str(f.relative_to(source)) for f in source.rglob("*") if f.is_file()]
            for file in filter_repo_objects(
                files, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns
            ):
                (self.cache / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(self.repository / file, self.cache / file)
        return str(self.cache)

    def cached(self) -> set[str]:
        return {str(f.relative_to(self.cache)) for f in self.cache.rglob("*") if f.is_file()}


COMMIT = "0123456789abcdef0123456789abcdef01234567"
NOT_DOWNLOADED = (
    "original/config.json",
    "original/model--00001-of-00002.safetensors",
    "consolidated-00001-of-00002.safetensors",
    "onnx/model.onnx",
    "adapter/adapter_model.safetensors",
    "pytorch_model.bin",
)


def _write_repository(folder: Path, files: int) -> set[str]:
    """Write a model and other files as on the hub, and return the files to download."""
    write_hub(folder, tiny(dtype=torch.float32), files=files)
    for name in ("tokenizer.json", "chat_template.jinja", "additional_chat_templates/tool.jinja"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("{}")
    needed = {str(f.relative_to(folder)) for f in folder.rglob("*") if f.is_file()}
    for name in NOT_DOWNLOADED:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("another format")
    return needed


@pytest.mark.parametrize("subfolder", ["", "of [one] stage"])
@pytest.mark.parametrize("files", [1, 3])
def test_only_files_that_the_index_names_are_downloaded(
    files: int, subfolder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = tmp_path / "repository"
    if subfolder:
        _write_repository(repository, 2)
    needed = _write_repository(repository / subfolder, files)
    assert sum(name.endswith(".safetensors") for name in needed) == files
    fake = FakeHub(repository, tmp_path / COMMIT)
    monkeypatch.setattr(hub, "snapshot_download", fake)
    local = hub.find_local_folder("owner/model", {"subfolder": subfolder} if subfolder else {})
    assert local == tmp_path / COMMIT / subfolder
    assert fake.cached() == {os.path.join(subfolder, name) for name in needed}
    assert [call["revision"] for call in fake.calls] == ["main", COMMIT], "one commit"


@pytest.mark.parametrize("files", [1, 2])
def test_weights_that_the_config_names(
    files: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in stock, these weights replace model.safetensors, which is not downloaded."""
    repository = tmp_path / "repository"
    size, kind = ("5GB", "") if files == 1 else ("100KB", ".index.json")
    tiny(dtype=torch.float32, seed=7).save_pretrained(repository, max_shard_size=size)
    (repository / f"model.safetensors{kind}").rename(repository / f"other.safetensors{kind}")
    needed = {path.name for path in repository.iterdir()}
    tiny(dtype=torch.float32).save_pretrained(tmp_path / "usual")
    shutil.copy(tmp_path / "usual" / "model.safetensors", repository)
    edit_config(repository, transformers_weights=f"other.safetensors{kind}")
    want = AutoModelForCausalLM.from_pretrained(repository)
    assert torch.equal(want.lm_head.weight, tiny(seed=7, dtype=torch.float32).lm_head.weight)
    fake = FakeHub(repository, tmp_path / COMMIT)
    monkeypatch.setattr(hub, "snapshot_download", fake)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = from_pretrained("owner/model")
        assert fake.cached() == needed
        for name, parameter in want.named_parameters():
            assert torch.equal(full_tensor(model.get_parameter(name)), parameter), name
        save_pretrained(model, tmp_path / "saved")
        assert "transformers_weights" not in (tmp_path / "saved" / "config.json").read_text()
        for option, words in {
            "variant": "variant: it is neither.*transformers' from_pretrained, and patch",
            "transformers_weights": "transformers_weights='ema' is not an option.*/config.json",
        }.items():
            with pytest.raises(ValueError, match=words):
                from_pretrained(repository, **{option: "ema"})
        for name, words in {
            "../model.safetensors": r"is '../model.safetensors', but must .* file in this folder",
            "model.bin": "is 'model.bin', but must .* ends with .safetensors or",
            "gone.safetensors": "repository has no gone.safetensors, which its config.json names",
        }.items():
            edit_config(repository, transformers_weights=name)
            with pytest.raises(ValueError, match=words):
                from_pretrained(repository)
    finally:
        dist.destroy_process_group()


def edit_config(folder: Path, **fields: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))


def test_a_damaged_index_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write_repository(tmp_path / "repository", 3)
    index = "model.safetensors.index.json"
    for text, words in (("{", "is damaged or not JSON"), ('{"weight_map": []}', "is not an index")):
        (tmp_path / "repository" / index).write_text(text)
        monkeypatch.setattr(
            hub, "snapshot_download", FakeHub(tmp_path / "repository", tmp_path / "cache")
        )
        with pytest.raises(ValueError, match=f"{index} {words}"):
            hub.find_local_folder("owner/model", {})


@pytest.fixture
def one_rank() -> Iterator[None]:
    """This process is a group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_a_trained_adapter_in_the_folder_is_not_lost(tmp_path: Path) -> None:
    """Stock attaches the adapter. Only a request for new adapters loads the model without it."""
    tiny(dtype=torch.float32).save_pretrained(tmp_path / "both")
    for name in ("both", "adapter"):
        adapted = peft.get_peft_model(tiny(dtype=torch.float32), _make_lora_config())
        adapted.save_pretrained(tmp_path / name)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "both")
    assert any("lora_" in name for name, _ in stock.named_parameters())
    beside = r"both has an adapter \(adapter_config.json\) beside its model, .*pass peft_config="
    with pytest.raises(ValueError, match=beside):
        from_pretrained(tmp_path / "both")
    new = from_pretrained(tmp_path / "both", peft_config=_make_lora_config())
    assert any("lora_" in name for name, _ in new.named_parameters())
    alone = r"adapter has an adapter .* and no model, .*PeftModel.from_pretrained\(base, folder"
    for config in (None, _make_lora_config()):
        with pytest.raises(ValueError, match=alone):
            from_pretrained(tmp_path / "adapter", peft_config=config)


@pytest.mark.usefixtures("one_rank")
def test_options_and_files_of_stock_from_pretrained(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    tiny(dtype=torch.float32).save_pretrained(folder)
    taken = {"dtype": {"": "bfloat16"}, "use_safetensors": True, "low_cpu_mem_usage": True}
    want = AutoModelForCausalLM.from_pretrained(folder, **taken)
    assert from_pretrained(folder, **taken).config.dtype == want.config.dtype == torch.bfloat16
    with pytest.raises(ValueError, match=r"use_safetensors: .*transformers' from_pretr"):
        from_pretrained(folder, use_safetensors=False)
    with pytest.raises(ValueError, match=r"missing 1 tensors: score.weight.* would add a head"):
        from_pretrained(folder, model_class=AutoModelForSequenceClassification)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"no safetensors .*; load other formats with tra"):
        from_pretrained(folder)


@pytest.mark.usefixtures("one_rank")
def test_settings_for_generation_in_the_config_are_read(tmp_path: Path) -> None:
    """Stock reads them from config.json if there is no generation_config.json."""
    tiny(dtype=torch.float32).save_pretrained(tmp_path)
    edit_config(tmp_path, do_sample=True, temperature=0.3, top_k=7, eos_token_id=5)
    (tmp_path / "generation_config.json").unlink()
    want = AutoModelForCausalLM.from_pretrained(tmp_path).generation_config
    own: Any = from_pretrained(tmp_path)
    assert (own.generation_config.temperature, own.generation_config.eos_token_id) == (0.3, 5)
    assert own.generation_config.to_dict() == want.to_dict()


def _download(rank: int, world: int, folder: str, caches: str) -> list[bool]:
    fake = FakeHub(Path(folder), Path(caches.format(rank=rank), COMMIT))
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(hub, "snapshot_download", fake)
        from_pretrained("owner/model", ep_size=2)
    return [call["local_files_only"] for call in fake.calls]


def test_one_rank_per_machine_downloads(tmp_path: Path) -> None:
    """The other ranks read the cache of this rank. A rank with its own cache downloads as well."""
    _write_repository(tmp_path / "repository", 3)
    shared, per_rank = f"{tmp_path}/shared", f"{tmp_path}/of rank {{rank}}"
    repository = str(tmp_path / "repository")
    assert run_ranks(_download, 2, repository, shared) == [[False] * 2, [True] * 2]
    assert run_ranks(_download, 2, repository, per_rank) == [[False] * 2, [True, False, False]]


def test_a_gpu_is_chosen_before_any_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    """With NCCL alone, every rank would otherwise gather on the first GPU."""
    called: list[str] = []

    def stop(*args: Any) -> None:
        called.append("run_on_all")
        raise InterruptedError

    monkeypatch.setattr(apply, "is_distributed", lambda: True)
    monkeypatch.setattr(
        apply, "choose_default_device", lambda: called.append("choose_default_device")
    )
    monkeypatch.setattr(apply, "check_everyone_calls", lambda *_: called.append("check"))
    monkeypatch.setattr(apply, "run_on_all", stop)
    with pytest.raises(InterruptedError):
        from_pretrained("owner/model")
    assert called == ["choose_default_device", "check", "run_on_all"]


def _call_on_rank_0(rank: int, world: int, folder: str) -> None:
    fake = FakeHub(Path(folder), Path(folder) / "cache")
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(hub, "snapshot_download", fake)
        patches.setattr(apply, "PATIENCE_OF_LOADING", timedelta(seconds=2))
        if rank == 0:
            with pytest.raises(RuntimeError, match="from_pretrained was called on only 1 of 2"):
                from_pretrained("owner/model", ep_size=2)
    assert not fake.calls


def test_a_rank_that_does_not_call_it_is_an_error(tmp_path: Path) -> None:
    _write_repository(tmp_path / "repository", 3)
    run_ranks(_call_on_rank_0, 2, str(tmp_path / "repository"))


def _download_slowly(rank: int, world: int, folder: str) -> None:
    """The rank that downloads takes longer than the timeout of the process group."""
    fake = FakeHub(Path(folder), Path(folder) / "cache")

    def download(*args: Any, **kwargs: Any) -> str:
        if rank == 0:
            time.sleep(4)
        return fake(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(hub, "snapshot_download", download)
        from_pretrained("owner/model", ep_size=2)


@pytest.mark.slow
def test_a_download_may_take_longer_than_the_timeout_of_a_collective(tmp_path: Path) -> None:
    _write_repository(tmp_path / "repository", 3)
    run_ranks(_download_slowly, 2, str(tmp_path / "repository"), group_timeout=2.0)


TARGETS = ["q_proj", "v_proj"]
# Words of the error that is raised before the download, and the adapter config.
REFUSED = {
    r"LoRA with DoRA \(use_dora\)": lambda: _make_lora_config(use_dora=True),
    r"single rows of embeddings \(trainable_token_indices\)": lambda: _make_lora_config(
        trainable_token_indices=[1, 2]
    ),
    r"LoRA on embeddings \(embed_tokens\)": lambda: _make_lora_config(["q_proj", "embed_tokens"]),
    r"replicated layers \(layer_replication\)": lambda: _make_lora_config(
        layer_replication=[(0, 2), (0, 2)]
    ),
    "init_lora_weights='pissa'": lambda: _make_lora_config(init_lora_weights="pissa"),
    "init_lora_weights='pissa_niter_4'": lambda: _make_lora_config(
        init_lora_weights="pissa_niter_4"
    ),
    "init_lora_weights='olora'": lambda: _make_lora_config(init_lora_weights="olora"),
    "init_lora_weights='orthogonal'": lambda: _make_lora_config(init_lora_weights="orthogonal"),
    r"IA3Config \(peft_type IA3\)": lambda: peft.IA3Config(
        target_modules=TARGETS, feedforward_modules=[]
    ),
    r"LoHaConfig \(peft_type LOHA\)": lambda: peft.LoHaConfig(target_modules=TARGETS),
    r"VeraConfig \(peft_type VERA\)": lambda: peft.VeraConfig(target_modules=TARGETS),
    r"PromptTuningConfig \(peft_type PROMPT_TUNING\)": lambda: peft.PromptTuningConfig(
        task_type="CAUSAL_LM", num_virtual_tokens=3
    ),
}
if hasattr(peft, "KasaConfig"):  # since peft 0.21
    REFUSED[r"KaSA \(kasa_config\)"] = lambda: _make_lora_config(kasa_config=peft.KasaConfig())
TAKEN = {
    "plain": lambda: _make_lora_config(),
    "rslora": lambda: _make_lora_config(use_rslora=True),
    "gaussian": lambda: _make_lora_config(init_lora_weights="Gaussian"),
    "no first values": lambda: _make_lora_config(init_lora_weights=False),
    "a bias of its own": lambda: _make_lora_config(lora_bias=True),
    "another head": lambda: _make_lora_config(modules_to_save=["lm_head"]),
    "all Linear modules": lambda: _make_lora_config("all-linear"),
}


def _make_lora_config(targets: list[str] | str = TARGETS, **more: Any) -> peft.LoraConfig:
    return peft.LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM", **more)


def _load_with_adapters(rank: int, world: int, folder: str) -> None:
    with pytest.MonkeyPatch.context() as patches:
        patches.delattr(hub, "snapshot_download")  # a download would raise another error
        for words, config in REFUSED.items():
            with pytest.raises(ValueError, match=rf"peft_config is .*{words}.*get_peft_model"):
                from_pretrained("owner/model", peft_config=config())
    with pytest.raises(
        ValueError, match=r"is LoRA on embeddings \(.*model.embed_tokens\); from_pre"
    ):
        from_pretrained(folder, peft_config=_make_lora_config(r".*(q_proj|tokens)"))
    for config in TAKEN.values():
        model = from_pretrained(folder, peft_config=config())
        factors = [p for name, p in model.named_parameters() if "lora_" in name]
        assert factors and all(torch.isfinite(p.full_tensor()).all() for p in factors)


def test_adapters_that_need_values_are_refused_by_name(tmp_path: Path) -> None:
    """The error comes before the download, which may take an hour. PEFT would raise it after."""
    write_hub(tmp_path / "hub", tiny(dtype=torch.float32))
    run_ranks(_load_with_adapters, 1, str(tmp_path / "hub"))
