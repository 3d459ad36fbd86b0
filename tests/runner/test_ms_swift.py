"""ms-swift with `hf-moe-ep run` trains on two ranks as stock does in one process.

The configuration is examples/trainers/ms_swift.yaml with a tiny model. Losses, gradient norms (with
clipping) and saved tensors of six steps are compared.
"""

import json
import math
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from support import commands
from support.commands import (
    LOSS_BUDGET,
    MODEL,
    ON_CPU,
    RANKS,
    STEPS,
    STOCK_BATCH,
    assert_adapts_experts,
    assert_same_log,
    assert_same_tensors,
    read_log_entries,
    read_saved_tensors,
    read_training_log,
    run_ours,
    run_stock,
)
from support.tiny_models import QWEN3_VL_MOE, tiny
from support.trainer_configs import Config, find_example, make_config, write_config
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3VLMoeForConditionalGeneration

from hf_moe_ep.checkpoints.convert import convert

pytest.importorskip("swift", "4.6", reason="needs ms-swift 4.6 or newer (make test-trainers)")

PLUGIN = find_example("ms_swift").with_name("ms_swift_plugin.py")
MIDDLE = STEPS // 2
LAST = f"checkpoint-{STEPS}"
LAUNCH = {"NPROC_PER_NODE": str(RANKS), "PYTHONPATH": ON_CPU}
# The preset of `--fsdp fsdp2`, with checkpoints that hold a model in the hub's layout.
FULL_STATE_DICT = "fsdp.json"
LORA: Config = {
    "tuner_type": "lora",
    "lora_rank": 4,
    "lora_alpha": 8,
    "lora_dropout": 0,
    "target_modules": ["q_proj", "v_proj"],
    "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
}
EVALUATION: Config = {
    "val_dataset": "chat/train.jsonl",
    "eval_strategy": "steps",
    "eval_steps": MIDDLE,
}
# A file for --external_plugins, which fills one gradient of a step with NaN.
POISON = f"""
from transformers import Trainer

original = Trainer.training_step

def training_step(self, model, *args, **kwargs):
    loss = original(self, model, *args, **kwargs)
    if self.state.global_step == {MIDDLE - 1}:
        next(p.grad for p in model.parameters() if p.grad is not None).fill_(float("nan"))
    return loss

Trainer.training_step = training_step
"""
# Parse the arguments of `swift sft` in the way of swift/cli/main.py.
PARSE = """
import sys
from swift.arguments import SftArguments
from swift.cli.main import parse_yaml_args
from swift.utils import parse_args

words = sys.argv[1:]
parse_yaml_args(words)
arguments, others = parse_args(SftArguments, words)
assert not others, others
print("FSDP", arguments.fsdp_config["fsdp_version"])
"""

# ms-swift's template uses constants as the ids of the placeholder tokens.
PLACEHOLDERS = {
    "<|vision_start|>": 151652,
    "<|vision_end|>": 151653,
    "<|image_pad|>": 151655,
    "<|video_pad|>": 151656,
}
PICTURE_MODEL, SIDE = "picture_model", 16
PICTURES: Config = {
    "model": PICTURE_MODEL,
    "model_type": "qwen3_vl_moe",
    "template": "qwen3_vl",
    "dataset": "pictures.jsonl",
    "freeze_vit": False,
    "freeze_aligner": False,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = commands.make_inputs(tmp_path_factory.mktemp("swift"))
    samples = [json.loads(line) for line in (folder / "preference/train.jsonl").open()]
    pairs = [
        {
            "messages": sample["prompt"] + sample["chosen"],
            "rejected_response": sample["rejected"][0]["content"],
        }
        for sample in samples
    ]
    texts = [{"messages": sample["chosen"]} for sample in samples]
    labelled = [
        {"messages": sample["prompt"] + sample["completion"], "label": sample["label"]}
        for sample in map(json.loads, (folder / "unpaired/train.jsonl").open())
    ]
    for name, lines in (("pairs", pairs), ("texts", texts), ("labelled", labelled)):
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / f"{name}.jsonl").write_text(text)
    fsdp = {
        "fsdp_version": 2,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "cpu_ram_efficient_loading": True,
        "activation_checkpointing": False,
        "state_dict_type": "FULL_STATE_DICT",
    }
    options = {"fsdp": "full_shard auto_wrap", "fsdp_config": fsdp}
    (folder / FULL_STATE_DICT).write_text(json.dumps(options))
    return folder


