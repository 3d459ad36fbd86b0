"""TRL's commands with `hf-moe-ep run --ep-size 2` train on two ranks as stock does in one process.

Both runs have the same command, such as `trl sft ...`, except for the batch size and
`--accelerate_config`. Losses, gradient norms (with clipping) and saved tensors of six steps are
compared.
"""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import yaml
from support import commands
from support.commands import (
    LAUNCH_CONFIG,
    LOSS_BUDGET,
    MAX_GRAD_NORM,
    MODEL,
    RANKS,
    STEPS,
    STOCK_BATCH,
    assert_same_training,
    read_log_entries,
    read_saved_tensors,
    read_training_log,
    run_ours,
    run_stock,
)
from support.scripts import ROOT
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

pytest.importorskip("trl", minversion="1.15")

EXAMPLE = ROOT / "examples" / "trainers" / "trl_sft.yaml"
LORA = "--use_peft --lora_r 4 --lora_alpha 8 --lora_dropout 0 --lora_target_modules q_proj v_proj"
EXPERTS = "--lora_target_parameters mlp.experts.gate_up_proj mlp.experts.down_proj"
COMMON = (
    f"--model_name_or_path {MODEL} --max_steps {STEPS} --save_strategy steps --save_steps {STEPS} "
    "--logging_steps 1 --learning_rate 1e-4 --lr_scheduler_type constant "
    f"--max_grad_norm {MAX_GRAD_NORM} --use_cpu --bf16 False --dtype float32 --report_to none "
    "--disable_tqdm True "
)
# All completions of a prompt are equal, and so are their rewards. Only the KL term to the reference
# has gradients. It is zero only in the first step, before weight decay changes the policy.
GREEDY = (
    "--reward_funcs rewards.length --beta 0.5 --num_generations 2 --max_completion_length 6 "
    "--top_k 1 --weight_decay 300"
)


@dataclass(frozen=True)
class Case:
    """A command of TRL.

    Attributes:
        options: options of the command in both runs.
        stock: further options of the stock command.
        ours: options of `hf-moe-ep run`.
        config: True if the command reads examples/trainers/trl_sft.yaml, which options override.
    """

    command: str
    data: str
    options: str = ""
    stock: str = ""
    ours: tuple[str, ...] = ()
    config: bool = False


# All samples have equally many tokens, so the mean over batches does not depend on their size.
EVALUATION = "--eval_strategy steps --eval_steps 3 --dataset_test_split train"

CASES = {
    "sft": Case("sft", "chat"),
    "sft, stock load": Case("sft", "chat", ours=("--stock-load",)),
    "sft, packing": Case("sft", "chat", "--packing --max_length 48 --packing_strategy wrapped"),
    "sft, example": Case("sft", "chat", "--max_length 48", config=True),
    "sft, evaluation": Case("sft", "chat", EVALUATION),
    "sft, LoRA": Case("sft", "chat", LORA),
    "sft, LoRA on experts": Case("sft", "chat", f"{LORA} {EXPERTS}"),
    "sft, --lora-experts": Case("sft", "chat", LORA, stock=EXPERTS, ours=("--lora-experts",)),
    "dpo": Case("dpo", "preference"),
    "dpo, precomputed": Case("dpo", "preference", "--precompute_ref_log_probs"),
    "sft, evaluation in bf16": Case("sft", "chat", "--bf16_full_eval"),
    "dpo, LoRA": Case("dpo", "preference", f"{LORA} {EXPERTS}"),
    # TRL computes the KL term of its default loss from the batch of each rank.
    "kto": Case("kto", "unpaired", "--loss_type apo_zero_unpaired"),
    "reward": Case("reward", "preference"),
    "grpo": Case("grpo", "prompt", GREEDY),
}

FAST = "sft, --lora-experts"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = commands.make_inputs(tmp_path_factory.mktemp("commands"))
    example = yaml.safe_load(EXAMPLE.read_text())
    del example["accelerate_config"]  # stock trains in one process
    (folder / "example.yaml").write_text(yaml.safe_dump(example))
    return folder


def make_command(case: Case, output: str, batch: int, *options: str) -> list[str]:
    words = f"trl {case.command} {COMMON} --dataset_name {case.data} --output_dir {output} "
    words += f"--per_device_train_batch_size {batch} {case.options}"
    words += " --config example.yaml" if case.config else ""
    return [*words.split(), *options]


def run_both(case: Case, name: str, folder: Path) -> tuple[Path, Path, str]:
    """Train both ways. Returns the output folders of stock and ours, and the output of ours."""
    outputs = [
        f"{name.replace(', ', '_').replace(' ', '-')}_{which}" for which in ("stock", "ours")
    ]
    run_stock(make_command(case, outputs[0], STOCK_BATCH, *case.stock.split()), folder)
    launched = ("--accelerate_config", LAUNCH_CONFIG)
    ours = make_command(case, outputs[1], STOCK_BATCH // RANKS, *launched)
    printed = run_ours(ours, folder, *case.ours)
    return folder / outputs[0], folder / outputs[1], printed


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name != FAST)) for name in CASES]
)
def test_a_command_of_trl_trains_as_stock(name: str, folder: Path) -> None:
    stock, ours, printed = run_both(CASES[name], name, folder)
    assert_same_training(ours, stock)
    evaluations = [read_log_entries(folder, "eval_loss") for folder in (ours, stock)]
    assert [len(entries) for entries in evaluations] == [2 * (name == "sft, evaluation")] * 2
    for mine, theirs in zip(*evaluations, strict=True):
        assert abs(mine["eval_loss"] - theirs["eval_loss"]) <= LOSS_BUDGET * theirs["eval_loss"]
    assert "hf-moe-ep run: patched Qwen3Moe" in printed
    assert "layout     2 ranks = dp_replicate 1 x ep_fsdp 1 x ep 2" in printed
    assert all(entry["tokens_per_second"] > 0 for entry in read_training_log(ours))
    assert all(entry["expert_load/worst_layer"] >= 1 for entry in read_training_log(ours))
    card = (ours / "README.md").read_text()
    assert "hf_moe_ep" not in card and "hf-moe-ep" not in card


@pytest.mark.slow
def test_a_command_with_a_dense_model_runs_as_without_the_runner(folder: Path) -> None:
    """All logged values and all saved tensors are bit-equal, because nothing is patched."""
    write_dense_model(folder)
    outputs, printed = [], []
    for run in (run_stock, run_ours):
        outputs.append(folder / f"dense_{run.__name__}")
        command = make_command(Case("sft", "chat"), outputs[-1].name, STOCK_BATCH)
        command[command.index(MODEL)] = "dense"
        printed.append(run(command, folder))
    stock, ours = ([read_training_log(path), read_saved_tensors(path)] for path in outputs)
    assert ours[0] == stock[0] and len(stock[0]) == STEPS
    assert ours[1].keys() == stock[1].keys() and stock[1]
    assert all(torch.equal(ours[1][name], tensor) for name, tensor in stock[1].items())
    lines = [line for line in printed[1].splitlines() if "hf-moe-ep" in line]
    warning = "warning: Qwen3ForCausalLM has no experts, so it is not patched"
    assert lines == [f"hf-moe-ep run: {warning}"]


def write_dense_model(folder: Path) -> None:
    """Write a tiny Qwen3 with the tokenizer of the MoE model."""
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
    }
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / MODEL)
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(vocab_size=len(tokenizer), **sizes)).save_pretrained(
        folder / "dense"
    )
    tokenizer.save_pretrained(folder / "dense")
