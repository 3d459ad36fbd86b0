"""Call the user's loss function (`compute_loss_func` of the Trainer) on the last pipeline stage.

`compute_loss_func(outputs, labels, num_items_in_batch=n)` must divide a sum over tokens by n, the
number of tokens of all accumulated batches. The losses of the micro-batches then add up to the loss
of their batch, and the losses of accumulated batches add up to the loss of the step. Every rank
gets the sum over the micro-batches as `outputs.loss`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from hf_moe_ep.upstream.models import asks_for

_LABELS, _NUM_ITEMS = "labels", "num_items_in_batch"


@dataclass(frozen=True)
class CallerLoss:
    """The user's loss function, and its arguments besides the outputs of the model.

    Attributes:
        labels: the labels of the whole batch.
        num_items: the number of tokens by which the function divides.
    """

    function: Callable[..., Any]
    labels: Tensor
    num_items: Tensor | int

    def add_arguments(self, given: dict[str, Any]) -> None:
        """Add labels and number of tokens to the arguments, which are then cut to micro-batches."""
        given |= {_LABELS: self.labels, _NUM_ITEMS: self.num_items}

    def check(self, given: dict[str, Any], config: Any) -> None:
        """Raise ValueError on every rank if the forward would compute the router's aux loss."""
        name = "output_router_logits"
        if asks_for(name, given, config):
            raise ValueError(
                f"compute_loss_func with pp_size > 1 gets the outputs of one micro-batch, but the "
                f"router's aux loss depends on all of them; set {name}=False in the model's "
                f"config, or leave out compute_loss_func: the model's own loss has the aux loss"
            )

    def take_labels(self, arguments: dict[str, Any]) -> tuple[dict[str, Any], Tensor]:
        """Split the arguments of a micro-batch into the model's arguments and the labels."""
        model_arguments = {n: x for n, x in arguments.items() if n not in (_LABELS, _NUM_ITEMS)}
        return model_arguments, arguments[_LABELS]

    def add_loss(self, output: Any, labels: Tensor) -> Any:
        """Compute the loss of a micro-batch, and return the output with this loss.

        Raises:
            ValueError: the function does not return a scalar tensor.
        """
        assert output.get("aux_loss") is None
        loss = self.function(output, labels, num_items_in_batch=self.num_items)
        if not isinstance(loss, Tensor) or loss.ndim:
            kind = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(
                f"compute_loss_func must return a scalar tensor, but returned {kind}; sum the "
                f"losses of the tokens, and divide the sum by num_items_in_batch"
            )
        return replace(output, loss=loss)


def take_loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Tensor:
    """Return the loss of the last stage, in place of the user's `compute_loss_func`."""
    return outputs.loss
