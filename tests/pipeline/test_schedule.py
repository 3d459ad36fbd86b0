"""A simulation without ranks runs the operations of every stage in their order.

As on real ranks, a stage waits until the neighbour has computed the operand of its next operation.
With a wrong order a stage waits forever, keeps too many activations, or takes longer than the
formula of the bubble says.
"""

from collections.abc import Sequence

import pytest

from hf_moe_ep.pipeline.schedule import (
    Operation,
    compute_bubble,
    list_early_receives,
    list_forwards_only,
    list_operations,
)

STAGES, MICRO_BATCHES = range(1, 9), range(1, 33)


def simulate(orders: Sequence[Sequence[Operation]]) -> tuple[int, list[int]]:
    """Run the operations of each stage. Every operation takes one time unit.

    Returns the time of the last operation, and for each stage the largest number of micro-batches
    that it has kept at one time.
    """
    last = len(orders) - 1
    done: dict[tuple[int, Operation], int] = {}
    positions, times = [0] * len(orders), [0] * len(orders)
    kept, most_kept = [0] * len(orders), [0] * len(orders)
    while any(position < len(order) for position, order in zip(positions, orders, strict=True)):
        before = list(positions)
        for stage, order in enumerate(orders):
            while positions[stage] < len(order):
                operation = order[positions[stage]]
                needed = []
                if operation.is_forward and stage > 0:
                    needed.append((stage - 1, operation))
                if not operation.is_forward:
                    needed.append((stage, Operation(True, operation.micro_batch)))
                    needed += [(stage + 1, operation)] if stage < last else []
                if any(key not in done for key in needed):
                    break
                times[stage] = max([times[stage], *(done[key] for key in needed)]) + 1
                done[stage, operation] = times[stage]
                kept[stage] += 1 if operation.is_forward else -1
                most_kept[stage] = max(most_kept[stage], kept[stage])
                positions[stage] += 1
        assert positions != before, f"every stage waits: {[o[p:] for o, p in zip(orders, before)]}"
    return max(times), most_kept


@pytest.mark.parametrize("stages", STAGES)
def test_1f1b_fills_the_bubble_and_keeps_few_micro_batches(stages: int) -> None:
    for count in MICRO_BATCHES:
        orders = [list_operations("1f1b", stage, stages, count) for stage in range(stages)]
        for order in orders:
            assert len(order) == len(set(order)) == 2 * count
        time, most_kept = simulate(orders)
        # Each operation takes one unit, so a stage works for 2 * count of `time` units.
        assert time == 2 * (count + stages - 1)
        assert compute_bubble(stages, count) == pytest.approx(1 - 2 * count / time)
        assert most_kept == [min(stages - stage, count) for stage in range(stages)]


@pytest.mark.parametrize("stages", STAGES)
def test_gpipe_runs_all_forwards_first(stages: int) -> None:
    for count in MICRO_BATCHES:
        orders = [list_operations("gpipe", stage, stages, count) for stage in range(stages)]
        time, most_kept = simulate(orders)
        assert time == 2 * (count + stages - 1) and most_kept == [count] * stages
        assert all(operation.is_forward for operation in orders[0][:count])


def test_the_examples_of_the_docstring() -> None:
    def text(schedule: str, stage: int) -> str:
        return " ".join(map(str, list_operations(schedule, stage, 2, 4)))

    assert text("1f1b", 0) == "F0 F1 B0 F2 B1 F3 B2 B3"
    assert text("1f1b", 1) == "F0 B0 F1 B1 F2 B2 F3 B3"
    assert text("gpipe", 0) == "F0 F1 F2 F3 B0 B1 B2 B3"
    assert [str(operation) for operation in list_forwards_only(3)] == ["F0", "F1", "F2"]


def test_the_simulation_finds_a_changed_order() -> None:
    orders = [list_operations("1f1b", stage, 2, 4) for stage in range(2)]
    swapped = list(orders[1])
    swapped[0], swapped[1] = swapped[1], swapped[0]
    with pytest.raises(AssertionError, match="every stage waits"):
        simulate([orders[0], swapped])
    late = [*orders[0][:2], orders[0][3], orders[0][2], *orders[0][4:]]  # F2 before B0
    assert simulate([late, orders[1]])[1] != simulate(orders)[1]


Step = tuple[str, int, int, Operation]  # what happens, the sender, the receiver, the operation


def list_script(
    schedule: str, stage: int, stages: int, count: int, early: bool | None
) -> list[Step]:
    """List the steps of a stage: start to receive, wait for an operand, start to send."""
    order = list_operations(schedule, stage, stages, count)
    awaited = list_early_receives(schedule, stage, stages, count)
    script: list[Step] = []
    for position, operation in enumerate(order):
        sender = stage - 1 if operation.is_forward else stage + 1
        receiver = stage + 1 if operation.is_forward else stage - 1
        if 0 <= sender < stages and ("receive", sender, stage, operation) not in script:
            script.append(("receive", sender, stage, operation))
        for following in order[position + 1 : position + 2]:
            next_sender = stage - 1 if following.is_forward else stage + 1
            is_early = awaited[position + 1] if early is None else early
            if is_early and 0 <= next_sender < stages:
                script.append(("receive", next_sender, stage, following))
        if 0 <= sender < stages:
            script.append(("wait", sender, stage, operation))
        if 0 <= receiver < stages:
            script.append(("send", stage, receiver, operation))
    return script


def all_stages_end(schedule: str, stages: int, count: int, early: bool | None = None) -> bool:
    """Simulate hosts that block as with NCCL; return False if all stages wait forever.

    The first transfer between two ranks in a direction blocks both hosts until both have started
    it. `early` replaces the result of `list_early_receives`.
    """
    scripts = [list_script(schedule, stage, stages, count, early) for stage in range(stages)]
    sent: set[tuple[int, int, Operation]] = set()
    connected: set[tuple[int, int]] = set()
    while any(scripts):
        heads = [script[0] for script in scripts if script]
        moved = False
        for script in scripts:
            if not script:
                continue
            kind, sender, receiver, operation = script[0]
            other = ("send" if kind == "receive" else "receive", sender, receiver, operation)
            if kind == "wait":
                runs = (sender, receiver, operation) in sent
            else:
                runs = (sender, receiver) in connected or other in heads
            if runs:
                if kind == "send":
                    sent.add((sender, receiver, operation))
                if other in heads:
                    connected.add((sender, receiver))
                del script[0]
                moved = True
        if not moved:
            return False
    return True


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_no_stage_waits_forever_if_transfers_block_the_host(schedule: str) -> None:
    for stages in range(1, 6):
        for count in range(1, 9):
            assert all_stages_end(schedule, stages, count), (stages, count)


def test_stages_would_wait_forever_for_gradients_awaited_too_early() -> None:
    assert not all_stages_end("gpipe", 2, 2, early=True)
    assert not all_stages_end("1f1b", 4, 3, early=True)
