"""Test that the examples of Accelerate, PEFT and the Trainer can save a sharded model.

Accelerate's examples call `model.save_pretrained` on every rank, with `is_main_process` and
`save_function`, and without a state dict.
"""

import errno
import os
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformers
from accelerate import Accelerator
from peft import (
    LoraConfig,
    PeftConfig,
    PeftModel,
    PrefixTuningConfig,
    PromptEncoderConfig,
    PromptTuningConfig,
    get_peft_model,
)
from safetensors.torch import load_file
from support.adapters import with_lora
from support.architectures.steps import build
from support.checks import Check, Found, on_ranks
from support.close import assert_close
from support.hub_files import assert_equal, hub_state, read_all
from support.jobs.trainer import training_rows, whole
from support.launched import FP32_BUDGET, launched, prepared
from support.listed_experts import PLAN, listed
from support.tiny_models import batch, tiny
from torch import nn
from transformers import Trainer, TrainingArguments
from transformers.integrations import DVCLiveCallback, WandbCallback, integration_utils

from hf_moe_ep import patch
from hf_moe_ep.checkpoints.storage import manifest
from hf_moe_ep.integrations import saving
from hf_moe_ep.upstream.adapters import restores_adapters_of_full_state


def _save_as_in_examples(
    accelerator: Accelerator, model: nn.Module, folder: str, **kwargs: Any
) -> None:
    accelerator.wait_for_everyone()
    unwrapped: Any = accelerator.unwrap_model(model)
    unwrapped.save_pretrained(
        folder,
        is_main_process=accelerator.is_main_process,
        save_function=accelerator.save,
        **kwargs,
    )
    accelerator.wait_for_everyone()


def every_rank_saves_with_the_arguments_of_examples(rank: int, world: int, folder: str) -> None:
    """The files equal stock's bit by bit, and no file is much larger than `max_shard_size`."""
    expected = hub_state(tiny(dtype=torch.float32))
    with launched():
        accelerator, model, _ = prepared(tiny(dtype=torch.float32), ep_size=2)
        _save_as_in_examples(accelerator, model, folder)
        assert_equal(read_all(Path(folder)), expected)
        _save_as_in_examples(accelerator, model, f"{folder}/small", max_shard_size="50KB")
        assert_equal(read_all(Path(folder, "small")), expected)
        files = list(Path(folder, "small").glob("*.safetensors"))
        assert len(files) > 1 and max(file.stat().st_size for file in files) < 100_000


def every_rank_saves_adapters_with_the_arguments_of_examples(
    rank: int, world: int, folder: str
) -> None:
    """A PeftModel and axolotl's function save the same adapters as `save_pretrained` does."""
    with launched():
        model = with_lora(tiny(dtype=torch.float32), r=2)
        accelerator, model, _ = prepared(model, ep_size=2)
        _save_as_in_examples(accelerator, model, f"{folder}/examples")
        assert saving.save_gathered_adapter(pytest.fail, model, f"{folder}/axolotl")
        # The Trainer passes state_dict=None if it was launched without FSDP.
        model.save_pretrained(f"{folder}/none", state_dict=None, is_main_process=rank == 0)
        model.save_pretrained(f"{folder}/by position", True, ["default"])
        saving.save_pretrained(model, f"{folder}/ours")
        initial = {"path_initial_model_for_weight_conversion": f"{folder}/pissa_init"}
        for save in (model.save_pretrained, partial(saving.save_pretrained, model)):
            with pytest.raises(ValueError, match=r"conversion='.*pissa_init' loads .*one process"):
                save(f"{folder}/converted", **initial)
    names = ("examples", "axolotl", "none", "by position", "ours")
    *actual, expected = (
        load_file(Path(folder, name, "adapter_model.safetensors")) for name in names
    )
    for adapters in actual:
        assert_equal(adapters, expected)


PROMPT_CONFIGS: dict[str, Callable[[], PeftConfig]] = {
    "prompt": lambda: PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    "prefix": lambda: PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    "p-tuning": lambda: PromptEncoderConfig(
        task_type="CAUSAL_LM", num_virtual_tokens=3, encoder_hidden_size=16
    ),
}


def _add_prompt_encoder(kind: str) -> Any:
    torch.manual_seed(3)
    return get_peft_model(tiny(dtype=torch.float32), PROMPT_CONFIGS[kind]())


