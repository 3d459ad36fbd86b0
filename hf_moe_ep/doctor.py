"""Check whether training can run on this machine. `examine` runs four groups of checks:

    packages   compare the installed versions with the ranges that this package allows
    wraps      look for the functions of Accelerate, transformers and PEFT that patch() wraps; if a
               function is missing, the feature that wraps it does not work. Also list the functions
               that are replaced in this process now
    machine    look for GPUs, Triton, NCCL, DeepEP and flash-attn, which decide what code runs. On
               a GPU, build one Triton kernel and compare its results with torch's
    launch     report how this process was started, or how the next `accelerate launch` would start
               processes

Each finding is one line with a mark: "ok"; "--" if something optional is missing; "FAIL" for a
problem that would stop training, with its fix. A broken package must not stop the report.
Therefore packages are imported inside functions, and a group whose check raises an error becomes
one finding. Models and the network between machines are not checked.
"""

from __future__ import annotations

import importlib
import importlib.util
import platform
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from hf_moe_ep.config import check_environment, read_launch_environment
from hf_moe_ep.upstream.launch_config import read_default_launch_config
from hf_moe_ep.upstream.requirements import (
    DISTRIBUTION,
    AllowedPackage,
    get_installed_version,
    list_allowed_packages,
)

OK, NOTE, FAIL = "ok", "--", "FAIL"

# The text about each missing optional package. A package that is installed, but broken or in a
# version that is not allowed, gets the mark FAIL if transformers or torch import it
# (_IMPORTED_BY_OTHERS), and "--" if not.
_WITHOUT = {
    "peft": "LoRA: not available, pip install 'hf_moe_ep[peft]'",
    "bitsandbytes": "experts_dtype='nf4': not available, pip install 'hf_moe_ep[quant]'",
    "trl": "SFTTrainer: not available, pip install 'hf_moe_ep[trl]'",
    "triton": "experts run on the torch path, pip install triton",
}
_REINSTALL = "reinstall or uninstall it"
_IMPORTED_BY_OTHERS = ("peft", "triton")
_FSDP2 = "distributed_type: FSDP and fsdp_version: 2 in its fsdp_config"
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    mark: str
    name: str
    text: str


def examine() -> dict[str, list[Finding]]:
    """Run all checks, and return the findings of each section by its title."""
    checks: dict[str, Callable[[], list[Finding]]] = {
        "packages": _check_packages,
        "wraps": _check_wraps,
        "machine": _check_machine,
        "launch": _check_launch,
    }
    sections = {}
    for title, check in checks.items():
        findings, error = _attempt(check)
        if findings is None:
            findings = [Finding(FAIL, title, f"could not be checked: {error}")]
        sections[title] = findings
    return sections


def list_failures(sections: Mapping[str, list[Finding]]) -> list[Finding]:
    """List the problems that would stop training."""
    findings = (finding for section in sections.values() for finding in section)
    return [finding for finding in findings if finding.mark == FAIL]


def _attempt(function: Callable[[], _Result]) -> tuple[_Result | None, str]:
    """Call a function. Return (its result, ""), or (None, the first line of its error)."""
    try:
        return function(), ""
    except Exception as error:  # noqa: BLE001  a broken package may raise anything at import
        lines = str(error).splitlines() or [""]
        return None, f"{type(error).__name__}: {lines[0]}".removesuffix(": ")


def _check_packages() -> list[Finding]:
    allowed = list_allowed_packages()
    here = Path(__file__).resolve().parent
    if allowed is None:
        text = f"at {here}: not installed, so the allowed versions are unknown; pip install ."
        return [Finding(NOTE, DISTRIBUTION, text), _report_python()]
    this_package = Finding(OK, DISTRIBUTION, f"{get_installed_version(DISTRIBUTION):<16} at {here}")
    _, error = _attempt(lambda: importlib.import_module("hf_moe_ep.apply"))
    if error:
        this_package = Finding(FAIL, DISTRIBUTION, f"at {here} cannot be imported: {error}")
    shown = [package for package in allowed if not package.extra or package.name in _WITHOUT]
    return [this_package, _report_python(), *map(_check_package, shown)]


def _report_python() -> Finding:
    return Finding(OK, "python", f"{platform.python_version():<16} {platform.platform()}")


