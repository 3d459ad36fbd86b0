"""Run the micro-batches of a forward through the pipeline stages.

`Pipeline` replaces the call of a model that was cut into stages. All stages get the same batch.
A call has these steps:

    agree       check that all stages have the same batch, and choose one number of micro-batches
                for all ranks (`agree.py`)
    run         run the operations of `schedule.py`. A forward calls the model of this stage, with
                all hooks, on one micro-batch. Hidden states are sent to the next stage, and their
                gradients to the previous stage
    tie         add up the gradients that the first and the last stage have for a tied embedding
    return      give every rank the loss of the batch (sent in fp64), its logits, or both

    call                                     operations   result on every rank
    labels, training mode, gradients         both         loss; `backward()` adds the gradients
    labels, but no training or no gradients  forwards     loss
    no labels, no training or no gradients   forwards     logits

With labels, logits are returned only if they are requested (`gather_logits`). In a training call
only the loss may get a gradient. A gradient for any other output, or for an output of a call that
does not train, raises an error (`gradients.py`).

The loss of the batch is the sum of the losses of all tokens, divided by `num_items_in_batch` if the
caller passes this number, and otherwise by the number of labels in the whole batch. A loss that the
caller computes from logits cannot be trained, because its gradients would have to pass the stages a
second time. The last stage can call a loss function of the caller instead (`caller_loss.py`). An
error in an operation ends the call on all ranks (`failure.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from hf_moe_ep.ops.devices import copy_to_device
from hf_moe_ep.pipeline.agree import (
    LOGITS,
    TRAINING,
    Agreement,
    agree,
    read_options,
    require_tokens,
)
from hf_moe_ep.pipeline.caller_loss import CallerLoss
from hf_moe_ep.pipeline.failure import Failure
from hf_moe_ep.pipeline.gradients import StepGradients, connect_loss, refuse_backward
from hf_moe_ep.pipeline.micro_batches import (
    MicroBatch,
    count_targets,
    cut_batch,
)
from hf_moe_ep.pipeline.schedule import (
    Operation,
    list_early_receives,
    list_forwards_only,
    list_operations,
)
from hf_moe_ep.pipeline.stage import Stage
from hf_moe_ep.pipeline.token_losses import (
    add_known_loss,
    detach_values,
    join_outputs,
    make_output,
)
from hf_moe_ep.ranks.boxes import get_local_tensor
from hf_moe_ep.ranks.collectives import all_gather
from hf_moe_ep.ranks.mesh import Meshes, Stages
from hf_moe_ep.ranks.neighbours import (
    Arrival,
    Channel,
    ShapeAndDtype,
    broadcast_tensor,
)
from hf_moe_ep.state import ModelState
from hf_moe_ep.upstream.models import (
    FUSED_HEAD,
    IGNORED_LABEL,
    bind_forward,
    find_tokens,
    get_fused_head_coefficient,
    is_fused_head,
)
from hf_moe_ep.upstream.modules import runs_compiled
from hf_moe_ep.upstream.sharded_models import reshard_unit

Call = Callable[..., Any]

# The dtypes that a loss may have; the result of `_encode_losses` has the index of a dtype.
_LOSS_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@dataclass
class _Channels:
    """The channels to the neighbours of a stage; None where there is no neighbour."""

    from_previous: Channel | None
    to_next: Channel | None
    grads_from_next: Channel | None
    grads_to_previous: Channel | None

    @staticmethod
    def make(stages: Stages, device: torch.device) -> _Channels:
        def connect(group: Any, other: int, what: str) -> Channel | None:
            if not 0 <= other < stages.size:
                return None
            where = (
                f"pipeline stage {stages.index} of {stages.size}, {what} stage {other} (rank "
                f"{stages.find_rank_in(other)})"
            )
            return Channel(group, stages.find_rank_in(other), device, where)

        previous, following = stages.index - 1, stages.index + 1
        return _Channels(
            connect(stages.forwards, previous, "receiving from"),
            connect(stages.forwards, following, "sending to"),
            connect(stages.backwards, following, "receiving from"),
            connect(stages.backwards, previous, "sending to"),
        )

    @property
    def all(self) -> list[Channel]:
        every = (self.from_previous, self.to_next, self.grads_from_next, self.grads_to_previous)
        return [channel for channel in every if channel is not None]


@dataclass
class _PipelineCall:
    """The state of one call: the tensors that micro-batches receive and produce on this stage.

    Attributes:
        batches: the micro-batches.
        trains: True if backward runs as well.
        wants_logits: True if the call returns the logits of the batch.
        has_fused_head: True if TRL's fused head computes the outputs (`token_losses.py`).
        divisor: the number by which the sum of the losses of all tokens is divided: a number of
            labels, or with TRL's fused head `ModelState.loss_divisor`, if that is set.
        losses_are_summed: True if the caller has passed `num_items_in_batch`.
        key: a part of the key of each transfer (`ranks/neighbours.py`). The key differs between
            calls whose hidden states may differ in shape or dtype.
        received: the hidden states of each micro-batch, until its backward has run.
        produced: the tensors for the next stage, or on the last stage the loss.
        forms: the shapes and dtypes of the tensors for the next stage, and of their gradients.
        arrivals: the transfers that were started, by the operation that needs the tensors.
        outputs: the model's outputs for all micro-batches on the last stage; on other stages only
            the output of the last micro-batch.
    """

    batches: list[MicroBatch]
    trains: bool
    wants_logits: bool
    has_fused_head: bool
    divisor: Any
    losses_are_summed: bool
    key: tuple[Any, ...]
    received: dict[int, list[Tensor]] = field(default_factory=dict)
    produced: dict[int, list[Tensor]] = field(default_factory=dict)
    forms: dict[int, list[ShapeAndDtype]] = field(default_factory=dict)
    arrivals: dict[Operation, Arrival] = field(default_factory=dict)
    outputs: list[Any] = field(default_factory=list)


class Pipeline:
    """Replaces the `__call__` of the model, whose hooks then run for each micro-batch.

    Attributes:
        num_bytes: the bytes of hidden states and gradients that this rank has sent so far.
    """

    def __init__(self, model: nn.Module, state: ModelState) -> None:
        self.model, self.state = model, state
        self._channels: _Channels | None = None
        self._failure: Failure | None = None

    @property
    def num_bytes(self) -> int:
        channels = [] if self._channels is None else self._channels.all
        return sum(channel.num_bytes for channel in channels)

    def __call__(self, stock: Call, *args: Any, **kwargs: Any) -> Any:
        """Run the call `model(*args, **kwargs)`; `stock` calls this stage on a micro-batch."""
        if runs_compiled():
            raise ValueError(
                f"a model with pp_size={self.state.stage.size} cannot be compiled as a whole, "
                f"because it runs a schedule of micro-batches; leave out torch.compile(model), and "
                f"pass compile_layers=True to patch()"
            )
        return self._call(stock, args, kwargs)

    @torch.compiler.disable
    def _call(self, stock: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        state, meshes = self.state, self.state.meshes
        assert meshes is not None and meshes.stages is not None
        if self._channels is None or self._failure is None:
            self._channels = _Channels.make(meshes.stages, meshes.device)
            self._failure = Failure(meshes)
        self._failure.check_no_earlier_error()
        given = bind_forward(self.model, args, kwargs)
        if state.caller_loss is not None:
            state.caller_loss.add_arguments(given)
        # Ranks compare their batches on the device of the model, before the forward, in which FSDP2
        # would move a batch there.
        given = {name: _move_to_device(value, meshes.device) for name, value in given.items()}
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                reshard_unit(module)  # an interrupted forward leaves units gathered
        with self._failure.raise_on_all_ranks():
            self._failure.set_operation("the comparison of all ranks")
            agreement = agree(self.model, state, given)
            if agreement.refusal is None:
                return self._compute(agreement, given, stock)
        raise agreement.refusal

    def _compute(self, agreement: Agreement, given: dict[str, Any], stock: Call) -> Any:
        """Run a call that all ranks have agreed on."""
        state, meshes = self.state, self.state.meshes
        stage: Stage = state.stage
        assert meshes is not None and meshes.stages is not None
        mode, count = agreement.mode, agreement.num_micro_batches
        num_rows = len(require_tokens(given))
        has_fused_head = is_fused_head(given)
        given.pop(FUSED_HEAD, None)
        losses_are_summed = given.get("num_items_in_batch") is not None
        if mode != LOGITS and not losses_are_summed:
            given["num_items_in_batch"] = count_targets(given, IGNORED_LABEL)
        divisor = given.get("num_items_in_batch")
        if isinstance(divisor, Tensor):  # callers also pass the number in a tensor [1]
            divisor = given["num_items_in_batch"] = divisor.squeeze()
        if has_fused_head and state.loss_divisor is not None:
            divisor = state.loss_divisor
        given["use_cache"] = False
        batches = cut_batch(given, num_rows, count)
        wants_logits = mode == LOGITS or state.gather_logits or state.config.gather_logits
        wants_logits &= not has_fused_head
        trains, key = mode == TRAINING, _make_key(self.model, given, mode)
        call = _PipelineCall(
            batches, trains, wants_logits, has_fused_head, divisor, losses_are_summed, key
        )
        if mode != TRAINING:
            with torch.no_grad():
                self._run(call, list_forwards_only(count), [True] * count, stock, stage)
            self._end_routing(meshes)
            output = self._gather_output(call, mode, None)
            return refuse_backward(output, stage.size) if agreement.may_learn else output
        if isinstance(self.model, FSDPModule):
            # A loop that accumulates gradients switches off the reduce-scatter until its last
            # backward. Each micro-batch would then keep unsharded gradients.
            self.model.set_requires_gradient_sync(True)
            self.model.set_is_last_backward(True)
        gradients = StepGradients(self.model.parameters(), meshes.stages, meshes.device)
        try:
            schedule = state.config.pp_schedule, stage.index, stage.size, count
            self._run(
                call, list_operations(*schedule), list_early_receives(*schedule), stock, stage
            )
            self._add_tied_gradients(stage)
        except BaseException:
            gradients.restore()
            raise
        gradients.take()
        self._end_routing(meshes)
        return self._gather_output(call, mode, gradients)

    def _end_routing(self, meshes: Meshes) -> None:
        """End this call in the open `record` or `replay`, if there is one."""
        if self.state.routing is not None:
            assert meshes.stages is not None
            self.state.routing.end_batch(meshes.stages, meshes.device)

    def _run(
        self,
        call: _PipelineCall,
        order: Sequence[Operation],
        may_receive_early: Sequence[bool],
        stock: Call,
        stage: Stage,
    ) -> None:
        """Run operations in order.

        If `may_receive_early` is True for an operation, the receive of its tensors is started
        before the preceding operation runs.
        """
        channels, failure = self._channels, self._failure
        assert channels is not None and failure is not None
        try:
            for position, operation in enumerate(order):
                kind = "forward" if operation.is_forward else "backward"
                failure.set_operation(f"the {kind} of micro-batch {operation.micro_batch}")
                self._start_receiving(call, operation, early=False)
                if position + 1 < len(order) and may_receive_early[position + 1]:
                    self._start_receiving(call, order[position + 1], early=True)
                if operation.is_forward:
                    self._forward(call, operation, stock, stage)
                    if operation.micro_batch == len(call.batches) - 1:
                        _finish_aux_loss(call, stage)
                else:
                    self._backward(call, operation)
            failure.set_operation("the end of the call")
            for channel in channels.all:
                channel.finish()
        except BaseException:
            stage.boundary.deferred = []
            for channel in channels.all:
                channel.forget()
            raise

    def _start_receiving(self, call: _PipelineCall, operation: Operation, *, early: bool) -> None:
        """Start to receive the tensors that an operation needs.

        With `early`, hidden states of unknown shape are not received: their shapes would have to be
        received first, which blocks, and the sender may be waiting for this stage.
        """
        channels, index = self._channels, operation.micro_batch
        assert channels is not None
        if operation in call.arrivals:
            return
        if operation.is_forward and channels.from_previous is not None:
            key = (*call.key, *_read_batch_shape(call.batches[index]))
            if channels.from_previous.knows(key) or not early:
                what = f"the hidden states of micro-batch {index}"
                call.arrivals[operation] = channels.from_previous.receive(key, what)
        forms = call.forms.get(index)
        if not operation.is_forward and channels.grads_from_next is not None and forms is not None:
            what = f"the gradients of micro-batch {index}"
            call.arrivals[operation] = channels.grads_from_next.receive_known(forms, what)

    def _forward(
        self, call: _PipelineCall, operation: Operation, stock: Call, stage: Stage
    ) -> None:
        channels, index = self._channels, operation.micro_batch
        assert channels is not None
        batch = call.batches[index]
        received: list[Tensor] = []
        if channels.from_previous is not None:
            received = call.arrivals.pop(operation).wait()
            for tensor in received:
                tensor.requires_grad_(call.trains)
        stage.boundary.begin(
            received,
            share=batch.share,
            rows=batch.rows,
            losses_are_summed=call.losses_are_summed,
        )
        # Only the last stage has the head.
        is_fused = call.has_fused_head and stage.is_last
        arguments = batch.arguments | ({FUSED_HEAD: True} if is_fused else {})
        caller_loss: CallerLoss | None = self.state.caller_loss
        if caller_loss is not None:
            arguments, labels = caller_loss.take_labels(arguments)
        try:
            output = stock(**arguments)
        finally:
            produced = stage.boundary.end()
        if caller_loss is not None and stage.is_last:
            output = caller_loss.add_loss(output, labels)
        if is_fused:
            coefficient = get_fused_head_coefficient(self.model)
            output = add_known_loss(output, call.divisor, coefficient, batch.share)
        if channels.to_next is not None:
            key = (*call.key, *_read_batch_shape(batch))
            channels.to_next.send(produced, key, f"the hidden states of micro-batch {index}")
            call.forms[index] = [ShapeAndDtype(tuple(x.shape), x.dtype) for x in produced]
            call.outputs[:] = [output]
        else:
            detached = _detach_output(output, with_logits=call.wants_logits)
            call.outputs.append(detach_values(output) if is_fused else detached)
            if output.get("loss") is not None:
                produced = [output["loss"]]
        if call.trains:
            call.received[index], call.produced[index] = received, produced

    def _backward(self, call: _PipelineCall, operation: Operation) -> None:
        channels, index, meshes = self._channels, operation.micro_batch, self.state.meshes
        assert channels is not None and meshes is not None
        received, produced = call.received.pop(index), call.produced.pop(index)
        grads: list[Tensor | None] = [None] * len(produced)
        if channels.grads_from_next is not None:
            grads = [*call.arrivals.pop(operation).wait()]
        pairs = [pair for pair in zip(produced, grads, strict=True) if pair[0].requires_grad]
        if pairs:
            tensors, tensor_grads = zip(*pairs, strict=True)
            # The caller may have called the model under autocast, but calls backward outside of it.
            with torch.autocast(meshes.device.type, enabled=False):
                torch.autograd.backward(tensors, tensor_grads)
        if channels.grads_to_previous is not None:
            sent = [torch.zeros_like(x) if x.grad is None else x.grad for x in received]
            what = f"the gradients of micro-batch {index}"
            channels.grads_to_previous.send_known(sent, what)

    def _add_tied_gradients(self, stage: Stage) -> None:
        """Add up the gradients that the first and the last stage have computed for a tied weight.

        Both stages shard the weight in the same way, so equal positions hold the same rows.
        """
        weight, meshes = stage.tied_weight, self.state.meshes
        if weight is None or not weight.requires_grad:
            return
        assert meshes is not None and meshes.stages is not None
        stages = meshes.stages
        other = stages.find_rank_in(stages.size - 1 if stage.is_first else 0)
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
        grad = get_local_tensor(weight.grad)
        own = grad.to(meshes.device)
        what = "the gradients of the tied embedding"
        groups = (stages.forwards, stages.backwards)
        out, back = groups if stage.is_first else reversed(groups)
        where = f"pipeline stage {stage.index} of {stage.size}, exchanging with rank {other}"
        sends = Channel(out, other, meshes.device, where)
        receives = Channel(back, other, meshes.device, where)
        forms = [ShapeAndDtype(tuple(own.shape), own.dtype)]
        # With NCCL the first transfer between two ranks blocks the host until both have started it.
        # So the last stage receives before it sends.
        arrival = None if stage.is_first else receives.receive_known(forms, what)
        sends.send_known([own], what)
        (theirs,) = (arrival or receives.receive_known(forms, what)).wait()
        sends.finish()
        grad.add_(theirs.to(grad.device))

    def _gather_output(
        self, call: _PipelineCall, mode: int, gradients: StepGradients | None
    ) -> Any:
        """Return the output of the whole batch. Every rank gets the same output."""
        meshes = self.state.meshes
        assert meshes is not None and meshes.stages is not None
        stages = meshes.stages
        source, group = stages.find_rank_in(stages.size - 1), stages.column.get_group()
        values: dict[str, Any] = {}
        if mode != LOGITS:
            # Unlike a broadcast, an all-gather ends only if no stage has failed.
            numbers = all_gather(_encode_losses(call, stages.is_last, meshes.device), group)[-1]
            loss, aux_loss, dtypes = numbers[0], numbers[1], numbers[2:].tolist()
            loss = loss.to(_LOSS_DTYPES[int(dtypes[0])])
            if dtypes[1] >= 0:
                values["aux_loss"] = aux_loss.to(_LOSS_DTYPES[int(dtypes[1])])
            if call.has_fused_head:
                joined = join_outputs(call.outputs, source, group, meshes.device)
                coefficient = get_fused_head_coefficient(self.model)
                return make_output(
                    joined, values.get("aux_loss"), gradients, call.divisor, coefficient
                )
            values["loss"] = loss
        if call.wants_logits:
            logits = None
            if stages.is_last:
                logits = torch.cat([output["logits"] for output in call.outputs])
            values["logits"] = broadcast_tensor(logits, source, group, meshes.device)
        if gradients is not None:
            values = connect_loss(values, gradients, stages.size, self.state.plan.aux_loss_coef)
        template = call.outputs[0]
        empty = dict.fromkeys(name for name in template if name not in values)
        return replace(template, **empty, **values)


def _move_to_device(value: Any, device: torch.device) -> Any:
    """Move an argument of a forward, or each entry of a dict (of attention masks), to a device."""
    if isinstance(value, dict):
        return {key: _move_to_device(entry, device) for key, entry in value.items()}
    return copy_to_device(value, device) if isinstance(value, Tensor) else value


def _finish_aux_loss(call: _PipelineCall, stage: Stage) -> None:
    """With "gpipe", add the aux loss of the whole batch to the losses of its micro-batches."""
    finished = stage.boundary.take_deferred()
    if finished is None:
        return
    terms, aux_loss = finished
    for index, term in enumerate(terms):
        output = call.outputs[index]
        # `_encode_losses` multiplies this value by the shares of the micro-batches, whose sum is 1.
        values = {"aux_loss": aux_loss.detach()}
        if output.get("loss") is not None:
            values["loss"] = output["loss"] + term.detach()
        call.outputs[index] = replace(output, **values)
        if call.trains:
            (loss,) = call.produced[index]
            call.produced[index] = [loss + term]


def _make_key(model: nn.Module, given: dict[str, Any], mode: int) -> tuple[Any, ...]:
    """Return the key of the tensors that stages exchange, without the sizes of the micro-batch."""
    # The number of tokens changes with each batch.
    options = {name: value for name, value in given.items() if name != "num_items_in_batch"}
    return mode, read_options(model, options, require_tokens(given))


def _read_batch_shape(batch: MicroBatch) -> tuple[int, ...]:
    tokens = find_tokens(batch.arguments)
    assert tokens is not None
    return tuple(tokens.shape[:2])


def _detach_output(output: Any, *, with_logits: bool) -> Any:
    """Return the losses of an output, and its logits if they are wanted, without the graph."""
    kept = {"loss", "aux_loss"} | ({"logits"} if with_logits else set())
    values = {
        name: x.detach() if isinstance(x, Tensor) and name in kept else None
        for name, x in output.items()
    }
    return replace(output, **values)


def _encode_losses(call: _PipelineCall, is_last: bool, device: torch.device) -> Tensor:
    """Return four fp64 numbers: loss and aux loss of the batch, and for both an index of a dtype.

    The index is one of _LOSS_DTYPES, or -1 if the model computes no such loss. All numbers are
    zeros on stages other than the last one.
    """
    numbers = torch.zeros(4, dtype=torch.float64, device=device)
    if not is_last:
        return numbers
    for position, name in enumerate(("loss", "aux_loss")):
        losses = [output.get(name) for output in call.outputs]
        numbers[2 + position] = -1
        if not isinstance(losses[0], Tensor):
            continue
        numbers[2 + position] = _LOSS_DTYPES.index(losses[0].dtype)
        shares = [1.0 if name == "loss" else batch.share for batch in call.batches]
        for loss, share in zip(losses, shares, strict=True):
            numbers[position] += loss.double() * share
    return numbers
