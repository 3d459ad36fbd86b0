"""Run a trainer's command without hf_moe_ep in one process, and by `hf-moe-ep run` on two ranks.

`make_inputs` writes a tiny Qwen3-MoE, a tokenizer with a ChatML template, and data for each kind of
training. Two ranks with batch 2 draw the samples of one process with batch 4, in the same order.
All samples of a data set have equally many tokens, and equally many tokens with a label. Otherwise
a trainer that averages over the tokens of each rank has another loss on two ranks, even in stock.
"""

import json
import os
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from pydoc_data import topics
from typing import Any

import torch
import yaml
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from support.close import assert_close
from support.scripts import CPU_4, ROOT, run_command
from support.tiny_models import tiny

STEPS = 6
STOCK_BATCH, RANKS = 4, 2
SAMPLES = 32
# fp32 rounds by 6e-8 per operation. The sums of two ranks differ from those of one process, and
# AdamW divides by small second moments in its first steps.
LOSS_BUDGET, NORM_BUDGET, TENSOR_BUDGET = 1e-5, 1e-4, 1e-4
MAX_GRAD_NORM = 0.5  # assert_same_log checks that clipping acts
MODEL, LAUNCH_CONFIG = "model", "cpu_2.yaml"
# A folder for PYTHONPATH, with code that trainers need on CPU ranks but not on GPUs.
ON_CPU = os.fspath(Path(__file__).parent / "trainers_on_cpu")
REWARDS = (
    "def length(completions, **_):\n    return [float(len(c[0]['content'])) for c in completions]\n"
)
_CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_QUESTION_TOKENS, _ANSWER_TOKENS = 12, 20  # tokens


def make_inputs(folder: Path, **config: Any) -> Path:
    """Write the model, all data sets, a launch config for two ranks and a reward function.

    `config` has fields of the model's config. Returns the folder, in which commands run.
    """
    texts = [text for text in topics.topics.values() if len(text) > 400]
    tokenizer = _make_tokenizer(texts)
    model = tiny(
        dtype=torch.float32, vocab_size=len(tokenizer), max_position_embeddings=512, **config
    )
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.config.pad_token_id = model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder / MODEL)
    tokenizer.save_pretrained(folder / MODEL)
    draw_text = _make_draw_text(tokenizer, texts)
    for name, make_sample in _DATA.items():
        (folder / name).mkdir()
        lines = [json.dumps(make_sample(draw_text, index)) + "\n" for index in range(SAMPLES)]
        (folder / name / "train.jsonl").write_text("".join(lines))
    write_launch_config(folder)
    (folder / "rewards.py").write_text(REWARDS)
    return folder


def write_launch_config(folder: Path) -> None:
    """Write the config of `accelerate launch` for two ranks."""
    launch = yaml.safe_load(CPU_4.read_text()) | {"num_processes": RANKS}
    (folder / LAUNCH_CONFIG).write_text(yaml.safe_dump(launch))


def _make_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Train a BPE tokenizer with the special tokens of ChatML."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    result = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    result.chat_template = _CHATML
    return result


DrawText = Callable[[int], str]
Sample = dict[str, Any]


