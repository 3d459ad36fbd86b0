"""`fused_loss`: a patched model returns stock's loss and gradients, and no logits."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support import parity
from support.checks import Check, Found, on_ranks
from support.close import FP32_INSIDE, FP64_MODEL, assert_close
from support.host_numbers import NoHostNumbers
from support.needs import SINCE_5_23
from support.parity import TWO_FORWARDS, Case
from support.tiny_models import batch, tiny
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from transformers import Trainer, TrainingArguments

from hf_moe_ep import apply_ep_fsdp2, patch, unpatch
from hf_moe_ep.loss import attach
from hf_moe_ep.state import STATE
from hf_moe_ep.upstream.causal_loss import find_other_use_of_logits

FUSED = {"fused_loss": True}


def use_small_chunks(model: nn.Module) -> None:
    """Compute 5 tokens at a time, for the rest of this process."""
    attach._SMALLEST_CHUNK, attach._TOKENS_PER_HIDDEN = 5, 0


@pytest.fixture(autouse=True)
def _use_small_chunks() -> None:
    use_small_chunks(nn.Identity())


@contextmanager
def count_rows_of_logits(model: nn.Module) -> Iterator[list[int]]:
    """Yield a list that gets, per call of the head, the number of rows of its logits."""
    head, rows = model.get_output_embeddings(), []
    stock = nn.functional.linear

    def count_rows(x: Tensor, weight: Tensor, *args: Any) -> Tensor:
        if weight is head.weight:
            rows.append(x.shape[:-1].numel())
        return stock(x, weight, *args)

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(nn.functional, "linear", count_rows)
        yield rows


def _checkpoint_in_small_chunks(model: nn.Module) -> None:
    use_small_chunks(model)
    parity.checkpointing(model, use_reentrant=False)


def _adapt_head(model: nn.Module) -> nn.Module:
    """Attach random adapters to the head and to attention."""
    config = LoraConfig(r=3, target_modules=["lm_head", "q_proj"], init_lora_weights=False)
    return get_peft_model(model, config, autocast_adapter_dtype=False)


def _train_copy_of_head(model: nn.Module) -> nn.Module:
    """Attach adapters to attention, and train a copy of the head."""
    config = LoraConfig(
        r=3, target_modules=["q_proj"], init_lora_weights=False, modules_to_save=["lm_head"]
    )
    return get_peft_model(model, config, autocast_adapter_dtype=False)


BASE = Case("ep 2", 2, 2, config=FUSED, prepare=use_small_chunks)
CASES = [
    BASE.with_(
        name="ep 2, two forwards, checkpoint", prepare=_checkpoint_in_small_chunks, **TWO_FORWARDS
    ),
    BASE.with_(name="tied", model={"tie_word_embeddings": True}),
    BASE.with_(name="LoRA on the head", wrap=_adapt_head),
    BASE.with_(name="sp 2", sp=2, config={}),
]
MORE_CASES = [
    BASE.with_(name="a trained copy of the head", wrap=_train_copy_of_head),
    BASE.with_(name="ep 1", ep=1),
    BASE.with_(name="a rank without labels", micro_batches=parity.one_rank_without_labels),
    BASE.with_(name="accumulation", micro_batches=parity.three_micro_batches),
    BASE.with_(name="frozen head", freeze=("lm_head",)),
    BASE.with_(name="HSDP, sp", world=4, replicate=2, sp=2),
]


def _run_without_logits(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    with count_rows_of_logits(model) as rows:
        output = model(**inputs)
    assert output.logits is None and "logits" not in output
    assert max(rows) <= 5 and sum(rows) == inputs["labels"].numel()
    return output.loss


def bf16_under_accelerates_policy_equals_unfused(rank: int, world: int) -> None:
    """Accelerate also sets output_dtype, to which FSDP2 casts the output of the head."""
    use_small_chunks(nn.Identity())
    bf16 = torch.bfloat16
    policy = MixedPrecisionPolicy(param_dtype=bf16, reduce_dtype=torch.float32, output_dtype=bf16)
    losses, grads = [], []
    for config in (FUSED, {"fused_loss": False}):
        model = tiny(dtype=torch.float32)
        apply_ep_fsdp2(model, ep_size=2, mp_policy=policy, **config)
        loss = model(**batch(model, 2, 12, seed=rank)).loss
        loss.backward()
        losses.append(loss)
        grads.append({n: p.grad.full_tensor() for n, p in model.named_parameters()})
    assert losses[0].dtype == torch.float32
    assert_close("loss", *losses, FP32_INSIDE)
    for name, grad in grads[1].items():
        assert_close(name, grads[0][name], grad, 2**-6)  # bf16 rounds by 2**-9


def fp16_recomputes_after_a_reshard_of_the_head(rank: int, world: int) -> None:
    """Before backward, a forward for another purpose has resharded the head."""
    use_small_chunks(nn.Identity())
    grads = []
    for config in (FUSED, {"fused_loss": False}):
        model = tiny(dtype=torch.float16)
        apply_ep_fsdp2(model, ep_size=2, **config)
        inputs = batch(model, 2, 12, seed=rank)
        loss = model(**inputs, num_items_in_batch=torch.tensor(20_000)).loss
        with torch.no_grad():
            model(**inputs)
        (loss * 2**16).backward()
        grads.append({n: p.grad.full_tensor() for n, p in model.named_parameters()})
    for name, grad in grads[1].items():
        assert_close(name, grads[0][name], grad, 2**-7)


def parameters_may_be_on_the_host(rank: int, world: int) -> None:
    use_small_chunks(nn.Identity())
    model, reference = tiny(seed=rank), tiny(seed=0)
    apply_ep_fsdp2(model, ep_size=2, offload_policy=CPUOffloadPolicy(pin_memory=False), **FUSED)
    inputs = batch(reference, 2, 12)
    _run_without_logits(model, inputs).backward()
    reference(**inputs).loss.backward()
    for name, parameter in reference.named_parameters():
        grad = model.get_parameter(name).grad.full_tensor()
        assert_close(name, grad, parameter.grad, FP64_MODEL)


@pytest.mark.parametrize(
    "claim",
    parity.on_ranks(CASES)
    + parity.on_ranks(MORE_CASES, slow=True)
    + on_ranks(
        2,
        bf16_under_accelerates_policy_equals_unfused,
        fp16_recomputes_after_a_reshard_of_the_head,
        parameters_may_be_on_the_host,
        slow=True,
    ),
)
def test_on_ranks(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)


OPTIONS = [
    {},
    {"num_items_in_batch": torch.tensor(11)},
    {"num_items_in_batch": 11},
    {"num_items_in_batch": torch.tensor([11])},
    {"ignore_index": 3},
    {"shift_labels": True},
    {"output_router_logits": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=[str(x) for x in OPTIONS])
@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_vl_moe"])
def test_loss_and_gradients_equal_stock(name: str, options: dict[str, Any]) -> None:
    model, stock = patch(tiny(name), **FUSED), tiny(name)
    inputs = batch(stock, 3, 9, pad=4)
    if "shift_labels" in options:
        shifted = nn.functional.pad(inputs["labels"], (0, 1), value=-100)[:, 1:]
        options = {"shift_labels": shifted.contiguous()}
    if "ignore_index" in options:
        if name == "qwen3_vl_moe" and not SINCE_5_23:
            pytest.skip("Qwen3-VL-MoE of this transformers does not pass ignore_index to its loss")
        inputs["labels"] = inputs["labels"].masked_fill(inputs["labels"] == -100, 3)
    got = _run_without_logits(model, inputs | options)
    want = stock(**inputs, **options).loss.squeeze()
    assert_close("loss", got, want, FP32_INSIDE)
    got.backward()
    want.backward()
    parity.assert_same_gradients(name, model, stock, lambda _: FP64_MODEL)


@pytest.mark.parametrize("number", [11, 11.0, torch.tensor(11)], ids=["int", "float", "tensor"])
def test_the_number_of_items_is_not_copied_to_the_device(number: Any) -> None:
    """On a GPU such a copy waits for the forward of the decoder."""
    model = patch(tiny(), **FUSED)
    inputs = batch(model, 2, 9) | {"use_cache": False}
    want = model(**inputs, num_items_in_batch=torch.tensor(11)).loss
    with NoHostNumbers():
        got = model(**inputs, num_items_in_batch=number).loss
    assert torch.equal(got, want)


def test_logits_are_computed_if_code_may_read_them() -> None:
    model, stock = patch(tiny(), **FUSED), tiny()
    inputs = batch(stock, 2, 9)
    want = stock(**inputs).logits
    unlabelled = {name: x for name, x in inputs.items() if name != "labels"}
    assert torch.equal(model(**unlabelled).logits, want)
    assert torch.equal(model(**inputs, return_dict=False)[1], want)
    assert model(**inputs).logits is None
    assert torch.equal(model.eval()(**inputs).logits, want)
    model.train()
    model.loss_function = lambda logits, labels, vocab_size, **kwargs: logits.sum()
    assert torch.equal(model(**inputs).loss, want.sum())
    prompt = inputs["input_ids"][:1, :4]
    settings = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(prompt, **settings), stock.generate(prompt, **settings))


def _cap_logits_by_hook(model: nn.Module) -> None:
    model.lm_head.register_forward_hook(lambda _, __, logits: 3 * torch.tanh(logits / 3))


def _double_gradient_of_weight(model: nn.Module) -> None:
    model.lm_head.weight.register_hook(lambda grad: 2 * grad)


def _clamp_gradient_of_logits(model: nn.Module) -> None:
    model.lm_head.register_full_backward_pre_hook(lambda _, grads: (grads[0].clamp(min=0.0),))


def _add_z_loss(output: Any) -> Any:
    output.loss = output.loss + 0.1 * output.logits.logsumexp(-1).square().mean()
    return output


def _add_z_loss_by_hook(model: nn.Module) -> None:
    model.register_forward_hook(lambda _, __, output: _add_z_loss(output))


def _add_z_loss_by_wrapper(model: nn.Module) -> None:
    stock = model.forward
    model.forward = lambda *args, **kwargs: _add_z_loss(stock(*args, **kwargs))


READERS = {
    "hook that caps logits": _cap_logits_by_hook,
    "hook on a weight": _double_gradient_of_weight,
    "hook on the gradient of logits": _clamp_gradient_of_logits,
    "hook on the model": _add_z_loss_by_hook,
    "wrapper of the forward": _add_z_loss_by_wrapper,
}


@pytest.mark.parametrize("is_before", [True, False], ids=["before patch", "after patch"])
@pytest.mark.parametrize("name", READERS)
def test_logits_are_computed_for_hooks_and_wrappers_of_the_user(
    name: str, is_before: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The Trainer reads only the loss, but this code may read or change the logits."""
    model, stock = tiny(), tiny()
    READERS[name](stock)
    for change in [READERS[name], patch] if is_before else [patch, READERS[name]]:
        change(model)
    getattr(model, STATE).only_loss_is_read = True
    inputs = batch(stock, 3, 9, pad=4)
    with caplog.at_level("INFO", "hf_moe_ep"):
        losses = [model(**inputs).loss for _ in range(2)]
    assert caplog.text.count("is computed from whole logits, because") == 1
    want = stock(**inputs).loss
    assert_close("loss", losses[0], want, FP32_INSIDE)
    losses[0].backward()
    want.backward()
    parity.assert_same_gradients(name, model, stock, lambda _: FP64_MODEL)


