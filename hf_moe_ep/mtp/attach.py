"""Run the head for multi-token prediction in training, and add its loss to the loss of the model.

The hooks of a training forward, in the order of their calls:

    causal LM        BeginMtpForward   begins a forward with labels
    first layer      KeepInput         stores its input, the embeddings of the tokens
    a decoder layer  KeepArguments     stores its other arguments (mask, positions). The layers of
                                       the head get the same arguments
    final norm       KeepHidden        stores its output
    causal LM        AddMtpLoss        runs the head, and adds the loss of the head

The loss of depth k is the cross-entropy of the labels k + 1 positions ahead, divided by the same
number as the loss of the model. With D depths the loss of the model becomes

    loss + mtp_loss_weight / D * (loss of depth 1 + .. + loss of depth D)

A position counts if the label is not ignored, if the position is not padding (a 2-D attention mask
is 1), and if the label is in the same document (the position ids of packed documents restart). The
main model's loss function computes the cross-entropy, so slices of sequences (sp_size > 1) and
losses without logits (fused_loss) work as for the main model.

The hooks are registered before the hooks of other features. Therefore `BeginMtpForward` runs before
the sequences are sliced, and `AddMtpLoss` runs before other features restore the head and the loss
function, which they have replaced for this forward.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional

from hf_moe_ep.architectures import Parts
from hf_moe_ep.mtp.build import check_no_adapters, find_template, set_layers_in_config
from hf_moe_ep.mtp_head import MtpHead
from hf_moe_ep.ranks.all_ranks import PATIENCE_OF_RANK_0, check_everyone_calls
from hf_moe_ep.ranks.collectives import sum_over_ranks
from hf_moe_ep.sequence.packed_rows import find_text_positions
from hf_moe_ep.sequence.slices import SLICE, Slice
from hf_moe_ep.state import ModelState, PackageHook, patched_state
from hf_moe_ep.upstream.models import (
    CACHE_NAMES,
    IGNORED_LABEL,
    bind_forward,
    get_output_head,
    is_fused_head,
    text_config,
)


def check(parts: Parts, state: ModelState) -> None:
    """Raise ValueError if the head cannot be trained with this model."""
    if parts.mtp is not None:
        check_no_adapters(parts.root, state.config.mtp_layers)


def attach(parts: Parts, state: ModelState) -> None:
    """Register the hooks, if the model has a head."""
    if parts.mtp is None:
        return
    if state.config.mtp_from_scratch:
        set_layers_in_config(parts, state)
    begin_hook = BeginMtpForward(state, parts.mtp)
    parts.causal_lm.register_forward_pre_hook(begin_hook, with_kwargs=True)
    parts.main_layers[0].register_forward_pre_hook(KeepInput(begin_hook), with_kwargs=True)
    find_template(parts).register_forward_pre_hook(KeepArguments(begin_hook), with_kwargs=True)
    parts.final_norm[0].register_forward_hook(KeepHidden(begin_hook))
    parts.causal_lm.register_forward_hook(AddMtpLoss(begin_hook), always_call=True)


def mtp_loss(model: nn.Module, *, reset: bool = True) -> float | None:
    """Return the mean loss of the head for multi-token prediction; every rank calls this.

    The loss is averaged over the labels of all ranks and depths, in the training forwards since the
    last reset, without the factor `mtp_loss_weight`. A call costs one all-reduce and one host sync.

    Returns:
        The mean loss, or None if there was no label.

    Raises:
        ValueError: the model is not patched, or has no head (mtp_layers is 0).
        RuntimeError: other ranks do not call this function.
    """
    state = patched_state(model)
    if not state.config.mtp_layers:
        raise ValueError("this model was patched with mtp_layers=0; patch it with mtp_layers=1")
    if state.meshes is not None:
        check_everyone_calls("mtp_loss", patience_of_rank_0=PATIENCE_OF_RANK_0)
    sums = state.mtp_sums
    if sums is None:
        sums = torch.zeros(2, dtype=torch.float64, device=state.mesh_device)
    total = sums if state.meshes is None else sum_over_ranks(sums.clone())
    if reset:
        state.mtp_sums = None
    loss, count = total.tolist()
    return loss / count if count else None


@dataclass
class _Forward:
    """One forward that trains the head.

    Attributes:
        model_arguments: the arguments of the causal LM, by name.
        embeds: the input of the first decoder layer, (B, S, H).
        args, kwargs: the arguments of a decoder layer, without its hidden states and caches.
        hidden: the output of the final norm.
    """

    model_arguments: dict[str, Any]
    embeds: Tensor | None = None
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    hidden: Tensor | None = None

    @property
    def ignored(self) -> int:
        """The label of positions that do not count."""
        return int(self.model_arguments.get("ignore_index", IGNORED_LABEL))

    @property
    def part(self) -> Slice | None:
        """This rank's slice of the sequences; None if sequences are not split."""
        part: Slice | None = self.kwargs.get(SLICE)
        return part if part is not None and part.size > 1 else None


class BeginMtpForward(PackageHook):
    """Pre-forward hook of the causal LM: prepares the training of the head in this forward."""

    def __init__(self, state: ModelState, head: MtpHead) -> None:
        self.state, self.head = state, head
        self.forward: _Forward | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the forward, because a copy of the model is not running."""
        return vars(self) | {"forward": None}

    @torch.compiler.disable
    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.forward = None
        if not (model.training and torch.is_grad_enabled()):
            return
        # Adapters may have been attached since `patch`.
        check_no_adapters(model, self.state.config.mtp_layers)
        arguments = bind_forward(model, args, kwargs)
        layers = self.state.config.mtp_layers
        if arguments.get("labels") is None or is_fused_head(arguments):
            raise ValueError(
                f"mtp_layers={layers} trains a head from the labels of a forward in training, and "
                f"this forward computes no loss of labels; pass labels=, or leave mtp_layers out "
                f"if the loss is computed outside of the model"
            )
        if arguments.get("return_dict") is False:
            raise ValueError(
                f"mtp_layers={layers} adds to the loss in the model's output, which "
                f"return_dict=False makes a tuple; leave return_dict out"
            )
        self.forward = _Forward(arguments)


class KeepInput(PackageHook):
    """Pre-forward hook of the first decoder layer: stores its input."""

    def __init__(self, begin_hook: BeginMtpForward) -> None:
        self.begin_hook = begin_hook

    @torch.compiler.disable
    def __call__(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        forward = self.begin_hook.forward
        if forward is not None and forward.embeds is None:
            forward.embeds = args[0] if args else kwargs["hidden_states"]


class KeepArguments(PackageHook):
    """Pre-forward hook of a decoder layer: stores its arguments except hidden states and caches."""

    def __init__(self, begin_hook: BeginMtpForward) -> None:
        self.begin_hook = begin_hook

    @torch.compiler.disable
    def __call__(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        forward = self.begin_hook.forward
        if forward is not None and not forward.kwargs:
            left_out = (*CACHE_NAMES, "hidden_states")
            forward.args = args[1:]
            forward.kwargs = {name: x for name, x in kwargs.items() if name not in left_out}
            if "use_cache" in kwargs:
                forward.kwargs["use_cache"] = False


class KeepHidden(PackageHook):
    """Forward hook of the final norm: stores its output."""

    def __init__(self, begin_hook: BeginMtpForward) -> None:
        self.begin_hook = begin_hook

    @torch.compiler.disable
    def __call__(self, norm: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        if self.begin_hook.forward is not None:
            self.begin_hook.forward.hidden = output


class AddMtpLoss(PackageHook):
    """Forward hook of the causal LM: runs the head, and adds the loss of the head to the output."""

    def __init__(self, begin_hook: BeginMtpForward) -> None:
        self.begin_hook = begin_hook

    @torch.compiler.disable
    def __call__(self, model: Any, args: tuple[Any, ...], output: Any) -> Any:
        forward, self.begin_hook.forward = self.begin_hook.forward, None
        if forward is None or output is None:  # the forward has raised an error
            return None
        state = self.begin_hook.state
        weight = state.config.mtp_loss_weight
        if weight:
            loss = self._compute_loss(model, forward)
            return replace(output, loss=output.loss + weight * loss)
        leads_to_gradients, state.leads_to_gradients = state.leads_to_gradients, False
        try:
            with torch.no_grad():
                self._compute_loss(model, forward)
        finally:
            state.leads_to_gradients = leads_to_gradients
        return None

    def _compute_loss(self, model: Any, forward: _Forward) -> Tensor:
        """Return the mean of the losses of all depths."""
        assert forward.embeds is not None and forward.hidden is not None
        head = self.begin_hook.head
        next_labels, divisor = _find_next_labels(forward)
        depths = range(1, len(head.blocks) + 1)
        embeds = [_shift_embeds(forward.embeds, depth) for depth in depths]
        if forward.part is not None:
            embeds = [forward.part.take(x, 1) for x in embeds]
        outputs = head(forward.hidden, embeds, forward.args, forward.kwargs)
        losses: list[Tensor] = []
        for depth, hidden in zip(depths, outputs, strict=True):
            labels = _select_labels(next_labels, depth, forward)
            hidden = hidden.to(forward.hidden.dtype)
            losses.append(self._compute_depth_loss(model, hidden, labels, divisor, forward))
            self._add_to_sums(losses[-1], labels, divisor, forward.ignored)
        return torch.stack(losses).mean()

    def _compute_depth_loss(
        self, model: Any, hidden: Tensor, labels: Tensor, divisor: Any, forward: _Forward
    ) -> Tensor:
        output_layer: Any = get_output_head(model)
        # The main model has just called this module, so FSDP2 has gathered its parameters. Here the
        # forward is called without hooks. If another forward reshards the parameters before
        # backward, they must be gathered again.
        logits = output_layer.forward(hidden)
        if isinstance(output_layer, FSDPModule) and logits.requires_grad:
            logits.register_hook(partial(_gather_unit, output_layer))
        options = {SLICE: forward.part} if forward.part is not None else {}
        if "ignore_index" in forward.model_arguments:
            options["ignore_index"] = forward.model_arguments["ignore_index"]
        loss: Tensor = model.loss_function(
            logits=logits,
            labels=None,
            vocab_size=text_config(model.config).vocab_size,
            num_items_in_batch=divisor,
            shift_labels=labels,
            **options,
        )
        return loss

    @torch.no_grad()
    def _add_to_sums(self, loss: Tensor, labels: Tensor, divisor: Any, ignored: int) -> None:
        """Add the loss and the number of labels of one depth to the sums of `mtp_loss`.

        If there are no labels, the loss may be nan, and 0 is added instead.
        """
        state = self.begin_hook.state
        num_labels = (labels != ignored).sum().to(loss.device).double()
        total = torch.where(num_labels > 0, loss.detach().double() * divisor, 0.0)
        sums = torch.stack([total, num_labels])
        state.mtp_sums = sums if state.mtp_sums is None else state.mtp_sums + sums


def _gather_unit(unit: FSDPModule, grad: Tensor) -> None:
    unit.unshard()


def _shift_embeds(x_BSH: Tensor, by: int) -> Tensor:
    """Shift a sequence to the left by `by` positions, and fill its end with zeros."""
    return functional.pad(x_BSH[:, by:], (0, 0, 0, min(by, x_BSH.shape[1])))


def _find_next_labels(forward: _Forward) -> tuple[Tensor, Any]:
    """Return the label of the next token of each position, and the divisor of the model's loss."""
    arguments, ignored = forward.model_arguments, forward.ignored
    shifted: Tensor | None = arguments.get("shift_labels")
    if shifted is None:
        shifted = functional.pad(arguments["labels"], (0, 1), value=ignored)[:, 1:]
    divisor = arguments.get("num_items_in_batch")
    if divisor is None:
        return shifted, (shifted != ignored).sum()
    # Some callers pass the number in a tensor [1].
    return shifted, divisor.squeeze() if isinstance(divisor, Tensor) else divisor


def _select_labels(next_labels: Tensor, depth: int, forward: _Forward) -> Tensor:
    """Return the label `depth + 1` positions ahead of each position.

    Positions that do not count, as the module docstring says, get the ignored label.
    """
    arguments, ignored = forward.model_arguments, forward.ignored
    labels = _shift_numbers(next_labels, depth, ignored)
    mask, positions = arguments.get("attention_mask"), arguments.get("position_ids")
    if isinstance(mask, Tensor) and mask.ndim == 2:
        labels = labels.masked_fill((mask == 0).to(labels.device), ignored)
    text = find_text_positions(positions) if isinstance(positions, Tensor) else None
    if text is not None:
        in_document = _shift_numbers(text, depth + 1, -1) - text == depth + 1
        labels = labels.masked_fill(~in_document.to(labels.device), ignored)
    return labels.contiguous()


def _shift_numbers(numbers_BS: Tensor, by: int, fill: int) -> Tensor:
    """Shift each row to the left by `by` positions, and fill its end with `fill`."""
    length = numbers_BS.shape[1]
    return functional.pad(numbers_BS[:, by:], (0, min(by, length)), value=fill)
