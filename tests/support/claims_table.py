"""Write tests/README.md, claim -> test, from the docstrings of the tests; `--check` only compares.

The first sentence of a test module is a row, and so is that of each test, and of each check on
ranks `name(..., rank, world)`, that has a docstring, behind its name: names are the claims there.
What is run of TRL is a table of the cases that its tests run.
"""

import argparse
import ast
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
COMMAND = "python tests/support/claims_table.py"
INTRODUCTION = f"""# What is claimed, and the test that proves it

Made by `{COMMAND}` from the docstrings of the tests; a test compares.
The first row of a file is what all of it proves; rows with `...` are tests in it that need more
words than their name. `make test` runs all but those marked slow, `make test-full` all but those
for a GPU, `make gpu` those.

- `claims/`: end to end, what the README says; `house/`: rules of the source tree and of the docs.
- `support/`: what tests share. Start with `ranks.py` (N processes with a hard end), `checks.py`
  (spawn once, report each), `parity.py` (N ranks against stock) and `tiny_models.py`.
- Every other folder mirrors the one of that name in `hf_moe_ep/`.

## Optimizers of a sharded model

Three steps in fp32 on two CPU ranks, ep_size 2, beside one process. FSDP2's parameters are
DTensors, which some optimizers cannot take.

| optimizer | on a sharded model |
|---|---|
| torch: Adadelta, Adagrad, Adam, AdamW, Adamax, ASGD, NAdam | as one process |
| torch: RAdam, RMSprop, SGD | as one process |
| torch: Muon, of matrices (experts are 3-D) | runs; it rounds to bf16, weights within 2e-4 |
| torch: Adafactor, Rprop | an error that names them |
| transformers: Adafactor (`optim="adafactor"`) | an error that names it |
| bitsandbytes 0.50: AdamW, AdamW8bit, PagedAdamW8bit, Lion8bit | an error that names them |
| torchao 0.18: AdamW8bit | runs; weights within 6e-4 of one process |
| torchao 0.18: AdamW4bit, AdamWFp8 | fail in torchao's own code |
"""


TRAINERS = """## Trainers of TRL

What the tests run on 4 ranks, each beside stock in one process (or, where it is refused, up to the
error), from `support/trl_cases.py`: losses within 1e-6 of stock's, norms of gradients within 1e-5,
and what the trainer logs besides; with `generate` in training 1e-5. "-": nobody has run it.
Distillation (GKD) is off-policy; KTO is without its KL term, which TRL takes of a rank's batch.
"""


def trainers() -> str:
    """A row for each trainer, full and LoRA, a column for each (ep, sp) of the cases."""
    from support.trl_cases import PREFERENCES, REWARD, SFT, generating

    cases = [*SFT, *REWARD, *PREFERENCES, *generating()]
    sizes = sorted({(case.sp, case.ep) for case in cases})
    reasons = list(dict.fromkeys(case.refused for case in cases if case.refused))
    heads = [f"ep {ep}" + (f", sp {sp}" if sp > 1 else "") for sp, ep in sizes]
    lines = [f"| trainer | | {' | '.join(heads)} |", "|---" * (2 + len(sizes)) + "|"]
    for trainer in dict.fromkeys(case.trainer for case in cases):
        for lora in (False, True):
            cells = []
            for size in sizes:
                here = [
                    case
                    for case in cases
                    if (case.trainer, bool(case.lora), case.sp, case.ep) == (trainer, lora, *size)
                ]
                refused = [f"refused ({reasons.index(c.refused) + 1})" for c in here if c.refused]
                cells.append(refused[0] if refused else "as stock" if here else "-")
            lines.append(f"| {trainer} | {'LoRA' if lora else 'full'} | {' | '.join(cells)} |")
    whys = [f'{number}. "... {reason} ..."' for number, reason in enumerate(reasons, start=1)]
    return "\n".join([TRAINERS, *lines, "", "Refused, with an error that says:", "", *whys]) + "\n"


def first_sentence(docstring: str) -> str:
    """Up to the first full stop that ends a sentence, on one line."""
    text = " ".join(docstring.split("\n\n")[0].split())
    return re.split(r"(?<=[^.])\.(?=\s+[A-Z`])", text)[0].rstrip(".")


def rows_of_file(file: Path) -> Iterator[tuple[str, str]]:
    """(claim, test) of one test module, the module's own first."""
    tree = ast.parse(file.read_text())
    name = file.relative_to(TESTS).as_posix()
    docstring = ast.get_docstring(tree)
    if docstring is None:
        raise ValueError(f"tests/{name} has no docstring; its first sentence is what it proves")
    yield first_sentence(docstring), f"[{name}]({name})"
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and (text := ast.get_docstring(node)):
            arguments = [argument.arg for argument in node.args.args]
            on_ranks = ["rank", "world"] in (arguments[:2], arguments[-2:], arguments[-3:-1])
            if node.name.startswith("test_") or (on_ranks and not node.name.startswith("_")):
                words = node.name.removeprefix("test_").replace("_", " ")
                yield f"... {words}. {first_sentence(text)}", f"`{node.name}`"


def table() -> str:
    """The whole of tests/README.md."""
    folders: dict[str, list[Path]] = {}
    for file in sorted(TESTS.rglob("test_*.py")):
        folders.setdefault(file.parent.relative_to(TESTS).as_posix(), []).append(file)
    parts = [INTRODUCTION, trainers()]
    for folder in sorted(folders, key=lambda name: (name != "claims", name != ".", name)):
        rows = [row for file in folders[folder] for row in rows_of_file(file)]
        title = "The package's own modules" if folder == "." else f"{folder}/"
        lines = [f"## {title}", "", "| claim | test |", "|---|---|"]
        lines += [f"| {claim.replace('|', chr(92) + '|')} | {test} |" for claim, test in rows]
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="exit with 1 if it is out of date")
    sys.path.append(os.fspath(TESTS))
    readme = TESTS / "README.md"
    if parser.parse_args().check:
        return int(not readme.exists() or readme.read_text() != table())
    readme.write_text(table())
    return 0


if __name__ == "__main__":
    sys.exit(main())
