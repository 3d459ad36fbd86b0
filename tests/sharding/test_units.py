"""FSDP2 units that stay gathered never use old weights, and recomputed units reduce gradients.

Outside of forward and backward, parameters are shards, even after an error.
"""

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch as mock_patch

import pytest
import torch
from support import architectures
from support.adapters import EXPERTS, with_lora
from support.checks import Check, Found, on_ranks
from support.close import assert_close
from support.parity import checkpointing
from support.tiny_models import batch, tiny
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from hf_moe_ep import apply_ep_fsdp2, clip_grad_norm_
from hf_moe_ep.upstream.hub import list_kept_in_fp32

Batch = dict[str, Tensor]
Prepare = Callable[[nn.Module], None]
_reentrant = partial(checkpointing, use_reentrant=True)


def _no_forward(model: nn.Module, inputs: Batch) -> None:
    pass


def _in_training(model: nn.Module, inputs: Batch) -> None:
    model(**inputs)


def _in_evaluation(model: nn.Module, inputs: Batch) -> None:
    model.eval()
    model(**inputs)
    model.train()


def _without_gradients(model: nn.Module, inputs: Batch) -> None:
    with torch.no_grad():
        model(**inputs)


def _fail(*args: Any) -> None:
    raise RuntimeError("planted")


def _fails_in_forward(model: nn.Module, inputs: Batch) -> None:
    for module in (model.model.layers[0].mlp, model.model.layers[1], model.lm_head):
        hook = module.register_forward_pre_hook(_fail)
        with pytest.raises(RuntimeError, match="planted"):
            model(**inputs)
        hook.remove()


def _is_interrupted(model: nn.Module, inputs: Batch) -> None:
    """Without KeyboardInterrupt, torch would call the hook that reshards after an error."""

    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    hook = model.model.layers[0].mlp.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(**inputs)
    hook.remove()