def make_picture_inputs(folder: Path) -> None:
    """Write a tiny Qwen3-VL-MoE with its processor, and data for it.

    Every fourth sample has a picture, so rank 1 has no pictures.
    """
    from transformers import Qwen2VLImageProcessor, Qwen3VLProcessor, Qwen3VLVideoProcessor

    tokens = json.loads((folder / MODEL / "tokenizer.json").read_text())
    for text, token in PLACEHOLDERS.items():
        tokens["model"]["vocab"][text] = token
        tokens["added_tokens"].append(tokens["added_tokens"][0] | {"id": token, "content": text})
    (folder / "tokenizer.json").write_text(json.dumps(tokens))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
    )
    sizes = {"vocab_size": 151664, "max_position_embeddings": 512}
    names = ("vision_start", "vision_end", "image", "video")
    ids = dict(zip(names, PLACEHOLDERS.values(), strict=True))
    model = tiny(
        "qwen3_vl_moe",
        dtype=torch.float32,
        text_config=QWEN3_VL_MOE["text_config"] | sizes,
        **{f"{name}_token_id": token for name, token in ids.items()},
    )
    model.save_pretrained(folder / PICTURE_MODEL)
    patches = {"patch_size": 4, "temporal_patch_size": 2, "merge_size": 2}
    size = {"shortest_edge": SIDE**2, "longest_edge": SIDE**2}  # areas, not edges
    processor = Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(size=size, **patches),
        tokenizer=tokenizer,
        video_processor=Qwen3VLVideoProcessor(**patches),
        chat_template="{{ messages }}",  # ms-swift has a template of its own
    )
    processor.save_pretrained(folder / PICTURE_MODEL)
    lines = []
    for index, line in enumerate((folder / "chat/train.jsonl").open()):
        sample = json.loads(line) | {"images": []}
        if index % 4 == 0:
            picture = folder / f"{index}.png"
            colors = random.Random(index).randbytes(3 * SIDE * SIDE)
            Image.frombytes("RGB", (SIDE, SIDE), colors).save(picture)
            sample["images"] = [str(picture)]
            sample["messages"][0]["content"] = "<image>" + sample["messages"][0]["content"]
        lines.append(json.dumps(sample) + "\n")
    (folder / "pictures.jsonl").write_text("".join(lines))


def train_stock(folder: Path, output: str, command: str = "sft", **changes: Any) -> Path:
    """Train in one process without hf_moe_ep and FSDP. Returns the output folder."""
    file = write_config(make_config("ms_swift", output, fsdp=None, **changes), folder)
    run_stock(["swift", command, file], folder, f"{output}.txt", PYTHONPATH=ON_CPU)
    return folder / output


def train_ours(
    folder: Path,
    output: str,
    command: str = "sft",
    models: int = 1,
    sp_size: int = 1,
    model_class: str = "Qwen3MoeForCausalLM",
    **changes: Any,
) -> Path:
    """Train on two ranks with `hf-moe-ep run`. Returns the output folder.

    Args:
        models: the number of models of `model_class` that are patched.
        sp_size: the number of ranks that share a batch.
        changes: changed keys of the configuration.
    """
    batch = STOCK_BATCH * sp_size // RANKS
    sizes = {"per_device_train_batch_size": batch, "per_device_eval_batch_size": batch}
    file = write_config(make_config("ms_swift", output, **sizes, **changes), folder)
    options = ["--sp-size", str(sp_size)] if sp_size > 1 else []
    words = ["swift", command, file]
    printed = run_ours(words, folder, *options, output=f"{output}.txt", **LAUNCH)
    check_run(folder / output, printed, models, model_class)
    return folder / output


