"""Write ARCHITECTURES.md, a table of architectures and features, from tests/architectures.json.

    python -m support.architectures.table                writes the page anew from that file
    python -m support.architectures.table found.jsonl    first adds the results in found.jsonl to it

Both commands need PYTHONPATH=tests. `results.py` describes how tests record their results, and
`make architectures` runs all these tests. A feature without a recorded result is "not tested".
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING

from hf_moe_ep.architectures import read_differences
from support.architectures.results import COLUMNS, read_results
from support.architectures.types import INSTALLED, OUTSIDE

ROOT = Path(__file__).resolve().parents[3]
DATA = ROOT / "tests/architectures.json"
PAGE = ROOT / "ARCHITECTURES.md"
COMMAND = "make architectures"
# The result in the column "vision" of a model without a tower for pictures or sound.
TEXT_ONLY = {"none": "text alone"}
INTRODUCTION = f"""# Architectures

This page lists every Mixture-of-Experts model type of Transformers {{version}}, and what
tests found when they compared it with stock. Types with a star do not compute their experts
through the experts interface of Transformers: a file in `model_patches` describes their MoE blocks,
or says why they are refused; [notebook 6](notebooks/6_new_architecture.ipynb) shows how to add one.
Types that accept any text model, such as `internvl`, have no row.

`{COMMAND}` runs the tests and writes the page from `tests/architectures.json`. That file
also holds the largest error, max|got - want| / max|want|, of each comparison.

- EP + FSDP2: the loss, every gradient, the gradient norm and one step of AdamW equal stock's, for a
  patched model in one process and on 2 ranks with `ep_size=2`.
- LoRA on experts: the same values equal those of stock PEFT, which has no EP.
- sequence parallelism: training with `sp_size=2` equals stock. In a type marked "gathered", the
  modules listed below mix tokens outside of attention. They get whole sequences, so their
  computation and activations are not divided by `sp_size`. Modules marked "only keys" get the keys
  of whole sequences, and all else is divided, except keys and values. Encoders of pictures and
  sound run on every rank, except the tower of `qwen3_vl_moe`, which is divided.
- context parallelism: training with `cp_size=2` equals stock. The modules marked "gathered" are the
  same.
- expert tensor parallelism: the values of the first column equal stock's with `etp_size=2`.
- vision tower: training equals stock, whichever ranks have pictures and whichever have only text.
  "-" marks a model that takes only text.
- hub files: `save_pretrained` writes the same keys and the same bits as stock, and
  `from_pretrained` reads them. For `qwen3_vl_moe` they are compared with published checkpoints,
  whose experts are transposed; stock reads these, but writes experts as they are in memory.
- resume at another layout: `save_checkpoint` saves a run with `ep_size=2`, and `load_checkpoint`
  loads it with another layout. Parameters and moments are the same, and so is the loss of the next
  step; for some types the whole next step is compared.

"yes" means that the comparison passed in fp64, and "not tested" that no test has compared it yet.
"no" means that hf_moe_ep refuses it with an error, which is listed below under the number in
brackets. The models are small and have random weights, so the page says nothing about speed.
"""

# Model type -> column -> result.
Results = Mapping[str, Mapping[str, Mapping[str, Any]]]


def merged(data: dict[str, Any], found: Results) -> dict[str, Any]:
    """Return `data` with the new results `found`, which replace older ones of the same cells.

    Types are sorted by name, and types without results are included.
    """
    old: Results = data.get("types", {})
    types = {}
    for model_type in sorted({*old, *found, *INSTALLED, *OUTSIDE}):
        columns = {**_without_copies_of_ep(old.get(model_type, {})), **found.get(model_type, {})}
        if reason := read_differences(model_type).refused:
            columns = {name: {"refused": reason} for name in COLUMNS}
        # If patch() refuses a type, its columns without a result are refused for the same reason.
        if "refused" in columns.get("ep", {}):
            columns = dict.fromkeys(COLUMNS, columns["ep"]) | columns
        if not _has_tower(model_type):
            columns["vision"] = TEXT_ONLY
        types[model_type] = {name: columns[name] for name in COLUMNS if name in columns}
    return {"transformers": version("transformers"), "types": types}


def _without_copies_of_ep(
    columns: Mapping[str, Mapping[str, Any]],
) -> Mapping[str, Mapping[str, Any]]:
    """Remove the refusals that `merged` copied from the column "ep" into other columns."""
    ep = columns.get("ep", {})
    return {name: x for name, x in columns.items() if name == "ep" or "refused" not in x or x != ep}


def _has_tower(model_type: str) -> bool:
    parts = CONFIG_MAPPING[model_type].sub_configs
    return "vision_config" in parts or "audio_config" in parts


def page(data: Mapping[str, Any]) -> str:
    """Return the text of ARCHITECTURES.md."""
    types: Results = data["types"]
    reasons = _number_reasons(types)
    lines = [INTRODUCTION.format(version=data["transformers"])]
    titles = ["model type", *COLUMNS.values()]
    lines += [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for model_type, found in types.items():
        cells = [_cell(found.get(column), reasons) for column in COLUMNS]
        star = " *" if model_type in OUTSIDE else ""
        lines.append(" | ".join([f"| `{model_type}`{star}", *cells]) + " |")
    lines += ["", "## Gathered sequences", ""]
    lines += [
        f"- `{model_type}`: {', '.join(gathered)}"
        for model_type, found in types.items()
        if (gathered := found.get("sp", {}).get("gathered"))
    ]
    lines += ["", "## Why not", ""]
    lines += [f"{number}. {reason}" for reason, number in reasons.items()]
    return "\n".join(lines).rstrip() + "\n"


def _number_reasons(types: Results) -> dict[str, int]:
    """Number the reasons of all refusals and failures, in the order of the table's cells."""
    numbers: dict[str, int] = {}
    for found in _all_results(types):
        if reason := _reason(found):
            numbers.setdefault(reason, len(numbers) + 1)
    return numbers


def _all_results(types: Results) -> Iterator[Mapping[str, Any]]:
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
        return "yes, gathered" if found.get("gathered") else "yes"
    kind = "no" if "refused" in found else "FAILS"
    return f"{kind} ({reasons[_reason(found)]})"


def read_data() -> dict[str, Any]:
    """Read the results that are recorded so far."""
    data: dict[str, Any] = json.loads(DATA.read_text()) if DATA.exists() else {}
    return data


def format_report(data: Mapping[str, Any]) -> str:
    """Return the data as the text of its file, which has one line for each result."""
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
    DATA.write_text(format_report(data))
    PAGE.write_text(page(data))
    return 0


if __name__ == "__main__":
    sys.exit(main())
