"""Compare LoRA on stacked experts with stock PEFT on the stock model in one process, in fp64."""

import copy
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
from support import checks, parity
from support.adapters import EXPERTS, TARGETS, with_lora
from support.architectures import tiny as tiny_of
from support.checks import Check, Found
from support.close import FP32_INSIDE, FP64_MODEL, assert_close
from support.modalities import modality_by_step
from support.needs import NO_ADD_ADAPTER
from support.parity import CHECKPOINT, Case, on_ranks
from support.quantised import SIZES, dequantise_experts
from support.redirected import call_redirected
from support.tiny_models import batch, tiny
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hf_moe_ep import apply_ep_fsdp2, load_checkpoint, patch, save_checkpoint, unpatch
from hf_moe_ep.lora.factors import pack_factors
from hf_moe_ep.state import STATE, MoELayer, find_state


def adapt_one_layer(model: nn.Module) -> nn.Module:
    """Train only the adapters of the last layer, so no gradient flows to the layer below it."""
    model = with_lora(model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name and "layers.1." in name)
    return model


def add_by_transformers(model: nn.Module) -> nn.Module:
    config = peft.LoraConfig(r=4, target_parameters=list(EXPERTS), init_lora_weights=False)
    model.add_adapter(config)
    return model


BOTH = with_lora
ROUTER_AND_HEAD = partial(
    with_lora, parameters=(*EXPERTS, "mlp.gate.weight"), modules_to_save=["lm_head"]
)
TOKENS = partial(with_lora, trainable_token_indices=[1, 2, 3])
PICTURES = partial(with_lora, modules=("q_proj", "qkv"))
MODALITIES = {
    "model": {"name": "qwen3_vl_moe"},
    "micro_batches": modality_by_step,
    "budget": FP32_INSIDE,
}
TWO_RANKS = [
    Case("ep 2", 2, 2, wrap=BOTH),
    Case("ep 2, checkpoint, rsLoRA", 2, 2, wrap=partial(with_lora, use_rslora=True)).with_(
        prepare=CHECKPOINT, micro_batches=parity.three_micro_batches
    ),
]
FAST_QUANTISED, *QUANTISED = [
    Case(f"ep 2, experts in {kind}", 2, 2, wrap=BOTH, model=SIZES[kind]).with_(
        config={"experts_dtype": kind}, change_reference=partial(dequantise_experts, kind=kind)
    )
    for kind in SIZES
]
MORE_CASES = [
    Case("ep 1, rank 1, experts only", 2, 1, wrap=partial(with_lora, r=1, modules=())),
    Case("ep 2, HSDP", 4, 2, 2, wrap=BOTH),
    Case("ep 2, sp 2", 4, 2, sp=2, wrap=BOTH),
    Case("ep 4, rank 16", 4, 4, wrap=partial(with_lora, r=16)),
    Case("ep 1", 4, 1, wrap=BOTH),
    Case("ep 2, attention only", 4, 2, wrap=partial(with_lora, parameters=())),
    Case("ep 4, two forwards, checkpoint", 4, 4, wrap=BOTH, prepare=CHECKPOINT).with_(
        micro_batches=parity.three_micro_batches, backward=parity.two_forwards_backward
    ),
    Case("ep 2, chunks", 4, 2, wrap=BOTH).with_config(dispatch_chunks=2),
    Case("pictures", 4, 2, wrap=PICTURES).with_(**MODALITIES),
    Case("pictures, sp 2", 4, 2, sp=2, wrap=PICTURES).with_(**MODALITIES),
    Case("router and head", 4, 2, wrap=ROUTER_AND_HEAD),
    Case("one layer", 4, 2, wrap=adapt_one_layer),
    Case("eager experts", 4, 1, wrap=BOTH).with_config(experts_backend="eager"),
    Case("expert_shard_dim 1", 4, 2, wrap=BOTH).with_config(expert_shard_dim=1),
    Case("transformers' own add_adapter", 4, 2, wrap=add_by_transformers, needs=NO_ADD_ADAPTER),
    Case("trained tokens, tied", 4, 2, wrap=TOKENS, model={"tie_word_embeddings": True}),
]
# Each LoRA rank and target occurs at each ep_size. Uneven micro-batches are accumulated.
MATRIX = [
    Case(f"ep {ep}, rank {r}, {what}", 4, ep, wrap=partial(with_lora, r=r, **TARGETS[what])).with_(
        micro_batches=parity.three_micro_batches, prepare=CHECKPOINT if r == 8 else None
    )
    for ep in (1, 2, 4)
    for r in (1, 8, 16)
    for what in ("both", "experts", "attention")
]


