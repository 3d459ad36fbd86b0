"""Every notebook runs from top to bottom, and its results are right."""

import json
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from hf_moe_ep.planner.options import NOT_COUNTED

ROOT = Path(__file__).resolve().parents[2]
KINDS = ("parameters", "gradients", "optimizer", "gathered")


def _run(name: str, folder: Path, *expressions: str) -> dict[str, Any]:
    """Execute notebooks/`name` in `folder`, and return the values of its last expressions."""
    notebook = nbformat.read(ROOT / "notebooks" / name, as_version=4)
    nbformat.validate(notebook)
    stored = [cell for cell in notebook.cells if cell.get("outputs")]
    assert not stored, f"{name} is committed with outputs"
    pairs = ", ".join(f"{expression!r}: {expression}" for expression in expressions)
    notebook.cells.append(nbformat.v4.new_code_cell(f"import json\nprint(json.dumps({{{pairs}}}))"))
    # Use one thread, as every test does, and the checkout if the package is not installed.
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(paths),
    }
    client = NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(folder)}})
    client.execute(env=environment)
    (output,) = notebook.cells[-1].outputs
    return json.loads(output.text)


@pytest.mark.slow
def test_quickstart(tmp_path: Path) -> None:
    values = _run(
        "1_quickstart.ipynb",
        tmp_path,
        "stock_losses",
        "patched_losses",
        "weights",
        "[list(counts.values()) for counts in rows.values()]",
        "refusal",
        "loss.item()",
    )
    stock, patched = values["stock_losses"], values["patched_losses"]
    assert len(stock) == len(patched) == 50
    # An untrained model predicts 256 bytes almost uniformly: ln 256 = 5.545.
    assert abs(patched[0] - 5.545) < 0.1
    assert patched[-1] < 0.6 * patched[0]
    assert values["loss.item()"] < 0.6 * patched[0]  # unpatched, with the trained weights
    # The model is fp64, but a last bit of the logits may change how the loss rounds to fp32.
    assert max(abs(a - b) for a, b in zip(stock, patched)) < 1e-5
    assert 0 < values["weights"] < 1e-5  # 0 would mean that stock's own code ran twice
    assert "ep_size=2" in values["refusal"]

    small, published = values["[list(counts.values()) for counts in rows.values()]"]
    for per_expert, per_rank in small + published:
        assert 0 < per_rank <= per_expert <= 8
    assert small[0][1] < small[0][0]
    assert small[-1][0] == small[-1][1]  # one expert per rank: both counts are equal
    # A uniform router chooses 8 of 128 experts on 8 ranks: 8 * 7 / 8 = 7 on other ranks. A rank has
    # 16 experts, and none of them is chosen with probability C(112, 8) / C(128, 8) = 0.3328.
    assert abs(published[1][0] - 7) < 0.1  # 4096 tokens: a standard error of 0.014
    assert abs(published[1][1] - 7 * (1 - 0.3328)) < 0.1


@pytest.mark.slow
def test_will_it_fit(tmp_path: Path) -> None:
    values = _run(
        "5_will_it_fit.ipynb",
        tmp_path,
        "exit_code",
        "[list(bars.items()) for bars in by_world.values()]",
        "list(by_ep.items())",
        "list(on_8_gpus.values())",
        "NOT_COUNTED",
    )
    assert values["exit_code"] == 0
    assert values["NOT_COUNTED"] == list(NOT_COUNTED)

    small, large = values["[list(bars.items()) for bars in by_world.values()]"]
    for bars in (small, large):
        for (ranks, bar), (twice, half) in pairwise(bars):
            assert twice == 2 * ranks
            # The tolerance is for padding: many ranks shard norms and routers unevenly.
            for kind in ("parameters", "gradients", "optimizer"):
                assert bar[kind] / half[kind] == pytest.approx(2, rel=2e-3)
            assert bar["gathered"] == pytest.approx(half["gathered"], rel=2e-3)
    # 64 ranks shard 30.53 billion fp32 parameters, and moments that are twice as large.
    assert small[-1][0] == 64
    assert small[-1][1]["parameters"] == pytest.approx(30.532e9 * 4 / 64 / 2**30, rel=1e-3)
    assert small[-1][1]["optimizer"] == pytest.approx(2 * small[-1][1]["gradients"], rel=1e-3)
    totals = [sum(bar[kind] for kind in KINDS) for _, bar in large]
    assert totals[0] > 80 > totals[1]  # one bar crosses the line of the plot

    gathered = [bar["gathered"] for _, bar in values["list(by_ep.items())"]]
    assert gathered == sorted(gathered, reverse=True) and gathered[0] > 2 * gathered[-1]
    full, low, adapters = values["list(on_8_gpus.values())"]
    assert low["optimizer"] == pytest.approx(full["optimizer"] / 2, rel=1e-3)
    assert adapters["optimizer"] < 0.1 * low["optimizer"]
    assert adapters["parameters"] > low["parameters"]