def _collect_losses(
    rank: int, between: Callable[[nn.Module, Batch], None], options: dict[str, Any]
) -> list[Tensor]:
    """Take three steps and return their losses and norms; `between` runs before each clipping."""
    model = apply_ep_fsdp2(tiny(), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    found = []
    for step in range(3):
        inputs, others = (batch(model, 2, 7, seed=10 * step + 2 * k + rank) for k in range(2))
        loss = model(**inputs).loss
        loss.backward()
        between(model, others)
        found += [loss.detach(), clip_grad_norm_(model, 1.0)]
        optimizer.step()
        optimizer.zero_grad()
    return found


WHOLE_EXPERTS = {"ep_size": 2}
# Experts are units, and all units stay gathered.
NEVER_RESHARD = {"ep_size": 1, "reshard_after_forward": False}


def _check_losses(
    between: Callable[[nn.Module, Batch], None], options: dict[str, Any], rank: int, world: int
) -> None:
    want = _collect_losses(rank, _no_forward, options)
    for number, value in enumerate(_collect_losses(rank, between, options)):
        assert torch.equal(value, want[number]), (number, value, want[number])


def _take_gradients(model: nn.Module, inputs: Batch, listed: nn.Module | None) -> dict[str, Tensor]:
    """Run a step, and list the parameters of `listed` between its forward and its backward."""
    model.zero_grad()
    loss = model(**inputs).loss
    if listed is not None:
        parameters = list(listed.parameters())
        assert parameters and all(isinstance(p, DTensor) for p in parameters), type(listed)
    loss.backward()
    return {name: p.grad.full_tensor() for name, p in model.named_parameters()}


def _check_listed(
    prepare: Prepare | None, build: dict[str, Any], options: dict[str, Any], rank: int, world: int
) -> None:
    model = tiny(**build)
    if prepare is not None:
        prepare(model)
    apply_ep_fsdp2(model, **options)
    inputs = batch(model, 2, 7, seed=rank)
    want = _take_gradients(model, inputs, None)
    layers = model.model.layers
    for listed in (model, nn.ModuleList([model]), layers, layers[-1], model.lm_head):
        for name, grad in _take_gradients(model, inputs, listed).items():
            assert torch.equal(grad, want[name]), (type(listed), name)
    # A rank that lists alone takes the same collectives as the others.
    for name, grad in _take_gradients(model, inputs, model if rank == 0 else None).items():
        assert torch.equal(grad, want[name]), f"listed on rank 0: {name}"


def _append_output(outputs: list[torch.Tensor], *arguments: Any) -> None:
    outputs.append(arguments[-1])


def _units_may_run_after_a_list(rank: int, world: int) -> None:
    """A unit that is still gathered runs once more, after a list of parameters."""
    gradients = []
    for lists in (False, True):
        model = apply_ep_fsdp2(tiny(), ep_size=2)
        hidden: list[torch.Tensor] = []
        model.model.layers[0].register_forward_hook(partial(_append_output, hidden))
        loss = model(**batch(model, 2, 7, seed=rank)).loss
        if lists:
            assert model.device.type == "cpu"
        early = model.lm_head(hidden[0]).square().mean()
        (loss + early).backward()
        gradients.append({n: p.grad.full_tensor() for n, p in model.named_parameters()})
    for name, grad in gradients[0].items():
        assert torch.equal(grad, gradients[1][name]), name


def _embedding_is_called_first(rank: int, world: int) -> None:
    """A unit that the caller runs before the first forward of the root does not become the root."""
    stock, model = tiny(), apply_ep_fsdp2(tiny(), ep_size=2)
    for step in range(2):
        inputs = [batch(stock, 2, 7, seed=2 * step + other) for other in range(world)]
        losses = []
        for m, batches in ((stock, inputs), (model, inputs[rank : rank + 1])):
            m.zero_grad()
            for own in batches:
                embeds = m.get_input_embeddings()(own["input_ids"])
                losses.append(m(inputs_embeds=embeds, labels=own["labels"]).loss)
                (losses[-1] / len(batches)).backward()
        assert_close("loss", losses[-1], losses[rank], 1e-10)
        expected = dict(stock.named_parameters())
        for name, parameter in model.named_parameters():
            assert_close(name, parameter.grad.full_tensor(), expected[name].grad, 1e-10)


def _routers_compute_in_fp32(
    prepare: Prepare | None,
    options: dict[str, Any],
    rank: int,
    world: int,
    model_type: str = "glm4_moe",
) -> None:
    """Transformers keeps GLM-4.5's router in fp32 in a bf16 model, and a step must use fp32."""
    model = architectures.tiny(model_type, dtype=torch.bfloat16)
    if not any(
        pattern.search("gate.weight") for pattern in list_kept_in_fp32(model, torch.bfloat16)
    ):
        return  # transformers 5.16 keeps the correction bias of GLM-4.5 alone
    gates = [layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "gate")]
    gates = [gate for gate in gates if hasattr(gate, "weight")]
    if prepare is not None:
        prepare(model)
    wanted, seen = [gate.weight.detach().clone() for gate in gates], []
    assert gates and all(weight.dtype == torch.float32 for weight in wanted)
    assert not any(torch.equal(weight, weight.bfloat16()) for weight in wanted)
    apply_ep_fsdp2(model, **options)
    hooks = [
        gate.register_forward_pre_hook(lambda module, _: seen.append(module.weight.clone()))
        for gate in gates
    ]
    loss = model(**batch(model, 2, 7, seed=rank)).loss
    for hook in hooks:
        hook.remove()
    assert len(seen) == len(wanted) and all(map(torch.equal, seen, wanted))
    loss.backward()
    assert all(gate.weight.grad.full_tensor().any() for gate in gates)


