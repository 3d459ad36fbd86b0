"""The documentation site builds without a warning; its pages, names and anchors exist."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from support import pages

import hf_moe_ep

needs_mkdocs = pytest.mark.skipif(
    find_spec("mkdocs") is None, reason="needs mkdocs: pip install '.[docs]'"
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site in strict mode, with notebooks that are converted but not run."""
    folder = tmp_path_factory.mktemp("site")
    variables = {"DOCS_EXECUTE": "false", "NO_MKDOCS_2_WARNING": "1"}
    result = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", os.fspath(folder)],
        cwd=pages.ROOT,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=560,
    )
    assert result.returncode == 0, result.stderr[-6000:]
    assert "WARNING" not in result.stderr
    return folder


@pytest.mark.slow
@needs_mkdocs
def test_the_api_page_has_every_public_name(site: Path) -> None:
    api = (site / "api" / "index.html").read_text()
    missing = [
        name
        for name in hf_moe_ep.__all__
        if name != "__version__" and not re.search(rf'id="hf_moe_ep\.[\w.]*\.{name}"', api)
    ]
    assert not missing


@pytest.mark.slow
@needs_mkdocs
def test_generated_pages_and_notebooks_exist(site: Path) -> None:
    command_line = (site / "command-line" / "index.html").read_text()
    for command in ("doctor", "merge-adapter", "plan"):
        assert f'id="{command}"' in command_line
    assert "qwen3_moe" in (site / "architectures" / "index.html").read_text()
    for notebook in (pages.ROOT / "notebooks").glob("*.ipynb"):
        assert (site / "notebooks" / notebook.stem / "index.html").is_file()


@pytest.mark.slow
@needs_mkdocs
def test_anchors_of_links_exist(site: Path) -> None:
    """MkDocs' strict mode checks the files of links, not the anchors."""
    broken = []
    for page in site.rglob("index.html"):
        for href in re.findall(r'href="([^"]+#[^"]+)"', page.read_text()):
            file, _, anchor = href.partition("#")
            if "://" in file:
                continue
            target = (page.parent / file).resolve() if file else page
            target = target / "index.html" if target.is_dir() else target
            if f'id="{anchor}"' not in target.read_text():
                broken.append((page.relative_to(site).as_posix(), href))
    assert not broken
