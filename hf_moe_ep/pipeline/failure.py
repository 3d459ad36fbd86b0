"""End a call of a model with pipeline stages on all ranks if one rank raises an error in it.

Before a stage computes, all ranks have agreed on the call (`agree.py`). An error that a rank raises
later, such as a lack of memory or an error of the caller's loss function, is unknown to the others,
which wait for its tensors. The rank therefore writes its error to the store, and then closes its
connections. The transfers for which the other ranks wait then raise errors. These ranks find the
first error in the store, and close their connections as well:

    rank 0    rank 1    stage 0; rank 0 has no memory, and rank 1 waits for it in an all-gather
    rank 2    rank 3    stage 1; rank 2 waits for rank 0, and rank 3 for rank 2

    "pipeline stage 1 of 2, the forward of micro-batch 0 ended because of rank 0 (pipeline stage 0
    of 2, the forward of micro-batch 1: OutOfMemoryError: ..)"

As long as no rank fails, this sends nothing. The connections cannot be opened again, so the model
cannot run again either. Connections of NCCL are not closed: the other ranks wait until NCCL's
watchdog ends them, or until the launcher ends them because the first rank has exited.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from hf_moe_ep.ranks.closing import close_group
from hf_moe_ep.ranks.mesh import Meshes
from hf_moe_ep.ranks.timeouts import find_error, report_error


@dataclass
class Failure:
    """The first error of a model's pipeline, if there was one.

    Attributes:
        operation: what this rank computes, as the subject of a sentence.
        text: the rank, the operation and the error; "" as long as there was none.
    """

    meshes: Meshes
    operation: str = ""
    text: str = ""

    def check_no_earlier_error(self) -> None:
        """Raise RuntimeError if an earlier call has failed."""
        if self.text:
            raise RuntimeError(
                f"an earlier call of this model ended because of {self.text}; its ranks have "
                f"closed their connections and cannot run it again: start the processes again, "
                f"for example from the last checkpoint"
            )

    def set_operation(self, operation: str) -> None:
        """Set the operation that this rank computes from now on, for the text of an error."""
        self.operation = operation

    @contextmanager
    def raise_on_all_ranks(self) -> Iterator[None]:
        """Run a block. If one rank raises an error in the block, all ranks raise an error.

        Raises:
            RuntimeError: another rank has raised an error; the message names the rank and what it
                computed.
        """
        try:
            yield
        except BaseException as error:
            groups, stages = self.meshes.list_groups(), self.meshes.stages
            assert stages is not None
            place = f"pipeline stage {stages.index} of {stages.size}, {self.operation}"
            first = find_error(groups)
            lines = f"{type(error).__name__}: {error}".splitlines()
            self.text = first or f"rank {dist.get_rank()} ({place}: {lines[0]})"
            report_error(self.text, groups)
            for group in groups:
                close_group(group)
            # An error of a connection that another rank has closed says nothing about the cause.
            is_own = isinstance(error, torch.OutOfMemoryError) or not isinstance(
                error, RuntimeError
            )
            if is_own or (first is not None and first in str(error)):
                raise
            if first is not None:
                raise RuntimeError(f"{place} ended because of {first}") from error
            if type(error) is RuntimeError or isinstance(error, dist.DistError):
                # The error may come from a collective inside the model, which names no operation.
                raise RuntimeError(f"{place} failed: {error}") from error
            raise
