"""Write ARCHITECTURES.md, architectures x features, from tests/architectures.json.

    PYTHONPATH=tests python -m support.architectures.table                the page, from that file
    PYTHONPATH=tests python -m support.architectures.table found.jsonl    with what tests found

How tests record what they find: `results.py`; `make architectures` runs them all. What no test has
recorded is "not tested".
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING

from hf_moe_ep.architectures import differences
from support.architectures.results import COLUMNS, read_results
from support.architectures.types import INSTALLED

ROOT = Path(__file__).resolve().parents[3]
DATA = ROOT / "tests/architectures.json"
PAGE = ROOT / "ARCHITECTURES.md"
COMMAND = "make architectures"
# A model without a tower has nothing to show there.
TEXT_ONLY = {"none": "text alone"}
INTRODUCTION = f"""# Architectures

Every Mixture-of-Experts model type of Transformers {{version}} with experts on its experts
interface, and what tests found when they compared it with stock. Made by `{COMMAND}` from
`tests/architectures.json`: what the tests found, with the largest error max|got - want| / max|want|
of each. A test compares the two.

- EP + FSDP2: one process patched, and 2 ranks at `ep_size=2`: loss, every gradient, their norm and
  one step of AdamW equal stock's.
- LoRA on experts: as stock PEFT without EP. Sequence parallelism: `sp_size=2` equals stock.
- vision tower: any mix of text and pictures over the ranks; "-" is a model of text alone.
- hub files: `save_pretrained` writes what stock would write, key by key and bit by bit, and
  `from_pretrained` reads it.
- resume: `save_checkpoint` at `ep_size=2`, `load_checkpoint` at another layout: the same parameters
  and moments, and the step that would have come next, or its loss.

"yes" is a passed comparison in fp64, "not tested" that there is none yet, "no" a refusal: an error
that says why, under the number beside it. Weights are random and small here: nothing is said of
speed.
"""

Results = Mapping[str, Mapping[str, Mapping[str, Any]]]


def merged(data: dict[str, Any], found: Results) -> dict[str, Any]:
    """The data with what was found instead of what stood there, in the order of types."""
    old: Results = data.get("types", {})
    types = {}
    for model_type in sorted({*old, *found, *INSTALLED}):
        columns = {**_own(old.get(model_type, {})), **found.get(model_type, {})}
        if reason := differences(model_type).refused:
            columns = {name: {"refused": reason} for name in COLUMNS}
        if "refused" in columns.get("ep", {}):  # not even patched, so nothing else is granted
            columns = dict.fromkeys(COLUMNS, columns["ep"]) | columns
        if not _has_tower(model_type):
            columns["vision"] = TEXT_ONLY
        types[model_type] = {name: columns[name] for name in COLUMNS if name in columns}
    return {"transformers": version("transformers"), "types": types}


def _own(columns: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Mapping[str, Any]]:
    """The columns without those that are refused because EP was."""
    ep = columns.get("ep", {})
    return {name: x for name, x in columns.items() if name == "ep" or "refused" not in x or x != ep}


def _has_tower(model_type: str) -> bool:
    return "vision_config" in CONFIG_MAPPING[model_type].sub_configs


def page(data: Mapping[str, Any]) -> str:
    """The whole of ARCHITECTURES.md."""
    types: Results = data["types"]
    reasons = _reasons(types)
    lines = [INTRODUCTION.format(version=data["transformers"])]
    lines += [" | ".join(["| model type", *COLUMNS.values()]) + " |", "|---" * 7 + "|"]
    for model_type, found in types.items():
        cells = [_cell(found.get(column), reasons) for column in COLUMNS]
        lines.append(" | ".join([f"| `{model_type}`", *cells]) + " |")
    lines += ["", "## Why not", ""]
    lines += [f"{number}. {reason}" for reason, number in reasons.items()]
    return "\n".join(lines).rstrip() + "\n"


def _reasons(types: Results) -> dict[str, int]:
    numbers: dict[str, int] = {}
    for found in _all_found(types):
        if reason := _reason(found):
            numbers.setdefault(reason, len(numbers) + 1)
    return numbers


def _all_found(types: Results) -> Iterator[Mapping[str, Any]]:
    for columns in types.values():
        yield from columns.values()


def _reason(found: Mapping[str, Any]) -> str:
    reason = found.get("refused") or found.get("failed") or ""
    return str(reason).replace("|", "\\|")


def _cell(found: Mapping[str, Any] | None, reasons: Mapping[str, int]) -> str:
    if found is None:
        return "not tested"
    if "none" in found:
        return "-"
    if "max_error" in found:
        return "yes"
    kind = "no" if "refused" in found else "FAILS"
    return f"{kind} ({reasons[_reason(found)]})"


def read_data() -> dict[str, Any]:
    """Return the results that are recorded so far."""
    data: dict[str, Any] = json.loads(DATA.read_text()) if DATA.exists() else {}
    return data


def as_text(data: Mapping[str, Any]) -> str:
    """The data as its file has it: a line for each finding."""
    types = [
        f"  {json.dumps(model_type)}: {{"
        + ",".join(f"\n   {json.dumps(c)}: {json.dumps(f)}" for c, f in found.items())
        + "}"
        for model_type, found in data["types"].items()
    ]
    return (
        f'{{"transformers": {json.dumps(data["transformers"])},\n "types": {{\n'
        + ",\n".join(types)
        + "}}\n"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("found", nargs="*", type=Path, help="files that tests recorded")
    data = merged(read_data(), {})
    for file in parser.parse_args().found:
        data = merged(data, read_results(file))
    DATA.write_text(as_text(data))
    PAGE.write_text(page(data))
    return 0


if __name__ == "__main__":
    sys.exit(main())
