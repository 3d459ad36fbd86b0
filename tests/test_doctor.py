"""`hf-moe-ep doctor` reports each problem with its fix, and also runs if packages are broken."""

import os
import subprocess
import sys
import warnings
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import accelerate
import pytest
import torch
import transformers
from packaging.specifiers import SpecifierSet
from support.tiny_models import tiny

from hf_moe_ep import doctor, patch
from hf_moe_ep.cli import main as cli
from hf_moe_ep.doctor import Finding
from hf_moe_ep.ops import sum_check
from hf_moe_ep.upstream import requirements, wrap
from hf_moe_ep.upstream.requirements import AllowedPackage

ROOT = Path(__file__).resolve().parents[1]
REQUIRED = ("torch", "transformers", "accelerate", "huggingface_hub", "safetensors")
LAUNCH_VARIABLES = ("RANK", "WORLD_SIZE", "ACCELERATE_MIXED_PRECISION", "ACCELERATE_USE_FSDP")


@pytest.fixture(autouse=True)
def _not_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the launch variables and the default Accelerate config of whoever runs the tests."""
    for name in LAUNCH_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(doctor, "read_default_launch_config", lambda: None)


def _report(capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Run doctor; return its exit code and its output, with line breaks replaced by spaces."""
    code = cli.main(["doctor"])
    return code, " ".join(capsys.readouterr().out.split())


def _give_version(monkeypatch: pytest.MonkeyPatch, package: str, version: str | None) -> None:
    """Make importlib.metadata report this version of `package`; None: it is not installed."""
    original = metadata.version

    def changed(name: str) -> str:
        if name != package:
            return original(name)
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(metadata, "version", changed)


def test_a_machine_on_which_training_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(wrap, "_in_force", set())  # as in the process of the command
    assert cli.main(["doctor"]) == 0
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert lines[-1] == "training can run here" and "FAIL" not in text
    assert text.isascii() and max(map(len, lines)) <= 100 and len(lines) <= 40
    for name in REQUIRED:
        line = next(line for line in lines if line.split()[1:2] == [name])
        assert line.split()[0] == "ok" and metadata.version(name) in line, line
    assert "allowed >=5.16.1,<6" in text, "the range of setup.cfg"