def test_true_warns_of_a_reader_but_gives_later_hooks_no_logits() -> None:
    model, outputs = patch(tiny(), **FUSED), []
    inputs = batch(model, 2, 9)
    model.register_forward_hook(lambda _, __, output: outputs.append(output.logits))
    assert model(**inputs).logits is None and outputs == [None]
    _cap_logits_by_hook(model)
    with pytest.warns(UserWarning, match=r"_cap_logits_by_hook.*a hook of its head.*remove it"):
        assert model(**inputs).logits is not None


def test_auto_computes_logits_in_a_loop_of_the_user() -> None:
    model = patch(tiny())
    assert model(**batch(model, 2, 9)).logits is not None


def test_an_interrupted_forward_restores_the_functions() -> None:
    model = patch(tiny(), **FUSED)
    inputs = batch(model, 2, 9)
    before = {**vars(model)}, {**vars(model.lm_head)}
    with pytest.raises(ValueError, match=r"18 tokens, but was given 14 labels"):
        model(**inputs | {"labels": inputs["labels"][:, :7]})
    assert ({**vars(model)}, {**vars(model.lm_head)}) == before
    _run_without_logits(model, inputs)
    assert ({**vars(model)}, {**vars(model.lm_head)}) == before
    assert "_loss_function" not in vars(unpatch(model))


