"""Train the matrices of a patched model by Muon, and its other parameters by AdamW.

Muon orthogonalises the momentum of a matrix. `Muon.step` does the following on each rank:

    momentum    It is sharded like its parameter, so each rank updates its shards.
    update      Matrices that are whole on a rank are orthogonalised there. A sharded matrix is sent
                to its owner, which sends the update back (owners.py).
    AdamW       One fused call per parameter group updates the shards of all other parameters.

Communication and computation overlap. While the first bucket of sharded matrices is sent, the rank
orthogonalises its whole matrices. While it orthogonalises the first half of a bucket, the results
of the previous bucket are sent back, and during the second half the next bucket is sent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from hf_moe_ep.etp import map_ids_to_split_dims
from hf_moe_ep.optim.matrices import (
    Layouts,
    MatrixLayout,
    find_matrix_layouts,
    find_requested_layout,
)
from hf_moe_ep.optim.orthogonal import adjust_lr, choose_dtype, orthogonalise
from hf_moe_ep.optim.owners import (
    BUCKET_BYTES,
    PIECES,
    Bucket,
    Matrices,
    MatrixRange,
    assign_owners,
    divide_whole_matrices,
    find_sharding,
)
from hf_moe_ep.ranks.all_ranks import check_alike, check_everyone_calls, gather_from_all
from hf_moe_ep.ranks.boxes import get_local_tensor
from hf_moe_ep.ranks.collectives import Transfer, start_all_to_all
from hf_moe_ep.sharding.units import reshard
from hf_moe_ep.state import get_computing_device, patched_state

_ADJUST = (None, "original", "match_rms_adamw", "spectral_unclamped")
# torch has a fused AdamW for these devices.
_FUSED_ON = ("cpu", "cuda")

# Matrices of a bucket that are orthogonalised at once: for each range the position of the range in
# the ranges of their owner, and the [start, stop) of the matrices, counted from the range's first.
_Piece = list[tuple[int, int, int]]


class Muon(Optimizer):
    """Train the matrices of a patched model by Muon, and its other parameters by AdamW.

    Each matrix is trained as by `torch.optim.Muon`, with the same momentum, the same Newton-Schulz
    steps in bf16 and the same decoupled weight decay. An expert's gate, up and down are three
    matrices [out, in], also where gate and up are stored as one parameter. Projections of attention
    are matrices as they are stored. AdamW trains embeddings, the head, routers, convolutions,
    norms, biases and adapters.

    No rank gathers the model. Experts that are whole on a rank need no communication. Every other
    matrix is sent to one rank in bf16, and its update is sent back.

        model = apply_ep_fsdp2(patch(model, ep_size=8))
        optimizer = Muon(model, lr=3e-4, adjust_lr_fn="match_rms_adamw")

    With the Trainer: `Trainer(optimizer_cls_and_kwargs=(Muon, {"model": model, "lr": 3e-4}))`.

    Args:
        model: patched, sharded or not. Accelerate may shard it after the optimizer was created. If
            you call apply_ep_fsdp2, create the optimizer afterwards.
        lr: the learning rate of the matrices, which `adjust_lr_fn` scales by each matrix's shape.
        momentum: the factor by which the momentum decays in each step.
        nesterov: use Nesterov momentum.
        weight_decay: the decoupled weight decay of all parameters, also of AdamW's.
        ns_steps: the number of Newton-Schulz steps.
        adjust_lr_fn: None or "original" multiplies lr by sqrt(max(1, out / in)). "match_rms_adamw"
            multiplies it by 0.2 * sqrt(max(out, in)), so that learning rates and weight decays that
            were tuned for AdamW can be used (https://arxiv.org/abs/2502.16982, section 2.2).
            "spectral_unclamped", which torch.optim.Muon has from torch 2.15 on, multiplies it by
            sqrt(out / in).
        split_heads: train each head of the projections to queries, keys and values as a matrix.
        adamw_lr: the learning rate of AdamW; None stands for `lr`.
        adamw_betas: the `betas` of torch.optim.AdamW.
        adamw_eps: the `eps` of torch.optim.AdamW.
        param_groups: the parameters to train, as dicts with "params" and options of their own, as
            in torch.optim. "use_muon": True or False chooses Muon or AdamW for a group. Without
            this key the rules above choose. If `param_groups` is None, all parameters that require
            gradients are trained.

    Raises:
        ValueError: the model is not patched; an option is invalid; no rule covers a parameter.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float | Tensor,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.1,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        split_heads: bool = False,
        adamw_lr: float | Tensor | None = None,
        adamw_betas: tuple[float, float] = (0.9, 0.95),
        adamw_eps: float = 1e-8,
        param_groups: Iterable[Mapping[str, Any]] | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise ValueError(
                f"Muon takes the patched model, because it must know which parameters are "
                f"matrices, got {type(model).__name__}; write Muon(model, lr=...), and choose "
                f"parameters with param_groups=[{{'params': ...}}]"
            )
        patched_state(model)
        self.model = model
        self.split_heads = split_heads
        self._bucket_bytes = BUCKET_BYTES
        self._assignment: _Assignment | None = None
        self._muon_defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
        }
        self._adamw_defaults = {
            "lr": lr if adamw_lr is None else adamw_lr,
            "weight_decay": weight_decay,
            "betas": adamw_betas,
            "eps": adamw_eps,
        }
        if param_groups is None:
            trained = [p for p in model.parameters() if p.requires_grad]
            param_groups = [{"params": trained}]
        super().__init__([dict(group) for group in param_groups], {"lr": lr})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters to train, as in torch.optim.

            for parameter in model.model.layers[0].parameters():
                parameter.requires_grad_(True)
            optimizer.add_param_group({"params": model.model.layers[0].parameters()})

        A group without "use_muon" becomes two groups if the rules choose both algorithms. Frozen
        parameters may be given as well; they are trained as soon as they get gradients. With
        pipeline stages every rank must call this, even with an empty list.
        """
        # The layouts are not stored, because they refer to the parameters. Accelerate shards a
        # model after its optimizer was created, and frees each unsharded parameter meanwhile.
        layouts = self._find_layouts()
        params = param_group["params"]
        params = [params] if isinstance(params, Tensor) else list(params)
        plain = [p[1] if isinstance(p, tuple) else p for p in params]
        options = {key: value for key, value in param_group.items() if key != "params"}
        if "use_muon" in options:
            self._add_group(layouts, params, plain, options)
            return
        by_muon, used = self._choose_algorithms(layouts, plain)
        for use_muon in (True, False):
            if use_muon in used:
                chosen = [trained_by_muon == use_muon for trained_by_muon in by_muon]
                self._add_group(
                    layouts,
                    [p for p, is_chosen in zip(params, chosen, strict=True) if is_chosen],
                    [p for p, is_chosen in zip(plain, chosen, strict=True) if is_chosen],
                    options | {"use_muon": use_muon},
                )

    def _choose_algorithms(
        self, layouts: Layouts, params: list[nn.Parameter]
    ) -> tuple[list[bool], set[bool]]:
        """Return for each parameter if Muon trains it, and the set of these values on all stages.

        Checkpoints and schedulers number the groups, so all pipeline stages must have the same
        number of groups, of which some may be empty. Every rank calls this.
        """
        stages = getattr(patched_state(self.model).meshes, "stages", None)
        if stages is None:
            by_muon = _choose_on_this_stage(layouts, params)
            return by_muon, set(by_muon)
        column = stages.column.get_group()
        by_stage = gather_from_all(
            "Muon.add_param_group", lambda: _choose_on_this_stage(layouts, params), column
        )
        return by_stage[stages.index], set().union(*by_stage)

    def _add_group(
        self, layouts: Layouts, params: list[Any], plain: list[Any], options: dict[str, Any]
    ) -> None:
        use_muon = options["use_muon"]
        options = (self._muon_defaults if use_muon else self._adamw_defaults) | options
        _check_options(options)
        for parameter in plain if use_muon else ():
            self._find_layout(layouts, parameter)  # raises ValueError if there is none
        super().add_param_group({"params": params, **options})

    def _find_layouts(self) -> Layouts:
        reshard(self.model)
        return find_matrix_layouts(self.model, split_heads=self.split_heads)

    def _find_layout(self, layouts: Layouts, parameter: nn.Parameter) -> MatrixLayout:
        """Return the layout of a parameter that the rules or the user give to Muon.

        Raises:
            ValueError: the parameter holds no matrices, or parts of matrices that cannot be joined.
        """
        by_rule = layouts.matrix_layouts.get(parameter)
        layout = by_rule or find_requested_layout(self.model, parameter)
        if layout is not None:
            return layout
        reason = "which is neither a matrix nor a stacked weight of experts"
        if id(parameter) in map_ids_to_split_dims(self.model):
            etp_size = patched_state(self.model).config.etp_size
            reason = (
                f"a LoRA factor of which etp_size={etp_size} gives a rank two ranges of the rows "
                f"of each matrix"
            )
        raise ValueError(
            f"a group with 'use_muon': True has a parameter {tuple(parameter.shape)}, {reason}; "
            f"set 'use_muon': False for it"
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have gradients. Every rank calls this.

        A parameter without a gradient and its state do not change. The same parameters must have
        gradients on all ranks.

        Args:
            closure: computes the loss again, as in torch.optim.

        Returns:
            The result of `closure`, or None.

        Raises:
            RuntimeError: on this rank other matrices have gradients than in the previous step, but
                within five minutes not all ranks reported such a change.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        updates: list[_Update] = []
        for group in self.param_groups:
            trained = [p for p in group["params"] if p.grad is not None]
            if group["use_muon"]:
                updates += self._update_momentum(group, trained)
            else:
                self._run_adamw(group, trained)
        self._orthogonalise(updates)
        return loss

    def _run_adamw(self, group: dict[str, Any], params: list[nn.Parameter]) -> None:
        """Run torch's AdamW on this rank's shards."""
        columns: dict[str, list[Tensor]] = {"exp_avg": [], "exp_avg_sq": [], "step": []}
        for parameter in params:
            state, device = self.state[parameter], get_local_tensor(parameter).device
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=device)
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
            elif state["step"].device != device:
                # Accelerate loads all states on the host, and `load_state_dict` does not move
                # "step" to the device.
                state["step"] = state["step"].to(device)
            for key, column in columns.items():
                column.append(get_local_tensor(state[key]))
        beta1, beta2 = group["betas"]
        if params:
            adamw(
                [get_local_tensor(p) for p in params],
                _get_local_grads(params),
                columns["exp_avg"],
                columns["exp_avg_sq"],
                [],
                columns["step"],
                foreach=False,
                fused=all(get_local_tensor(p).device.type in _FUSED_ON for p in params),
                amsgrad=False,
                beta1=beta1,
                beta2=beta2,
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )

    def _update_momentum(self, group: dict[str, Any], params: list[nn.Parameter]) -> list[_Update]:
        """Update the momentum of a group, decay its weights, and return the updates of the step."""
        if not params:
            return []
        for parameter in params:
            if "momentum_buffer" not in self.state[parameter]:
                assert parameter.grad is not None
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter.grad)
        buffers = [get_local_tensor(self.state[p]["momentum_buffer"]) for p in params]
        shards, grads = [get_local_tensor(p) for p in params], _get_local_grads(params)
        lr = float(group["lr"])
        torch._foreach_lerp_(buffers, grads, 1 - group["momentum"])
        torch._foreach_mul_(shards, 1 - lr * group["weight_decay"])
        return [
            _Update(*tensors, lr, group)
            for tensors in zip(params, shards, grads, buffers, strict=True)
        ]

    def _orthogonalise(self, updates: Sequence[_Update]) -> None:
        """Orthogonalise all updates and add them to the parameters."""
        if not updates:
            self._forget_assignment()
            return
        assignment = self._assign(updates)
        device = get_computing_device(self.model)
        exchanges = [
            _BucketExchange(
                bucket,
                assignment.matrices,
                updates,
                device,
                self._bucket_bytes // PIECES,
                f"bucket {number} of Muon.step",
            )
            for number, bucket in enumerate(assignment.buckets)
        ]
        if exchanges:
            exchanges[0].start()
        for matrix_range in assignment.whole:
            _apply_whole(matrix_range, assignment.matrices, updates, device)
        if exchanges:
            exchanges[0].receive()
        for number, exchange in enumerate(exchanges):
            exchange.orthogonalise(partial(_exchange_neighbours, exchanges, number))
            if number + 1 < len(exchanges):
                exchanges[number + 1].receive()  # frees the tensor that was sent
            exchange.send_results()
        if exchanges:
            exchanges[-1].finish()

    def _forget_assignment(self) -> None:
        """Forget the matrices of the step before, if no rank trains a matrix in this step."""
        meshes = patched_state(self.model).meshes
        if self._assignment is not None and meshes is not None:
            _check_others_assign(meshes.stage_group)
        self._assignment = None

    def _assign(self, updates: Sequence[_Update]) -> _Assignment:
        """Assign the matrices to owners, or return the previous result if nothing has changed."""
        if self._assignment is not None and self._assignment.fits(updates):
            return self._assignment
        layouts = self._find_layouts()
        names = {p: name for name, p in self.model.named_parameters()}
        matrices = []
        for update in updates:
            parameter = update.parameter
            if parameter not in names:
                raise ValueError(
                    f"a parameter {tuple(parameter.shape)} of this optimizer does not belong to "
                    f"its model any more; create Muon after apply_ep_fsdp2(model), or pass model "
                    f"and optimizer to accelerator.prepare together"
                )
            layout = self._find_layout(layouts, parameter)
            matrices.append(_describe_matrices(names[parameter], parameter, layout, update))
        meshes = patched_state(self.model).meshes
        if meshes is not None:
            # Pipeline stages have different matrices.
            _check_others_assign(meshes.stage_group)
            check_alike(
                "Muon.step",
                meshes.stage_group,
                matrices=[(entry.name, entry.shape, entry.steps) for entry in matrices],
            )
        self._assignment = _Assignment(
            [update.parameter for update in updates],
            matrices,
            list(divide_whole_matrices(matrices, self._bucket_bytes // PIECES)),
            assign_owners(matrices, self._bucket_bytes),
        )
        return self._assignment


def _choose_on_this_stage(layouts: Layouts, params: list[nn.Parameter]) -> list[bool]:
    if unknown := [layouts.unknown[p] for p in params if p in layouts.unknown]:
        raise ValueError(
            f"it is unknown whether these parameters are matrices for Muon: "
            f"{', '.join(unknown)}; give them to AdamW by Muon(model, ..., param_groups=["
            f"{{'params': [...], 'use_muon': False}}, {{'params': the other parameters}}])"
        )
    return [p in layouts.matrix_layouts for p in params]


def _check_others_assign(group: dist.ProcessGroup | None) -> None:
    """Check that all ranks assign matrices in this step, before a collective would hang.

    A rank assigns the matrices anew if other parameters than before have gradients on this rank.
    """
    try:
        check_everyone_calls("assigning matrices in Muon.step", group=group)
    except RuntimeError as error:
        raise RuntimeError(
            f"Muon.step: on this rank other matrices have gradients than in the step before, but "
            f"not on all ranks; freeze, unfreeze and add parameters on all ranks in the same step "
            f"({error})"
        ) from error


@dataclass(frozen=True)
class _Update:
    """One parameter of Muon in one step, with its shards on this rank and its group's options."""

    parameter: nn.Parameter
    shard: Tensor
    grad: Tensor
    buffer: Tensor
    lr: float
    group: dict[str, Any]