def _trained_copies_and_heads_compute_in_fp32(rank: int, world: int) -> None:
    """PEFT trains a copy of a router; a head for multi-token prediction has a router of its own."""
    build = partial(architectures.tiny, "glm4_moe", dtype=torch.bfloat16)
    mtp = {"mtp_layers": 1, "mtp_from_scratch": True}
    copies = partial(with_lora, seed=0, modules_to_save=["gate"])
    seen: list[Tensor] = []
    for name, prepare, options in (("modules_to_save.", copies, {}), ("mtp.", None, mtp)):
        model: Any = build()
        if not any(p.search("gate.weight") for p in list_kept_in_fp32(model, torch.bfloat16)):
            return  # transformers 5.16 keeps the correction bias of GLM-4.5 alone
        model = apply_ep_fsdp2(model if prepare is None else prepare(model), ep_size=2, **options)
        seen.clear()
        for path, module in model.named_modules():
            if path.endswith((".gate", ".gate.modules_to_save.default")) and name in f"{path}.":
                module.register_forward_pre_hook(lambda gate, _: seen.append(gate.weight.clone()))
        model.train()(**batch(model, 2, 7, seed=rank)).loss.backward()
        assert seen and all(weight.dtype == torch.float32 for weight in seen), (name, seen)
        assert not any(torch.equal(weight, weight.bfloat16()) for weight in seen), name
        grads = [p.grad for n, p in model.named_parameters() if name in n and ".gate." in n]
        assert grads and all(grad is not None for grad in grads), name


def _adapted_routers_compute_in_fp32(rank: int, world: int) -> None:
    """PEFT adds its factors to the router's weight before the router's own forward."""
    for options in ({"parameters": (*EXPERTS, "mlp.gate.weight")}, {"modules_to_save": ["gate"]}):
        model = with_lora(architectures.tiny("glm4_moe", dtype=torch.bfloat16), seed=0, **options)
        apply_ep_fsdp2(model, ep_size=2)
        model(**batch(model, 2, 7, seed=rank)).loss.backward()
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        grads = [p.grad for name, p in trained.items() if "mlp.gate." in name]
        assert grads and all(grad is not None for grad in grads)


def _heads_compute_in_fp32(rank: int, world: int) -> None:
    """In a bf16 model transformers keeps the head of HY-V4 in fp32, and a step must use fp32."""
    sizes = {"dtype": torch.bfloat16, "tie_word_embeddings": False}
    stock = architectures.tiny("hy_v4", **sizes)
    inputs = batch(stock, 2, 7, seed=rank)
    assert stock(**inputs).logits.dtype == stock.lm_head.weight.dtype == torch.float32
    weight = stock.lm_head.weight.detach()
    assert not torch.equal(weight, weight.bfloat16())
    for options in ({}, {"fused_loss": True}):
        model: Any = apply_ep_fsdp2(architectures.tiny("hy_v4", **sizes), ep_size=2, **options)
        seen: list[Tensor] = []
        model.lm_head.register_forward_pre_hook(
            lambda head, args, seen=seen: seen.extend((head.weight.detach().clone(), args[0]))
        )
        out = model(**inputs)
        assert torch.equal(seen[0], weight) and seen[1].dtype == torch.float32
        assert options or out.logits.dtype == torch.float32
        out.loss.backward()
        assert model.lm_head.weight.grad.full_tensor().any()
        assert model.model.norm.weight.grad.full_tensor().any()


def _routers_of_a_script_are_cast(rank: int, world: int) -> None:
    """Qwen3-MoE's router computes in the dtype of the rows, whatever dtype a script gives it."""
    model = tiny(dtype=torch.bfloat16)
    for layer in model.model.layers:
        layer.mlp.gate.float()
    apply_ep_fsdp2(model, ep_size=2)
    model(**batch(model, 2, 7, seed=rank)).loss.backward()


def _parameters_may_be_frozen_after_a_forward(rank: int, world: int) -> None:
    """Parameters that are frozen after a forward without backward get no gradients."""
    model = apply_ep_fsdp2(tiny(), ep_size=2)
    inputs = batch(model, 2, 7, seed=rank)
    model(**inputs)
    model.model.layers.requires_grad_(False)
    model(**inputs).loss.backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is None) == (".layers." in name), name