@pytest.mark.slow
def test_own_loop(tmp_path: Path) -> None:
    values = _run("2_own_loop.ipynb", tmp_path, "differences", "runs", "weights", "done.stdout")
    two_ranks = values["differences"]["ep 2 on two ranks"]
    assert two_ranks["norms"] < 1e-10  # fp64 sums in another order
    assert two_ranks["losses"] < 1e-6  # Transformers computes the loss in fp32
    assert 0 < values["weights"] < 1e-10
    mistaken = values["differences"]["mean per rank"]
    assert mistaken["losses"] > 1e-2 and mistaken["norms"] > 1e-2
    losses = values["runs"]["ep 2 on two ranks"]["losses"]
    assert len(losses) == 30
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    assert "ep_fsdp 1 x ep 2; this rank: experts 0 .. 3" in values["done.stdout"]


@pytest.mark.slow
def test_checkpoints(tmp_path: Path) -> None:
    values = _run(
        "3_checkpoints.ipynb",
        tmp_path,
        "[done.returncode, exit_codes]",
        "[killed, resumed, undisturbed]",
        "progress",
        "weights",
        "[refusal, victim.name]",
        "[difference, identical, len(saved)]",
        "[os.path.exists(f'out/step-{step}/manifest.json') for step in (6, 8)]",
    )
    returncode, exit_codes = values["[done.returncode, exit_codes]"]
    assert returncode != 0
    assert exit_codes == [0, 2, 0]  # verify a complete and a torn checkpoint, convert
    assert values["[os.path.exists(f'out/step-{step}/manifest.json') for step in (6, 8)]"] == [
        True,
        False,
    ]
    assert values["progress"] == {"step": 6}

    killed, resumed, undisturbed = values["[killed, resumed, undisturbed]"]
    assert len(killed) == 8 and len(resumed) == 8 and len(undisturbed) == 14
    # The loss is fp32. Weights are fp64, and their sums have another order.
    for losses, want in ((killed, undisturbed[:8]), (resumed, undisturbed[6:])):
        assert max(abs(a - b) / b for a, b in zip(losses, want)) < 1e-6
    assert 0 < values["weights"] < 1e-10
    assert undisturbed[-1] < undisturbed[0] - 0.5

    refusal, victim = values["[refusal, victim.name]"]
    assert victim in refusal and "has changed since it was written" in refusal
    difference, identical, number = values["[difference, identical, len(saved)]"]
    assert difference < 1e-10 and identical
    # Each of 2 layers has 8 experts with 3 matrices, a router, 4 matrices and 2 norms of attention,
    # and 2 norms. The model has 3 more tensors.
    assert number == 2 * (8 * 3 + 1 + 4 + 2 + 2) + 3


