"""MkDocs hook: add the pages that are generated, and the files that lie outside docs/.

architectures.md   a copy of ARCHITECTURES.md
api.md             one mkdocstrings entry for each public name of hf_moe_ep
command-line.md    the help text of every command
notebooks/         the notebooks of the repository
results/           the pictures of benchmarks/results/

The pages link to files outside docs/ by their paths in the repository, so the links also work
there; here they become links to the files above.
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


# Before mkdocs-jupyter, which converts the notebooks that it finds among the files.
@event_priority(100)
def on_files(files, config):
    """Add the generated pages, the notebooks and the pictures to MkDocs' files."""
    pages = {
        "architectures.md": (ROOT / "ARCHITECTURES.md").read_text(),
        "api.md": _api(),
        "command-line.md": _command_line(),
    }
    for name, content in pages.items():
        files.append(File.generated(config, name, content=content))
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        files.append(_file(ROOT, path, config))
    for path in sorted((ROOT / "benchmarks/results").glob("*.png")):
        files.append(_file(ROOT / "benchmarks", path, config))
    return files


def on_page_markdown(markdown, **_):
    """Replace links to files of the repository by links to their copies in the site."""
    markdown = markdown.replace("](../ARCHITECTURES.md", "](architectures.md")
    return markdown.replace("](../benchmarks/results/", "](results/")


def _file(folder: Path, path: Path, config) -> File:
    """Return MkDocs' entry of a file outside docs/; its address is its path below `folder`.

    Not File.generated: mkdocs-jupyter finds a notebook by `src_dir`, which a generated file lacks.
    """
    return File(
        path.relative_to(folder).as_posix(),
        os.fspath(folder),
        config.site_dir,
        config.use_directory_urls,
    )


def _api() -> str:
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


def _command_line() -> str:
    """Return the help texts of the command and of all its subcommands."""
    overview = _help()
    commands = re.findall(r"^    ([a-z][a-z-]+)", overview, flags=re.MULTILINE)
    blocks = [f"# Command line\n\n```text\n{overview}```"]
    blocks += [f"## {command}\n\n```text\n{_help(command)}```" for command in commands]
    return "\n\n".join(blocks) + "\n"


def _help(*command: str) -> str:
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