def _units_may_be_gathered_by_hand(rank: int, world: int) -> None:
    """After a backward, a unit that the caller gathers lists its gathered parameters."""
    model = apply_ep_fsdp2(tiny(), ep_size=2)
    model(**batch(model, 2, 7, seed=rank)).loss.backward()
    assert all(isinstance(p, DTensor) for p in model.parameters())
    layer: Any = model.model.layers[0]
    layer.unshard()
    listed = dict(layer.named_parameters())
    assert not isinstance(listed["self_attn.q_proj.weight"], DTensor)
    layer.reshard()
    assert all(isinstance(p, DTensor) for p in model.parameters())


def _fails_in_backward(options: dict[str, Any], prepare: Prepare | None, rank: int, _: int) -> None:
    """Incomplete gradients are refused. After they are deleted, training is as without the error.

    The gradients of the units that the error has stopped must not be added to later gradients.
    """
    model = tiny()
    if prepare is not None:
        prepare(model)
    apply_ep_fsdp2(model, **options)
    inputs, others = batch(model, 2, 7, seed=rank), batch(model, 2, 7, seed=2 + rank)
    want = _take_gradients(model, inputs, None)

    def fail_in_backward(module: nn.Module, args: Any, output: Tensor) -> None:
        if output.requires_grad:  # not in the first run of a reentrant checkpoint
            output.register_hook(_fail)

    for layer in model.model.layers:
        model.zero_grad()
        loss = model(**others).loss
        hook = layer.self_attn.o_proj.register_forward_hook(fail_in_backward)
        if prepare is None:
            loss = model(**others).loss
        with pytest.raises(RuntimeError, match="planted"):
            loss.backward()
        hook.remove()
        assert all(isinstance(p, DTensor) for p in model.parameters())
        for refused in (partial(model, **inputs), partial(clip_grad_norm_, model, 1.0)):
            with pytest.raises(ValueError, match=r"last backward raised .* optimizer.zero_grad"):
                refused()
        for name, grad in _take_gradients(model, inputs, None).items():
            assert torch.equal(grad, want[name]), name


def _checkpoint_blocks(model: nn.Module) -> None:
    """Make each MoE block call a reentrant checkpoint in its own code, as some models do."""
    for layer in model.model.layers:
        stock = layer.mlp.forward
        layer.mlp.forward = partial(checkpoint, stock, use_reentrant=True)


def two_forwards_before_one_backward(prepare: Prepare | None, rank: int, world: int) -> None:
    """The second forward reshards units that the first one left gathered for its backward."""
    gradients = []
    for one_backward in (True, False):
        model = tiny()
        if prepare is not None:
            prepare(model)
        apply_ep_fsdp2(model, ep_size=2)
        losses = []
        for k in range(2):
            losses.append(model(**batch(model, 2, 7, seed=2 * k + rank)).loss)
            if not one_backward:
                losses.pop().backward()
        if one_backward:
            sum(losses).backward()
        gradients.append({n: p.grad.full_tensor() for n, p in model.named_parameters()})
    for name, grad in gradients[0].items():
        assert_close(name, grad, gradients[1][name], 1e-10)


def _generates(options: dict[str, Any], expected: int, rank: int, world: int) -> None:
    """`generate` gathers units that stay gathered once, and always with the present weights.

    The first token gathers the embedding, two layers, and the norm with the head; experts too, if
    they are units. By default the embedding and the first layer are resharded after each token.
    """
    model, stock = apply_ep_fsdp2(tiny(seed=rank), **options), tiny()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, stock)]
    inputs = batch(stock, 2, 8)
    prompt = {"input_ids": inputs["input_ids"], "max_new_tokens": 6, "do_sample": False}
    for _ in range(2):
        with mock_patch.object(
            _fsdp_param_group, "foreach_all_gather", wraps=_fsdp_param_group.foreach_all_gather
        ) as gather:
            got = model.eval().generate(**prompt)
        assert torch.equal(got, stock.eval().generate(**prompt))
        assert gather.call_count == expected, gather.call_count
        for m, optimizer in zip((model, stock), optimizers, strict=True):
            m.train()(**inputs).loss.backward()
            optimizer.step()
            optimizer.zero_grad()