@pytest.mark.slow
def test_lora(tmp_path: Path) -> None:
    values = _run(
        "4_lora.ipynb",
        tmp_path,
        "stock_losses",
        "sharded",
        "[whole, on_rank_0]",
        "[same, effect]",
        "exit_code",
        "[stacked, single]",
        "in_4_bits",
        "said",
        "[same_in_4_bits, rounding]",
    )
    stock, sharded = values["stock_losses"], values["sharded"]["losses"]
    assert len(stock) == len(sharded) == 20
    assert max(abs(a - b) / b for a, b in zip(sharded, stock)) < 1e-6  # the loss is fp32
    assert sharded[-1] < sharded[0] - 0.2
    whole, on_rank_0 = values["[whole, on_rank_0]"]
    assert 2 * on_rank_0 == whole
    same, effect = values["[same, effect]"]
    assert same < 1e-10 and effect > 0.1  # fp64; the adapter has an effect
    assert values["exit_code"] == 0

    stacked, single = values["[stacked, single]"]
    # With rank 4 and 8 experts, stacked factors have 8 * 4 rows or columns, single factors have 4.
    experts = [key for key in stacked if ".experts." in key]
    assert len(experts) == 2 * 2 * 2 and all(32 in stacked[key] for key in experts)
    experts = [key for key in single if ".experts." in key]
    assert len(experts) == 2 * 8 * 3 * 2 and all(4 in single[key] for key in experts)

    losses = values["in_4_bits"]["losses"]
    assert losses[-1] < losses[0] - 0.2 and losses != sharded
    assert "0.5625 bytes per parameter" in values["said"]
    same, rounding = values["[same_in_4_bits, rounding]"]
    assert same < 1e-10 and rounding > 1e-3


@pytest.mark.slow
def test_new_architecture(tmp_path: Path) -> None:
    values = _run(
        "6_new_architecture.ipynb",
        tmp_path,
        "description.splitlines()[0]",
        "exit_code",
        "[described, described_given, described_block, described_shared]",
        "differences",
        "weights",
        "[stock_run, grouped_run, listed_run]",
        "refusals",
    )
    assert "(pebble), patched by hf_moe_ep; plan derived" in values["description.splitlines()[0]"]
    assert values["exit_code"] == 0
    derived, given, block, shared = values[
        "[described, described_given, described_block, described_shared]"
    ]
    assert "plan derived" in derived and "this rank: experts 0 .. 2" in derived
    assert "(grouped), patched by hf_moe_ep; plan given" in given
    assert "(listed), patched by hf_moe_ep; plan given" in block
    assert "sp group [0, 1]" in shared
    for name in ("derived", "given", "described", "shared"):
        assert values["differences"][name]["norms"] < 1e-10  # fp64 sums in another order
        assert values["differences"][name]["losses"] < 1e-6  # Transformers' loss is fp32
    assert all(0 < difference < 1e-10 for difference in values["weights"].values())
    for run in values["[stock_run, grouped_run, listed_run]"]:
        assert sum(run["losses"][-5:]) < 0.8 * sum(run["losses"][:5])

    refusals = values["refusals"]
    for words in ("'layers.*.moe.router', 'layers.*.moe.groups'", "plan=ModelPlan('grouped', "):
        assert words in refusals["two routers"]
    assert "ModelPlan(block=MoEBlock(...))" in refusals["a list of experts"]
    assert "was not tested on pebble" in refusals["sp_size"]


@pytest.mark.slow
def test_routing(tmp_path: Path) -> None:
    values = _run("7_routing.ipynb", tmp_path, "found", "agreement", "mismatch", "str(loads[-1])")
    # name: (maximum over mean of the worst layer, of the sum over layers, held-out loss)
    results = values["found"]
    for name in ("Qwen3-MoE, none", "GLM-4-MoE, none"):
        assert results[name][0] > 1.5
    # Stock's aux loss balances only the sum over layers; the other methods balance every layer.
    assert results["Qwen3-MoE, aux loss"][1] < 1.2 < results["Qwen3-MoE, aux loss"][0]
    for name in ("Qwen3-MoE, per layer", "GLM-4-MoE, bias"):
        worst, _, loss = results[name]
        assert worst < 1.5
        assert loss < results[f"{name.split(',')[0]}, none"][2] + 0.05
    assert "expert load of 3 layers of 8 experts" in values["str(loads[-1])"]

    assert all(0.9 < share < 1 for share in values["agreement"].values())
    live, replayed = values["mismatch"]["live"], values["mismatch"]["replayed"]
    assert replayed["mean"] < live["mean"] and replayed["99.9 %"] < live["99.9 %"]