@pytest.mark.parametrize("claim", on_ranks([*TWO_RANKS[:1], FAST_QUANTISED]))
def test_adapters_equal_one_process(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)


@pytest.mark.parametrize(
    "claim", on_ranks(TWO_RANKS[1:] + QUANTISED + MORE_CASES + MATRIX, slow=True)
)
def test_more_adapters_equal_one_process(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)


def test_adapters_are_disabled_added_and_merged_as_in_stock() -> None:
    """In one process, a patched and a stock model switch, add and merge the same adapters."""
    torch.manual_seed(0)
    stock = with_lora(tiny())
    model = copy.deepcopy(stock)
    patch(model)
    inputs = batch(stock, 2, 9)
    with torch.no_grad():

        def assert_same_logits(what: str) -> None:
            assert_close(what, model(**inputs).logits, stock(**inputs).logits, FP64_MODEL)

        assert_same_logits("one adapter")
        with model.disable_adapter(), stock.disable_adapter():
            assert_same_logits("none")
        for each in (stock, model):
            torch.manual_seed(1)
            config = peft.LoraConfig(
                r=3, target_parameters=list(EXPERTS), init_lora_weights=False, lora_alpha=5
            )
            each.add_adapter("second", config)
            each.base_model.set_adapter(["default", "second"])
        assert_same_logits("two at once")
        for each in (stock, model):
            each.set_adapter("second")
        assert_same_logits("the second")
        model, stock = model.merge_and_unload(), stock.merge_and_unload()
        assert_same_logits("merged")


def test_adapters_attached_after_patch_equal_stock() -> None:
    stock, model = tiny(), patch(tiny())
    wrapped = []
    for each in (stock, model):
        torch.manual_seed(0)
        wrapped.append(with_lora(each))
    inputs = batch(stock, 2, 9)
    with torch.no_grad():
        stock_logits, logits = (each(**inputs).logits for each in wrapped)
    assert_close("logits", logits, stock_logits, FP64_MODEL)


def test_layers_have_adapters_only_during_a_forward() -> None:
    """A deep copy of a model uses its own adapters."""
    model = patch(with_lora(tiny(), seed=0))
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for name, parameter in twin.named_parameters():
            if "lora_B" in name:
                parameter.zero_()
    inputs = batch(tiny(), 2, 9)
    for each in (model, twin):
        layers = [m for m in each.modules() if isinstance(vars(m).get(STATE), MoELayer)]
        known = {id(parameter) for parameter in each.parameters()}
        used: list[set[int]] = []

        def record(module: nn.Module, args: Any, used: list[set[int]] = used) -> None:
            adapters = getattr(module, STATE).adapters
            assert adapters.keys() == {"gate_up_proj", "down_proj"}
            used += [{id(a.a), id(a.b)} for active in adapters.values() for a in active]

        hooks = [module.register_forward_pre_hook(record) for module in layers]
        with torch.no_grad():
            each(**inputs)
        for hook in hooks:
            hook.remove()
        assert len(used) == 2 * len(layers) and all(ids <= known for ids in used)
        assert all(not getattr(module, STATE).adapters for module in layers)
    with torch.no_grad(), model.disable_adapter():
        assert_close("nothing added", twin(**inputs).logits, model(**inputs).logits, FP64_MODEL)


def a_forward_without_the_adapter_does_not_change_the_step(rank: int, world: int) -> None:
    """Preference training runs a forward without the adapter before it trains a step."""
    stock, model = with_lora(tiny(), seed=0), with_lora(tiny(), seed=0)
    for each in (stock, model):
        torch.manual_seed(1)
        config = peft.LoraConfig(
            r=3, target_parameters=list(EXPERTS), init_lora_weights=False, target_modules=["q_proj"]
        )
        each.add_adapter("second", config)
        each.set_adapter("default")
    apply_ep_fsdp2(model, ep_size=world)
    both = [(each, torch.optim.AdamW(each.parameters(), lr=1e-3)) for each in (model, stock)]
    for step, adapter in enumerate(("default", "second", "second", "default")):
        logits, trained = [], []
        for each, optimizer in both:
            with torch.no_grad(), each.disable_adapter():
                logits.append(each(**batch(each, 2, 7, seed=step)).logits)
            each.set_adapter(adapter)
            each(**batch(each, 2, 9, seed=step)).loss.backward()
            trained.append({name for name, p in each.named_parameters() if p.grad is not None})
            assert trained[-1] == {n for n, p in each.named_parameters() if p.requires_grad}
            optimizer.step()
            optimizer.zero_grad()
        assert_close(f"reference logits of step {step}", *logits, FP64_MODEL)
        assert trained[0] == trained[1] and any(adapter in name for name in trained[0])
    tensors = {name: parity.full_tensor(p.detach()) for name, p in model.named_parameters()}
    for name, tensor in pack_factors(model, tensors).items():
        assert_close(name, tensor, stock.get_parameter(name), FP64_MODEL)