def prompt_encoders_are_trained_saved_and_used_by_generate(
    rank: int, world: int, folder: str
) -> None:
    """Training, `generate` and saving with a prompt encoder equal one stock process.

    To generate and to save, PEFT calls the encoder outside the model's forward.
    """
    for kind in PROMPT_CONFIGS:
        stock = _add_prompt_encoder(kind)
        trained = [parameter for parameter in stock.parameters() if parameter.requires_grad]
        stock_optimizer = torch.optim.SGD(trained, lr=0.1)
        inputs = batch(stock.get_base_model(), 2, 7)
        with launched():
            accelerator, model, optimizer = prepared(
                _add_prompt_encoder(kind), make_optimizer=torch.optim.SGD, ep_size=2
            )
            prompt = {"input_ids": inputs["input_ids"][:, :3]}
            assert torch.equal(*_generate(prompt, model, stock)), f"{kind}, before a step"
            for _ in range(2):
                stock(**inputs).loss.backward()
                stock_optimizer.step()
                stock_optimizer.zero_grad()
                accelerator.backward(model(**inputs).loss)
                optimizer.step()
                optimizer.zero_grad()
            _save_as_in_examples(accelerator, model, f"{folder}/{kind}")
            state_dict = accelerator.get_state_dict(model)
            _save_as_in_examples(
                accelerator, model, f"{folder}/given {kind}", state_dict=state_dict
            )
            assert torch.equal(*_generate(prompt, model, stock)), kind
        for name in (kind, f"given {kind}"):
            base = tiny(dtype=torch.float32)
            loaded = PeftModel.from_pretrained(base, f"{folder}/{name}").eval()
            logits = loaded(**inputs).logits
            assert_close(name, logits.detach(), stock(**inputs).logits.detach(), FP32_BUDGET)


def _generate(prompt: dict[str, torch.Tensor], *models: Any) -> list[torch.Tensor]:
    texts = [model.eval().generate(**prompt, max_new_tokens=3, do_sample=False) for model in models]
    for model in models:
        model.train()
    return texts


def saving_on_the_main_process_alone_raises_an_error(rank: int, world: int, folder: str) -> None:
    """If only rank 0 saves, inside `if is_main_process:`, it does not wait for five minutes."""
    with launched():
        for make in (tiny, lambda **kw: with_lora(tiny(**kw), r=2)):
            accelerator, model, _ = prepared(make(dtype=torch.float32), ep_size=2)
            if accelerator.is_main_process:
                with (
                    mock.patch.object(saving, "PATIENCE_OF_RANK_0", timedelta(seconds=1)),
                    pytest.raises(RuntimeError, match=r"only 1 of 2 ranks within 0:00:01; call it"),
                ):
                    accelerator.unwrap_model(model).save_pretrained(folder)
            accelerator.wait_for_everyone()
            _save_as_in_examples(accelerator, model, folder)  # the failed call has no effect
    dist.barrier()


def rank_0_waits_for_a_rank_that_is_late(rank: int, world: int, folder: str) -> None:
    """Rank 0 waits longer than PATIENCE_OF_RANK_0 if another rank has called `save_pretrained`.

    In that case the call is not inside `if is_main_process:`, so the last rank will call it, too.
    """
    with launched():
        _, model, _ = prepared(tiny(dtype=torch.float32), ep_size=1)
        if rank == 2:
            time.sleep(4)
        with mock.patch.object(saving, "PATIENCE_OF_RANK_0", timedelta(seconds=1)):
            model.save_pretrained(folder)  # type: ignore[operator]
    assert Path(folder, "config.json").exists()


def options_that_a_sharded_save_would_ignore_are_refused(rank: int, world: int) -> None:
    """The error names the option and the remedy, also if a state dict is given."""
    with launched():
        accelerator, model, _ = prepared(tiny(dtype=torch.float32), ep_size=2)
        options = ("push_to_hub", "variant", "distributed_checkpoint", "save_original_format")
        for name, whole in product(options, (None, accelerator.get_state_dict(model))):
            if name == "push_to_hub" and whole is not None:
                continue  # stock code saves and pushes
            arguments: Any = {name: name != "save_original_format", "state_dict": whole}
            with pytest.raises(ValueError, match=rf"not take {name}=.*; (save, then|leave it)"):
                model.save_pretrained(  # type: ignore[operator]
                    "/nowhere", is_main_process=accelerator.is_main_process, **arguments
                )


def _create_trainer(folder: str, model: Any, **arguments: Any) -> Trainer:
    defaults = {"use_cpu": True, "max_steps": 1, "report_to": [], "disable_tqdm": True}
    options: Any = defaults | {"save_strategy": "no", "learning_rate": 0.05} | arguments
    return Trainer(
        model=patch(model, ep_size=2),
        args=TrainingArguments(folder, **options),
        train_dataset=training_rows("uneven")[:16],
    )


