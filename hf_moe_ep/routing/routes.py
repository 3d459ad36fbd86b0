"""`Routes` holds the experts of each token of a batch in each layer, as a tensor [B, S, L, K].

A batch has B rows of S tokens; each token has K experts in each of L layers. Routes are recorded in
a forward (`RoutingReplay.record`), or `Routes.from_engine` copies the arrays of an inference
engine, one array per sequence, into a padded batch:

    tokens of a row      pad pad t0 t1 t2 t3         pad_side="left", padded_to=6
    rows of the array            r0 r1 r2            t3 was sampled last, so it had no forward
    routes               -1  -1  r0 r1 r2 -1         -1: the router chooses ("routes live")

Row s of an array has the experts of the sequence's token s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hf_moe_ep.ops.devices import copy_to_device

LIVE = -1


@dataclass(eq=False)
class Routes:
    """The experts of every token of one batch.

    Attributes:
        ids: [B, S, L, K], integers. If all K ids of a token in a layer are -1, the router chooses
            ("routes live"). The `input_ids` with which the model is called are [B, S]. From pinned
            CPU memory the ids are copied without a host sync.
        layers: the index of the decoder layer of each of the L entries.
        weights: [B, S, L, K], routing weights for the tokens that have ids. If it is None, the
            router's own weights are used, which are differentiable.
        num_experts: the number of experts of the model that chose the routes, if known.
    """

    ids: Tensor
    layers: tuple[int, ...]
    weights: Tensor | None = None
    num_experts: int | None = None

    @classmethod
    def from_engine(
        cls,
        arrays: Sequence[Any],
        input_lengths: Sequence[int],
        *,
        padded_to: int,
        pad_side: str | Sequence[int],
        layers: str | Sequence[int] = "all",
        starts: Sequence[int] | None = None,
    ) -> Routes:
        """Create the routes of a padded batch from the arrays that an inference engine returned.

        vLLM (`enable_return_routed_experts`) and SGLang (`return_routed_experts`) return logical
        expert ids, [tokens - 1, layers, K]. The last token was sampled but had no forward, so it
        routes live. `CompletionOutput.routed_experts` of vLLM is such an array. Decode the response
        of a server like this:

            vLLM    np.load(io.BytesIO(base64.b64decode(choice["routed_experts"])))
            SGLang  np.frombuffer(base64.b64decode(meta_info["routed_experts"]), np.int32)
                      .reshape(-1, layers, K)

        vLLM 0.21 returns the prompt's rows in a separate array: concatenate both arrays.

        Args:
            arrays: one array per row of the batch, numpy or torch, with n - 1 or n rows for n
                tokens.
            input_lengths: the number of tokens of each row, without padding.
            padded_to: the number of tokens of each row with padding, S.
            pad_side: "left" or "right", or the number of padding tokens before each row.
            layers: the decoder layers of an array's entries. "all" means all decoder layers or all
                MoE layers, depending on the number of entries. Entries of dense layers are not
                read.
            starts: the index of each array's first token, if the engine left out a cached prefix;
                the tokens of this prefix route live.

        Raises:
            ValueError: the numbers of rows, layers or tokens do not fit; the message has both
                numbers.
        """
        if len(arrays) != len(input_lengths):
            raise ValueError(
                f"there are {len(arrays)} arrays of routes, but {len(input_lengths)} input_lengths"
            )
        tensors = [_convert_to_tensor(array, row) for row, array in enumerate(arrays)]
        if not tensors:
            raise ValueError("no arrays of routes; a batch has at least one row")
        shapes = {tuple(tensor.shape[1:]) for tensor in tensors}
        if len(shapes) > 1:
            raise ValueError(f"arrays of one batch differ in [layers, K]: {sorted(shapes)}")
        num_layers, top_k = shapes.pop()
        shape = (len(tensors), padded_to, num_layers, top_k)
        ids = torch.full(shape, LIVE, dtype=torch.int16, device="cpu")
        for row, (tensor, length) in enumerate(zip(tensors, input_lengths, strict=True)):
            start = 0 if starts is None else starts[row]
            if start + len(tensor) not in (length - 1, length):
                raise ValueError(
                    f"array {row} has {len(tensor)} rows from token {start} on, but its sequence "
                    f"has {length} tokens; engines return {length - 1 - start} rows (the last "
                    f"token was sampled, not forwarded) or {length - start}"
                )
            first = _count_padding_in_front(pad_side, row, padded_to - length)
            if first < 0 or first + length > padded_to:
                raise ValueError(
                    f"row {row} has {length} tokens after {first} of padding, more than "
                    f"padded_to={padded_to}"
                )
            ids[row, first + start : first + start + len(tensor)] = tensor
        all_layers = tuple(range(num_layers))
        return cls(ids, all_layers if layers == "all" else _check_layers(layers, num_layers))

    def pack(
        self, lengths_or_positions: Sequence[int] | Tensor, *, pad_side: str = "right"
    ) -> Routes:
        """Concatenate all rows into one row without padding, as a packing collator does.

        Args:
            lengths_or_positions: the number of tokens of each row, or the position_ids [1, tokens]
                of the packed row, which start at 0 in each document.
            pad_side: the side on which the rows of these routes are padded.

        Raises:
            ValueError: there is not one length per row, or a length exceeds S.
        """
        lengths = _list_lengths(lengths_or_positions)
        batch, sequence = self.ids.shape[:2]
        if len(lengths) != batch or max(lengths) > sequence:
            raise ValueError(
                f"routes of {batch} rows of {sequence} tokens cannot be packed into documents of "
                f"{lengths} tokens"
            )

        def pack_rows(x: Tensor) -> Tensor:
            rows = zip(x, lengths, strict=True)
            left = pad_side == "left"
            return torch.cat([r[sequence - n :] if left else r[:n] for r, n in rows]).unsqueeze(0)

        weights = None if self.weights is None else pack_rows(self.weights)
        return replace(self, ids=pack_rows(self.ids), weights=weights)

    def to(self, device: torch.device | str) -> Routes:
        """Copy the routes to a device; from pinned memory to a GPU without a host sync."""
        weights = None if self.weights is None else copy_to_device(self.weights, device)
        return replace(self, ids=copy_to_device(self.ids, device), weights=weights)

    def rows(self, start: int, stop: int) -> Routes:
        """Return the routes of the rows `start` to `stop` - 1 of the batch."""
        weights = None if self.weights is None else self.weights[start:stop]
        return replace(self, ids=self.ids[start:stop], weights=weights)


def _convert_to_tensor(array: Any, row: int) -> Tensor:
    tensor = array if isinstance(array, Tensor) else torch.from_numpy(array.astype("int64"))
    if tensor.ndim != 3 or tensor.is_floating_point():
        raise ValueError(
            f"array {row} of routes is {tensor.dtype} {tuple(tensor.shape)}; engines return "
            f"integers [tokens, layers, K]"
        )
    return tensor


def _count_padding_in_front(pad_side: str | Sequence[int], row: int, padding: int) -> int:
    if not isinstance(pad_side, str):
        return int(pad_side[row])
    if pad_side not in ("left", "right"):
        raise ValueError(f"pad_side={pad_side!r} is neither 'left' nor 'right'")
    return padding if pad_side == "left" else 0


def _check_layers(layers: str | Sequence[int], num_layers: int) -> tuple[int, ...]:
    if isinstance(layers, str):
        raise ValueError(f"layers={layers!r} is neither 'all' nor numbers of decoder layers")
    if len(layers) != num_layers:
        raise ValueError(f"layers names {len(layers)} layers, but the arrays have {num_layers}")
    return tuple(layers)


def _list_lengths(lengths_or_positions: Sequence[int] | Tensor) -> list[int]:
    if not isinstance(lengths_or_positions, Tensor):
        return list(lengths_or_positions)
    if lengths_or_positions.ndim == 1:
        return [int(length) for length in lengths_or_positions.tolist()]
    shape = tuple(lengths_or_positions.shape)
    if len(shape) != 2 or shape[0] != 1:
        raise ValueError(f"position_ids of a packed row are [1, tokens], not {shape}")
    if shape[1] and (first := int(lengths_or_positions[0, 0])) != 0:
        raise ValueError(
            f"position_ids of a packed row start at 0 in each document, but the first one is "
            f"{first}; pass the position_ids of the whole row"
        )
    begins = (lengths_or_positions[0] == 0).nonzero().flatten().tolist()
    return [end - begin for begin, end in zip(begins, [*begins[1:], shape[1]], strict=True)]
