"""DPO, KTO, GRPO and GKD of TRL on 4 ranks at ep 2, with any reference, log what stock logs.

Stock is one process, with the batch of all ranks and a reference of the same weights. Each case is
a script of a user of TRL, but for `patch`.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState
from peft import LoraConfig
from support.adapters import ATTENTION, EXPERTS, with_lora
from support.checks import Check, Found, on_ranks
from support.launched import launched
from support.tiny_models import tiny
from torch import nn

from hf_moe_ep import patch

pytest.importorskip("trl", minversion="1.16")

WORLD = 4
STEPS = 4
SIZES: dict[str, Any] = {"dtype": torch.float32, "num_hidden_layers": 3}
LOSS_BUDGET = 1e-6  # absolute, losses are below 1; fp32 rounding is 6e-8 per operation
NORM_BUDGET = 1e-5  # relative
Log = list[dict[str, float]]


def _length(completions: list[str], **_: Any) -> list[float]:
    """A reward: the same for the same completion."""
    return [float(len(completion)) for completion in completions]


@dataclass(frozen=True)
class Case:
    """A run: `reference` is "none" (TRL loads the policy's checkpoint), "stock" or "patched".

    `lora` is "ours" where the policy comes with adapters, of which TRL keeps a copy as reference,
    and "TRL's" where TRL attaches them, and switches them off.
    """

    name: str
    reference: str
    trainer: str = "DPO"
    lora: str = ""
    sp: int = 1
    reference_ep: int = 2
    arguments: dict[str, Any] = field(default_factory=dict)


SYNC = {"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.5}
PRECOMPUTE = {"precompute_ref_log_probs": True}
# TRL's KL term is that of a rank's batch, also in stock: a loss without it can be compared.
NO_KL = {"loss_type": "apo_zero_unpaired"}
OFF_POLICY = {"lmbda": 0.0}
# Completions of a prompt are equal, and so are their rewards: what is learned is the reference's.
GREEDY = {"beta": 0.5, "num_generations": 2, "max_completion_length": 6, "top_k": 1}
CASES = [
    Case("stock reference", "stock"),
    Case("patched reference", "patched"),
    Case("no reference", "none"),
    Case("patched reference at another ep", "patched", reference_ep=4),
    Case("stock reference, sp 2", "stock", sp=2),
    Case("stock reference, synchronised", "stock", arguments=SYNC),
    Case("patched reference, synchronised", "patched", arguments=SYNC),
    Case("patched reference, precomputed", "patched", arguments=PRECOMPUTE),
    Case("no reference, precomputed", "none", arguments=PRECOMPUTE),
    Case("adapters and their copy", "none", lora="ours"),
    Case("adapters and their copy, precomputed", "none", lora="ours", arguments=PRECOMPUTE),
    Case("adapters switched off", "none", lora="TRL's"),
    Case("adapters switched off, precomputed", "none", lora="TRL's", arguments=PRECOMPUTE),
    Case("KTO, stock reference", "stock", trainer="KTO", arguments=NO_KL),
    Case("KTO, patched reference", "patched", trainer="KTO", arguments=NO_KL),
    Case("GRPO", "none", trainer="GRPO", arguments=GREEDY),
    Case("GKD, patched teacher", "patched", trainer="GKD", arguments=OFF_POLICY),
]


def tokenizer() -> Any:
    """Words are the tokens."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    words = {f"word{index}": index for index in range(97)}
    made = Tokenizer(WordLevel(words, unk_token="word0"))
    made.pre_tokenizer = WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=made, pad_token="word1", eos_token="word2")
    fast.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    return fast


def _words(start: int, count: int, step: int) -> str:
    return "".join(f"word{3 + (start + step * place) % 90} " for place in range(count))


def samples(trainer: str) -> list[dict[str, Any]]:
    """Prompts and completions of many lengths; those that are chosen count upwards."""
    found = []
    for index in range(STEPS * WORLD):
        prompt = _words(index, 2 + index % 4, 1)
        pair = [_words(7 * index, 3 + index % 5, 1), _words(5 * index, 2 + index % 7, 3)]
        if trainer == "GKD":
            turns = zip(("user", "assistant"), (prompt, pair[0]), strict=True)
            found.append({"messages": [{"role": role, "content": text} for role, text in turns]})
        elif trainer == "GRPO":
            found.append({"prompt": prompt})
        elif trainer == "DPO":
            found.append({"prompt": prompt, "chosen": pair[0], "rejected": pair[1]})
        else:
            label = index % 3 != 0
            found.append({"prompt": prompt, "completion": pair[0 if label else 1], "label": label})
    return found