def check_run(
    output: Path, printed: str, models: int = 1, model_class: str = "Qwen3MoeForCausalLM"
) -> None:
    """Check what the run on two ranks has printed and logged."""
    assert printed.count(f"hf-moe-ep run: patched {model_class} (--ep-size 2") == models
    assert "layout     2 ranks = dp_replicate 1 x ep_fsdp 1 x ep 2" in printed
    log = read_training_log(output)
    assert all(entry["tokens_per_second"] > 0 for entry in log)
    assert all(entry["expert_load/worst_layer"] >= 1 for entry in log)


@pytest.fixture(scope="module")
def stock_sft(folder: Path) -> Path:
    return train_stock(folder, "stock_sft", **EVALUATION)


def test_evaluation_and_resume_equal_stock(folder: Path, stock_sft: Path) -> None:
    """The preset of `--fsdp fsdp2` has sharded checkpoints and activation checkpointing.

    ms-swift then saves no whole model. `convert` makes it from a checkpoint.
    """
    output = train_ours(folder, "sft", save_steps=MIDDLE, **EVALUATION)
    assert_same_log(read_training_log(output), read_training_log(stock_sft))
    got, want = (read_log_entries(path, "eval_loss") for path in (output, stock_sft))
    assert len(got) == len(want) == 2
    for mine, theirs in zip(got, want, strict=True):
        assert abs(mine["eval_loss"] - theirs["eval_loss"]) <= LOSS_BUDGET * theirs["eval_loss"]
    middle = f"sft/checkpoint-{MIDDLE}"
    resumed = train_ours(folder, "resumed", resume_from_checkpoint=middle)
    assert_same_log(read_training_log(resumed), read_training_log(stock_sft))
    for run in (output, resumed):
        convert(run / LAST, run / "whole")
        assert_same_tensors(read_saved_tensors(run / "whole"), read_saved_tensors(stock_sft / LAST))


