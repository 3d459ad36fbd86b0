"""On two ranks, the head for multi-token prediction trains as in one process."""

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.checks import Check, Found, on_ranks
from support.close import FP64_MODEL, assert_close
from support.extra_files import assert_same_bytes, read_files, write_with_extra
from support.fp64 import FP64
from support.launched import launched
from support.mtp_reference import load_stock, write_base
from support.parity import checkpointing, full_tensor, whole_parameters
from support.tiny_models import batch
from torch.distributed.fsdp import FSDPModule
from transformers import AutoModelForCausalLM

from hf_moe_ep import (
    apply_ep_fsdp2,
    data_parallel_size,
    expert_load,
    from_pretrained,
    global_token_count,
    hub_tensors,
    load_checkpoint,
    mtp_loss,
    patch,
    save_checkpoint,
    save_pretrained,
    update_router_bias,
)
from hf_moe_ep.checkpoints.convert import convert
from hf_moe_ep.etp import restore_stock_shapes
from hf_moe_ep.mtp_head import find_head

OPTIONS = {"mtp_layers": 1, "mtp_loss_weight": 0.3}


def write_on_first(rank: int, write: Callable[[], object]) -> None:
    if rank == 0:
        write()
    dist.barrier()


def load(loader: str, folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """Load a checkpoint in shards or whole, and shard it."""
    options = OPTIONS | options
    if loader == "ours":
        model = from_pretrained(folder, dtype=dtype, **options)
    else:
        model = apply_ep_fsdp2(load_stock(folder, dtype=dtype), **options)
    return without_aux_loss(model.train())


def without_aux_loss(model: Any) -> Any:
    """Turn off the router's aux loss, which depends on the batches of all ranks."""
    if hasattr(model.config, "output_router_logits"):
        model.config.output_router_logits = False
    return model


def training_equals_one_process(
    model_type: str, loader: str, rank: int, world: int, folder: str, *,
    checkpoints: bool | None = None, layers: int = 1, **options: Any,
) -> None:  # fmt: skip
    """Losses, every gradient, and the weights after three steps, are the same in one process.

    A forward for evaluation runs before each step, and must not leave gathered weights.
    """
    base = Path(folder) / "base"
    write_on_first(rank, lambda: write_base(base, model_type, layers=layers))
    options |= {"mtp_layers": layers}
    with FP64():
        model = load(loader, base, torch.float64, **options)
        single = without_aux_loss(patch(load_stock(base), **OPTIONS | {"mtp_layers": layers}))
        if checkpoints is not None:
            checkpointing(model, checkpoints)
        ranks = data_parallel_size(model)
        own = rank if ranks > 1 else 0
        optimizers = [
            torch.optim.AdamW(m.parameters(), lr=1e-3, foreach=False) for m in (model, single)
        ]
        for step in range(3):
            batches = [
                batch(single, 1 + n, 8 + 3 * n + step, seed=9 * step + n, pad=2 * n)
                for n in range(ranks)
            ]
            count = global_token_count(model, [batches[own]["labels"]])
            model.eval()
            with torch.no_grad():
                model(**batches[own])
            model.train()
            loss = model(**batches[own], num_items_in_batch=count).loss
            (loss * ranks).backward()
            losses = [single(**data, num_items_in_batch=count).loss for data in batches]
            sum(losses).backward()
            assert_close(f"loss {step}", loss, losses[own], FP64_MODEL)
            got, want = mtp_loss(model), mtp_loss(single)
            assert abs(got / want - 1) < FP64_MODEL and want > 0.1, (got, want)
            wanted = dict(single.named_parameters())
            grads = {name: full_tensor(p.grad) for name, p in model.named_parameters()}
            for name, grad in restore_stock_shapes(model, grads).items():
                assert_close(f"step {step}: {name}", grad, wanted[name].grad, FP64_MODEL)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    for name, parameter in whole_parameters(model).items():
        assert_close(name, parameter, wanted[name].detach(), FP64_MODEL)
    head = find_head(model)
    assert isinstance(head, FSDPModule) and isinstance(head.blocks[0], FSDPModule)
    stacked = [p for n, p in head.named_parameters() if n.endswith("mlp.experts.down_proj")]
    assert len(stacked) == layers
    ep_size = options.get("ep_size", 1)
    assert all(ep_size == 1 or p.to_local().shape[0] == p.shape[0] // ep_size for p in stacked)


def every_save_has_the_trained_head(
    model_type: str, loader: str, rank: int, world: int, folder: str
) -> None:
    """All functions save the same bytes, also in a run that resumes with ep 1."""
    root = Path(folder)
    base = root / "base"
    write_on_first(rank, lambda: write_base(base, model_type))
    before = read_files(base)
    model = load(loader, base, ep_size=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(2):
        model(**batch(model, 2, 9, seed=2 * step + rank)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    save_pretrained(model, root / "saved", max_shard_size="60KB")
    model.save_pretrained(root / "method")
    save_checkpoint(root / "step", model, optimizer)
    saved = read_files(root / "saved")
    assert saved.keys() == before.keys()
    extra = [
        k
        for k in before
        if k.startswith(("mtp.", f"model.layers.{model.config.num_hidden_layers}."))
    ]
    same = [k for k in extra if torch.equal(saved[k].double(), before[k].double())]
    assert len(extra) > 10 and all(k.endswith("correction_bias") for k in same), same
    assert_same_bytes(read_files(root / "method"), saved)
    assert_same_bytes(dict(hub_tensors(model, max_bytes=100_000)), saved)
    if rank == 0:
        convert(root / "step", root / "converted", max_shard_size="60KB")
        assert_same_bytes(read_files(root / "converted"), saved)
    dist.barrier()
    resumed = load(loader, base, ep_size=1)
    new_optimizer = torch.optim.AdamW(resumed.parameters(), lr=1e-2)
    load_checkpoint(root / "step", resumed, new_optimizer)
    save_pretrained(resumed, root / "again")
    assert_same_bytes(read_files(root / "again"), saved)
    with torch.no_grad():
        for other in (resumed, load("ours", root / "saved", ep_size=2)):
            for first, second in zip(model.parameters(), other.parameters(), strict=True):
                assert torch.equal(full_tensor(first), full_tensor(second))


def biases_of_the_head_are_updated(rank: int, world: int, folder: str) -> None:
    base = Path(folder) / "base"
    write_on_first(rank, lambda: write_base(base, "glm4_moe"))
    model = load("ours", base, ep_size=2, bias_update_rate=0.25)
    gate = find_head(model).blocks[0].mlp.gate
    before = gate.e_score_correction_bias.clone()
    model(**batch(model, 2, 9, seed=rank)).loss.backward()
    counts = expert_load(model).counts[-1]
    update_router_bias(model)
    want = before + 0.25 * (counts.double().mean() - counts).sign().to(before.device)
    assert torch.equal(gate.e_score_correction_bias, want.to(before.dtype))
    assert not torch.equal(gate.e_score_correction_bias, before)
    _check_error_on_rank_0_alone(model, rank)


def _check_error_on_rank_0_alone(model: Any, rank: int) -> None:
    """The failed call does not reset the loss, which the next call on all ranks returns."""
    if rank == 0:
        with (
            mock.patch("hf_moe_ep.mtp.attach.PATIENCE_OF_RANK_0", timedelta(seconds=1)),
            pytest.raises(RuntimeError, match=r"mtp_loss was called on only 1 of 2 ranks within"),
        ):
            mtp_loss(model)
    dist.barrier()
    assert mtp_loss(model) is not None


def the_trainer_trains_and_saves_the_head(rank: int, world: int, folder: str) -> None:
    """The Trainer trains the head. Its checkpoint and its saved model have the trained values."""
    from transformers import Trainer, TrainingArguments

    root = Path(folder)
    write_on_first(rank, lambda: write_with_extra(root / "base", "qwen3_next"))
    with launched(FSDP_STATE_DICT_TYPE="SHARDED_STATE_DICT"):
        args = TrainingArguments(
            str(root / "run"), max_steps=2, save_steps=2, use_cpu=True, report_to="none",
            per_device_train_batch_size=1, disable_tqdm=True, learning_rate=1e-2,
            gradient_accumulation_steps=2, eval_strategy="steps", eval_steps=1,
        )  # fmt: skip
        model = patch(AutoModelForCausalLM.from_pretrained(root / "base"), ep_size=2, **OPTIONS)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        rows = [{k: v[0] for k, v in batch(model, 1, 9, seed=i).items()} for i in range(8)]
        trainer = Trainer(model, args, train_dataset=rows, eval_dataset=rows[:2])
        trainer.train()
        trainer.save_model(str(root / "saved"))
    dist.barrier()
    saved = read_files(root / "saved")
    base = read_files(root / "base")
    assert saved.keys() == base.keys()
    assert not torch.equal(saved["mtp.fc.weight"].float(), base["mtp.fc.weight"].float())
    assert all(name in before for name in ("mtp.fc.weight", "mtp.norm.weight"))
    if rank == 0:
        convert(root / "run" / "checkpoint-2", root / "converted", config=root / "base")
        assert_same_bytes(read_files(root / "converted"), saved)


FAST = {
    "ep 2, qwen3_next": partial(training_equals_one_process, "qwen3_next", "ours", ep_size=2),
    "biases": biases_of_the_head_are_updated,
}
SLOW = {
    "saves, deepseek_v3": partial(every_save_has_the_trained_head, "deepseek_v3", "ours"),
    "ep 2 stock, glm4_moe, checkpointed": partial(
        training_equals_one_process, "glm4_moe", "stock", ep_size=2, checkpoints=False
    ),
    "sp 2, qwen3_5_moe_text": partial(
        training_equals_one_process, "qwen3_5_moe_text", "ours", sp_size=2
    ),
    "Trainer": the_trainer_trains_and_saves_the_head,
    "etp 2, glm4_moe": partial(training_equals_one_process, "glm4_moe", "stock", etp_size=2),
    "ep 2, deepseek_v3, 2 layers": partial(
        training_equals_one_process, "deepseek_v3", "ours", ep_size=2, layers=2
    ),
    "ep 2, qwen3_5_moe_text, 2 layers": partial(
        training_equals_one_process, "qwen3_5_moe_text", "stock", ep_size=2, layers=2
    ),
    "ep 1, qwen3_next": partial(training_equals_one_process, "qwen3_next", "ours", ep_size=1),
    "sp 2, ep 2, glm4_moe, checkpointed": partial(
        training_equals_one_process, "glm4_moe", "ours", sp_size=2, ep_size=2, checkpoints=False
    ),
    "sp 2, fused loss, deepseek_v3": partial(
        training_equals_one_process, "deepseek_v3", "ours", sp_size=2, fused_loss=True
    ),
    "reentrant, glm4_moe": partial(
        training_equals_one_process, "glm4_moe", "ours", ep_size=2, checkpoints=True
    ),
    "compiled, glm4_moe": partial(
        training_equals_one_process, "glm4_moe", "ours", ep_size=2, compile_layers="eager"
    ),
    "saves, qwen3_5_moe_text": partial(
        every_save_has_the_trained_head, "qwen3_5_moe_text", "stock"
    ),
    "saves, qwen3_next": partial(every_save_has_the_trained_head, "qwen3_next", "ours"),
}


@pytest.mark.parametrize("claim", [*on_ranks(2, FAST), *on_ranks(2, SLOW, slow=True)])
def test_on_two_ranks(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)