def the_trainer_saves_an_adapter_on_every_rank_or_on_none(
    rank: int, world: int, folder: str
) -> None:
    """There is an error if only rank 0 saves, or cannot write. Otherwise ranks would hang."""

    def fail(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with launched(FSDP_STATE_DICT_TYPE="SHARDED_STATE_DICT"):
        trainer = _create_trainer(folder, with_lora(tiny(dtype=torch.float32), r=2))
        trainer.train()
        if trainer.is_world_process_zero():
            with (
                mock.patch.object(saving, "PATIENCE_OF_RANK_0", timedelta(seconds=1)),
                pytest.raises(
                    RuntimeError, match=r"save_model of the Trainer was called on only 1"
                ),
            ):
                trainer.save_model()
        dist.barrier()
        with (
            mock.patch.object(saving, "call_stock_save", fail),
            pytest.raises(RuntimeError, match=r"saving .* failed on rank 0: .*No space left"),
        ):
            trainer.save_model()
        trainer.save_model()
    assert len(load_file(Path(folder, "adapter_model.safetensors"))) > 0


def saving_on_each_of_two_nodes_is_refused(rank: int, world: int, folder: str) -> None:
    """Otherwise the second node would write a model without tensors. One node is accepted."""
    model = tiny(dtype=torch.float32, num_hidden_layers=1)
    node = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    with launched(MASTER_ADDR="127.0.0.1", MASTER_PORT="29999", **node):  # nothing connects to it
        with pytest.raises(ValueError, match=r"on 2 nodes \(2 ranks, 1 per node\).*share"):
            _create_trainer(folder, model, save_on_each_node=True)
    with launched():
        _create_trainer(folder, model, save_on_each_node=True)


def _create_callback_that_saves(tracker: str) -> transformers.TrainerCallback:
    """Create the callback of a tracker, which need not be installed."""
    kind = {"wandb": WandbCallback, "dvclive": DVCLiveCallback}[tracker]
    settings = {"WANDB_LOG_MODEL": "checkpoint", "HF_DVCLIVE_LOG_MODEL": "true"}
    package = SimpleNamespace(Live=type("Live", (), {}))
    with (
        mock.patch.dict(sys.modules, {tracker: package}),
        mock.patch.dict(os.environ, settings),
        mock.patch.object(integration_utils, f"is_{tracker}_available", lambda: True),
    ):
        return kind()


def options_with_which_a_rank_acts_alone_are_refused(rank: int, world: int, folder: str) -> None:
    """Otherwise all other ranks would wait for this rank."""
    model = tiny(dtype=torch.float32, num_hidden_layers=1)
    with launched():
        trainer = _create_trainer(folder, model, auto_find_batch_size=True)
        message = r"auto_find_batch_size=True .*\(of 2\) wait .*--gpus 2 .* plans the memory"
        with pytest.raises(ValueError, match=message):
            trainer.train()
        for tracker, variable in {"wandb": "WANDB", "dvclive": "HF_DVCLIVE"}.items():
            trainer = _create_trainer(folder, model)
            trainer.add_callback(_create_callback_that_saves(tracker))
            with pytest.raises(ValueError, match=f"^{variable}_LOG_MODEL makes rank 0 .*all 2 ran"):
                trainer.train()


def push_to_hub_uploads_what_save_model_writes(rank: int, world: int, folder: str) -> None:
    """With SHARDED_STATE_DICT stock uploads no weights; with FULL_STATE_DICT it uploads fp32."""
    uploads: list[str] = []
    hub = mock.Mock(upload_folder=lambda folder_path, **_: uploads.append(folder_path))
    for kind in ("SHARDED_STATE_DICT", "FULL_STATE_DICT"):
        out = f"{folder}/{kind}"
        with launched(FSDP_STATE_DICT_TYPE=kind):
            trainer = _create_trainer(
                out, tiny(dtype=torch.bfloat16, num_hidden_layers=1), bf16=True
            )
            trainer.train()
            trainer.save_model(f"{out}/saved")
            trainer.hub_model_id = "nobody/nothing"
            with (
                mock.patch.object(transformers.trainer, "hf_api", lambda *_, **__: hub),
                mock.patch.object(Trainer, "_finish_current_push", lambda self: None),
            ):
                trainer.push_to_hub()
        if rank == 0:
            assert uploads.pop() == out
            weights = read_all(Path(out))
            assert_equal(weights, read_all(Path(out, "saved")))
            assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
            card = Path(out, "README.md").read_text()
            assert f"# {kind}" in card and "hf_moe_ep" not in card and "FSDP" not in card, card
    assert not uploads


def _build_with_two_adapters_and_a_trained_router(seed: int) -> Any:
    """Make a model with a trained active adapter, trained routers and a frozen second adapter."""
    torch.manual_seed(seed)
    config = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    model: Any = get_peft_model(tiny(dtype=torch.float32, num_hidden_layers=1), config)
    model.add_adapter("second", config)
    for name, parameter in model.named_parameters():
        if name.endswith("mlp.gate.weight"):
            parameter.requires_grad_(True)
    return model


def tensors_that_are_trained_with_an_adapter_are_resumed(
    rank: int, world: int, folder: str
) -> None:
    """Stock's checkpoint has the moments of the router, but neither router nor second adapter."""
    save = {"save_strategy": "steps", "save_steps": 1}
    router = "base_model.model.model.layers.0.mlp.gate.weight"
    for kind in ("SHARDED_STATE_DICT", "FULL_STATE_DICT"):
        out = f"{folder}/{kind}"
        with launched(FSDP_STATE_DICT_TYPE=kind):
            trainer = _create_trainer(out, _build_with_two_adapters_and_a_trained_router(1), **save)
            before = whole(trainer.model)
            trainer.train()
            expected = whole(trainer.model)
            assert not torch.equal(before[router], expected[router])
            trainer.accelerator.save_state(f"{out}/state")
            resumed = _create_trainer(out, _build_with_two_adapters_and_a_trained_router(2), **save)
            if kind.startswith("FULL") and not restores_adapters_of_full_state():
                with pytest.raises(ValueError, match=r"accelerate .* restores no adapters from"):
                    resumed.train(resume_from_checkpoint=True)
                continue
            resumed.train(resume_from_checkpoint=True)  # no step is left
            assert_equal(whole(resumed.model), expected)
            with torch.no_grad():
                for parameter in resumed.model.parameters():
                    parameter.fill_(5.0)
            resumed.accelerator.load_state(f"{out}/state")
            assert_equal(whole(resumed.model), expected)
            checkpoint = Path(out, "checkpoint-1")
            assert manifest.read(checkpoint)["layout"]["rows_per_step"] == 2 * 8
            dist.barrier()
            if rank == 0:
                shutil.rmtree(checkpoint / "beside_adapters")
            dist.barrier()
            manifest.write(checkpoint, {})
            if kind.startswith("FULL"):  # the file has the router; the other adapter is frozen
                warned = pytest.warns(UserWarning, match="lacks .*lora_A.second.weight.* keep the")
                with warned if rank == 0 else nullcontext():
                    resumed.train(resume_from_checkpoint=True)
            else:
                message = f"has the active adapter, but lacks .*{router}"
                with pytest.raises(ValueError, match=message):
                    resumed.train(resume_from_checkpoint=True)


def _state_dicts_have_stock_parameters(
    make: Callable[[], Any], options: dict[str, Any], rank: int, world: int, folder: str
) -> None:
    """Test what Accelerate gathers, what it saves, and a save of the gathered state dict."""
    stock = make().float()
    expected = stock.state_dict()
    with launched():
        accelerator, model, _ = prepared(make().float(), ep_size=2, **options)
        gathered = accelerator.get_state_dict(model)
        accelerator.save_model(model, f"{folder}/model")
        if not options:  # a plan of the user has no layout of the hub to compare with
            _save_as_in_examples(accelerator, model, f"{folder}/hub", state_dict=gathered)
    if rank > 0:
        assert not gathered
        return
    assert_equal(gathered, expected)
    saved = load_file(Path(folder, "model", "model.safetensors"))
    assert expected.keys() - saved.keys() <= {"lm_head.weight"}  # it may be tied
    assert_equal(saved, {name: expected[name] for name in saved})
    if not options:
        stock.save_pretrained(f"{folder}/stock")
        assert_equal(read_all(Path(folder, "hub")), load_file(f"{folder}/stock/model.safetensors"))


STACKED = {
    f"state dicts of {name} have stock parameters": partial(
        _state_dicts_have_stock_parameters, make, options
    )
    for name, make, options in (
        ("dbrx", partial(build, "dbrx"), {}),
        ("jetmoe", partial(build, "jetmoe"), {}),
        ("longcat_flash", partial(build, "longcat_flash"), {}),
        ("experts in a list", listed, {"plan": PLAN}),
    )
}
ON_TWO_RANKS = [
    every_rank_saves_with_the_arguments_of_examples,
    every_rank_saves_adapters_with_the_arguments_of_examples,
    saving_on_the_main_process_alone_raises_an_error,
    options_that_a_sharded_save_would_ignore_are_refused,
    the_trainer_saves_an_adapter_on_every_rank_or_on_none,
    saving_on_each_of_two_nodes_is_refused,
    options_with_which_a_rank_acts_alone_are_refused,
    push_to_hub_uploads_what_save_model_writes,
]
SLOW_ON_TWO_RANKS = [
    prompt_encoders_are_trained_saved_and_used_by_generate,
    tensors_that_are_trained_with_an_adapter_are_resumed,
]


@pytest.mark.parametrize(
    "claim", [*on_ranks(2, *ON_TWO_RANKS), *on_ranks(2, *SLOW_ON_TWO_RANKS, STACKED, slow=True)]
)
def test_on_two_ranks(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)


@pytest.mark.parametrize("claim", on_ranks(3, rank_0_waits_for_a_rank_that_is_late, slow=True))
def test_on_three_ranks(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)