def test_external_plugins_patch_as_the_runner_does(folder: Path, stock_sft: Path) -> None:
    """The file is imported before ms-swift loads the model. The command has no `hf-moe-ep run`."""
    changes = {"external_plugins": str(PLUGIN), "fsdp": FULL_STATE_DICT}
    changes |= {"per_device_train_batch_size": STOCK_BATCH // RANKS}
    file = write_config(make_config("ms_swift", "external", **changes), folder)
    variables = LAUNCH | {"HF_MOE_EP_EP_SIZE": "2"}
    printed = run_stock(["swift", "sft", file], folder, "external.txt", **variables)
    check_run(folder / "external", printed)
    assert "sharding will read its layers from" in printed
    assert_same_log(read_training_log(folder / "external"), read_training_log(stock_sft))
    saved = [read_saved_tensors(output / LAST) for output in (folder / "external", stock_sft)]
    assert_same_tensors(*saved)


def test_a_step_with_nan_gradients_changes_nothing_as_in_stock(folder: Path) -> None:
    (folder / "poison.py").write_text(POISON)
    changes = {"external_plugins": "poison.py"}
    want = train_stock(folder, "stock_nan", **changes)
    got = train_ours(folder, "nan", fsdp=FULL_STATE_DICT, **changes)
    logs = [read_training_log(output) for output in (got, want)]
    for mine, theirs in zip(*logs, strict=True):
        assert math.isnan(mine["grad_norm"]) == math.isnan(theirs["grad_norm"])
        assert math.isnan(mine["grad_norm"]) == (mine["step"] == MIDDLE)
        assert abs(mine["loss"] - theirs["loss"]) <= LOSS_BUDGET * theirs["loss"]
    assert_same_tensors(read_saved_tensors(got / LAST), read_saved_tensors(want / LAST))


def test_ms_swift_accepts_the_unchanged_example(folder: Path) -> None:
    """Options replace the model and the data, which have to be downloaded, and the GPUs."""
    (folder / "parse.py").write_text(PARSE)
    options = f"--model {MODEL} --model_type qwen3_moe --template chatml --use_cpu true"
    options += " --dataset chat/train.jsonl"
    command = [sys.executable, "parse.py", str(find_example("ms_swift")), *options.split()]
    printed = run_stock(command, folder, "parse.txt", PYTHONPATH=ON_CPU)
    assert printed.splitlines()[-1] == "FSDP 2"


def test_without_fsdp_an_error_names_the_option(folder: Path) -> None:
    with pytest.raises(AssertionError, match="exit code 1 ") as error:
        train_ours(folder, "ddp", fsdp=None)
    assert "never sharded: every process would train alone" in str(error.value)
    assert "ms-swift: Add --fsdp fsdp2 to the command" in str(error.value)


def test_lora_and_its_export_equal_stock(folder: Path) -> None:
    want = train_stock(folder, "stock_lora", **LORA)
    got = train_ours(folder, "lora", fsdp=FULL_STATE_DICT, **LORA)
    assert_same_log(read_training_log(got), read_training_log(want))
    assert_same_tensors(read_saved_tensors(got / LAST), read_saved_tensors(want / LAST))
    assert_adapts_experts(got / LAST)
    assert_same_tensors(export_merged(got, folder), export_merged(want, folder))


def export_merged(output: Path, folder: Path) -> dict[str, Tensor]:
    """Merge the adapter of a run with `swift export`. Returns the model's tensors."""
    merged = f"{output.name}_merged"
    command = f"swift export --adapters {output / LAST} --merge_lora true --output_dir {merged}"
    run_stock(command.split(), folder, "export.txt", PYTHONPATH=ON_CPU)
    return read_saved_tensors(folder / merged)


def test_pretraining_with_sequence_parallelism_equals_stock(folder: Path) -> None:
    """ms-swift splits samples over processes itself, but both ranks must get the same samples.

    ms-swift also replaces torch's function for gradient checkpointing.
    """
    data = {"dataset": "texts.jsonl", "gradient_checkpointing": True, "use_logits_to_keep": False}
    want = train_stock(folder, "stock_pt", "pt", **data)
    got = train_ours(folder, "pt", "pt", sp_size=2, fsdp=FULL_STATE_DICT, **data)
    assert_same_log(read_training_log(got), read_training_log(want))
    assert_same_tensors(read_saved_tensors(got / LAST), read_saved_tensors(want / LAST))


def test_dpo_equals_stock(folder: Path) -> None:
    """The reference model is patched as well, and sharded layer by layer."""
    data = {"dataset": "pairs.jsonl", "rlhf_type": "dpo", "learning_rate": 1e-4}
    want = train_stock(folder, "stock_dpo", "rlhf", **data)
    got = train_ours(folder, "dpo", "rlhf", models=2, fsdp=FULL_STATE_DICT, **data)
    assert_same_log(read_training_log(got), read_training_log(want))
    assert_same_tensors(read_saved_tensors(got / LAST), read_saved_tensors(want / LAST))


def test_kto_equals_stock(folder: Path) -> None:
    """ms-swift computes the KL term of KTO's default loss from the batch of each rank."""
    data = {"dataset": "labelled.jsonl", "rlhf_type": "kto", "loss_type": "apo_zero_unpaired"}
    data["learning_rate"] = 1e-4
    want = train_stock(folder, "stock_kto", "rlhf", **data)
    got = train_ours(folder, "kto", "rlhf", models=2, fsdp=FULL_STATE_DICT, **data)
    assert_same_log(read_training_log(got), read_training_log(want))
    assert_same_tensors(read_saved_tensors(got / LAST), read_saved_tensors(want / LAST))


def test_pictures_on_one_of_two_ranks_train_as_stock(folder: Path) -> None:
    """The vision tower is trained as well.

    hf_moe_ep writes the experts transposed, as in the published checkpoints. Stock writes them as
    in the model that was read. Stock can read both forms.
    """
    make_picture_inputs(folder)
    want = train_stock(folder, "stock_pictures", **PICTURES)
    kind = Qwen3VLMoeForConditionalGeneration
    got = train_ours(
        folder, "pictures", model_class=kind.__name__, fsdp=FULL_STATE_DICT, **PICTURES
    )
    assert_same_log(read_training_log(got), read_training_log(want))
    read = [kind.from_pretrained(output / LAST).state_dict() for output in (got, want)]
    assert_same_tensors(*read)
