"""The sdist holds every file that its tests read, and the metadata is complete."""

import configparser
import email
import os
import re
import shutil
import subprocess
import sys
import tarfile
from email.message import Message
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
NOT_COPIED = (".git", ".venv*", "out", "build", "dist", "*.egg-info", "__pycache__", ".*_cache")
BUILD = "from setuptools import build_meta; build_meta.build_sdist('dist')"
VERSIONED = ("torch", "transformers", "accelerate", "peft", "trl")
FOLDERS = (
    ".github",
    "benchmarks",
    "docs",
    "examples",
    "hf_moe_ep",
    "model_patches",
    "notebooks",
    "tests",
)


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> tuple[set[str], Message]:
    """The names in the archive, without its top folder, and its PKG-INFO."""
    source = tmp_path_factory.mktemp("sdist") / "source"
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(*NOT_COPIED))
    (source / "dist").mkdir()
    subprocess.run(
        [sys.executable, "-c", BUILD], cwd=source, check=True, capture_output=True, timeout=120
    )
    (archive,) = (source / "dist").glob("*.tar.gz")
    with tarfile.open(archive) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
        (info,) = (name for name in file.getnames() if name.count("/") == 1 and "PKG-INFO" in name)
        content = file.extractfile(info)
        assert content is not None
        return names, email.message_from_bytes(content.read())


def test_the_sdist_holds_what_its_tests_read(sdist: tuple[set[str], Message]) -> None:
    names, _ = sdist
    top = [path for path in ROOT.iterdir() if path.is_file() and not path.name.startswith(".")]
    inside = [
        path
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.*")
        if path.is_file() and "__pycache__" not in path.parts
    ]
    wanted = {os.fspath(path.relative_to(ROOT)) for path in [*top, *inside]}
    assert wanted - names == set()


def test_the_metadata_is_complete(sdist: tuple[set[str], Message]) -> None:
    _, info = sdist
    assert info["Author"] == "hf_moe_ep contributors"
    assert info["License-Expression"] == "Apache-2.0" and info["License"] is None
    assert "mixture-of-experts" in info["Keywords"]
    versions = {f"Programming Language :: Python :: 3.{minor}" for minor in (10, 11, 12, 13)}
    assert versions <= set(info.get_all("Classifier") or ())


def declared() -> dict[str, SpecifierSet]:
    """The ranges of setup.cfg; extras say the same of a package that is in several."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    texts = [setup["options"]["install_requires"], *setup["options.extras_require"].values()]
    found: dict[str, SpecifierSet] = {}
    for line in "\n".join(texts).splitlines():
        if line and not line.startswith("#"):
            requirement = Requirement(line)
            first = found.setdefault(requirement.name, requirement.specifier)
            assert first == requirement.specifier, requirement.name
    return found


@pytest.mark.parametrize("name", VERSIONED)
def test_the_readme_names_the_versions_that_are_declared(name: str) -> None:
    said = re.findall(rf"`{name}([<>=].*?)`", (ROOT / "README.md").read_text())
    assert [SpecifierSet(one) for one in said] == [declared()[name]]


def test_the_oldest_versions_that_are_tested_are_those_that_are_declared() -> None:
    lines = (ROOT / "constraints-oldest.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if "==" in line)
    for name in ("torch", "transformers", "accelerate", "peft", "bitsandbytes"):
        floor = next(one for one in declared()[name] if one.operator == ">=")
        assert Version(pins[name]) == Version(floor.version), name
    assert pins["trl"] in declared()["trl"]  # 0.29, the oldest, is run apart
