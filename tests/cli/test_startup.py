"""Help and versions are printed without importing torch, so they appear at once.

Each case runs in a fresh process, because the process of the tests has imported torch already.
"""

import json
import subprocess
import sys
from importlib import import_module

import pytest

import hf_moe_ep
from hf_moe_ep.cli.main import COMMANDS, main

HEAVY = ("accelerate", "bitsandbytes", "numpy", "peft", "torch", "transformers")
PROBE = """
import json, sys
from hf_moe_ep.cli.main import main
try:
    code = main({arguments!r})
except SystemExit as exit:
    code = exit.code
print(json.dumps([code, sorted(set({heavy!r}) & set(sys.modules))]))
"""


def _run_program(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120
    )


@pytest.mark.parametrize(
    ("arguments", "code"), [([], 0), (["--help"], 0), (["plan", "--help"], 0), (["plam"], 2)]
)
def test_help_needs_no_other_package(arguments: list[str], code: int) -> None:
    _check_imports(arguments, code)


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command_needs_no_other_package(command: str) -> None:
    _check_imports([command, "--help"], 0)
    _check_imports([command, "--no-such-option"], 2)


def _check_imports(arguments: list[str], code: int) -> None:
    result = _run_program(PROBE.format(arguments=arguments, heavy=HEAVY))
    assert json.loads(result.stdout.splitlines()[-1]) == [code, []]
    assert (result.stderr == "") == (code == 0), result.stderr


def test_the_bare_command_prints_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    bare = capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["--help"])
    assert bare == capsys.readouterr().out and bare.startswith("usage: hf-moe-ep")


def test_the_printed_version_is_the_version_of_the_package(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as exit:
        main(["--version"])
    assert exit.value.code == 0
    assert capsys.readouterr().out == f"hf-moe-ep {hf_moe_ep.__version__}\n"


def test_each_public_name_is_the_object_of_its_module() -> None:
    assert {*hf_moe_ep._DEFINED_IN, "__version__"} == set(hf_moe_ep.__all__)
    for name, module in hf_moe_ep._DEFINED_IN.items():
        assert getattr(hf_moe_ep, name) is getattr(import_module(f"hf_moe_ep.{module}"), name)
        assert name in dir(hf_moe_ep)


@pytest.mark.slow
def test_a_submodule_does_not_hide_the_function_of_its_name() -> None:
    """`hf_moe_ep.patch` stays the function after the module is imported."""
    _run_program(
        "import hf_moe_ep.patch, hf_moe_ep.describe\n"
        "from hf_moe_ep import describe, patch\n"
        "assert patch.__name__ == 'patch' and describe.__name__ == 'describe'\n"
    )