@dataclass(frozen=True)
class _Assignment:
    """The matrices that are whole on this rank, and the buckets of all sharded matrices.

    `matrices` has one entry for each of the `parameters`.
    """

    parameters: list[nn.Parameter]
    matrices: list[Matrices]
    whole: list[MatrixRange]
    buckets: list[Bucket]

    def fits(self, updates: Sequence[_Update]) -> bool:
        """Return True if a step updates the same parameters by the same Newton-Schulz steps."""
        return len(updates) == len(self.parameters) and all(
            update.parameter is parameter and update.group["ns_steps"] == entry.steps
            for update, parameter, entry in zip(
                updates, self.parameters, self.matrices, strict=True
            )
        )


class _BucketExchange:
    """The exchange of one bucket in one step.

    The methods are called in this order: `start` sends blocks to the owners, `receive`,
    `orthogonalise`, `send_results` sends blocks of the results back, `finish`. Each transfer needs
    a tensor to send and a tensor to receive. The owner writes the results over the blocks that it
    has received, and sends them back from there.
    """

    def __init__(
        self,
        bucket: Bucket,
        matrices: Sequence[Matrices],
        updates: Sequence[_Update],
        device: torch.device,
        piece_bytes: int,
        where: str,
    ) -> None:
        self._bucket, self._matrices, self._updates = bucket, matrices, updates
        self._device, self._piece_bytes, self._where = device, piece_bytes, where
        self._own_rank = next(
            matrices[matrix_range.index].sharding.rank
            for ranges in bucket.ranges
            for matrix_range in ranges
        )
        self._owned = bucket.ranges[self._own_rank]
        # The numbers of elements that this rank sends to each rank in `start`, and receives.
        self._sent = [sum(self._block_sizes(ranges, self._own_rank)) for ranges in bucket.ranges]
        self._expected = [sum(self._block_sizes(self._owned, rank)) for rank in self._ranks]
        self._transfer: Transfer | None = None
        self._received: Tensor | None = None
        # The blocks of all ranks of the matrices that this rank owns, ordered by rank and then as
        # in `_owned`. They are views of `_values`.
        self._values: Tensor | None = None
        self._blocks: list[Tensor] = []

    @property
    def _ranks(self) -> range:
        return range(len(self._bucket.ranges))

    def start(self) -> None:
        """Send this rank's blocks of all matrices to their owners."""
        values = self._empty(sum(self._sent))
        start = 0
        for ranges in self._bucket.ranges:
            for piece in self._divide_blocks(ranges):
                block = _compute_block(piece, self._matrices, self._updates, self._device)
                values[start : start + block.numel()].view(block.shape).copy_(block)
                start += block.numel()
                del block  # is freed before the next block is computed
        self._send(values, self._sent, self._expected)

    def receive(self) -> None:
        """Wait for the blocks of all ranks."""
        self._set_values(self._wait())

    def orthogonalise(self, halfway: Callable[[], None]) -> None:
        """Orthogonalise the matrices that this rank owns, in pieces of matrices of one shape.

        Args:
            halfway: is called when about half of the matrices are computed. If the number of pieces
                is odd, it is called after half of the steps of the piece in the middle.
        """
        pieces = self._divide_into_pieces()
        middle, is_odd = divmod(len(pieces), 2)
        for piece in pieces[:middle]:
            self._orthogonalise_piece(piece)
        if is_odd:
            self._orthogonalise_piece(pieces[middle], halfway, is_whole=len(pieces) == 1)
        else:
            halfway()
        for piece in pieces[middle + is_odd :]:
            self._orthogonalise_piece(piece)

    def send_results(self) -> None:
        """Send each rank its blocks of the results."""
        assert self._values is not None
        values, self._values, self._blocks = self._values, None, []
        self._send(values, self._expected, self._sent)

    def finish(self) -> None:
        """Add the received results to this rank's shards."""
        ranges = [matrix_range for owned in self._bucket.ranges for matrix_range in owned]
        blocks = self._wait().split(self._block_sizes(ranges, self._own_rank))
        for matrix_range, block in zip(ranges, blocks, strict=True):
            shape = self._block_shape(matrix_range, self._own_rank)
            _apply(matrix_range, block.view(shape), self._matrices, self._updates)

    def _send(self, values: Tensor, counts: list[int], expected: list[int]) -> None:
        """Start the all-to-all of values that are ordered by the ranks to which they are sent."""
        self._received = self._empty(sum(expected))
        self._transfer = start_all_to_all(
            self._received,
            values,
            send_counts=counts,
            recv_counts=expected,
            group=self._bucket.group,
            where=self._where,
        )

    def _wait(self) -> Tensor:
        assert self._transfer is not None and self._received is not None
        self._transfer.wait()
        received, self._transfer, self._received = self._received, None, None
        return received

    def _divide_blocks(self, ranges: Iterable[MatrixRange]) -> Iterator[MatrixRange]:
        """Divide ranges into pieces of which this rank's block has at most `piece_bytes`."""
        for matrix_range in ranges:
            itemsize = self._matrices[matrix_range.index].itemsize
            _, rows, columns = self._block_shape(matrix_range, self._own_rank)
            yield from matrix_range.divide(
                max(1, self._piece_bytes // max(1, rows * columns * itemsize))
            )

    def _set_values(self, values: Tensor) -> None:
        shapes = [self._block_shape(owned, rank) for rank in self._ranks for owned in self._owned]
        blocks = values.split([math.prod(shape) for shape in shapes])
        self._blocks = [block.view(shape) for block, shape in zip(blocks, shapes, strict=True)]
        self._values = values

    def _divide_into_pieces(self) -> list[_Piece]:
        """Divide the matrices that this rank owns into pieces, which are orthogonalised at once.

        A piece has matrices of one shape. Its size is at most `piece_bytes`, or it is one matrix.
        """
        groups: dict[tuple[tuple[int, int], int], list[int]] = {}
        for position, matrix_range in enumerate(self._owned):
            entry = self._matrices[matrix_range.index]
            groups.setdefault((entry.shape, entry.steps), []).append(position)
        pieces: list[_Piece] = []
        for positions in groups.values():
            entry = self._matrices[self._owned[positions[0]].index]
            at_once = max(1, self._piece_bytes // entry.matrix_bytes)
            free = 0  # the number of matrices that fit in the last piece
            for position in positions:
                start, end = 0, self._owned[position].stop - self._owned[position].start
                while start < end:
                    if free == 0:
                        pieces.append([])
                        free = at_once
                    stop = min(end, start + free)
                    pieces[-1].append((position, start, stop))
                    free -= stop - start
                    start = stop
        return pieces

    def _orthogonalise_piece(
        self, piece: _Piece, halfway: Callable[[], None] | None = None, *, is_whole: bool = False
    ) -> None:
        """Orthogonalise a piece, and write the result over the blocks of its matrices.

        If the piece is the whole bucket (`is_whole`), its blocks are freed in the meantime.
        """
        steps = self._matrices[self._owned[piece[0][0]].index].steps
        # Nothing else refers to the joined matrices, so they are freed in the first step.
        result = orthogonalise(self._join(piece, free_blocks=is_whole), steps, halfway)
        if is_whole:
            self._set_values(self._empty(sum(self._expected)))
        for block, view in self._iterate_blocks(piece, result):
            block.copy_(view)

    def _join(self, piece: _Piece, *, free_blocks: bool) -> Tensor:
        """Join the blocks of all ranks to the matrices [N, out, in] of a piece."""
        shape = self._matrices[self._owned[piece[0][0]].index].shape
        joined = self._empty((sum(stop - start for _, start, stop in piece), *shape))
        for block, view in self._iterate_blocks(piece, joined):
            view.copy_(block)
        if free_blocks:
            self._values, self._blocks = None, []
        return joined

    def _iterate_blocks(self, piece: _Piece, matrices: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each rank's blocks of a piece, each with the view of it in the whole matrices."""
        sizes = [stop - start for _, start, stop in piece]
        for (position, start, stop), whole in zip(piece, matrices.split(sizes), strict=True):
            for rank in self._ranks:
                block = self._blocks[rank * len(self._owned) + position]
                yield block[start:stop], self._view_block(whole, self._owned[position], rank)

    def _block_shape(self, matrix_range: MatrixRange, rank: int) -> tuple[int, int, int]:
        """Return the shape of a rank's block of the matrices in a range."""
        entry = self._matrices[matrix_range.index]
        shape = [matrix_range.stop - matrix_range.start, *entry.shape]
        shape[entry.sharded_dim] = entry.block_lengths(matrix_range.part)[rank]
        return shape[0], shape[1], shape[2]

    def _block_sizes(self, ranges: Iterable[MatrixRange], rank: int) -> list[int]:
        """Return the number of elements of a rank's block for each of the ranges."""
        return [math.prod(self._block_shape(matrix_range, rank)) for matrix_range in ranges]

    def _view_block(self, matrices: Tensor, matrix_range: MatrixRange, rank: int) -> Tensor:
        """Return a view of a rank's block of the whole matrices in a range."""
        entry = self._matrices[matrix_range.index]
        lengths = entry.block_lengths(matrix_range.part)
        return matrices.narrow(entry.sharded_dim, sum(lengths[:rank]), lengths[rank])

    def _empty(self, size: int | tuple[int, ...]) -> Tensor:
        update = self._updates[
            next(matrix_range.index for ranges in self._bucket.ranges for matrix_range in ranges)
        ]
        return torch.empty(size, dtype=choose_dtype(update.grad.dtype), device=self._device)


def _exchange_neighbours(exchanges: Sequence[_BucketExchange], number: int) -> None:
    """Finish the exchange before exchange `number`, and then start the exchange after it.

    Each of the two transfers runs while half of the matrices of bucket `number` are computed, and
    their tensors do not exist at the same time.
    """
    if number > 0:
        exchanges[number - 1].finish()
    if number + 1 < len(exchanges):
        exchanges[number + 1].start()


def _apply_whole(
    matrix_range: MatrixRange,
    matrices: Sequence[Matrices],
    updates: Sequence[_Update],
    device: torch.device,
) -> None:
    """Orthogonalise matrices that are whole on this rank, and add them to the parameters."""
    steps = matrices[matrix_range.index].steps
    result = orthogonalise(_compute_block(matrix_range, matrices, updates, device), steps)
    _apply(matrix_range, result, matrices, updates)


def _compute_block(
    matrix_range: MatrixRange,
    matrices: Sequence[Matrices],
    updates: Sequence[_Update],
    device: torch.device,
) -> Tensor:
    """Compute this rank's block [N, out, in] of an update that is not orthogonalised yet."""
    update, entry = updates[matrix_range.index], matrices[matrix_range.index]
    buffer = _view_range(matrix_range, entry, update.buffer)
    if update.group["nesterov"]:
        grad = _view_range(matrix_range, entry, update.grad)
        buffer = grad.lerp(buffer, update.group["momentum"])
    return buffer.to(device=device, dtype=choose_dtype(update.grad.dtype))


def _apply(
    matrix_range: MatrixRange,
    result: Tensor,
    matrices: Sequence[Matrices],
    updates: Sequence[_Update],
) -> None:
    """Add an orthogonalised block to this rank's shard of a parameter."""
    update, entry = updates[matrix_range.index], matrices[matrix_range.index]
    lr = adjust_lr(update.lr, update.group["adjust_lr_fn"], *entry.shape)
    target = _view_range(matrix_range, entry, update.shard)
    target.add_(result.to(target.device), alpha=-lr)


def _view_range(matrix_range: MatrixRange, entry: Matrices, values: Tensor) -> Tensor:
    """View a range's matrices in a shard, or this rank's block of them, as [N, out, in]."""
    stacked_view = entry.layout.stacked_view(values)
    return entry.view_block(stacked_view[matrix_range.start : matrix_range.stop], matrix_range.part)


def _describe_matrices(
    name: str, parameter: nn.Parameter, layout: MatrixLayout, update: _Update
) -> Matrices:
    unsharded = layout.stacked_view(torch.empty(parameter.shape, device="meta"))
    return Matrices(
        name=name,
        layout=layout,
        shape=layout.matrix_shape(unsharded.shape),
        sharding=find_sharding(parameter, layout),
        steps=update.group["ns_steps"],
        itemsize=choose_dtype(update.grad.dtype).itemsize,
    )


def _get_local_grads(params: list[nn.Parameter]) -> list[Tensor]:
    """Return this rank's shards of the gradients. Every parameter has a gradient."""
    return [get_local_tensor(cast(Tensor, parameter.grad)) for parameter in params]


def _check_options(options: Mapping[str, Any]) -> None:
    """Raise ValueError if an option of a group is unknown or out of its range."""
    use_muon = options["use_muon"]
    known = {"use_muon", "lr", "weight_decay", "initial_lr", "param_names"}
    known |= {"momentum", "nesterov", "ns_steps", "adjust_lr_fn"} if use_muon else {"betas", "eps"}
    if unknown := options.keys() - known:
        raise ValueError(
            f"a group with use_muon={use_muon} has the options {', '.join(sorted(known))}, got "
            f"{', '.join(sorted(unknown))}"
        )
    for name in ("lr", "weight_decay", "momentum", "eps"):
        if name in options and not options[name] >= 0:
            raise ValueError(f"{name} must be a number >= 0, got {options[name]}")
    if use_muon:
        if not 1 <= options["ns_steps"] < 100:
            raise ValueError(f"ns_steps must be 1 .. 99, got {options['ns_steps']}; try 5")
        if options["adjust_lr_fn"] not in _ADJUST:
            raise ValueError(
                f"adjust_lr_fn must be one of {', '.join(map(repr, _ADJUST))}, got "
                f"{options['adjust_lr_fn']!r}"
            )
    elif not all(0 <= beta < 1 for beta in options["betas"]):
        raise ValueError(f"betas must be numbers in [0, 1), got {options['betas']}")