def _check_package(package: AllowedPackage) -> Finding:
    version = get_installed_version(package.name)
    problem = package.sentence(version)
    if version is None and package.name in _WITHOUT:
        return Finding(NOTE, package.name, f"missing. {_WITHOUT[package.name]}")
    stops_training = package.name not in _WITHOUT or package.name in _IMPORTED_BY_OTHERS
    mark = FAIL if stops_training else NOTE
    if problem:
        return Finding(mark, package.name, problem)
    if package.name in _WITHOUT:
        _, error = _attempt(lambda: importlib.import_module(package.name))
        if error:
            return Finding(mark, package.name, f"{version} is broken: {error}; {_REINSTALL}")
    return Finding(OK, package.name, f"{version:<16} allowed {package.range or 'any'}")


def _check_wraps() -> list[Finding]:
    """Report missing functions, and the functions that wrappers replace in this process now.

    The process of `hf-moe-ep doctor` has patched no model. To see the functions that a training
    process replaces, call `examine` in that process.
    """
    from hf_moe_ep.integrations.install import report_wraps
    from hf_moe_ep.upstream.wrap import in_force

    rows = report_wraps()
    resolved = sum(row.resolved for row in rows)
    left_out = sum(not row.resolved and not row.error for row in rows)
    findings = []
    for row in rows:
        if row.error:
            text = f"{row.error}; see the allowed versions above"
            findings.append(Finding(FAIL if row.raises else NOTE, row.target, text))
    if not findings:
        replaced = sum(row.process for row in rows)
        text = f"{resolved} functions that patch() wraps exist; if needed, {replaced} of them are "
        text += "replaced for the whole process, the others on single objects"
        if left_out:
            text += f"; {left_out} more belong to packages that are not installed"
        findings.append(Finding(OK, "all", text))
    replaced_now = ", ".join(sorted(in_force())) or "none in this process"
    return [*findings, Finding(OK, "in force", replaced_now)]


def _check_machine() -> list[Finding]:
    kernels, error = _attempt(_report_kernels)
    if kernels is None:
        kernels = Finding(FAIL, "Triton kernels", f"could not be checked: {error}")
    return [
        *_report_gpus(),
        kernels,
        *_check_backends(),
        _check_deep_ep(),
        _check_flash_attention(),
    ]


def _report_gpus() -> list[Finding]:
    import torch

    if not torch.cuda.is_available():
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
        text = f"torch ({built}) sees none: ranks are CPU processes that communicate over gloo"
        return [Finding(NOTE, "GPU", text)]
    kinds: Counter[str] = Counter()
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        memory = gpu.total_memory / 2**30
        kinds[f"{gpu.name}, capability {gpu.major}.{gpu.minor}, {memory:.1f} GiB"] += 1
    return [Finding(OK, "GPU", f"{count} x {kind}") for kind, count in kinds.items()]


def _report_kernels() -> Finding:
    """Report whether experts_backend="auto" runs the Triton kernels or the torch path.

    The smallest kernel is built and checked as dispatch checks it. A kernel of the experts may
    still need more shared memory than this GPU has.
    """
    from hf_moe_ep.moe.experts import explain_missing_kernels

    name = "Triton kernels"
    reason = explain_missing_kernels() or _try_smallest_kernel()
    if reason:
        return Finding(NOTE, name, f"{reason}: experts run on the torch path")
    text = "the experts use them (experts_backend='auto'). One was built and is right; the first "
    return Finding(OK, name, f"{text}step checks the others")


def _try_smallest_kernel() -> str:
    """Return the reason why Triton cannot build kernels for the current GPU, or ""."""
    import torch

    from hf_moe_ep.ops.sum_check import TokenSumKind, check_sums_once

    return check_sums_once(TokenSumKind(torch.device("cuda"), torch.bfloat16, 2, 256))


def _check_backends() -> list[Finding]:
    import torch
    from torch import distributed as dist

    if not dist.is_available():
        text = "torch was built without torch.distributed: install a torch that has it"
        return [Finding(FAIL, "ranks", text)]
    available = {
        "gloo": dist.is_gloo_available(),
        "nccl": dist.is_nccl_available(),
        "mpi": dist.is_mpi_available(),
        "ucc": dist.is_ucc_available(),
    }
    names = [name for name, is_available in available.items() if is_available]
    mark, text = OK, ", ".join(names)
    if not available["gloo"]:
        mark, text = FAIL, "gloo is missing: install a torch that was built with gloo"
    findings = [Finding(mark, "backends", text)]
    if available["nccl"]:
        version = ".".join(map(str, torch.cuda.nccl.version()))
        findings.append(Finding(OK, "NCCL", version))
    elif torch.cuda.is_available():
        text = "missing: ranks with GPUs cannot communicate; install a torch that was built with it"
        findings.append(Finding(FAIL, "NCCL", text))
    else:
        findings.append(Finding(NOTE, "NCCL", "missing: only ranks with GPUs need it"))
    return findings