@pytest.mark.parametrize("size", ["sp_size", "cp_size", "pp_size"])
def test_adapters_that_count_from_the_end_of_a_row_need_whole_rows(size: str) -> None:
    """PEFT counts the tokens of activated LoRA in whole rows, but a layer gets slices of rows."""
    config = peft.LoraConfig(
        task_type="CAUSAL_LM", target_modules=["q_proj"], alora_invocation_tokens=[1, 2]
    )
    refused = rf"alora_invocation_tokens .* with {size}=2 a layer gets a part of the batch"
    patch(peft.get_peft_model(patch(tiny()), config))
    with pytest.raises(ValueError, match=refused):
        peft.get_peft_model(patch(tiny(), **{size: 2}), config)
    with pytest.raises(ValueError, match=refused):
        patch(peft.get_peft_model(tiny(), config), **{size: 2})


def test_adapters_that_compute_outside_of_the_forward_are_refused() -> None:
    configs: list[tuple[Any, str, dict[str, Any]]] = [
        (peft.AdaLoraConfig, "ADALORA", {"target_modules": ["q_proj"], "total_step": 9}),
        (peft.CPTConfig, "CPT", {"cpt_token_ids": [1, 2, 3]}),
    ]
    for kind, peft_type, options in configs:
        refused = rf"{kind.__name__} \(peft_type {peft_type}\) does not work .*: it .*; train LoRA"
        with pytest.raises(ValueError, match=refused):
            peft.get_peft_model(patch(tiny()), kind(task_type="CAUSAL_LM", **options))
        stock = peft.get_peft_model(tiny(), kind(task_type="CAUSAL_LM", **options))
        with pytest.raises(ValueError, match=refused):
            patch(stock)
    if hasattr(peft, "ShadowConfig"):  # since PEFT 0.21
        with pytest.raises(ValueError, match=r"ShadowConfig .*a loss of its own after the model's"):
            peft.get_peft_model(patch(tiny()), peft.ShadowConfig(task_type="CAUSAL_LM"))


@pytest.mark.parametrize("patch_first", [False, True])
def test_a_tuner_with_a_forward_of_its_own_equals_stock(patch_first: bool) -> None:
    """Poly's forward gives the tasks of the rows to the layers."""

    def adapt(model: nn.Module) -> nn.Module:
        torch.manual_seed(0)
        config = peft.PolyConfig(
            task_type="CAUSAL_LM", target_modules=["q_proj"], r=2, n_tasks=2, init_weights=False
        )
        return peft.get_peft_model(model, config).double()

    stock = adapt(tiny()).eval()
    model = (adapt(patch(tiny())) if patch_first else patch(adapt(tiny()))).eval()
    inputs = batch(tiny(), 2, 9) | {"task_ids": torch.tensor([0, 1])}
    with torch.no_grad():
        assert_close("logits", model(**inputs).logits, stock(**inputs).logits, FP64_MODEL)


@pytest.mark.parametrize("module", ["experts", "mlp"])
def test_copies_of_experts_are_refused(module: str) -> None:
    """With each MoE layer PEFT would copy the whole model, because the layer refers to it."""
    model = patch(tiny())
    stock = with_lora(tiny(), parameters=(), modules_to_save=[module])
    before = [name for name, _ in model.named_parameters()]
    refused = r"modules_to_save of the adapter contains \S*layers.0.mlp\S*: .*target_parameters"
    with pytest.raises(ValueError, match=refused):
        with_lora(model, modules_to_save=[module])
    assert [name for name, _ in model.named_parameters()] == before
    with pytest.raises(ValueError, match=refused):
        patch(stock)
    described = "experts" if module == "experts" else "ffn"
    config = peft.LoraConfig(r=3, target_modules=["Wqkv"], modules_to_save=[described])
    with pytest.raises(ValueError, match=r"contains \S*blocks.0.ffn\S*: .*target_parameters"):
        patch(peft.get_peft_model(tiny_of("dbrx"), config))
    config = peft.LoraConfig(r=3, target_modules=["q_proj"], modules_to_save=[module])
    adapted = with_lora(model, modules_to_save=["gate"])
    with pytest.raises(ValueError, match=refused):
        adapted.add_adapter("second", config)


def test_an_inactive_adapter_is_in_the_checkpoint(tmp_path: Path) -> None:
    """Two adapters are trained in turn. The inactive adapter is frozen, but is also saved."""

    def make(seed: int) -> tuple[nn.Module, Any]:
        model = with_lora(patch(tiny()), seed=seed, modules_to_save=["lm_head"])
        config = peft.LoraConfig(r=3, target_modules=["q_proj"], init_lora_weights=False)
        model.add_adapter("second", config)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    saved, optimizer = make(1)
    for adapter in ("default", "second"):
        saved.set_adapter(adapter)
        saved(**batch(saved, 2, 9)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    save_checkpoint(tmp_path / "one", saved, optimizer)
    for adapter in ("default", "second"):
        model, optimizer = make(2)
        model.set_adapter(adapter)
        load_checkpoint(tmp_path / "one", model, optimizer)
        for name, parameter in saved.named_parameters():
            assert torch.equal(model.get_parameter(name), parameter), (adapter, name)


def generate_works_before_any_forward(rank: int, world: int) -> None:
    for patch_first in (False, True):
        stock = with_lora(tiny(), seed=0)
        model = with_lora(patch(tiny(), ep_size=world) if patch_first else tiny(), seed=0)
        apply_ep_fsdp2(model, ep_size=world)
        prompt = batch(stock, 1, 5)["input_ids"]
        options = {"max_new_tokens": 4, "do_sample": False}
        tokens = [each.eval().generate(input_ids=prompt, **options) for each in (model, stock)]
        assert torch.equal(*tokens), patch_first


def _train_by_distillation(
    model: nn.Module, ranks: Iterable[int], checkpoints: bool
) -> list[Tensor]:
    """Take three steps with evaluations between them, and return the losses of this process.

    The model is called as TRL's distillation trainers do: the forward of the PeftModel calls the
    decoder, and multiplies by the head's weight. The second call between forward and backward
    represents a teacher.
    """

    def compute_loss(inputs: dict[str, Tensor]) -> Tensor:
        decoder = model.get_base_model().base_model
        weight = model.get_output_embeddings().weight
        hidden = decoder(inputs["input_ids"], inputs["attention_mask"]).last_hidden_state
        with torch.no_grad():
            teacher_hidden = decoder(inputs["input_ids"].flip(1)).last_hidden_state
        weight = weight.full_tensor() if isinstance(weight, DTensor) else weight
        return ((hidden - teacher_hidden) @ weight.T).square().mean()

    losses = []
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=0.05)
    for step in range(3):
        model.train()
        if checkpoints:
            parity.checkpointing(model, False)
        batches = [batch(tiny(), 2, 9, seed=2 * step + rank, pad=2) for rank in ranks]
        loss = sum(call_redirected(model, compute_loss, inputs) for inputs in batches)
        (loss / len(batches)).backward()
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            losses += [loss.detach(), call_redirected(model, compute_loss, batches[0])]
    return losses


def a_forward_that_calls_only_the_decoder(rank: int, world: int) -> None:
    for tied, checkpoints in ((False, False), (True, False), (False, True)):
        stock, model = (
            with_lora(tiny(tie_word_embeddings=tied), seed=0, fp32=False) for _ in range(2)
        )
        apply_ep_fsdp2(model, ep_size=world)
        want = _train_by_distillation(stock, range(world), checkpoints)
        got = _train_by_distillation(model, [rank], checkpoints)
        for step in range(3):
            dist.all_reduce(got[2 * step])
            dist.broadcast(got[2 * step + 1], src=0)
        for number, (loss, expected) in enumerate(zip(got, want, strict=True)):
            assert_close(f"loss {number}, tied {tied}", loss, expected, FP64_MODEL)
        state = find_state(model)
        assert state is not None and state.forward_number == 2 * len(want)