def _make_draw_text(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> DrawText:
    """Return a function that draws a text with a given number of tokens."""
    draw = random.Random(0)

    def draw_text(length: int) -> str:
        while True:
            tokens = tokenizer(draw.choice(texts))["input_ids"]
            start = draw.randrange(len(tokens) - length)
            text = tokenizer.decode(tokens[start : start + length]).strip()
            if len(tokenizer(text)["input_ids"]) == length and "\ufffd" not in text:
                return text

    return draw_text


def _make_question(draw_text: DrawText) -> list[dict[str, str]]:
    return [{"role": "user", "content": draw_text(_QUESTION_TOKENS)}]


def _make_answer(draw_text: DrawText) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": draw_text(_ANSWER_TOKENS)}]


def _make_chat(draw_text: DrawText, index: int) -> Sample:
    return {"messages": _make_question(draw_text) + _make_answer(draw_text)}


def _make_preference(draw_text: DrawText, index: int) -> Sample:
    return {
        "prompt": _make_question(draw_text),
        "chosen": _make_answer(draw_text),
        "rejected": _make_answer(draw_text),
    }


def _make_unpaired(draw_text: DrawText, index: int) -> Sample:
    label = index % 2 == 0
    return {
        "prompt": _make_question(draw_text),
        "completion": _make_answer(draw_text),
        "label": label,
    }


def _make_prompt(draw_text: DrawText, index: int) -> Sample:
    return {"prompt": _make_question(draw_text)}


# The data sets, each a folder with the file train.jsonl.
_DATA = {
    "chat": _make_chat,
    "preference": _make_preference,
    "unpaired": _make_unpaired,
    "prompt": _make_prompt,
}


def run_stock(
    command: Sequence[str], folder: Path, output: str = "stock.txt", **variables: str
) -> str:
    """Run a command without hf_moe_ep, and return what it printed."""
    return _run(command, folder, output, variables)


def run_ours(
    command: Sequence[str],
    folder: Path,
    *options: str,
    output: str = "ours.txt",
    **variables: str,
) -> str:
    """Run a command by `hf-moe-ep run --ep-size 2`, and return what it printed."""
    runner = [sys.executable, "-m", "hf_moe_ep", "run", "--ep-size", "2", *options, "--"]
    return _run([*runner, *command], folder, output, variables)


def _run(command: Sequence[str], folder: Path, output: str, variables: dict[str, str]) -> str:
    programs = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    paths = filter(None, [os.fspath(ROOT), variables.pop("PYTHONPATH", "")])
    common = {
        "PATH": programs,
        "PYTHONPATH": os.pathsep.join(paths),
        "HF_HOME": os.fspath(folder / "cache"),
    }
    file = folder / output
    run_command(command, output=file, variables=common | variables, folder=folder, timeout=400.0)
    return file.read_text()


Entry = dict[str, float]


def read_training_log(folder: Path) -> list[Entry]:
    """Read the training logs of the last checkpoint in a trainer's output folder."""
    return read_log_entries(folder, "loss")


def read_log_entries(folder: Path, key: str) -> list[Entry]:
    """Read the entries with a key from the log of a trainer's last checkpoint."""
    (file,) = sorted(folder.glob(f"**/checkpoint-{STEPS}/trainer_state.json"))
    history = json.loads(file.read_text())["log_history"]
    return [entry for entry in history if key in entry]


def read_saved_tensors(folder: Path) -> dict[str, Tensor]:
    """Read all safetensors files of a folder."""
    tensors: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def assert_same_training(ours: Path, stock: Path) -> None:
    """Compare losses, gradient norms and saved tensors in two output folders."""
    assert_same_log(read_training_log(ours), read_training_log(stock))
    assert_same_tensors(read_saved_tensors(ours), read_saved_tensors(stock))


def assert_adapts_experts(folder: Path) -> None:
    """Check that an adapter has trained factors for both matrices of experts in both layers."""
    tensors = read_saved_tensors(folder)
    for layer in (0, 1):
        for matrix in ("base_layer.", ""):  # PEFT nests the adapters of two parameters
            for factor in ("lora_A", "lora_B"):
                name = f"base_model.model.model.layers.{layer}.mlp.experts.{matrix}{factor}.weight"
                assert tensors[name].any(), name


def assert_same_log(got: Sequence[Entry], want: Sequence[Entry]) -> None:
    """Compare losses and gradient norms of all steps, some of which must have been clipped."""
    assert len(got) == len(want) == STEPS
    norms = [entry["grad_norm"] for entry in want]
    assert max(norms) > MAX_GRAD_NORM, f"no step is clipped: {norms}"
    for step, (mine, theirs) in enumerate(zip(got, want, strict=True), start=1):
        loss, norm = (abs(mine[key] - theirs[key]) for key in ("loss", "grad_norm"))
        assert loss <= LOSS_BUDGET * max(1.0, abs(theirs["loss"])), (step, mine, theirs)
        # A gradient with a norm below 1e-3 consists of rounding errors: the exact gradient is zero.
        assert norm <= NORM_BUDGET * max(1e-3, theirs["grad_norm"]), (step, mine, theirs)
    assert len({round(entry["loss"], 4) for entry in want}) > 1


def assert_same_tensors(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    """Compare saved tensors by name."""
    assert got.keys() == want.keys() and want, got.keys() ^ want.keys()
    for name, tensor in want.items():
        assert got[name].dtype == tensor.dtype
        assert_close(name, got[name], tensor, TENSOR_BUDGET)