def run(case: Case, folder: Path, processes: int, prepare: Callable[..., Any] | None) -> Log:
    """One training; `prepare` is what a script of ours does to a model beside stock's."""
    import trl
    from datasets import Dataset, load_from_disk
    from trl.experimental import gkd

    trainers = gkd if case.trainer == "GKD" else trl

    first = not dist.is_initialized() or dist.get_rank() == 0
    if first:  # a reference and a data set that every rank finds
        # GRPO takes no other reference than this one.
        seed = 1 if case.trainer == "GRPO" else 0
        tiny(**SIZES, seed=seed).save_pretrained(folder / "model")
        Dataset.from_list(samples(case.trainer)).save_to_disk(folder / "data")
    if dist.is_initialized():
        dist.barrier()
    policy: nn.Module = tiny(**SIZES)
    policy.name_or_path = policy.config._name_or_path = os.fspath(folder / "model")
    reference = None if case.reference == "none" else tiny(**SIZES, seed=1)
    if case.lora == "ours":
        policy = with_lora(policy, seed=0)
    if prepare is not None:
        prepare(policy, ep_size=2, sp_size=case.sp)
        if case.reference == "patched":
            prepare(reference, ep_size=case.reference_ep)
    beside: dict[str, Any] = {"ref_model": reference}
    if case.trainer == "GRPO":
        beside = {"reward_funcs": _length}
    elif case.trainer == "GKD":
        beside = {"teacher_model": reference}
    if case.lora == "TRL's":
        targets = {"target_parameters": list(EXPERTS), "target_modules": list(ATTENTION)}
        beside = {"peft_config": LoraConfig(r=4, init_lora_weights=False, **targets)}
        torch.manual_seed(0)  # factors are random, as if trained before
    arguments = getattr(trainers, f"{case.trainer}Config")(
        output_dir=os.fspath(folder),
        # Ranks of an sp group share theirs.
        per_device_train_batch_size=WORLD * (1 if prepare is None else case.sp) // processes,
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
        processing_class=tokenizer(),
        **beside,
    )
    trainer.train()
    kept = trainer.teacher_model if case.trainer == "GKD" else trainer.ref_model
    if prepare is not None and kept is not None:
        assert not any(parameter.requires_grad for parameter in kept.parameters())
        assert all(parameter.grad is None for parameter in kept.parameters())
        trained = {id(p) for group in trainer.optimizer.param_groups for p in group["params"]}
        assert not trained & {id(parameter) for parameter in kept.parameters()}
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def run_on_ranks(case: Case, rank: int, world: int, folder: str) -> Log:
    with launched():
        return run(case, Path(folder), world, patch)


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case], Log]:
    def log(case: Case) -> Log:
        try:
            return run(case, tmp_path_factory.mktemp("stock"), 1, None)
        finally:
            AcceleratorState._reset_state(True)

    return log


BY_NAME = {case.name: case for case in CASES}
CHECKS = on_ranks(
    WORLD, {case.name: partial(run_on_ranks, case) for case in CASES}, slow=True, timeout=400
)


@pytest.mark.filterwarnings("default::FutureWarning")
@pytest.mark.parametrize("claim", CHECKS)
def test_a_reference_gives_stocks_losses(
    found: Found, stock: Callable[[Case], Log], claim: Check
) -> None:
    got, want = found.values(claim)[0], stock(BY_NAME[claim.name])
    assert len(got) == len(want) == STEPS
    # Not accuracies: of equal models they count signs of roundings.
    compared = ("rewards/chosen", "rewards/rejected", "logps/chosen", "logps/rejected")
    # TRL divides GKD's loss by the tokens of all ranks and then averages over ranks, in stock too.
    times = WORLD if BY_NAME[claim.name].trainer == "GKD" else 1
    for step, (ours, theirs) in enumerate(zip(got, want, strict=True), start=1):
        where = f"{claim.name}, step {step}"
        assert abs(times * ours["loss"] - theirs["loss"]) <= LOSS_BUDGET, (where, ours, theirs)
        error = abs(times * ours["grad_norm"] - theirs["grad_norm"])
        assert error <= NORM_BUDGET * theirs["grad_norm"], (where, ours, theirs)
        for key in compared if BY_NAME[claim.name].trainer == "DPO" else ():
            budget = 10 * LOSS_BUDGET * max(1.0, abs(theirs[key]))
            assert abs(ours[key] - theirs[key]) <= budget, (where, key, ours, theirs)
    # Something is learned.
    assert any(abs(entry["loss"] - want[0]["loss"]) > 1e-4 for entry in want)
