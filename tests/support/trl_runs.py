"""Run the cases of `trl_cases` as a user of TRL would, and compare their logs with stock logs.

The script of a case differs from the stock script only by calls of `patch`.
"""

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState
from peft import LoraConfig
from torch import nn

from hf_moe_ep import patch
from support.adapters import ATTENTION, EXPERTS, with_lora
from support.checks import on_ranks
from support.launched import launched
from support.tiny_models import tiny
from support.trl_cases import Case
from support.words import make_tokenizer, text_of_tokens

WORLD = 4
STEPS = 4
NUM_SAMPLES = 48
SIZES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"dtype": torch.float32, "num_hidden_layers": 3},
    "qwen3_vl_moe": {"dtype": torch.float32},
}
# fp32 rounds by 6e-8 per operation. For values above 1 the budget is relative, else absolute.
LOSS_BUDGET = 1e-6
NORM_BUDGET = 1e-5  # relative
# Policy and reference are equal at the start, so the accuracies depend on rounding errors.
NOT_COMPARED = {"rewards/accuracies", "step_time"}
Log = list[dict[str, float]]
CHAT = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }} {% endgeneration %}"
    "{% else %}{{ message['content'] }} {% endif %}{% endfor %}"
)


def _make_tokens(start: int, count: int, step: int) -> list[int]:
    # Ids from 90 on are placeholders of pictures in a multimodal model.
    return [3 + (start + step * position) % 87 for position in range(count)]


def _make_words(tokens: list[int]) -> str:
    # TRL appends the end token, which must be a word of its own.
    return text_of_tokens(tokens) + " "


def make_samples(case: Case) -> list[dict[str, Any]]:
    """Make prompts and completions of many lengths.

    In a chosen completion the token ids increase by 1, in a rejected one by 3.
    """
    return [_make_sample(case, index) for index in range(NUM_SAMPLES)]


def _make_sample(case: Case, index: int) -> dict[str, Any]:
    prompt = _make_tokens(index, 2 + index % 4, 1)
    good, bad = _make_tokens(7 * index, 3 + index % 5, 1), _make_tokens(5 * index, 2 + index % 7, 3)
    question, chosen, rejected = _make_words(prompt), _make_words(good), _make_words(bad)
    if case.data == "tokens":
        return {"input_ids": prompt + good}
    if case.data == "chat" or case.trainer == "GKD":
        turns = (("user", question), ("assistant", chosen))
        return {"messages": [{"role": role, "content": words} for role, words in turns]}
    if case.trainer == "SFT":
        return {"prompt": question, "completion": chosen}
    if case.trainer in ("GRPO", "RLOO"):
        return {"prompt": question}
    if case.trainer == "KTO":
        label = index % 3 != 0
        return {"prompt": question, "completion": chosen if label else rejected, "label": label}
    return {"prompt": question, "chosen": chosen, "rejected": rejected}


def _reward_length(completions: list[str], **_: Any) -> list[float]:
    """Return the number of characters of each completion as its reward."""
    return [float(len(completion)) for completion in completions]


def _build_policy(case: Case, seed: int = 0) -> nn.Module:
    if case.trainer == "Reward":
        return tiny("qwen3_moe, rewards", **SIZES[case.model], seed=seed, num_labels=1)
    return tiny(case.model, **SIZES[case.model], seed=seed)


