"""The wheel contains the whole package, and its requirements are enough to train with it.

The wheel is built from the sdist, as `python -m build` does, so the sdist has everything that an
installation needs. The wheel is installed into new virtual environments, which contain only the
packages that its metadata requires, as links to the running environment. The tests need no network,
and the checkout is not on the path.
"""

import email
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
NOT_COPIED = (".git", ".venv*", "out", "build", "dist", "*.egg-info", "__pycache__", ".*_cache")
BUILD_SDIST = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
# The notebook imports matplotlib to draw, but the wheel does not require it.
NO_DRAWING = """
import sys
from unittest.mock import MagicMock
drawing = MagicMock()
drawing.pyplot.subplots = lambda rows, columns, **_: (MagicMock(), [MagicMock()] * rows * columns)
sys.modules |= {"matplotlib": drawing, "matplotlib.pyplot": drawing.pyplot}
"""
LORA = """
import torch
from peft import LoraConfig, get_peft_model
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from hf_moe_ep import patch

torch.set_default_dtype(torch.float64)
config = Qwen3MoeConfig(
    vocab_size=64, hidden_size=32, moe_intermediate_size=16, num_hidden_layers=2, num_experts=4,
    num_experts_per_tok=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    experts_implementation="eager",
)
experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
lora = LoraConfig(r=2, target_parameters=experts, target_modules=["q_proj"])
ids = torch.arange(48).view(2, 24)

def train(change, folder):
    torch.manual_seed(0)
    model = get_peft_model(change(Qwen3MoeForCausalLM(config)), lora).double()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    losses = []
    for _ in range(4):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.save_pretrained(folder)
    return losses

stock, patched = train(lambda model: model, "stock"), train(patch, "adapter")
assert stock[-1] < stock[0], stock
# transformers computes the loss in fp32.
assert max(abs(a - b) for a, b in zip(stock, patched)) < 1e-5, (stock, patched)
"""
ASSERT_MISSING = """
import importlib.util
found = [n for n in {names!r} if importlib.util.find_spec(n) is not None]
assert not found, f"installed, but not required: {{found}}"
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the sdist from a copy of the checkout, then `pip wheel` the sdist.

    The checkout is copied, because setuptools writes into the source.
    """
    folder = tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT, folder / "source", ignore=shutil.ignore_patterns(*NOT_COPIED))
    _run([sys.executable, "-c", BUILD_SDIST, os.fspath(folder)], folder / "source")
    (sdist,) = folder.glob("*.tar.gz")
    _run(
        [sys.executable, "-m", "pip", "wheel", os.fspath(sdist), "--no-deps", "--no-index"]
        + ["--no-build-isolation", "--disable-pip-version-check", "-w", os.fspath(folder)],
        folder,
    )
    (file,) = folder.glob("*.whl")
    return file


