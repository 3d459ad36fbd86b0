"""Describe the part of a model that a pipeline stage holds, and replace the rest by stand-ins.

A stage keeps its own layers under their own names and numbers. Small modules without parameters
replace everything that other stages hold, so the stock forward runs unchanged on every stage: it
computes masks and position embeddings as for the whole model. Stage 1 of 3 of a model of 6 layers:

    embed_tokens      NoEmbedding     zeros, which nothing reads
    layers 0, 1       LayerBefore     return the hidden states that stage 0 has sent
    layers 2, 3       own layers
    layers 4, 5       LayerAfter      keep the hidden states for stage 2, and pass them on
    norm              NoNorm          passes its input on
    lm_head           NoHead          zeros, which nothing reads
    loss function     return_zero_loss

A `Boundary` holds the tensors that a stage receives and sends for a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


@dataclass
class Boundary:
    """The tensors that this stage receives and sends for the micro-batch whose forward runs.

    Attributes:
        is_last: True on the last stage, which computes the loss.
        received: the hidden states of the previous stage; None on the first stage.
        received_sums: the sums for the aux loss of the routers of earlier stages
            (`moe/aux_loss.py`).
        sent: the hidden states for the next stage; None on the last stage.
        sent_sums: `received_sums` plus the sums of the routers of this stage, for the next stage.
        share: the number of rows in the micro-batch, divided by the rows of the batch.
        rows: the rows of the micro-batch, as a slice of the batch.
        losses_are_summed: True if the caller has passed `num_items_in_batch`.
        defers_aux_loss: True with "gpipe", whose aux loss is computed after all forwards.
        deferred: on the last stage with "gpipe", the sums of all routers, one tensor per
            micro-batch.
        finish_aux_loss: computes from `deferred` the terms that are added to the losses of the
            micro-batches, and the aux loss of the batch.
    """

    is_last: bool
    defers_aux_loss: bool = False
    deferred: list[Tensor] = field(default_factory=list)
    finish_aux_loss: Callable[[list[Tensor]], tuple[list[Tensor], Tensor]] | None = None
    received: Tensor | None = None
    received_sums: Tensor | None = None
    sent: Tensor | None = None
    sent_sums: Tensor | None = None
    share: float = 1.0
    rows: slice = field(default_factory=lambda: slice(None))
    losses_are_summed: bool = False

    def begin(
        self, received: list[Tensor], *, share: float, rows: slice, losses_are_summed: bool
    ) -> None:
        """Begin the forward of a micro-batch with the tensors that the previous stage has sent."""
        self.received, self.received_sums = (*received, None, None)[:2]
        self.sent = self.sent_sums = None
        self.share, self.rows, self.losses_are_summed = share, rows, losses_are_summed

    def end(self) -> list[Tensor]:
        """End the forward, and return the tensors for the next stage."""
        tensors = [tensor for tensor in (self.sent, self.sent_sums) if tensor is not None]
        self.received = self.received_sums = self.sent = self.sent_sums = None
        return tensors

    def take_deferred(self) -> tuple[list[Tensor], Tensor] | None:
        """Compute the aux loss of the batch; None if there is none, or if it was not deferred."""
        sums, self.deferred = self.deferred, []
        return self.finish_aux_loss(sums) if sums and self.finish_aux_loss is not None else None


@dataclass(frozen=True)
class WholeTensor:
    """The description of a parameter or a persistent buffer of the whole model.

    Attributes:
        shape, dtype: the shape and the dtype in the loaded model, before it is sharded.
        stage: the first stage that holds the tensor.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    stage: int
    is_parameter: bool


@dataclass
class Stage:
    """The part of the model that this rank's stage holds.

    Attributes:
        index, size: the number of this stage, and the number of stages.
        layers: the indices of the stage's decoder layers.
        num_layers: the number of decoder layers of all stages.
        boundary: the tensors of the micro-batch whose forward runs.
        moe_names: the names of the experts modules of all stages, in order.
        aliases: if the weight of the head is tied to the embedding: maps its name in this stage to
            the name of the parameter in the whole model.
        tied: on the first and on the last stage, the module that holds the tied weight, and the
            name of the weight in this module; None if the weights are not tied.
        has_adapters: True if PEFT wraps a module of any stage.
        tensors: all tensors of the whole model by name, in order, without tied copies.
        values: values that rank 0 has sent for parameters that are not sharded yet.
        routed: the `RoutedLayers` of the whole model, without their modules; or a text that says
            why its routing cannot be replayed.
        keys_of_adapters: on rank 0, after adapters of all stages were gathered: by adapter, maps
            the keys of PEFT's file to the names of their tensors in the gathered state dict.
    """

    index: int
    size: int
    layers: range
    num_layers: int
    boundary: Boundary
    moe_names: tuple[str, ...] = ()
    aliases: dict[str, str] = field(default_factory=dict)
    tied: tuple[nn.Module, str] | None = None
    has_adapters: bool = False
    tensors: dict[str, WholeTensor] = field(default_factory=dict)
    values: dict[nn.Parameter, Tensor] = field(default_factory=dict)
    routed: Any = None
    keys_of_adapters: dict[str, dict[str, str]] = field(default_factory=dict)

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.size - 1

    @property
    def tied_weight(self) -> nn.Parameter | None:
        """This stage's copy of the weight that the first and the last stage share."""
        if self.tied is None:
            return None
        module, name = self.tied
        weight = getattr(module, name)
        assert isinstance(weight, nn.Parameter)
        return weight

    @property
    def copied_weight(self) -> nn.Parameter | None:
        """The tied weight on the last stage, a copy of the weight on the first stage."""
        return None if self.is_first else self.tied_weight


class NoEmbedding(nn.Module):
    """Returns zeros of the shape and dtype of embeddings, without memory for them."""

    def __init__(self, boundary: Boundary) -> None:
        super().__init__()
        self.boundary = boundary

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.boundary.received
        assert hidden is not None
        return hidden.new_zeros(()).expand(*input_ids.shape, hidden.shape[-1])


class _OtherLayer(nn.Module):
    """Replaces a decoder layer of another stage.

    It keeps the layer's public attributes that are numbers, strings or None, because some models
    read such attributes in the loop over their layers.
    """

    def __init__(self, layer: nn.Module, boundary: Boundary) -> None:
        super().__init__()
        for name, value in vars(layer).items():
            if not name.startswith("_") and isinstance(value, int | float | str | None):
                setattr(self, name, value)
        self.boundary = boundary


class LayerBefore(_OtherLayer):
    """A layer of an earlier stage: returns the hidden states that the previous stage has sent."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        received = self.boundary.received
        assert received is not None
        return received


class LayerAfter(_OtherLayer):
    """A layer of a later stage: keeps the hidden states for the next stage."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.boundary.sent = hidden_states
        return hidden_states


class NoNorm(nn.Module):
    """Passes its input on."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return hidden_states


class NoHead(nn.Module):
    """Returns logits of one class, which nothing reads."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return hidden_states.detach().new_zeros((*hidden_states.shape[:-1], 1))


def return_zero_loss(logits: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Return zero as the loss, because only the last stage computes the loss."""
    return torch.zeros((), dtype=torch.float32, device=logits.device)
