"""Links, paths, names and calls in the pages exist. README leads to every page."""

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from support import pages

import hf_moe_ep
from hf_moe_ep import ParallelConfig

ROOT = pages.ROOT
PAGES = [*pages.names(), "ARCHITECTURES.md", "benchmarks/GPU.md", "benchmarks/results/README.md"]
TOP = "tests|examples|benchmarks|notebooks|docs|hf_moe_ep|model_patches"
# Arguments that from_pretrained passes on to transformers.
OF_TRANSFORMERS = {"dtype", "revision", "attn_implementation"}


@pytest.mark.parametrize("page", PAGES)
def test_links_of_a_page_exist(page: str) -> None:
    missing = [
        link
        for link, _ in pages.links(page)
        if (target := pages.target(page, link)) not in pages.GENERATED
        and not (ROOT / target).exists()
    ]
    assert not missing


@pytest.mark.parametrize("page", [page for page in PAGES if not page.startswith("docs/")])
def test_anchors_within_the_pages_exist(page: str) -> None:
    """tests/docs/test_site.py checks the anchors of docs/, on the site that MkDocs builds."""
    for link, anchor in pages.links(page):
        if anchor:
            headings = re.findall(r"^#+ (.*)", pages.read(pages.target(page, link)), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings}


@pytest.mark.parametrize("page", PAGES)
def test_paths_that_a_page_names_exist(page: str) -> None:
    spans = {span for span in pages.spans(page) if re.fullmatch(rf"({TOP})/[\w./-]*", span)}
    spans |= {span for span in pages.spans(page) if re.fullmatch(r"[A-Z]+\.md", span)}
    missing = [span for span in spans if not (ROOT / span).exists()]
    assert not missing


def test_every_page_of_docs_can_be_reached_from_the_readme() -> None:
    reached, waiting = set(), ["README.md"]
    while waiting:
        page = waiting.pop()
        if page in reached:
            continue
        reached.add(page)
        targets = (pages.target(page, link) for link, _ in pages.links(page))
        waiting += [t for t in targets if t.endswith(".md") and (ROOT / t).is_file()]
    assert {page for page in pages.names() if page.startswith("docs/")} <= reached


def test_every_page_of_docs_is_in_the_navigation() -> None:
    listed = re.findall(r"[\w-]+\.md|notebooks/\w+\.ipynb", (ROOT / "mkdocs.yml").read_text())
    docs = [page.removeprefix("docs/") for page in pages.names() if page.startswith("docs/")]
    notebooks = [f"notebooks/{path.name}" for path in (ROOT / "notebooks").glob("*.ipynb")]
    assert {*docs, *notebooks} <= set(listed)


def _read_rows(page: str, columns: int) -> Iterator[list[str]]:
    """Yield the cells of each table row that has this number of columns."""
    for line in pages.read(page).splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("|") and len(cells) == columns:
            yield cells


def test_the_models_of_the_readme_are_those_that_were_tested() -> None:
    """ARCHITECTURES.md lists the same parallelism for these models, and as many types."""
    tested = {
        row[0].strip("`* "): row for row in _read_rows("ARCHITECTURES.md", 9) if "`" in row[0]
    }
    readme = " ".join(pages.read("README.md").split())
    assert f"all {len(tested)} model types" in readme
    trained = sum(row[1] == "yes" for row in tested.values())
    assert f"{trained} of them can be trained" in readme
    num_types = 0
    for _, types in _read_rows("README.md", 2):
        for name in re.findall(r"`(\w+)`", types):
            if name != "model_type":
                assert tested[name][1] == "yes"
                assert tested[name][3].startswith("yes"), name
                assert tested[name][4].startswith("yes"), name
                num_types += 1
    assert num_types == 12


def _find_calls(page: str) -> Iterator[tuple[str, ast.Call]]:
    """Yield the calls of our public names in the sentences and tables of a page."""
    for span in pages.spans(page):
        try:
            tree = ast.parse(span.removesuffix(":").removeprefix("for key, tensor in "))
        except SyntaxError:
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                name = ast.unparse(node.func).removeprefix("hf_moe_ep.")
                if name in hf_moe_ep.__all__:
                    yield name, node


@pytest.mark.parametrize("page", PAGES)
def test_calls_in_the_text_have_arguments_that_exist(page: str) -> None:
    options = {field.name for field in fields(ParallelConfig)}
    for name, call in _find_calls(page):
        signature = inspect.signature(getattr(hf_moe_ep, name))
        known = set(signature.parameters)
        if any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values()):
            known |= options | OF_TRANSFORMERS
        if name == "compile_layers":
            known = {"model", *inspect.signature(torch.compile).parameters}
        used = {keyword.arg for keyword in call.keywords} - {None}
        assert used <= known, f"{ast.unparse(call)}: {used - known}"


@pytest.mark.parametrize("page", PAGES)
def test_names_in_the_text_exist(page: str) -> None:
    for attribute in re.findall(r"`hf_moe_ep\.(\w+)[`(]", pages.prose(page)):
        assert hasattr(hf_moe_ep, attribute) or importlib.import_module(f"hf_moe_ep.{attribute}")


def parse_tree(text: str) -> Iterator[tuple[Path, str]]:
    """Yield (path, description) for each folder and file of a source tree in a page.

    Indentation nests folders. A line begins with a name, and its text may name more files.
    """
    folders: list[tuple[int, Path]] = []
    for line in text.splitlines():
        indent = len(line) - len(line.lstrip())
        folders = [(i, folder) for i, folder in folders if i < indent]
        parent = folders[-1][1] if folders else Path()
        name, _, about = line.strip().partition(" ")
        if name.endswith("/"):
            folders.append((indent, parent / name))
            yield parent / name, about.strip()
            continue
        for file in re.findall(r"\w+\.py", line):
            if file == name or (ROOT / parent / file).exists():
                yield parent / file, about.strip()


(TREE,) = (block.text for block in pages.blocks("docs/source.md"))


def test_the_source_tree_names_every_folder() -> None:
    named = dict(parse_tree(TREE))
    assert not [path for path in named if not (ROOT / path).exists()]
    folders = {path for path in named if (ROOT / path).is_dir()}
    real = {
        file.parent.relative_to(ROOT)
        for top in ("hf_moe_ep", "model_patches")
        for file in (ROOT / top).rglob("*.py")
    }
    assert folders == real
    assert not [path for path, about in named.items() if not about and path.name != "hf_moe_ep"]


def test_a_line_of_the_source_tree_imports_only_lines_below_it() -> None:
    lines = [path for path, _ in parse_tree(TREE) if path.parent == Path("hf_moe_ep")]
    names = [path.stem for path in lines]
    inside = {path.stem for path in (ROOT / "hf_moe_ep").glob("*") if "__" not in path.name}
    assert set(names) == inside - {"model_patches", "py"}
    position = {name: number for number, name in enumerate(names)}
    for path in lines:
        files = [ROOT / path] if path.suffix else (ROOT / path).rglob("*.py")
        for file in files:
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(
                    "hf_moe_ep."
                ):
                    imported = str(node.module).split(".")[1]
                    if imported in position:
                        assert position[imported] >= position[path.stem], f"{file}: {node.module}"


def test_a_source_tree_by_hand() -> None:
    page = "top/\n  moe/     the layer\n    a.py     one thing\n  state.py what is kept\n"
    assert dict(parse_tree(page)) == {
        Path("top"): "",
        Path("top/moe"): "the layer",
        Path("top/moe/a.py"): "one thing",
        Path("top/state.py"): "what is kept",
    }