@pytest.mark.parametrize("other", [{"sp_size": 2, **FUSED}, {"pp_size": 2}])
def test_a_second_patch_finds_the_loss_behind_the_loss_of_slices(
    other: dict[str, Any],
) -> None:
    """The first `patch` has replaced the loss function that the second `patch` looks at."""
    model = patch(tiny(), sp_size=2)
    assert patch(model, **other) is model


def _make_model_with_forward(body: str) -> Any:
    """Make a model whose forward has the given body."""
    import linecache

    text = f"def forward(self, hidden, labels=None, **kwargs):\n    {body}\n"
    linecache.cache[f"<{body}>"] = (len(text), None, text.splitlines(True), f"<{body}>")
    names: dict[str, Any] = {"Output": dict}
    exec(compile(text, f"<{body}>", "exec"), names)
    return type("Model", (nn.Module,), {"forward": names["forward"]})()


RETURN = "; return Output(loss=loss, logits=logits)"
LOSS = "; loss = self.loss_function(logits, labels, 5, **kwargs)" + RETURN


@pytest.mark.parametrize(
    "body, use",
    [
        ("logits = self.lm_head(hidden[:, 1:])" + LOSS, ""),
        ("logits = self.lm_head(hidden.to(self.lm_head.weight.dtype)).float()" + LOSS, ""),
        ("logits = self.lm_head(hidden); loss = self.loss_function(logits=logits)" + RETURN, ""),
        ("logits = self.lm_head(hidden) * 2" + LOSS, "logits = self.lm_head(hidden) * 2"),
        ("logits = self.lm_head(hidden); logits = logits / 3" + LOSS, "logits = logits / 3"),
        ("logits = self.lm_head(hidden); logits /= 3" + LOSS, "logits /= 3"),
        ("logits = self.lm_head(hidden); z = logits.sum()" + LOSS, "z = logits.sum()"),
        ("logits = self.lm_head(hidden); print(logits)" + LOSS, "print(logits)"),
        ("self.lm_head(hidden); logits = self.lm_head(hidden)" + LOSS, "calls self.lm_head 2"),
        ("w = self.lm_head.weight; logits = self.lm_head(hidden)" + LOSS, "w = self.lm_head"),
        ("logits = self.lm_head(hidden); loss = 0" + RETURN, "does not pass logits to"),
        ("logits = self.other(hidden)" + LOSS, "calls self.lm_head 0"),
    ],
)
def test_other_uses_of_logits_are_found_in_the_code(body: str, use: str) -> None:
    found = find_other_use_of_logits(_make_model_with_forward(body), "lm_head")
    assert (found == "") if use == "" else use in found


