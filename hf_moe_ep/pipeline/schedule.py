"""List the forwards and backwards of a pipeline stage in the order in which the stage runs them.

A batch is cut into m micro-batches, which pass p stages one after the other. `list_operations`
returns the list of one stage. "1f1b" (one forward, one backward) begins the backward of a
micro-batch as early as possible, so stage s keeps the activations of at most p - s micro-batches.
With 2 stages and 4 micro-batches, F2 is the forward of micro-batch 2 and B2 its backward:

    stage 0    F0 F1 B0 F2 B1 F3 B2 B3
    stage 1    F0 B0 F1 B1 F2 B2 F3 B3

PipeDream-Flush (arXiv 2006.09503, section 3.2) and Megatron-LM (arXiv 2104.04473, section 2.2)
describe this schedule. "gpipe" (arXiv 1811.06965) runs all forwards first. It keeps the activations
of all micro-batches, but knows the routing of the whole batch before its first backward
(`moe/aux_loss.py` needs it for the aux loss of the whole batch):

    stage 0    F0 F1 F2 F3 B0 B1 B2 B3

In both schedules every stage waits for (p - 1) / (m + p - 1) of the time, which is called the
bubble. This file knows neither tensors nor ranks: `run.py` runs the operations, and starts the
transfers between stages (`ranks/neighbours.py`).
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple


class Operation(NamedTuple):
    """The forward of one micro-batch on one stage, or its backward."""

    is_forward: bool
    micro_batch: int

    def __str__(self) -> str:
        return f"{'F' if self.is_forward else 'B'}{self.micro_batch}"


def list_operations(
    schedule: str, stage: int, num_stages: int, num_micro_batches: int
) -> list[Operation]:
    """Return the operations of a stage in a training step, in order."""
    forwards = [Operation(True, index) for index in range(num_micro_batches)]
    backwards = [Operation(False, index) for index in range(num_micro_batches)]
    if schedule == "gpipe":
        return forwards + backwards
    assert schedule == "1f1b", schedule
    num_warmup = min(num_stages - stage - 1, num_micro_batches)
    order = forwards[:num_warmup]
    for forward, backward in zip(forwards[num_warmup:], backwards, strict=False):
        order += [forward, backward]
    return order + backwards[num_micro_batches - num_warmup :]


def list_early_receives(
    schedule: str, stage: int, num_stages: int, num_micro_batches: int
) -> list[bool]:
    """List for each operation whether its operand may be received before the preceding operation.

    The receive is started there, and waited for when the operation itself runs. The first entry is
    False, because no operation precedes it. Another entry is False if the neighbour that sends the
    operand waits for the result of the preceding operation. With
    NCCL both could wait forever, because the first transfer between two ranks blocks the host until
    both have started it. With "gpipe" the next stage sends the gradients of micro-batch 0 only
    after the last forward:

        stage 0 of 2, "gpipe"    F0 F1 F2 F3 | B0 B1 B2 B3
                                             B0 is not received before F3 has run
    """
    order = list_operations(schedule, stage, num_stages, num_micro_batches)
    result = [False]
    for current, following in pairwise(order):
        # Forwards get their operands from the previous stage, backwards from the next one.
        sender = stage - 1 if following.is_forward else stage + 1
        waits = False
        if 0 <= sender < num_stages and current.is_forward != following.is_forward:
            sender_order = list_operations(schedule, sender, num_stages, num_micro_batches)
            waits = sender_order.index(current) < sender_order.index(following)
        result.append(not waits)
    return result


def list_forwards_only(num_micro_batches: int) -> list[Operation]:
    """Return the operations of every stage in a forward without gradients."""
    return [Operation(True, index) for index in range(num_micro_batches)]


def compute_bubble(num_stages: int, num_micro_batches: int) -> float:
    """Return the share of a step in which a stage waits, if all stages take equally long."""
    return (num_stages - 1) / (num_micro_batches + num_stages - 1)
