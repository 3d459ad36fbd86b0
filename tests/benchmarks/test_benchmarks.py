"""Test the benchmarks against transformers' own expert parallelism and a stock Trainer script.

Bytes sent and bytes saved for backward equal a count by hand. The count uses the routing of the
stock model, which runs in this process on the batch of every rank.
"""

from pathlib import Path

import pytest
import step_vs_native as bench
import torch
import trainer_one_process as one_process
from benchmark_text import spread
from ranks import peak_mib, reset_peak
from support.messages import message_columns

FP32, INT32, INT64 = 4, 4, 8
# All sizes are different. With top-3 of 8, some tokens have all their experts on one rank.
SIZES = bench.Sizes(
    ep=(2, 4), hidden=48, experts=8, top_k=3, intermediate=20, layers=2, batch=2, seq=7, steps=2
)
HEADER = 9  # the fields of hf_moe_ep.dispatcher.Header


def _read_routing(sizes: bench.Sizes, directory: str) -> list[list[list[list[int]]]]:
    """Return the expert ids that the stock model chooses, as [rank][layer][token][k]."""
    model = bench.Qwen3MoeForCausalLM.from_pretrained(directory)
    ranks = []
    for rank in range(bench.WORLD):
        layers: list[list[list[int]]] = []
        handles = [
            layer.mlp.experts.register_forward_pre_hook(
                lambda module, args, layers=layers: layers.append(args[1].tolist())
            )
            for layer in model.model.layers
        ]
        with torch.no_grad():
            model(**bench.make_batch(sizes, rank))
        for handle in handles:
            handle.remove()
        ranks.append(layers)
    return ranks


def _list_peers(rank: int, ep: int) -> list[int]:
    return [peer for peer in range(bench.WORLD) if peer // ep == rank // ep]


def _count_expected_sent(sizes: bench.Sizes, routing: list, rank: int, ep: int) -> dict[str, dict]:
    """Count the bytes that a rank sends in a step. Each layer has 4 exchanges of rows.

    Rows are sent and returned in forward, and their gradients in backward.
    """
    local, ep_rank = sizes.experts // ep, rank % ep
    received = dict.fromkeys(
        _list_peers(rank, ep), 0
    )  # tokens of `peer` with an expert on this rank
    pairs_received = dict(received)
    sent = pairs_sent = 0
    for layer in range(sizes.layers):
        for peer in _list_peers(rank, ep):
            for experts in routing[peer][layer]:
                owners = [expert // local for expert in experts]
                if peer == rank:
                    sent += len(set(owners) - {ep_rank})
                    pairs_sent += sum(owner != ep_rank for owner in owners)
                else:
                    received[peer] += ep_rank in owners
                    pairs_received[peer] += owners.count(ep_rank)
    row = sizes.hidden * FP32
    routed, graded = (
        (message_columns(sizes.hidden + numbers) - sizes.hidden) * FP32
        for numbers in (2 * sizes.top_k, sizes.top_k)
    )
    rows_in, pairs_in = sum(received.values()), sum(pairs_received.values())
    return {
        # A rank sends its tokens in dispatch and in the backward of combine, and sends the rows of
        # other ranks back in combine and in the backward of dispatch.
        "ours": {
            "rows": 2 * (sent + rows_in) * row,
            # Weights and ids are sent behind the rows, and gradients of weights are sent back.
            "routing": sent * routed + rows_in * graded,
            "counts": sizes.layers * (ep - 1) * (HEADER + 1 + local) * INT64,
        },
        "native": {
            "rows": 2 * (pairs_sent + pairs_in) * row,
            "routing": 0,
            "counts": sizes.layers * (sizes.experts - local) * INT64,
        },
    }


def _count_expected_saved(sizes: bench.Sizes, routing: list, rank: int, ep: int) -> int:
    """Count the bytes of received rows, pre-activations and routing that our layers save."""
    local, ep_rank, total = sizes.experts // ep, rank % ep, 0
    tokens, top_k = sizes.batch * sizes.seq, sizes.top_k
    for layer in range(sizes.layers):
        received = pairs = 0
        for peer in _list_peers(rank, ep):
            for experts in routing[peer][layer]:
                num_local = sum(expert // local == ep_rank for expert in experts)
                received, pairs = received + (num_local > 0), pairs + num_local
        # The memory of a received row includes its routing.
        total += received * message_columns(sizes.hidden + 2 * top_k) * FP32
        total += pairs * 2 * sizes.intermediate * FP32
        total += received * top_k * (FP32 + INT32)  # weights; positions of the pairs
        total += pairs * INT32 + (local + 1) * INT32  # pairs by expert
        # The token of each row and the rows of each token, in buffers of the largest possible
        # size, and the local id of each expert and of "no expert", which padding chooses.
        rows = tokens * min(ep, top_k)
        total += (rows + 1) * INT32 + rows * INT32 + (sizes.experts + 1) * INT64
    return total


@pytest.mark.slow
def test_bytes_and_saved_tensors_equal_the_count_by_hand(tmp_path: Path) -> None:
    bench.write_model(SIZES, tmp_path)
    routing = _read_routing(SIZES, str(tmp_path))
    results = bench.measure(SIZES, memory=False, timeout=300)
    assert [result.ep for result in results] == [2, 4]
    for result in results:
        for rank, measured in enumerate(result.ranks):
            assert measured.sent == _count_expected_sent(SIZES, routing, rank, result.ep)
            saved = _count_expected_saved(SIZES, routing, rank, result.ep)
            assert measured.saved["ours"] == saved < measured.saved["native"]
            assert measured.error <= bench.TOLERANCE
            assert len(measured.seconds["ours"]) == len(measured.seconds["native"]) == SIZES.steps
        ours = sum(measured.sent["ours"]["rows"] for measured in result.ranks)
        native = sum(measured.sent["native"]["rows"] for measured in result.ranks)
        assert 0 < ours < native
    table = bench.report(SIZES, results, ["- nothing"])
    saved_mib = [measured.saved["ours"] / 2**20 for measured in results[1].ranks]
    assert f"| 4 | saved for backward, MiB | {spread(saved_mib)} |" in table


def test_peak_memory_is_measured_since_the_last_reset() -> None:
    reset_peak()
    before = peak_mib()
    torch.ones(2**26)  # 256 MiB of fp32, freed at once
    assert 250 < peak_mib() - before < 300
    reset_peak()
    assert peak_mib() - before < 50


@pytest.mark.slow
def test_one_line_does_not_slow_a_stock_trainer_script_down() -> None:
    """The logged losses and gradient norms agree to 1e-5.

    The smallest CPU seconds of three runs are compared, because other processes only add seconds:
    by their use of caches up to a tenth, even to the smallest.
    """
    sizes = ["--hidden=256", "--experts=16", "--top_k=4", "--intermediate=128", "--batch=8"]
    pairs = one_process.measure(sizes, 3, timeout=300)
    for pair in pairs:
        assert one_process.check_equal(pair) > 0, "bitwise equal results: the model was not patched"
    ratios = [pair["patched"]["cpu_seconds"] / pair["stock"]["cpu_seconds"] for pair in pairs]
    print(f"CPU seconds per step, patched / stock: {spread(ratios)}")
    smallest = {
        side: min(pair[side]["cpu_seconds"] for pair in pairs) for side in one_process.SIDES
    }
    assert smallest["patched"] < 1.1 * smallest["stock"], smallest