def test_the_wheel_contains_every_folder_and_no_tests(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as file:
        names = set(file.namelist())
        scripts = next(name for name in names if name.endswith("entry_points.txt"))
        assert "hf-moe-ep = hf_moe_ep.cli.main:main" in file.read(scripts).decode()
    package_files = {name for name in names if ".dist-info/" not in name}
    want = {
        (Path("hf_moe_ep") / path.relative_to(root)).as_posix()
        for root, package in ((ROOT / "hf_moe_ep", "."), (ROOT, "model_patches"))
        for path in (root / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert package_files == want
    data = {name for name in package_files if not name.endswith(".py")}
    assert data == {
        "hf_moe_ep/py.typed",
        "hf_moe_ep/planner/published_models.json",
        "hf_moe_ep/planner/rates.json",
    }


@dataclass(frozen=True)
class Installed:
    """A virtual environment with the wheel and its requirements, and a working folder."""

    python: Path
    work: Path

    def run(self, *command: str, code: int = 0) -> str:
        """Run a program of the environment in `work`, and return its output."""
        return _run([os.fspath(self.python.with_name(command[0])), *command[1:]], self.work, code)


@pytest.fixture(scope="module")
def plain(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """Return an environment made by `pip install WHEEL`."""
    return _install(wheel, "", tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def with_peft(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """Return an environment made by `pip install WHEEL[peft]`."""
    return _install(wheel, "peft", tmp_path_factory.mktemp("peft"))


@pytest.mark.slow
def test_the_quickstart_runs_from_the_wheel(plain: Installed) -> None:
    (notebook,) = (ROOT / "notebooks").glob("*quickstart.ipynb")
    cells = json.loads(notebook.read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    script = [NO_DRAWING, ASSERT_MISSING.format(names=["peft", "trl", "pytest", "ruff"]), *code]
    script.append("import hf_moe_ep, json")
    script.append("print(json.dumps([hf_moe_ep.__file__, stock_losses, patched_losses]))")
    (plain.work / "quickstart.py").write_text("\n\n".join(script))
    where, stock, patched = json.loads(plain.run("python", "quickstart.py").splitlines()[-1])
    assert Path(where).is_relative_to(plain.python.parents[1]), where
    assert patched[-1] < 0.6 * patched[0]
    # The model is fp64, but a last bit of the logits may change how the loss rounds to fp32.
    assert max(abs(a - b) for a, b in zip(stock, patched)) < 1e-5


@pytest.mark.slow
def test_the_doctor_runs_from_the_wheel(plain: Installed) -> None:
    text = plain.run("hf-moe-ep", "doctor")
    assert text.splitlines()[-1] == "training can run here"
    assert f"at {plain.python.parents[1]}" in " ".join(text.split())
    assert "LoRA: not available, pip install 'hf_moe_ep[peft]'" in text
    assert "Qwen/Qwen3-30B-A3B" in plain.run("hf-moe-ep", "memory", "--help")


@pytest.mark.slow
def test_the_extra_peft_is_enough_for_lora(with_peft: Installed) -> None:
    not_required = ["trl", "matplotlib", "sklearn", "pytest", "ruff"]
    (with_peft.work / "lora.py").write_text(ASSERT_MISSING.format(names=not_required) + LORA)
    with_peft.run("python", "lora.py")
    text = with_peft.run("hf-moe-ep", "export-adapter", "adapter", "single")
    assert "single: 2 layers, 4 experts each" in text


@pytest.mark.slow
def test_the_examples_train_from_the_wheel(with_peft: Installed) -> None:
    """Both example scripts run under accelerate launch with experts split over two ranks."""
    shutil.copytree(ROOT / "examples", with_peft.work / "examples")
    with_peft.run("python", "examples/make_small_model.py", "start")
    arguments = "--model start --block_size 32 --eval_blocks 8 --use_cpu"
    arguments += " --max_steps 2 --ep_size 2 --report_to none --logging_steps 1"
    for script in ("finetune_text", "finetune_lora"):
        with_peft.run(
            *("python", "-m", "accelerate.commands.launch", "--num_processes", "2"),
            *("--config_file", "examples/accelerate/cpu_4.yaml", f"examples/{script}.py"),
            *(*arguments.split(), "--output_dir", script),
        )
        assert list((with_peft.work / script).glob("*.safetensors")), script


def _install(wheel: Path, extra: str, folder: Path) -> Installed:
    """Make a virtual environment with the wheel, and with links to its requirements."""
    _run([sys.executable, "-m", "venv", "--without-pip", os.fspath(folder / "venv")], folder)
    python = folder / "venv" / "bin" / "python"
    _run(
        [sys.executable, "-m", "pip", "--python", os.fspath(python), "install", "--no-deps"]
        + ["--no-index", "--disable-pip-version-check", "--quiet", os.fspath(wheel)],
        folder,
    )
    (site,) = (folder / "venv" / "lib").glob("python*/site-packages")
    for distribution in _find_distributions(_read_requirements(wheel), extra):
        for entry in {file.parts[0] for file in distribution.files or () if file.parts[0] != ".."}:
            target = Path(str(distribution.locate_file(entry)))
            if entry != "__pycache__" and not (site / entry).exists():
                (site / entry).symlink_to(target, target_is_directory=target.is_dir())
    (folder / "work").mkdir()
    return Installed(python, folder / "work")


def _read_requirements(wheel: Path) -> list[Requirement]:
    with zipfile.ZipFile(wheel) as file:
        name = next(name for name in file.namelist() if name.endswith(".dist-info/METADATA"))
        lines = email.message_from_bytes(file.read(name)).get_all("Requires-Dist") or []
    return [Requirement(line) for line in lines]


def _find_distributions(
    requirements: Iterable[Requirement], extra: str
) -> list[metadata.Distribution]:
    """Find the installed distributions that pip would install for `requirements`, transitively."""
    todo = [(requirement, frozenset({extra})) for requirement in requirements]
    distributions: dict[str, metadata.Distribution] = {}
    visited: set[tuple[str, frozenset[str]]] = set()
    while todo:
        requirement, extras = todo.pop()
        marker = requirement.marker
        if marker and not any(marker.evaluate({"extra": extra}) for extra in {"", *extras}):
            continue
        name, own_extras = canonicalize_name(requirement.name), frozenset(requirement.extras)
        if (name, own_extras) in visited:
            continue
        visited.add((name, own_extras))
        distributions[name] = metadata.distribution(name)
        todo += [(Requirement(line), own_extras) for line in distributions[name].requires or ()]
    return list(distributions.values())


def _run(command: list[str], folder: Path, code: int = 0) -> str:
    """Run a command without the checkout on its path, check its exit code, and return stdout."""
    dropped = ("PYTHONPATH", "VIRTUAL_ENV", "RANK", "WORLD_SIZE")
    environment = {name: value for name, value in os.environ.items() if name not in dropped}
    environment |= {"HF_HUB_OFFLINE": "1", "HF_HOME": os.fspath(folder / "home")}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == code, f"{command}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout
