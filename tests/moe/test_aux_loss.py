"""The router's aux loss on N ranks equals the aux loss of one process on the concatenated batch.

There are two references. Stock code on the concatenated batch gives the value to 1e-6, because it
sums in fp32. The formula, computed here in fp64 from the router logits of all ranks, gives value
and gradients to 1e-10. The coefficient is so large that the aux loss outweighs the cross-entropy in
the router's gradient.

With `aux_loss_per_layer` both references compute the loss of each layer and average these losses.
The gradient of this mean ends at the routers: the reference detaches the input of each router and
computes the logits from the detached input.
"""

import copy
import gc
import sys
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft.utils import ModulesToSaveWrapper
from support.adapters import with_lora
from support.checks import Check, Found, on_ranks
from support.close import assert_close
from support.parity import checkpointing
from support.ranks import run_ranks
from support.tiny_models import batch, tiny
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from hf_moe_ep import (
    RoutingReplay,
    apply_ep_fsdp2,
    expert_load,
    global_token_count,
    patch,
    unpatch,
)
from hf_moe_ep.moe import aux_loss as module
from hf_moe_ep.moe.aux_loss import compute_terms, sum_over_layers
from hf_moe_ep.state import find_state

COEFFICIENT = 5.0
FP32 = 1e-6  # stock computes the aux loss in fp32, and HF the cross-entropy
MODEL = {"router_aux_loss_coef": COEFFICIENT, "output_router_logits": True}
Batch = dict[str, Tensor]


def _compute_own_aux(*args: Any, per_layer: bool = False) -> Tensor:
    """Compute the aux loss of one process; stock's function has the same positional arguments."""
    sums = sum_over_layers(*args, per_layer=per_layer)
    (loss,), _ = compute_terms([sums], args[2], world_size=1)
    return loss


def _compute_reference_aux(
    logits: list[tuple[Tensor, ...]], masks: list[Tensor | None], *, per_layer: bool
) -> Tensor:
    """Compute E sum_e f_e P_e in fp64 over all unmasked tokens of all layers and ranks.

    `logits[rank][layer]` has router logits. With `per_layer`, average the losses of the layers.
    """
    if per_layer:
        layers = [[(rows,) for rows in layer] for layer in zip(*logits, strict=True)]
        losses = [_compute_reference_aux(layer, masks, per_layer=False) for layer in layers]
        return torch.stack(losses).mean()
    top_k, unmasked = 2, []
    for rank_logits, mask in zip(logits, masks, strict=True):
        rows_T = slice(None) if mask is None else mask.flatten().bool()
        unmasked += [logits_TE.double()[rows_T] for logits_TE in rank_logits]
    probs_RE = torch.cat(unmasked).softmax(-1)
    chosen_RK = probs_RE.topk(top_k).indices
    share_E = nn.functional.one_hot(chosen_RK, probs_RE.shape[1]).double().sum((0, 1))
    return probs_RE.shape[1] * (share_E / len(probs_RE) * probs_RE.mean(0)).sum()


def _run_stock(reference: nn.Module, inputs: Batch, per_layer: bool) -> tuple[Any, Any]:
    """Return the outputs of a stock model, and the router logits for `_compute_reference_aux`.

    With `per_layer`, the gradient of these logits reaches only the weights of the routers.
    """
    inputs_of_gates: list[tuple[nn.Module, Tensor]] = []
    gates = [layer.mlp.gate for layer in reference.model.layers]
    if isinstance(gates[0], ModulesToSaveWrapper):
        gates = [gate.modules_to_save["default"] for gate in gates]
    hooks = [
        gate.register_forward_pre_hook(lambda gate, x: inputs_of_gates.append((gate, x[0])))
        for gate in gates
    ]
    out = reference(**inputs, output_router_logits=True)
    for hook in hooks:
        hook.remove()
    if not per_layer:
        return out, out.router_logits
    return out, tuple(x.detach() @ gate.weight.T for gate, x in inputs_of_gates)


def _make_batch(model: nn.Module, rank: int, kind: str) -> Batch:
    if kind == "no mask":
        inputs = batch(model, 2, 9, seed=rank)
        del inputs["attention_mask"]
        return inputs
    inputs = batch(model, 1 + rank % 2, 6 + 3 * rank, seed=rank, pad=2)
    if kind == "one rank all padding" and rank == 1:
        inputs["attention_mask"] = torch.zeros_like(inputs["attention_mask"])
        inputs["labels"] = torch.full_like(inputs["labels"], -100)
    return inputs


def _concatenate(batches: list[Batch]) -> Batch:
    """Concatenate the batches; shorter rows are padded on the right."""
    length = max(b["input_ids"].shape[1] for b in batches)
    fill = {"input_ids": 0, "attention_mask": 0, "labels": -100}
    return {
        key: torch.cat(
            [
                nn.functional.pad(b[key], (0, length - b[key].shape[1]), value=fill[key])
                for b in batches
            ]
        )
        for key in batches[0]
    }


def _compute_stock_aux(stock: nn.Module, inputs: Batch, per_layer: bool) -> Tensor:
    """Compute stock's aux loss. With `per_layer`, average the losses of the single layers."""
    with torch.no_grad():
        out = stock(**inputs)
    if not per_layer:
        return out.aux_loss
    mask = inputs.get("attention_mask")
    losses = [load_balancing_loss_func((rows,), 8, 2, mask) for rows in out.router_logits]
    return torch.stack(losses).mean()


def _train_stock(
    kind: str, world: int, summed: bool, per_layer: bool
) -> tuple[nn.Module, list[Any], Tensor, Tensor]:
    """Run forward and backward of a stock model with the batches of all ranks.

    Return the model with its gradients, the cross-entropy of each rank's batch, the aux loss in
    fp64, and the number of predicted tokens.
    """
    reference = tiny(**MODEL)
    batches = [_make_batch(reference, rank, kind) for rank in range(world)]
    count = sum(b["labels"][:, 1:].ne(-100).sum() for b in batches)
    assert isinstance(count, Tensor)
    outputs, losses = [], []
    for b in batches:
        out, logits = _run_stock(reference, b, per_layer)
        per_token = {"num_items_in_batch": count} if summed else {}
        loss = reference.loss_function(out.logits, b["labels"], 97, **per_token)
        outputs.append(logits)
        losses.append(loss if summed else loss / world)
    masks = [b.get("attention_mask") for b in batches]
    aux = _compute_reference_aux(outputs, masks, per_layer=per_layer)
    (sum(losses) + COEFFICIENT * aux).backward()
    return reference, [loss.detach() for loss in losses], aux.detach(), count


def _check_training(name: str, model: nn.Module, kind: str, summed: bool, positional: bool) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    per_layer = _is_per_layer(model)
    reference, losses, aux, count = _train_stock(kind, world, summed, per_layer)
    inputs = _make_batch(model, rank, kind)
    if kind != "no mask":
        batches = [_make_batch(model, other, kind) for other in range(world)]
        stock_aux = _compute_stock_aux(tiny(**MODEL), _concatenate(batches), per_layer)
        assert_close(f"{name}: stock's value", aux, stock_aux, FP32)
    extra = {"num_items_in_batch": count} if summed else {}
    assert count == global_token_count(model, inputs["labels"])
    args = ()
    if positional:
        args = (inputs.pop("input_ids"), inputs.pop("attention_mask"))
    model.zero_grad()
    out = model(*args, **inputs, **extra)
    assert_close(f"{name}: aux_loss", out.aux_loss, aux, 1e-10)
    want = losses[rank] * (1 if summed else world) + COEFFICIENT * aux / (world if summed else 1)
    assert_close(f"{name}: loss", out.loss, want, FP32)
    (out.loss * (world if summed else 1)).backward()
    _assert_same_grads(name, model, reference)


def _is_per_layer(model: nn.Module) -> bool:
    state = find_state(model)
    assert state is not None
    return state.config.aux_loss_per_layer


def _assert_same_grads(name: str, model: nn.Module, reference: nn.Module) -> None:
    wanted = dict(reference.named_parameters())
    for key, parameter in model.named_parameters():
        grad = parameter.grad
        assert (grad is not None) == parameter.requires_grad, key
        if grad is None:
            continue
        if dist.is_initialized():
            assert isinstance(grad, DTensor), key
            grad = grad.full_tensor()
        assert_close(f"{name}: grad of {key}", grad, wanted[key].grad, 1e-10)


def _check_outputs(model: nn.Module) -> None:
    """Check the aux loss without labels, in evaluation, and with a boolean mask.

    Without router logits the model returns no aux loss.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    _, _, aux, _ = _train_stock("padded", world, True, _is_per_layer(model))
    inputs = _make_batch(model, rank, "padded")
    labels = inputs.pop("labels")
    model.eval()
    with torch.no_grad():
        out = model(**inputs)
        assert out.loss is None
        assert_close("no labels", out.aux_loss, aux, 1e-10)
        out = model(**inputs, labels=labels)
        plain = model(**inputs, labels=labels, output_router_logits=False)
        assert_close("evaluation", out.loss, plain.loss + COEFFICIENT * aux, FP32)
        assert plain.aux_loss is None and plain.router_logits is None
        boolean = {**inputs, "attention_mask": inputs["attention_mask"].bool()}
        assert_close("boolean mask", model(**boolean).aux_loss, aux, 1e-10)
    model.train()


def _check_tuple(model: nn.Module) -> None:
    """Check that the tuple of return_dict=False has the same losses as the output object."""
    inputs = _make_batch(model, dist.get_rank(), "padded")
    with torch.no_grad():
        want = model(**inputs)
        got = model(**inputs, return_dict=False)
    assert isinstance(got, tuple)
    assert_close("loss in a tuple", got[0], want.loss, FP32)
    assert_close("aux_loss in a tuple", got[1], want.aux_loss, 1e-10)


def _shard(**layout: Any) -> nn.Module:
    return apply_ep_fsdp2(tiny(**MODEL), **layout)


KINDS = ("padded", "no mask")


def _check_kinds(layout: dict[str, Any], model: nn.Module) -> None:
    for kind in KINDS:
        for summed in (False, True):
            name = f"{layout}, {kind}, {'sum' if summed else 'mean'}"
            _check_training(name, model, kind, summed, positional=False)


def _check_layouts(rank: int, world: int, layouts: list[dict[str, Any]]) -> None:
    for layout in layouts:
        model = _shard(**layout)
        _check_kinds(layout, model)
        _check_training(f"{layout}, positional", model, "padded", True, positional=True)
        _check_outputs(model)


@pytest.mark.parametrize(
    ("world", "layouts"),
    [
        (2, [{"ep_size": 1}, {"ep_size": 2}]),
        pytest.param(4, [{"ep_size": 2, "dp_replicate_size": 2}], marks=pytest.mark.slow),
    ],
)
def test_the_aux_loss_of_all_ranks_equals_one_process(
    world: int, layouts: list[dict[str, Any]]
) -> None:
    run_ranks(_check_layouts, world, layouts)


def a_tuple_has_the_same_losses(rank: int, world: int) -> None:
    _check_tuple(_shard(ep_size=2))


def a_rank_with_only_padding_adds_nothing(rank: int, world: int) -> None:
    """The mean over the zero tokens of this rank would be NaN; the mean over all ranks is not."""
    model = _shard(ep_size=2)
    _check_training("all padding", model, "one rank all padding", True, positional=False)


def copies_of_routers_that_peft_trains_get_the_gradients(rank: int, world: int) -> None:
    """PEFT makes the copies of the routers after `patch`, or before it."""
    options = {"ep_size": 2, "aux_loss_per_layer": True}
    _check_trained_routers(apply_ep_fsdp2(_train_routers(patch(tiny(**MODEL), **options))))
    _check_trained_routers(apply_ep_fsdp2(_train_routers(tiny(**MODEL)), **options))


def _train_routers(model: nn.Module) -> nn.Module:
    """Let PEFT train a copy of every router; the copies differ from the original routers."""
    options = {"parameters": (), "modules": ("q_proj",), "modules_to_save": ["gate"]}
    adapted = with_lora(model, seed=1, fp32=False, **options)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "modules_to_save" in name:
                parameter += torch.randn_like(parameter)
    return adapted


def _check_trained_routers(model: nn.Module) -> None:
    """Check loss and gradients against stock PEFT, with the batches of all ranks in one process."""
    distributed = dist.is_initialized()
    rank, world = (dist.get_rank(), dist.get_world_size()) if distributed else (0, 1)
    reference = _train_routers(tiny(**MODEL))
    stock = reference.get_base_model()
    batches = [_make_batch(stock, other, "padded") for other in range(world)]
    out = model(**batches[rank])
    assert len(out.router_logits) == len(stock.model.layers)
    out.loss.backward()
    if not _is_per_layer(model):
        want = reference(**batches[0]).loss
    else:
        outputs, logits = zip(*(_run_stock(stock, b, True) for b in batches), strict=True)
        masks: list[Tensor | None] = [b["attention_mask"] for b in batches]
        aux = _compute_reference_aux(list(logits), masks, per_layer=True)
        assert_close("aux_loss", out.aux_loss, aux, 1e-10)
        pairs = zip(outputs, batches, strict=True)
        losses = [stock.loss_function(o.logits, b["labels"], 97) for o, b in pairs]
        want = sum(losses) / world + COEFFICIENT * aux
        own = losses[rank] + COEFFICIENT * aux
        assert_close("loss", out.loss, own, FP32)
    want.backward()
    _assert_same_grads("trained routers", model, reference)
    assert any(p.grad is not None and "gate" in n for n, p in reference.named_parameters())


@pytest.mark.parametrize(
    "claim",
    on_ranks(
        2,
        a_tuple_has_the_same_losses,
        a_rank_with_only_padding_adds_nothing,
        copies_of_routers_that_peft_trains_get_the_gradients,
    ),
)
def test_on_two_ranks(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)


@pytest.mark.parametrize("per_layer", [False, True])
@pytest.mark.parametrize("peft_first", [False, True])
def test_only_the_router_that_peft_trains_runs_and_counts(
    peft_first: bool, per_layer: bool
) -> None:
    """PEFT keeps the original router next to the trained copy."""
    if peft_first:
        model = patch(_train_routers(tiny(**MODEL)), aux_loss_per_layer=per_layer)
    else:
        model = _train_routers(patch(tiny(**MODEL), aux_loss_per_layer=per_layer))
    _check_trained_routers(model)
    inputs = _make_batch(model, 1, "padded")
    expert_load(model)
    out, twin = model(**inputs), copy.deepcopy(model)
    num_tokens = int(inputs["attention_mask"].sum())
    assert expert_load(model).counts.sum(1).tolist() == [2 * num_tokens] * len(out.router_logits)
    assert torch.equal(twin(**inputs).loss, out.loss)
    replay = RoutingReplay(model)
    with replay.record() as recorded:
        model(**inputs)
    for layer, logits in enumerate(out.router_logits):
        chosen = logits.topk(2).indices.sort().values
        assert torch.equal(recorded.ids[:, :, layer].flatten(0, 1).sort().values.long(), chosen)
    with replay.replay(recorded):
        assert torch.equal(model(**inputs).loss, out.loss)
    assert replay.last.agreement == 1


def test_lora_on_routers_gives_the_same_loss_before_and_after_patch() -> None:
    """A hook on PEFT's wrapper would run the router, and record its logits, twice."""
    options = {"parameters": ("mlp.gate.weight",), "modules": ("q_proj",)}
    first = patch(with_lora(tiny(**MODEL), seed=1, fp32=False, **options), aux_loss_per_layer=True)
    second = with_lora(patch(tiny(**MODEL), aux_loss_per_layer=True), seed=1, fp32=False, **options)
    inputs = _make_batch(first, 1, "padded")
    out = first(**inputs)
    assert len(out.router_logits) == 2
    assert torch.equal(out.loss, second(**inputs).loss)


def _check_per_layer(layout: dict[str, Any], rank: int, world: int) -> None:
    model = _shard(**layout, aux_loss_per_layer=True)
    _check_kinds(layout, model)
    _check_training(f"{layout}, all padding", model, "one rank all padding", True, positional=False)
    _check_outputs(model)


def _make_checkpointed(reentrant: bool) -> nn.Module:
    model = tiny(**MODEL)
    checkpointing(model, reentrant)
    return model


def the_loss_of_a_recomputed_layer_counts_once(rank: int, world: int) -> None:
    model = apply_ep_fsdp2(_make_checkpointed(False), ep_size=2, aux_loss_per_layer=True)
    _check_training("checkpointed", model, "padded", True, positional=False)


def each_micro_batch_adds_its_own_aux_loss(rank: int, world: int) -> None:
    """Stock code does the same. The three micro-batches have different sizes."""
    model, reference = _shard(ep_size=2, aux_loss_per_layer=True), tiny(**MODEL)
    batches = [
        [_make_batch(model, micro + other, "padded") for other in range(2)] for micro in range(3)
    ]
    count = sum(b["labels"][:, 1:].ne(-100).sum() for micro in batches for b in micro)
    for micro in batches:
        (model(**micro[rank], num_items_in_batch=count).loss * world).backward()
        outputs, logits = zip(*(_run_stock(reference, b, True) for b in micro), strict=True)
        masks: list[Tensor | None] = [b["attention_mask"] for b in micro]
        aux = _compute_reference_aux(list(logits), masks, per_layer=True)
        losses = [
            reference.loss_function(out.logits, b["labels"], 97, num_items_in_batch=count)
            for out, b in zip(outputs, micro, strict=True)
        ]
        (sum(losses) + COEFFICIENT * aux).backward()
    _assert_same_grads("accumulated", model, reference)


def _check_slices(sizes: dict[str, int], per_layer: bool, rank: int, world: int) -> None:
    """Check that two ranks with slices of one padded batch get the loss of whole sequences."""
    model, reference = _shard(**sizes, aux_loss_per_layer=per_layer), tiny(**MODEL)
    inputs = _make_batch(reference, 1, "padded")
    out, logits = _run_stock(reference, inputs, per_layer)
    mask: list[Tensor | None] = [inputs["attention_mask"]]
    aux = _compute_reference_aux([logits], mask, per_layer=per_layer)
    (reference.loss_function(out.logits, inputs["labels"], 97) + COEFFICIENT * aux).backward()
    got = model(**inputs)
    assert_close("aux_loss", got.aux_loss, aux, 1e-10)
    got.loss.backward()
    _assert_same_grads(f"{sizes}, {per_layer=}", model, reference)


SLICES = {
    f"{name}{', per layer' if per_layer else ''}": partial(_check_slices, sizes, per_layer)
    for name, sizes in {"sp 2": {"sp_size": 2}, "cp 2": {"ep_size": 2, "cp_size": 2}}.items()
    for per_layer in (False, True)
}


PER_LAYER_ON_TWO = {
    "ep 1": partial(_check_per_layer, {"ep_size": 1}),
    "ep 2": partial(_check_per_layer, {"ep_size": 2}),
}
PER_LAYER_ON_FOUR = {
    "ep 4": partial(_check_per_layer, {"ep_size": 4}),
    "ep 2, replicas": partial(_check_per_layer, {"ep_size": 2, "dp_replicate_size": 2}),
}
PER_LAYER = [
    *on_ranks(
        2,
        PER_LAYER_ON_TWO,
        the_loss_of_a_recomputed_layer_counts_once,
        each_micro_batch_adds_its_own_aux_loss,
        slow=True,
        timeout=480,
    ),
    *on_ranks(4, PER_LAYER_ON_FOUR, slow=True, timeout=480),
]


@pytest.mark.parametrize("claim", PER_LAYER)
def test_the_aux_loss_per_layer_of_all_ranks_equals_one_process(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)


@pytest.mark.parametrize("claim", on_ranks(2, SLICES, slow=True))
def test_ranks_that_share_sequences_get_the_aux_loss_of_whole_sequences(
    found: Found, claim: Check
) -> None:
    found.raise_if_failed(claim)


def test_one_process_computes_the_aux_loss_per_layer() -> None:
    """The model is not sharded, and its loss differs from stock's loss over all layers."""
    gc.collect()  # the function stays replaced as long as patched models of other tests exist
    model, reference = patch(tiny(**MODEL), aux_loss_per_layer=True), tiny(**MODEL)
    inputs = _make_batch(model, 1, "padded")
    names = vars(sys.modules[type(model).__module__])
    stock_function = names["load_balancing_loss_func"]
    out, (want, logits) = model(**inputs), _run_stock(reference, inputs, True)
    aux = _compute_reference_aux([logits], [inputs["attention_mask"]], per_layer=True)
    assert_close("aux_loss", out.aux_loss, aux, 1e-10)
    assert_close("stock's value", aux, _compute_stock_aux(reference, inputs, True), FP32)
    assert abs(aux - want.aux_loss) > 1e-3, "the loss per layer equals stock's"
    out.loss.backward()
    loss = reference.loss_function(want.logits, inputs["labels"], 97)
    (loss + COEFFICIENT * aux).backward()
    _assert_same_grads("one process", model, reference)
    assert stock_function is not load_balancing_loss_func
    unpatch(model)
    assert names["load_balancing_loss_func"] is load_balancing_loss_func, "not restored"


def test_only_the_loss_per_layer_sees_two_layers_with_opposite_loads() -> None:
    """By hand: of two experts all tokens of layer 0 choose expert 0, and of layer 1 expert 1.

    The sum over layers is even, so the loss of the sum has no gradient. Each layer is as uneven as
    possible, so the loss per layer has a gradient.
    """
    log_3 = torch.log(torch.tensor(3.0, dtype=torch.float64))
    first = torch.stack([log_3, 0 * log_3]).expand(3, 2)  # probabilities 3/4, 1/4
    layers = [rows.clone().requires_grad_() for rows in (first, first.flip(1))]
    over_layers = _compute_own_aux(tuple(layers), 2, 1)
    per_layer = _compute_own_aux(tuple(layers), 2, 1, per_layer=True)
    assert_close("over layers", over_layers, torch.tensor(2 * (0.5 * 0.5 + 0.5 * 0.5)), 1e-12)
    assert_close("per layer", per_layer, torch.tensor(2 * 0.75), 1e-12)
    (grad,) = torch.autograd.grad(over_layers, layers[0], retain_graph=True)
    assert grad.abs().max() < 1e-16
    (grad,) = torch.autograd.grad(per_layer, layers[0])
    # The loss of layer 0 is 2 f P = 2 P, halved by the mean over 2 layers. P is the mean
    # probability p of 3 tokens, and the derivative of p by its logit is p (1 - p).
    slope = 0.75 * 0.25 / 3
    assert_close("gradient", grad, torch.tensor([slope, -slope]).expand(3, 2), 1e-12)


def test_aux_loss_per_layer_is_refused_if_training_computes_no_aux_loss() -> None:
    with pytest.raises(ValueError, match=r"no forward of Qwen3MoeForSequenceClassification \("):
        patch(tiny("qwen3_moe, rewards"), aux_loss_per_layer=True)
    model = patch(tiny(), aux_loss_per_layer=True)
    inputs = _make_batch(model, 1, "padded")
    with pytest.raises(ValueError, match="this training forward computed no aux loss; set out"):
        model(**inputs)
    assert model(**inputs, output_router_logits=True).aux_loss is not None
    with torch.no_grad():
        model(**inputs)
    model.eval()
    model(**inputs)
    frozen = patch(tiny(), aux_loss_per_layer=True)
    for layer in frozen.model.layers:
        layer.mlp.gate.requires_grad_(False)
    with pytest.raises(ValueError, match=r"if no router is trained, leave aux_loss_per_layer out"):
        frozen(**inputs, output_router_logits=True)
    # With reentrant checkpointing stock's aux loss has no gradient either, but no error says so.
    with pytest.raises(ValueError, match=r"no router's logits require a gradient\. If gra"):
        patch(_make_checkpointed(True), aux_loss_per_layer=True)(**inputs)
    patch(_make_checkpointed(False), aux_loss_per_layer=True)(**inputs)


def test_the_loss_of_three_tokens_equals_the_formula_by_hand() -> None:
    """One layer has two experts and top-1. The last token is masked."""
    log_3 = torch.log(torch.tensor(3.0))
    logits_TE = torch.tensor([[0.0, log_3], [0.0, 0.0], [9.0, -9.0]])
    logits_TE[1, 0] = -log_3  # probabilities (1/4, 3/4) twice, then a token that must not count
    mask = torch.tensor([[1, 1, 0]])
    got = _compute_own_aux((logits_TE,), 2, 1, mask)
    assert_close("aux", got, torch.tensor(2 * (0 * 0.25 + 1 * 0.75)), 1e-6)  # fp32


class _CountOperators(TorchDispatchMode):
    """Counts all operators that reach a kernel or make a view."""

    calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


def _make_logits(num_layers: int, tokens: int = 15, seed: int = 0) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    layers = torch.randn(num_layers, tokens, 128, generator=generator, dtype=torch.float64)
    return tuple(layer.clone().requires_grad_() for layer in layers)


@pytest.mark.parametrize("per_layer", [False, True])
def test_the_number_of_operators_does_not_depend_on_the_number_of_layers(per_layer: bool) -> None:
    """A loop over 48 layers would run 900 operators."""
    counts = []
    for num_layers in (2, 48):
        logits, mask = _make_logits(num_layers), torch.ones(3, 5)
        with _CountOperators() as operators:
            _compute_own_aux(logits, 128, 8, mask, per_layer=per_layer)
        counts.append(operators.calls)
    assert counts[0] == counts[1] <= 40


@pytest.mark.parametrize("per_layer", [False, True])
@pytest.mark.parametrize("two_dtypes", [False, True], ids=["one dtype", "two dtypes"])
@pytest.mark.parametrize("stacked", [6, 4, 1])
def test_stacked_layers_have_the_loss_of_a_loop_over_layers(
    per_layer: bool, two_dtypes: bool, stacked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most `stacked` layers are stacked, and only layers of one dtype."""
    monkeypatch.setattr(module, "_MAX_STACKED_ON_CPU", stacked * 15 * 128)
    leaves, mask = _make_logits(6), torch.tensor([[1, 1, 0, 1, 0]] * 3)
    logits = tuple(x.float() if two_dtypes and index % 2 else x for index, x in enumerate(leaves))
    got = _compute_own_aux(logits, 128, 8, mask, per_layer=per_layer)
    got_grads = torch.autograd.grad(got, leaves)
    pairs, probabilities, tokens = [], [], mask.sum()
    for rows in logits:
        probs_TE = rows[mask.flatten().bool()].softmax(-1)
        chosen = nn.functional.one_hot(probs_TE.topk(8).indices, 128)
        pairs.append(chosen.double().sum((0, 1)))
        probabilities.append(probs_TE.double().sum(0))
    p_LE, q_LE = torch.stack(pairs), torch.stack(probabilities)
    if per_layer:
        want = 128 * (p_LE * q_LE).sum(1).mean() / tokens**2
    else:
        want = 128 * (p_LE.sum(0) * q_LE.sum(0)).sum() / (6 * tokens) ** 2
    tolerance = FP32 if two_dtypes else 1e-12
    assert_close("loss", got, want, tolerance)
    for got_grad, want_grad in zip(got_grads, torch.autograd.grad(want, leaves), strict=True):
        assert_close("gradient", got_grad, want_grad, tolerance)


class _CountTopK(TorchFunctionMode):
    """Counts calls of topk. Replay uses a mode like this to replace a router's choice."""

    calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += func in (torch.topk, Tensor.topk)
        return func(*args, **(kwargs or {}))


def test_the_second_run_of_routers_is_neither_recorded_nor_replayed() -> None:
    """With `aux_loss_per_layer` the loss runs the routers a second time."""
    plain, model = patch(tiny(**MODEL)), patch(tiny(**MODEL), aux_loss_per_layer=True)
    inputs = _make_batch(model, 1, "padded")
    routes, want = [], model(**inputs)
    for other in (plain, model):
        with RoutingReplay(other).record() as recorded:
            other(**inputs)
        routes.append(recorded.ids)
    assert torch.equal(*routes)
    replay = RoutingReplay(model)
    with replay.replay(recorded):
        got = model(**inputs)
    assert replay.last.agreement == 1
    assert torch.equal(got.loss, want.loss) and torch.equal(got.aux_loss, want.aux_loss)
    gate = model.model.layers[0].mlp.gate.weight
    assert torch.equal(*(torch.autograd.grad(out.loss, gate)[0] for out in (got, want)))
    with _CountTopK() as topk:
        model(**inputs)
    assert topk.calls == len(model.model.layers) + 1, "one per router, and one of the loss"
