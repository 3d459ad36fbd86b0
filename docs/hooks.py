"""MkDocs hook: add the pages that are generated, and the files that lie outside docs/.

architectures.md   a copy of ARCHITECTURES.md
api.md             one mkdocstrings entry for each public name of hf_moe_ep
command-line.md    the help text of every command
notebooks/         the notebooks of the repository
results/           the pictures of benchmarks/results/

Links to files outside docs/ are paths in the repository, so that they work on GitHub. This hook
replaces each of them by the address of the copy in the site.
"""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

from mkdocs.plugins import event_priority
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
_ADDRESSES = {
    "../ARCHITECTURES.md": "architectures.md",
    "../benchmarks/results/": "results/",
    "../hf_moe_ep/config.py": "api.md#hf_moe_ep.config.ParallelConfig",
}


# This hook must run before mkdocs-jupyter, which converts the notebooks in MkDocs' list of files.
@event_priority(100)
def on_files(files, config):
    """Add the generated pages, the notebooks and the pictures to MkDocs' files."""
    pages = {
        "architectures.md": (ROOT / "ARCHITECTURES.md").read_text(),
        "api.md": _render_api(),
        "command-line.md": _render_command_line(),
    }
    for name, content in pages.items():
        files.append(File.generated(config, name, content=content))
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        files.append(_make_file(ROOT, path, config))
    for path in sorted((ROOT / "benchmarks/results").glob("*.png")):
        files.append(_make_file(ROOT / "benchmarks", path, config))
    return files


def on_page_markdown(markdown, **_):
    """Replace links to files of the repository by links to their copies in the site."""
    for path, address in _ADDRESSES.items():
        markdown = markdown.replace(f"]({path}", f"]({address}")
    return markdown


def _make_file(folder: Path, path: Path, config) -> File:
    """Return MkDocs' entry of a file outside docs/; its address is its path below `folder`.

    File.generated cannot be used, because mkdocs-jupyter finds a notebook by `src_dir`, which a
    generated file lacks.
    """
    return File(
        path.relative_to(folder).as_posix(),
        os.fspath(folder),
        config.site_dir,
        config.use_directory_urls,
    )


def _render_api() -> str:
    """Return one mkdocstrings entry for each public name, with the module that defines it."""
    tree = ast.parse((ROOT / "hf_moe_ep/__init__.py").read_text())
    defined_in = next(
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "_DEFINED_IN"
    )
    entries = [f"::: hf_moe_ep.{module}.{name}" for name, module in sorted(defined_in.items())]
    intro = "Import every name on this page from `hf_moe_ep` itself."
    return "\n\n".join(["# API", intro, *entries]) + "\n"


def _render_command_line() -> str:
    """Return the help texts of the command and of all its subcommands."""
    overview = _run_help()
    commands = re.findall(r"^    ([a-z][a-z-]+)", overview, flags=re.MULTILINE)
    blocks = [f"# Command line\n\n```text\n{overview}```"]
    blocks += [f"## {command}\n\n```text\n{_run_help(command)}```" for command in commands]
    return "\n\n".join(blocks) + "\n"


def _run_help(*command: str) -> str:
    environment = {**os.environ, "COLUMNS": "90", "PYTHONPATH": os.fspath(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "hf_moe_ep", *command, "--help"],
        capture_output=True,
        check=True,
        cwd=ROOT,
        env=environment,
        text=True,
    )
    return done.stdout