def adapters_that_sharding_would_change_are_refused(rank: int, world: int) -> None:
    """After sharding, views of one tensor, copied layers and merged weights would be separate.

    Hooks of parameters, such as those of PEFT's OSF, would be lost. The vectors of VB-LoRA belong
    to all layers.
    """
    merged: Any = with_lora(tiny(), seed=0)
    merged.merge_adapter()
    apply_ep_fsdp2(merged, ep_size=world)
    inputs = batch(merged, 1, 5)
    loss = merged(**inputs).loss
    message = (
        r"q_proj were merged into its weights before .*model\.unmerge_adapter\(\) before apply"
    )
    with pytest.raises(ValueError, match=message), merged.disable_adapter():
        merged(**inputs)
    assert torch.equal(merged(**inputs).loss, loss)
    tied = tiny(tie_word_embeddings=True)
    targets = ["q_proj", "embed_tokens", "lm_head"]
    tied = peft.get_peft_model(
        tied, peft.LoraConfig(target_modules=targets, ensure_weight_tying=True)
    )
    replicas = peft.LoraConfig(target_modules=["q_proj"], layer_replication=[(0, 2), (0, 2)])
    hooked, stepping = with_lora(tiny()), with_lora(tiny())
    watched = tiny()
    if rank == 0:  # as a script that logs gradients on one rank
        watched.get_parameter("model.layers.0.self_attn.q_proj.weight").register_hook(torch.neg)
    bank = peft.VBLoRAConfig(r=2, num_vectors=16, vector_length=8, target_modules=["q_proj"])
    for parameter in filter(lambda p: p.requires_grad, hooked.parameters()):
        parameter.register_hook(torch.neg)
    next(p for p in stepping.parameters() if p.requires_grad).register_post_accumulate_grad_hook(
        lambda _: None
    )
    for model, message in (
        (tied, r"lora_embedding_\w.* and .*are views of the same numbers.*ensure_weight_tying"),
        (peft.get_peft_model(tiny(), replicas), r"layer_replication=\[.* share frozen weights"),
        (hooked, r"lora_A\S* \(one of 16 parameters\) has a hook .* replaces parameters"),
        (peft.get_peft_model(tiny(), bank), r"vblora_vector_bank\S* belongs to .*several decoder"),
        (stepping, r"lora_A\S* \(one of 1 parameters\) has a hook"),
        (watched, r"q_proj\.weight \(one of 1 parameters\) has a hook"),
    ):
        with pytest.raises(ValueError, match=message):
            apply_ep_fsdp2(model, ep_size=world)


def quantised_experts_keep_their_scales(rank: int, world: int) -> None:
    """The Trainer casts the whole model before an evaluation with `bf16_full_eval`."""
    for kind in ("nf4", "fp8"):
        model = with_lora(tiny(**SIZES[kind], dtype=torch.float32), seed=0)
        apply_ep_fsdp2(model, ep_size=world, experts_dtype=kind)
        scales = {n: p for n, p in model.named_parameters() if n.endswith("_block_scale")}
        assert scales and all(scale.dtype == torch.float32 for scale in scales.values())
        before = {name: scale.to_local().clone() for name, scale in scales.items()}
        model.to(torch.bfloat16)
        assert model.get_input_embeddings().weight.dtype == torch.bfloat16
        for name, scale in before.items():
            assert torch.equal(model.get_parameter(name).to_local(), scale), (kind, name)


@pytest.mark.parametrize(
    "claim",
    checks.on_ranks(
        2,
        a_forward_without_the_adapter_does_not_change_the_step,
        generate_works_before_any_forward,
        a_forward_that_calls_only_the_decoder,
        adapters_that_sharding_would_change_are_refused,
        quantised_experts_keep_their_scales,
    ),
)
def test_on_two_ranks(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)


def test_a_merged_model_can_be_patched_and_unpatched() -> None:
    merged = patch(with_lora(tiny(), seed=0)).merge_and_unload()
    inputs = batch(merged, 2, 9)
    with torch.no_grad():
        logits = merged(**inputs).logits
        assert torch.equal(patch(merged)(**inputs).logits, logits)
        assert_close("logits of stock's code", unpatch(merged)(**inputs).logits, logits, FP64_MODEL)
    assert not [key for module in merged.modules() for key in vars(module) if "hf_moe_ep" in key]