def _own_generate_is_called(rank: int, world: int) -> None:
    """A library, or the user, may have set `generate` of one model before it is sharded."""
    model: Any = tiny()
    stock = model.generate
    model.generate = lambda ids: ("own", stock(ids, max_new_tokens=2, do_sample=False))
    apply_ep_fsdp2(model, ep_size=2)
    tokens = batch(model, 2, 8)["input_ids"]
    name, got = model.eval().generate(tokens)
    assert name == "own"
    assert torch.equal(got, tiny().eval().generate(tokens, max_new_tokens=2, do_sample=False))


BETWEEN = {
    "in training": _in_training,
    "in evaluation": _in_evaluation,
    "without gradients": _without_gradients,
    "that fails": _fails_in_forward,
    "that is interrupted": _is_interrupted,
}
LISTED: dict[str, tuple[Prepare | None, dict[str, Any], dict[str, Any]]] = {
    "whole experts": (None, {}, WHOLE_EXPERTS),
    "no resharding": (None, {}, NEVER_RESHARD),
    "tied, fused loss": (None, {"tie_word_embeddings": True}, {"ep_size": 1, "fused_loss": True}),
    "fixed buffers": (None, {"num_hidden_layers": 4}, {"ep_size": 1, "fsdp_double_buffer": True}),
    "reentrant": (_reentrant, {}, NEVER_RESHARD),
}
CHECKS = on_ranks(
    2,
    {name: partial(_check_losses, between, WHOLE_EXPERTS) for name, between in BETWEEN.items()},
    {"listed: whole experts": partial(_check_listed, *LISTED["whole experts"])},
    {
        "called after a list": _units_may_run_after_a_list,
        "embedding called first": _embedding_is_called_first,
        "routers in fp32": partial(_routers_compute_in_fp32, None, {"ep_size": 2}),
        "frozen": _parameters_may_be_frozen_after_a_forward,
        "gathered by hand": _units_may_be_gathered_by_hand,
        "fails in backward": partial(_fails_in_backward, WHOLE_EXPERTS, None),
        "two forwards": partial(two_forwards_before_one_backward, None),
        "two forwards, reentrant": partial(two_forwards_before_one_backward, _reentrant),
    },
)
MORE_CHECKS = on_ranks(
    2,
    {
        f"{name}, no resharding": partial(_check_losses, BETWEEN[name], NEVER_RESHARD)
        for name in ("in training", "without gradients", "that fails")
    },
    {
        f"listed: {name}": partial(_check_listed, *case)
        for name, case in LISTED.items()
        if name != "whole experts"
    },
    {
        "routers in fp32, reentrant": partial(_routers_compute_in_fp32, _reentrant, NEVER_RESHARD),
        "routers in fp32, with children": partial(
            _routers_compute_in_fp32, None, {"ep_size": 2}, model_type="ernie4_5_moe"
        ),
        "copies and heads of routers in fp32": _trained_copies_and_heads_compute_in_fp32,
        "heads in fp32": _heads_compute_in_fp32,
        "adapters on routers in fp32": _adapted_routers_compute_in_fp32,
        "routers in fp32 of a script": _routers_of_a_script_are_cast,
        "routers in fp32, buffers": partial(
            _routers_compute_in_fp32, None, {"ep_size": 1, "fsdp_double_buffer": True}
        ),
        "own generate": _own_generate_is_called,
        "generation": partial(_generates, WHOLE_EXPERTS, 14),
        "generation, no resharding": partial(_generates, NEVER_RESHARD, 6),
        "fails in backward, no resharding": partial(_fails_in_backward, NEVER_RESHARD, None),
        "fails in backward, reentrant": partial(_fails_in_backward, NEVER_RESHARD, _reentrant),
        "two forwards, reentrant in the model's code": partial(
            two_forwards_before_one_backward, _checkpoint_blocks
        ),
    },
    slow=True,
)


@pytest.mark.parametrize("claim", [*CHECKS, *MORE_CHECKS])
def test_other_forwards_do_not_change_losses_or_gradients(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)