def _check_deep_ep() -> Finding:
    name, effect = "DeepEP", "dispatcher='deepep' is refused, 'all_to_all' (the default) runs"
    if importlib.util.find_spec("deep_ep") is None:
        return Finding(NOTE, name, f"not installed: {effect}")
    _, error = _attempt(lambda: importlib.import_module("deep_ep"))
    if error:
        return Finding(NOTE, name, f"broken: {error}; {effect}")
    return Finding(
        OK, name, f"{get_installed_version('deep_ep') or ''} dispatcher='deepep' may run"
    )


def _check_flash_attention() -> Finding:
    name = "flash-attn"
    if importlib.util.find_spec("flash_attn") is None:
        text = "not installed: models are loaded with attn_implementation='sdpa' (the default)"
        return Finding(NOTE, name, text)
    _, error = _attempt(lambda: importlib.import_module("flash_attn"))
    if error:  # transformers imports flash-attn if it is installed.
        return Finding(FAIL, name, f"broken: {error}; {_REINSTALL}")
    version = get_installed_version("flash_attn") or ""
    return Finding(OK, name, f"{version} attn_implementation='flash_attention_2' may run")


def _check_launch() -> list[Finding]:
    variables = read_launch_environment()
    findings = [Finding(OK, name, value) for name, value in variables.items()]
    _, error = _attempt(check_environment)
    if error:
        findings.append(Finding(FAIL, "environment", error.partition(": ")[2]))
    world = int(variables.get("WORLD_SIZE", "1"))
    by_accelerate = "ACCELERATE_MIXED_PRECISION" in variables
    if world > 1 or by_accelerate:
        return [*findings, _check_this_launch(variables, world, by_accelerate)]
    text = "one process: nothing is sharded"
    return [*findings, Finding(NOTE, "this process", text), _check_next_launch()]


def _check_this_launch(variables: Mapping[str, str], world: int, by_accelerate: bool) -> Finding:
    """Report how a patched model runs in this process, if a launcher has started it."""
    name = "this launch"
    with_fsdp = variables.get("ACCELERATE_USE_FSDP", "").lower() == "true"
    if not by_accelerate:
        text = f"{world} processes, not started by accelerate launch: call apply_ep_fsdp2(model)"
        return Finding(OK, name, f"{text} in your own loop")
    if with_fsdp and variables.get("FSDP_VERSION", "1") != "2":
        version = variables.get("FSDP_VERSION", "1")
        return Finding(FAIL, name, f"FSDP version {version} is refused; write {_FSDP2}")
    if with_fsdp:
        return Finding(OK, name, f"{world} processes with FSDP2: a patched model is sharded")
    if world > 1:
        text = f"{world} processes without FSDP: ep_size > 1 is refused; write {_FSDP2}"
        return Finding(FAIL, name, text)
    return Finding(NOTE, name, "one process: nothing is sharded")


def _check_next_launch() -> Finding:
    """Report how a patched model would run with the default config of `accelerate launch`."""
    name = "next launch"
    default_config, error = _attempt(read_default_launch_config)
    if error:
        fix = "repair the file, or remove it and name another file with --config_file"
        return Finding(FAIL, name, f"the default accelerate config cannot be read: {error}; {fix}")
    if default_config is None:
        text = "no default accelerate config; name a file: accelerate launch --config_file FILE"
        return Finding(NOTE, name, text)
    path, config = default_config
    problem = _find_launch_problem(config)
    if problem:
        return Finding(FAIL, name, f"{path}: {problem}")
    if config.get("distributed_type") == "FSDP":
        text = f"{config.get('num_processes')} processes with FSDP2: a patched model is sharded"
        return Finding(OK, name, f"{path}: {text}")
    return Finding(NOTE, name, f"{path}: one process, nothing is sharded")


def _find_launch_problem(config: Mapping[str, Any]) -> str:
    """Return why a patched model would refuse a launch config, or "" if it would run."""
    kind = str(config.get("distributed_type"))
    version = (config.get("fsdp_config") or {}).get("fsdp_version") or 1
    if kind == "FSDP" and int(version) != 2:
        return f"FSDP version {version} is refused; write fsdp_version: 2 in its fsdp_config"
    if kind not in ("FSDP", "NO"):
        return f"{kind} shards nothing, ep_size > 1 is refused; write {_FSDP2}"
    parallelism = config.get("parallelism_config") or {}
    size = int(parallelism.get("parallelism_config_tp_size") or 1)
    if size > 1:
        return f"tp_size {size} in its parallelism_config is refused; set it to 1"
    return ""
