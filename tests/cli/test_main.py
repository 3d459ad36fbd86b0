"""Every command shows its options, and wrong arguments get a useful error.

For a wrong argument or folder, the command prints one line that names the file and a remedy, and no
traceback. Its exit code is 2.
"""

import importlib.util
import json
import re
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file

from hf_moe_ep.checkpoints import verify as verify_module
from hf_moe_ep.cli.main import main


def _help_text(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as exit:
        main([*arguments, "--help"])
    assert exit.value.code == 0
    return capsys.readouterr().out


def test_every_argument_of_every_command_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    text = _help_text(capsys)
    commands = re.findall(r"^    ([a-z-]+)", text, re.MULTILINE)
    assert len(commands) >= 6 and {"doctor", "inspect", "merge-adapter"} <= set(commands)
    for command in commands:
        text = _help_text(capsys, command)
        entries = re.sub(r"\n {10,}", "   ", text.partition("\n\n")[2])
        for entry in re.findall(r"^  \S.*", entries, re.MULTILINE):
            assert re.search(r"\S   *\S+", entry), (command, entry)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder with files and folders that a user may name by mistake."""
    folder = tmp_path_factory.mktemp("named")
    (folder / "file").write_text("x")
    contents = {"damaged": "{", "list": "[]", "nobody": '{"model_type": "nobody"}'}
    for name, text in contents.items():
        model, adapter = folder / f"{name}-model", folder / f"{name}-adapter"
        for target, file in ((model, "config.json"), (adapter, "adapter_config.json")):
            target.mkdir()
            (target / file).write_text(text)
        save_file({"w": torch.ones(2)}, adapter / "adapter_model.safetensors")
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text('{"model_type": "qwen3_moe"}')
    save_file({"w": torch.ones(3, 5)}, folder / "model" / "model.safetensors")
    (folder / "empty").mkdir()
    return folder


# The arguments of a wrong call, and words of its error. {} is the folder.
WRONG = {
    "doctor now": 'unknown argument now; "hf-moe-ep doctor --help" lists the arguments',
    "run --epsize 8 -- python": r"argument --epsize \(did you mean --ep-size\?\); .hf-moe-ep",
    "plan {}/model --gpu-memori=80": r"argument --gpu-memori \(did you mean --gpu-memory\?\); ",
    "verify {}/nowhere": "nowhere does not exist; name the folder of a checkpoint",
    "verify {}/file": "file is a file; name the folder of a checkpoint",
    "verify {}/empty": "empty holds no safetensors checkpoint: neither model.safetensors nor",
    "verify {}/list-adapter": "holds only an adapter; name the folder of a model",
    "inspect {}/nowhere": "nowhere does not exist; name the folder of a checkpoint",
    "inspect {}/list-adapter": "holds only an adapter; .* hf-moe-ep merge-adapter",
    "architecture {}/list-model": "list-model/config.json contains a list, but",
    "memory {}/list-model --gpus 8": "config.json contains a list, but must",
    "memory {}/damaged-model --gpus 8": "config.json is damaged or not JSON: Expect",
    "memory {}/nobody-model --gpus 8": "'nobody', which transformers .* does not know",
    "memory {}/file --gpus 8": "file is damaged or not JSON",
    "memory {}/model --gpus 0": r"world_size \(0\) must be 1 or more; try 8",
    "memory {}/model --gpus 8 --lora-targets experts": "of adapters, .*; add --lora-rank",
    "convert {}/nowhere {}/out": "nowhere is not a folder; name the folder of a training",
    "convert {}/file {}/out": "file is not a folder; name the folder of a training checkpoint",
    "convert {}/model {}/out": "model is not a training checkpoint: it has neither",
    "convert {}/model {}/file/out": "lies in .*file, which is a file; name another folder",
    "convert {}/model {}/out --max-shard-size big": "'big' is not a size; try '5GB'",
    "convert {}/empty {}/out": "empty has no config.json; name the model's folder with --config",
    "export-adapter {}/nowhere {}/out": "nowhere is not an adapter folder: it has no adapter",
    "export-adapter {}/damaged-adapter {}/out": "_config.json is damaged or not JSON",
    "export-adapter {}/list-adapter {}/out": "_config.json contains a list, but must",
    "export-adapter {}/nobody-adapter {}/out": "is of peft_type None, not 'LORA'",
    "merge-adapter {}/model {}/nowhere {}/out": "nowhere is not an adapter folder: it has no",
    "merge-adapter {}/nowhere {}/list-adapter {}/out": "does not exist on this machine",
}


def test_a_missing_package_gives_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, package=None: None)
    line = "memory Qwen/Qwen3-30B-A3B --gpus 1 --experts-dtype nf4 --lora-rank 16"
    assert main(line.split()) == 2
    shown = capsys.readouterr().err
    assert re.fullmatch(r"hf-moe-ep: error: .*bitsandbytes.*\n", shown), shown


@pytest.mark.parametrize("line", WRONG)
def test_a_wrong_argument_gives_one_line(
    line: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(folder.rglob("*"))
    assert main([argument.format(folder) for argument in line.split()]) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and re.fullmatch(r"hf-moe-ep: error: .*\n", shown.err), shown.err
    assert re.search(WRONG[line], shown.err), shown.err
    assert sorted(folder.rglob("*")) == before


def test_inspect_prints_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(folder / "model"), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == {
        "what": "a model in safetensors files",
        "tensors": "1",
        "files": "1",
        "dtypes": "torch.float32",
        "bytes": "60",
    }


def test_ctrl_c_gives_exit_code_130(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with mock.patch.object(verify_module, "verify", side_effect=KeyboardInterrupt):
        assert main(["verify", str(folder / "model")]) == 130
    assert capsys.readouterr().err == "hf-moe-ep: interrupted\n"
