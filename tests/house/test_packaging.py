"""The sdist has every file that its tests read, and its metadata is complete."""

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
    """Build the sdist, and return its file names without the top folder, and its PKG-INFO."""
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


def test_the_sdist_has_the_files_that_its_tests_read(sdist: tuple[set[str], Message]) -> None:
    names, _ = sdist
    top = [path for path in ROOT.iterdir() if path.is_file() and not path.name.startswith(".")]
    inside = [
        path
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.*")
        if path.is_file() and "__pycache__" not in path.parts
    ]
    expected = {os.fspath(path.relative_to(ROOT)) for path in [*top, *inside]}
    assert expected - names == set()


def test_the_metadata_is_complete(sdist: tuple[set[str], Message]) -> None:
    _, info = sdist
    assert info["Author"] == "hf_moe_ep contributors"
    assert info["License-Expression"] == "Apache-2.0" and info["License"] is None
    assert "mixture-of-experts" in info["Keywords"]
    versions = {f"Programming Language :: Python :: 3.{minor}" for minor in (10, 11, 12, 13)}
    assert versions <= set(info.get_all("Classifier") or ())


def read_ranges() -> dict[str, SpecifierSet]:
    """Return the version ranges of setup.cfg. A package in several extras has the same range."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    texts = [setup["options"]["install_requires"], *setup["options.extras_require"].values()]
    ranges: dict[str, SpecifierSet] = {}
    for line in "\n".join(texts).splitlines():
        if line and not line.startswith("#"):
            requirement = Requirement(line)
            first = ranges.setdefault(requirement.name, requirement.specifier)
            assert first == requirement.specifier, requirement.name
    return ranges


@pytest.mark.parametrize("name", VERSIONED)
def test_the_readme_names_the_versions_that_are_declared(name: str) -> None:
    named = re.findall(rf"`{name}([<>=].*?)`", (ROOT / "README.md").read_text())
    assert [SpecifierSet(text) for text in named] == [read_ranges()[name]]


def test_the_oldest_tested_versions_are_the_declared_ones() -> None:
    lines = (ROOT / "constraints-oldest.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if "==" in line)
    for name in ("torch", "transformers", "accelerate", "peft", "bitsandbytes"):
        floor = next(specifier for specifier in read_ranges()[name] if specifier.operator == ">=")
        assert Version(pins[name]) == Version(floor.version), name
    assert pins["trl"] in read_ranges()["trl"]  # the oldest trl, 0.29, is tested separately