def test_a_model_that_scales_its_logits_keeps_them() -> None:
    from transformers import GraniteMoeConfig, GraniteMoeForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 20}
    config = GraniteMoeConfig(**sizes, num_attention_heads=2, num_key_value_heads=2)
    with pytest.raises(ValueError, match=r"fused_loss=True.*GraniteMoe.*logits_scaling`"):
        patch(GraniteMoeForCausalLM(config), **FUSED)
    model = patch(GraniteMoeForCausalLM(config))
    getattr(model, STATE).only_loss_is_read = True
    assert model(**batch(model, 1, 5)).logits is not None


class _ReadingTrainer(Trainer):
    """A Trainer whose compute_loss reads the logits."""

    def compute_loss(self, *args: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        loss, outputs = super().compute_loss(*args, return_outputs=True, **kwargs)
        assert outputs.logits is not None
        return (loss, outputs) if return_outputs else loss


class _Dataset(torch.utils.data.Dataset):
    def __init__(self, model: nn.Module) -> None:
        whole = batch(model, 8, 12, pad=4)
        self.rows = [{name: x[i] for name, x in whole.items()} for i in range(8)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.rows[index]


def _train(
    folder: Any, kind: type[Trainer], patched: bool, fused_loss: Any = "auto", **options: Any
) -> tuple[list[float], list[int], list[int]]:
    """Return logged losses, and the rows of logits per call in training and in evaluation."""
    model = tiny(dtype=torch.float32)
    if patched:
        patch(model, fused_loss=fused_loss)
    smoothing = options.pop("label_smoothing_factor", 0.0)
    arguments = TrainingArguments(
        str(folder), max_steps=3, per_device_train_batch_size=2, logging_steps=1, use_cpu=True,
        save_strategy="no", report_to="none", gradient_accumulation_steps=2,
        label_smoothing_factor=smoothing, learning_rate=1e-3, disable_tqdm=True,
    )  # fmt: skip
    rows = _Dataset(model)
    trainer = kind(model, arguments, train_dataset=rows, eval_dataset=rows, **options)
    with count_rows_of_logits(model) as training_rows:
        trainer.train()
    with count_rows_of_logits(model) as evaluation_rows:
        evaluated = trainer.evaluate()["eval_loss"]
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return [*losses, evaluated], training_rows, evaluation_rows


def _compute_shape(prediction: Any) -> dict[str, float]:
    return {"shape": float(prediction.predictions.shape[-1])}


@pytest.mark.parametrize(
    "kind, options, fuses_training, fuses_evaluation",
    [
        (Trainer, {}, True, True),
        (Trainer, {"compute_metrics": _compute_shape}, True, False),
        (_ReadingTrainer, {}, False, False),
        pytest.param(
            *(Trainer, {"label_smoothing_factor": 0.1}, False, False), marks=pytest.mark.slow
        ),
        pytest.param(*(Trainer, {"fused_loss": False}, False, False), marks=pytest.mark.slow),
    ],
    ids=["plain", "compute_metrics", "compute_loss reads logits", "label smoothing", "off"],
)
def test_auto_fuses_if_the_trainer_reads_only_the_loss(
    tmp_path: Any,
    kind: type[Trainer],
    options: dict[str, Any],
    fuses_training: bool,
    fuses_evaluation: bool,
) -> None:
    got, *rows = _train(tmp_path, kind, True, **options)
    stock = {name: x for name, x in options.items() if name != "fused_loss"}
    want, *_ = _train(tmp_path, kind, False, **stock)
    assert_close("losses", torch.tensor(got), torch.tensor(want), 1e-5)
    assert [max(calls) <= 5 for calls in rows] == [fuses_training, fuses_evaluation]


def test_a_partial_loss_of_the_user_is_not_fused() -> None:
    """A partial of stock's loss function may have arguments that a fused loss would not use."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    model = patch(tiny(), **FUSED)
    model.loss_function = partial(ForCausalLMLoss, ignore_index=-100)
    assert model(**batch(model, 2, 9)).logits is not None