@pytest.mark.parametrize(
    ("version", "problem", "reason"),
    [
        (
            "5.10.0",
            "too old",
            "older versions are not tested, and their experts may lack is_concatenated",
        ),
        ("6.1.0", "too new", "newer versions are not tested"),
    ],
)
def test_a_version_out_of_the_range(
    version: str,
    problem: str,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    _give_version(monkeypatch, "transformers", version)
    code, text = _report(capsys)
    assert code == 1
    assert f"FAIL transformers {version} is {problem}, allowed is >=5.16.1,<6 ({reason}" in text
    assert "): pip install 'transformers>=5.16.1,<6'" in text
    assert text.endswith("1 to fix: transformers")


def test_a_wrong_version_of_an_optional_package_is_a_note(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    allowed = AllowedPackage("trl", SpecifierSet(">=0.29"), "trl")
    monkeypatch.setattr(doctor, "list_allowed_packages", lambda: [allowed])
    _give_version(monkeypatch, "trl", "0.20.0")
    code, text = _report(capsys)
    assert (
        code == 0
        and "-- trl 0.20.0 is too old, allowed is >=0.29 (older versions are not tested)" in text
    )


def test_a_required_package_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _give_version(monkeypatch, "safetensors", None)
    code, text = _report(capsys)
    assert code == 1
    assert "FAIL safetensors missing, allowed is any: pip install safetensors" in text


def test_a_function_to_wrap_that_does_not_exist_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delattr(transformers.Trainer, "save_model")
    code, text = _report(capsys)
    assert code == 1
    assert "FAIL transformers.trainer:Trainer.save_model" in text
    assert "saving a sharded model in the hub's layout" in text, "the feature that is switched off"
    assert "functions that patch() wraps exist" not in text


@pytest.mark.parametrize(
    ("targets", "shown"),
    [(set(), "none in this process"), ({"trl.b:f", "peft.a:g"}, "peft.a:g, trl.b:f")],
)
def test_functions_that_are_replaced_now_are_listed(
    targets: set[str], shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wrap, "_in_force", targets)
    assert doctor.examine()["wraps"][-1] == Finding("ok", "in force", shown)


def test_a_missing_function_that_no_result_depends_on_is_a_note(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delattr(accelerate.Accelerator, "log")
    code, text = _report(capsys)
    assert code == 0
    assert "-- accelerate.accelerator:Accelerator.log" in text


def test_patch_warns_of_a_version_with_the_text_of_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    allowed = [AllowedPackage("transformers", SpecifierSet(">=5.16.1,<6"))]
    monkeypatch.setattr(requirements, "list_allowed_packages", lambda: allowed)
    # A process reads the versions once; here they are read at each `patch`.
    read_anew = requirements.list_version_problems.__wrapped__
    monkeypatch.setattr(requirements, "list_version_problems", read_anew)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*allowed is")
        patch(tiny())
    _give_version(monkeypatch, "transformers", "5.6.0")
    warning = f"transformers {allowed[0].sentence('5.6.0')}"
    with pytest.warns(UserWarning, match="allowed is") as warned:
        patch(tiny())
    # If an older TRL was imported before, patch() also warns of the functions that this TRL lacks.
    assert [text for entry in warned if "allowed is" in (text := str(entry.message))] == [warning]


def test_without_peft(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    _give_version(monkeypatch, "peft", None)
    code, text = _report(capsys)
    assert code == 0
    assert "-- peft missing. LoRA: not available, pip install 'hf_moe_ep[peft]'" in text


@pytest.mark.parametrize(
    ("major", "built", "kernels"),
    [
        (9, "", "ok Triton kernels the experts use them (experts_backend='auto'). One was built"),
        (9, "no C compiler", "-- Triton kernels RuntimeError: no C compiler: experts run on the"),
        (7, "", "-- Triton kernels compute capability (7, "),
    ],
)
def test_a_machine_with_gpus(
    major: int,
    built: str,
    kernels: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """torch is made to report two GPUs, because the machine of the tests may have none."""

    def build(kind: sum_check.TokenSumKind) -> list[sum_check.Comparison]:
        assert kind.device.type == "cuda"
        if built:
            raise RuntimeError(built)
        return []

    _report(capsys)  # imports packages that would not be imported with these GPUs
    check = sum_check.check_sums_once.__wrapped__  # without the cache of this process
    monkeypatch.setattr(sum_check, "check_sums_once", check)
    monkeypatch.setattr(sum_check, "compare_token_sums", build)
    gpu = SimpleNamespace(name="A GPU", major=major, minor=0, total_memory=80 << 30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (major, 0))
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 3))
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    code, text = _report(capsys)
    assert code == 0, text
    assert f"ok GPU 2 x A GPU, capability {major}.0, 80.0 GiB" in text
    assert "ok NCCL 2.27.3" in text and kernels in text
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    code, text = _report(capsys)
    assert code == 1 and "FAIL NCCL missing: ranks with GPUs cannot communicate" in text


# Accelerate's default config, the exit code of doctor, and the beginning of the line in its output.
CONFIGS: dict[str, tuple[dict[str, Any], int, str]] = {
    "FSDP2": (
        {"distributed_type": "FSDP", "num_processes": 8, "fsdp_config": {"fsdp_version": 2}},
        0,
        "ok next launch /c.yaml: 8 processes with FSDP2: a patched model is sharded",
    ),
    "FSDP1": (
        {"distributed_type": "FSDP", "fsdp_config": {}},
        1,
        "FAIL next launch /c.yaml: FSDP version 1 is refused; write fsdp_version: 2",
    ),
    "DDP": (
        {"distributed_type": "MULTI_GPU"},
        1,
        "FAIL next launch /c.yaml: MULTI_GPU shards nothing, ep_size > 1 is refused; write",
    ),
    "context parallel": (
        {
            "distributed_type": "FSDP",
            "fsdp_config": {"fsdp_version": 2},
            "parallelism_config": {"parallelism_config_tp_size": 2},
        },
        1,
        "FAIL next launch /c.yaml: tp_size 2 in its parallelism_config is refused; set it to 1",
    ),
    "empty fields": (
        {
            "distributed_type": "FSDP",
            "fsdp_config": {"fsdp_version": None},
            "parallelism_config": {"parallelism_config_tp_size": None},
        },
        1,
        "FAIL next launch /c.yaml: FSDP version 1 is refused",
    ),
    "one process": ({"distributed_type": "NO"}, 0, "-- next launch /c.yaml: one process"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_the_default_config_of_accelerate(
    case: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config, exit_code, line = CONFIGS[case]
    monkeypatch.setattr(doctor, "read_default_launch_config", lambda: (Path("/c.yaml"), config))
    code, text = _report(capsys)
    assert code == exit_code and line in text, text


# Variables of `accelerate launch`, the exit code of doctor, and the beginning of the line in its
# output.
LAUNCHES: dict[str, tuple[dict[str, str], int, str]] = {
    "FSDP2": (
        {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"},
        0,
        "ok this launch 4 processes with FSDP2",
    ),
    "FSDP1": ({"ACCELERATE_USE_FSDP": "true"}, 1, "FAIL this launch FSDP version 1 is refused"),
    "DDP": ({}, 1, "FAIL this launch 4 processes without FSDP: ep_size > 1 is refused"),
}


@pytest.mark.parametrize("case", LAUNCHES)
def test_the_launch_of_this_process(
    case: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    variables, exit_code, line = LAUNCHES[case]
    monkeypatch.delenv("FSDP_VERSION", raising=False)
    common = {"RANK": "0", "WORLD_SIZE": "4", "ACCELERATE_MIXED_PRECISION": "no"}
    for name, value in (common | variables).items():
        monkeypatch.setenv(name, value)
    code, text = _report(capsys)
    assert code == exit_code and line in text and "ok WORLD_SIZE 4" in text, text


@pytest.mark.parametrize(
    ("name", "value", "fix"),
    [
        ("HF_MOE_EP_EP_SIZE", "eight", "try HF_MOE_EP_EP_SIZE=8"),
        ("HF_MOE_EP_EPSIZE", "8", "only HF_MOE_EP_EP_SIZE, HF_MOE_EP_SP_SIZE, "),
    ],
)
def test_an_invalid_variable_of_hf_moe_ep_is_a_failure(
    name: str,
    value: str,
    fix: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(name, value)
    code, text = _report(capsys)
    assert code == 1 and "FAIL environment" in text and fix in text, text


def test_only_rank_0_prints(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    assert cli.main(["doctor"]) == 0
    assert capsys.readouterr().out == ""


@pytest.mark.slow
def test_broken_packages_are_findings(tmp_path: Path) -> None:
    """doctor runs in a subprocess in which two packages raise at import.

    In the subprocess, Accelerate also finds a default config that asks for FSDP version 1.
    """
    for name in ("peft", "flash_attn"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise OSError('undefined symbol: xyz')\n")
    home = tmp_path / "home"
    (home / "accelerate").mkdir(parents=True)
    config = "distributed_type: FSDP\nfsdp_config:\n  fsdp_version: 1\n"
    (home / "accelerate" / "default_config.yaml").write_text(config)
    path = os.pathsep.join([os.fspath(tmp_path), os.fspath(ROOT)])
    environment = {k: v for k, v in os.environ.items() if k not in LAUNCH_VARIABLES}
    environment |= {"PYTHONPATH": path, "HF_HOME": os.fspath(home)}
    report = subprocess.run(
        [sys.executable, "-m", "hf_moe_ep", "doctor"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    text = " ".join(report.stdout.split())
    assert report.returncode == 1, report.stderr
    assert "is broken: OSError: undefined symbol: xyz; reinstall or uninstall it" in text
    assert "FAIL flash-attn broken: OSError: undefined symbol: xyz" in text
    assert "hf_moe_ep cannot be imported: OSError: undefined symbol: xyz" in text
    imported = subprocess.run(
        [sys.executable, "-c", "from hf_moe_ep import patch"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    last_line = imported.stderr.splitlines()[-1]
    assert imported.returncode == 1
    assert last_line.startswith("ImportError: hf_moe_ep cannot be used: OSErr")
    assert "hf-moe-ep doctor" in last_line
    assert "default_config.yaml: FSDP version 1 is refused" in text


@pytest.mark.slow
def test_under_accelerate_launch(tmp_path: Path) -> None:
    """Two ranks print one report."""
    config = ROOT / "examples" / "accelerate" / "cpu_4.yaml"
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config)]
    command += ["--num_processes", "2", "-m", "hf_moe_ep", "doctor"]
    result = subprocess.run(
        command,
        env=os.environ | {"PYTHONPATH": os.fspath(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("training can run here") == 1
    assert "2 processes with FSDP2: a patched model is sharded" in " ".join(result.stdout.split())
