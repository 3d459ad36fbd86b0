"""The notebooks run from top to bottom, and the numbers they arrive at are right."""

import json
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[2]


def _run(name: str, *expressions: str) -> dict[str, Any]:
    """Execute notebooks/`name`; return the values of the expressions at its end."""
    notebook = nbformat.read(ROOT / "notebooks" / name, as_version=4)
    nbformat.validate(notebook)
    stored = [cell for cell in notebook.cells if cell.get("outputs")]
    assert not stored, f"{name} is committed with outputs"
    pairs = ", ".join(f"{expression!r}: {expression}" for expression in expressions)
    notebook.cells.append(nbformat.v4.new_code_cell(f"import json\nprint(json.dumps({{{pairs}}}))"))
    # The kernel starts in the root, from where hf_moe_ep can be imported without an install.
    resources = {"metadata": {"path": str(ROOT)}}
    NotebookClient(notebook, timeout=120, resources=resources).execute()
    (output,) = notebook.cells[-1].outputs
    return json.loads(output.text)


def test_quickstart() -> None:
    values = _run(
        "quickstart.ipynb",
        "stock_losses",
        "patched_losses",
        "weights",
        "rows",
        "refusal",
        "[load.sum(-1).tolist() for load in loads.values()]",
        "sample.numel() * config.num_experts_per_tok",
    )
    stock, patched = values["stock_losses"], values["patched_losses"]
    assert len(stock) == len(patched) == 50
    # A fresh model is close to uniform over 256 bytes: ln 256 = 5.545.
    assert abs(patched[0] - 5.545) < 0.1
    assert patched[-1] < 0.6 * patched[0]
    # fp64 but for the cross-entropy, whose fp32 rounding a last bit of the logits may flip.
    assert max(abs(a - b) for a, b in zip(stock, patched)) < 1e-5
    assert 0 < values["weights"] < 1e-5  # 0 would mean that stock's own code ran twice
    for per_expert, per_rank in values["rows"].values():
        assert 0 < per_rank <= per_expert <= 2
    assert values["rows"]["2"][1] < values["rows"]["2"][0]
    assert values["rows"]["8"][0] == values["rows"]["8"][1]  # one expert a rank: nothing to save
    assert "ep_size=2" in values["refusal"]
    pairs = values["sample.numel() * config.num_experts_per_tok"]
    assert values["[load.sum(-1).tolist() for load in loads.values()]"] == [[pairs, pairs]] * 2