def train(case: Case, folder: Path, processes: int, prepare: Callable[..., Any] | None) -> Log:
    """Train once and return the log. `prepare` is `patch`, or None in a stock script."""
    import trl
    from datasets import Dataset, load_from_disk

    trainers: Any = trl
    if case.trainer == "GKD":
        from trl.experimental import gkd as trainers
    words = make_tokenizer(97)
    words.chat_template = CHAT

    if not dist.is_initialized() or dist.get_rank() == 0:
        # All ranks load this model and data set. GRPO takes no reference model as an argument, but
        # loads this model as its reference.
        saved = _build_policy(case, seed=1 if case.trainer == "GRPO" else 0)
        saved.save_pretrained(folder / "model")
        Dataset.from_list(make_samples(case)).save_to_disk(folder / "data")
    if dist.is_initialized():
        dist.barrier()
    policy: nn.Module = _build_policy(case)
    policy.name_or_path = policy.config._name_or_path = os.fspath(folder / "model")
    reference = None if case.reference == "none" else _build_policy(case, seed=1)
    if case.lora == "ours":
        policy = with_lora(policy, seed=0)
    if prepare is not None:
        sizes = {"ep_size": case.ep, "sp_size": case.sp, "cp_size": case.cp, "pp_size": case.pp}
        prepare(policy, **sizes)
        if case.reference == "patched":
            prepare(reference, ep_size=case.reference_ep)
    options: dict[str, Any] = {}
    if case.trainer in ("DPO", "KTO"):
        options = {"ref_model": reference}
    elif case.trainer in ("GRPO", "RLOO"):
        options = {"reward_funcs": _reward_length}
    elif case.trainer == "GKD":
        options = {"teacher_model": reference}
    if case.lora == "TRL's":
        if case.trainer in ("DPO", "KTO"):
            options = {}
        heads = {"task_type": "SEQ_CLS", "modules_to_save": ["score"]}
        options["peft_config"] = LoraConfig(
            r=4,
            init_lora_weights=False,  # random factors, as if they were trained before
            target_parameters=list(EXPERTS),
            target_modules=list(ATTENTION),
            **(heads if case.trainer == "Reward" else {}),
        )
        torch.manual_seed(0)
    ranks_per_batch = 1 if prepare is None else case.sp * case.cp * case.pp
    arguments = getattr(trainers, f"{case.trainer}Config")(
        output_dir=os.fspath(folder),
        # All runs have the same global batch.
        per_device_train_batch_size=WORLD * ranks_per_batch // processes,
        max_steps=STEPS,
        logging_steps=1,
        learning_rate=1e-4,
        max_grad_norm=0.5,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **case.arguments,
    )
    trainer = getattr(trainers, f"{case.trainer}Trainer")(
        policy,
        args=arguments,
        train_dataset=load_from_disk(os.fspath(folder / "data")),
        processing_class=words,
        **options,
    )
    trainer.train()
    frozen = getattr(trainer, "teacher_model" if case.trainer == "GKD" else "ref_model", None)
    if prepare is not None and frozen is not None:
        assert not any(parameter.requires_grad for parameter in frozen.parameters())
        assert all(parameter.grad is None for parameter in frozen.parameters())
        trained = {id(p) for group in trainer.optimizer.param_groups for p in group["params"]}
        assert not trained & {id(parameter) for parameter in frozen.parameters()}
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def run_on_ranks(case: Case, rank: int, world: int, folder: str) -> tuple[Log | str, Log]:
    """Return a rank's log, or the error text of a refused case, and the stock log of the rank.

    The stock log is empty unless the case has `each_rank`.
    """
    stock_log = train(case, Path(folder), world, None) if case.each_rank else []
    AcceleratorState._reset_state(True)
    with launched():
        if not case.refused:
            return train(case, Path(folder), world, patch), stock_log
        try:
            train(case, Path(folder), world, patch)
        except ValueError as error:
            return str(error), stock_log
    return "no error", stock_log


class StockLogs:
    """The logs of stock runs in one process. Cases that differ only in their layout share a run."""

    def __init__(self, new_folder: Callable[[], Path]) -> None:
        self._new_folder = new_folder
        self._logs: dict[str, Log] = {}

    def find_or_run(self, case: Case) -> Log:
        reference = "none" if case.reference == "none" else "stock"
        stock = replace(case, name="", ep=1, sp=1, reference_ep=1, reference=reference)
        if repr(stock) not in self._logs:
            try:
                self._logs[repr(stock)] = train(stock, self._new_folder(), 1, None)
            finally:
                AcceleratorState._reset_state(True)
        return self._logs[repr(stock)]


def make_checks(cases: list[Case]) -> list[Any]:
    """Make parameters for `parametrize` that run each case on 4 ranks."""
    runs = {case.name: partial(run_on_ranks, case) for case in cases}
    return on_ranks(WORLD, runs, slow=True, timeout=400)


def assert_equals_stock(case: Case, found: tuple[Log | str, Log], stock: StockLogs) -> None:
    """Compare rank 0's log with the stock log, or its error text with the text of the case."""
    got, stock_log = found
    if case.refused:
        assert isinstance(got, str) and case.refused in got, got
    else:
        assert isinstance(got, list)
        assert_same_log(case, got, stock_log if case.each_rank else stock.find_or_run(case))


def assert_same_log(case: Case, got: Log, want: Log) -> None:
    """Compare all logged values, and check that the loss changes during training."""
    assert len(got) == len(want) == STEPS
    for step, (ours, theirs) in enumerate(zip(got, want, strict=True), start=1):
        assert ours.keys() == theirs.keys()
        for key in theirs.keys() - NOT_COMPARED:
            got_value, relative = ours[key], max(1.0, abs(theirs[key]))
            budget = LOSS_BUDGET * relative if key == "loss" else 10 * LOSS_BUDGET * relative
            if key == "grad_norm":
                budget = NORM_BUDGET * theirs[key]
            if case.trainer == "GKD" and not case.each_rank and key in ("loss", "grad_norm"):
                # TRL divides by the tokens of all ranks, and then averages over the ranks, too.
                got_value *= WORLD // (case.sp * case.cp)
            assert abs(got_value - theirs[key]) <= budget, (case.name, step, key, ours, theirs)
    assert any(abs(entry["loss"] - want[0]["loss"]) > 1e-4 for entry in want)
