"""Every Python block of README and docs/ runs, with a small model instead of a large one.

A block expects a dataset, eight GPUs and a model of 30B parameters. The tests run it on two CPU
ranks with a model of two layers. `SMALLER` lists all changes of its text. `RUNS` has a function for
each block, which defines the names that the page expects its reader to define.
"""

import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformers
from accelerate import Accelerator
from support import pages
from support.checks import Check, Found, on_ranks
from support.launched import launched
from support.mtp_reference import write_base
from support.tiny_models import Row, batch, tiny, vision_batch
from support.words import make_tokenizer, text_of_tokens
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from hf_moe_ep import Muon, apply_ep_fsdp2, describe, expert_load, hub_tensors, patch

BLOCKS = {
    (block.page, block.number): block
    for page in pages.names()
    for block in pages.blocks(page)
    if block.language == "python"
}
SMALLER = {
    '"Qwen/Qwen3-30B-A3B"': '"start"',
    '"Qwen/Qwen3-Next-80B-A3B-Instruct"': '"with_head"',
    "ep_size=8": "ep_size=2",
    "sp_size=8, cp_size=4": "cp_size=2",
    "fsdp_size=8": "fsdp_size=2",
    "sp_size=4": "sp_size=2",
}
# 64: nf4 quantises blocks of 64 values.
SIZES = {"hidden_size": 64, "moe_intermediate_size": 64}
ONE_STEP = partial(
    transformers.TrainingArguments, use_cpu=True, max_steps=1, report_to="none", disable_tqdm=True
)
Names = dict[str, Any]


def _run(page: str, number: int, **names: Any) -> Names:
    """Run a block with the given global names, and return all global names after it."""
    code = BLOCKS[page, number].text
    for large, small in SMALLER.items():
        code = code.replace(large, small)
    exec(compile(code, str(BLOCKS[page, number]), "exec"), names)
    return names


@contextmanager
def _work_in(folder: str) -> Iterator[dict[str, torch.Tensor]]:
    """Change to a folder with the checkpoint "start", and yield a batch for its model."""
    before = os.getcwd()
    os.chdir(folder)
    stock = tiny(dtype=torch.float32, **SIZES)
    try:
        if not dist.is_initialized() or dist.get_rank() == 0:
            stock.save_pretrained("start")
        if dist.is_initialized():
            dist.barrier()
        yield batch(stock, 8, 12)
    finally:
        os.chdir(before)


def _assert_trained(saved: str) -> None:
    """Check that stock loads the folder and that training has changed the experts."""
    dist.barrier()
    before, after = (AutoModelForCausalLM.from_pretrained(name) for name in ("start", saved))
    name = "model.layers.1.mlp.experts.down_proj"
    assert not torch.equal(before.get_parameter(name), after.get_parameter(name).to(torch.float32))


def run_trainer(page: str, number: int, rank: int, world: int, folder: str) -> None:
    """The environment of `launched` and ONE_STEP make the Trainer take one step on a CPU."""
    with (
        _work_in(folder) as inputs,
        launched(),
        mock.patch("transformers.TrainingArguments", ONE_STEP),
    ):
        rows = [{name: column[row] for name, column in inputs.items()} for row in range(8)]
        names = _run(page, number, data=rows * 4)
        assert names["trainer"].state.global_step == 1
        assert "experts 0 .. 3" in describe(names["model"]) or rank
        _assert_trained("out")


def load_with_stock(page: str, number: int, rank: int, world: int, folder: str) -> None:
    with _work_in(folder):
        names = _run(page, number)
        assert names["model"].dtype == torch.bfloat16
        assert "ep_size 2" in describe(names["model"])


def print_loaded(page: str, number: int, rank: int, world: int, folder: str) -> None:
    with _work_in(folder), mock.patch("builtins.print") as printed:
        _run(page, number)
    assert f"experts {4 * rank} .. {4 * rank + 3}" in str(printed.call_args.args[0])


def print_patched(page: str, number: int, rank: int, world: int, folder: str) -> None:
    with mock.patch("builtins.print") as printed:
        _run(page, number, model=patch(tiny(), ep_size=2))
    assert "not sharded yet; asks for ep_size 2" in str(printed.call_args.args[0])


def patch_stages(page: str, number: int, rank: int, world: int, folder: str) -> None:
    model = tiny()
    with mock.patch.dict(SMALLER, {"ep_size=8": "ep_size=1"}):
        _run(page, number, model=model)
    assert "pp_size 2" in describe(model)


def run_accelerate_loop(page: str, number: int, rank: int, world: int, folder: str) -> None:
    on_cpu = partial(Accelerator, cpu=True)
    with _work_in(folder) as inputs, launched(), mock.patch("accelerate.Accelerator", on_cpu):
        rows = [{name: column[row] for name, column in inputs.items()} for row in range(8)]
        _run(page, number, loader=DataLoader(rows, batch_size=2))
        _assert_trained("out/model")


def run_own_loop(page: str, number: int, rank: int, world: int, folder: str) -> None:
    with _work_in(folder) as inputs, mock.patch("torch.distributed.init_process_group"):
        _run(page, number, batches=[inputs, inputs])
        _assert_trained("out")


def train_a_head(page: str, number: int, rank: int, world: int, folder: str) -> None:
    def train(model: Any) -> None:
        model.train()
        model(**batch(model, 2, 12)).loss.backward()

    with _work_in(folder), mock.patch("builtins.print") as printed:
        if rank == 0:
            write_base(Path("with_head"), "qwen3_next")
        dist.barrier()
        _run(page, number, train=train)
    assert printed.call_args.args[0] > 1


def resume_from_checkpoints(page: str, number: int, rank: int, world: int, folder: str) -> None:
    """The script runs twice. The second run resumes from the checkpoint of step 200."""
    steps: list[int] = []

    def train_one_step(model: Any, optimizer: Any, step: int) -> None:
        if step % 100 == 99:
            model(**inputs).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        steps.append(step)

    with _work_in(folder) as inputs:
        for _ in range(2):
            model, optimizer = _shard_and_step(inputs)
            _run(page, number, model=model, optimizer=optimizer, train_one_step=train_one_step)
        assert steps == list(range(200))
        assert sorted(os.listdir("out")) == ["step-100", "step-200"]
        _assert_trained("model")


def shard_sequences(page: str, number: int, rank: int, world: int, folder: str) -> None:
    with _work_in(folder) as inputs:
        model = _run(page, number)["model"]
        assert model(**inputs).logits is None and "sp group [0, 1]" in describe(model)


def split_attention(page: str, number: int, rank: int, world: int, folder: str) -> None:
    with _work_in(folder) as inputs:
        model = _run(page, number)["model"]
        assert model(**inputs).logits is None and "cp group [0, 1]" in describe(model)


def train_on_images(page: str, number: int, rank: int, world: int, folder: str) -> None:
    """The ranks get different rows, and only one of the four rows has an image."""
    model = tiny("qwen3_vl_moe", dtype=torch.float32)
    rows: list[Row] = [[5], [2, (8, 8), 3], [7], [4]]
    data = [vision_batch(model, [row], seed) for seed, row in enumerate(rows)]
    with _work_in(folder), launched():
        args = ONE_STEP(output_dir="out", per_device_train_batch_size=1, save_strategy="no")
        names = _run(page, number, model=model, args=args, data=data, collate=_take_first)
        assert names["trainer"].state.global_step == 1


def _take_first(samples: list[Any]) -> dict[str, Any]:
    return dict(samples[0])


def train_qlora(page: str, number: int, rank: int, world: int, folder: str) -> None:
    with _work_in(folder) as inputs:
        model = _run(page, number)["model"]
        assert "nf4" in describe(model)
        model(**inputs).loss.backward()
        trained = [name for name, p in model.named_parameters() if p.grad is not None]
        assert trained and all("lora_" in name for name in trained)
        assert any("experts" in name for name in trained)


def _shard_and_step(inputs: dict[str, torch.Tensor]) -> tuple[Any, torch.optim.Optimizer]:
    """Return a sharded fp64 model and its optimizer after one step."""
    stock = AutoModelForCausalLM.from_pretrained("start").double().train()
    model = apply_ep_fsdp2(stock, ep_size=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(**inputs).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def create_muon(page: str, number: int, rank: int, world: int, folder: str) -> None:
    optimizer = _run(page, number, model=tiny())["optimizer"]
    assert [group["use_muon"] for group in optimizer.param_groups] == [True, False]


def train_by_muon(page: str, number: int, rank: int, world: int, folder: str) -> None:
    with _work_in(folder) as inputs, launched():
        rows = [{name: column[row] for name, column in inputs.items()} for row in range(8)]
        model = patch(tiny(dtype=torch.float32), ep_size=2)
        args = ONE_STEP(output_dir="out", save_strategy="no")
        names = _run(page, number, model=model, args=args, data=rows * 4)
        assert names["trainer"].state.global_step == 1


def group_parameters(page: str, number: int, rank: int, world: int, folder: str) -> None:
    optimizer = _run(page, number, model=patch(tiny()))["optimizer"]
    decays = [(group["use_muon"], group["weight_decay"]) for group in optimizer.param_groups]
    assert decays == [(False, 0.0), (True, 0.1), (False, 0.1)]


def unfreeze_a_layer(page: str, number: int, rank: int, world: int, folder: str) -> None:
    model = patch(tiny())
    model.model.layers[0].requires_grad_(False)
    optimizer = Muon(model, 1e-3)
    _run(page, number, model=model, optimizer=optimizer)
    groups = [group["use_muon"] for group in optimizer.param_groups]
    assert groups == [True, False, True, False]


def print_expert_load(page: str, number: int, rank: int, world: int, folder: str) -> None:
    with _work_in(folder) as inputs, mock.patch("builtins.print") as printed:
        model, _ = _shard_and_step(inputs)
        _run(page, number, model=model)
        assert "expert load of 2 layers of 8 experts" in str(printed.call_args.args[0])


def balance_load(page: str, number: int, rank: int, world: int, folder: str) -> None:
    with _work_in(folder) as inputs:
        model, optimizer = _shard_and_step(inputs)
        with torch.no_grad():
            before = model(**inputs).logits
        assert (expert_load(model, reset=False).rank_max_over_mean > 1).all()
        _run(page, number, model=model, optimizer=optimizer)
        with torch.no_grad():
            assert torch.allclose(model(**inputs).logits, before, rtol=0, atol=1e-10)
        assert "balance_experts" in describe(model)


def freeze_routers(page: str, number: int, rank: int, world: int, folder: str) -> None:
    model = patch(tiny())
    _run(page, number, model=model)
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    assert frozen == [f"model.layers.{layer}.mlp.gate.weight" for layer in range(2)]


def record_and_replay(page: str, number: int, rank: int, world: int, folder: str) -> None:
    with _work_in(folder) as inputs:
        model, _ = _shard_and_step(inputs)
        names = _run(
            page,
            number,
            model=model,
            batch=inputs,
            log_probabilities=lambda output: output.logits.log_softmax(-1),
            loss_of=lambda output, old: (output.logits.log_softmax(-1) - old).square().sum(),
        )
        assert names["replay"].last.agreement == 1.0
        assert names["routes"].ids.shape == (8, 12, 2, 2)


def read_engine_arrays(page: str, number: int, rank: int, world: int, folder: str) -> None:
    """Two samples have 5 and 7 tokens. An engine never forwards the last token of a sample, which
    therefore has no routes.
    """
    lengths = [5, 7]
    arrays = [torch.randint(8, (length - 1, 2, 2)).numpy() for length in lengths]
    outputs = [SimpleNamespace(outputs=[SimpleNamespace(routed_experts=a)]) for a in arrays]
    names = _run(
        page,
        number,
        llm=SimpleNamespace(generate=lambda prompts, sampling: outputs),
        prompts=["..", ".."],
        sampling=None,
        lengths=lengths,
        input_ids=torch.zeros(2, 7),
    )
    ids = names["routes"].ids
    assert ids.shape == (2, 7, 2, 2)
    assert torch.equal(ids[0, 2:6].long(), torch.as_tensor(arrays[0]))
    assert (ids[0, :2] == -1).all() and (ids[:, 6] == -1).all()


def send_to_an_engine(page: str, number: int, rank: int, world: int, folder: str) -> None:
    """2 of 100 steps run. At the end the engine has the weights of the step before the last."""
    model, held, lists = apply_ep_fsdp2(tiny(dtype=torch.float32), ep_size=2), {}, []

    def load_weights(weights: list[tuple[str, torch.Tensor]]) -> None:
        held.update((key, tensor.clone()) for key, tensor in weights)
        lists.append([key for key, _ in weights])

    def train_one_step(model: Any, optimizer: Any, step: int) -> None:
        with torch.no_grad():
            model.model.norm.weight.add_(step)

    names = {"model": model, "optimizer": None, "train_one_step": train_one_step}
    with mock.patch.dict(SMALLER, {"range(100)": "range(2)"}):
        _run(page, number, engine=SimpleNamespace(load_weights=load_weights), **names)
    # The norm has changed, and the embedding is in the same module.
    assert sorted(lists[-1]) == ["model.embed_tokens.weight", "model.norm.weight"]
    assert sum(map(len, lists[:-1])) == len(held)
    assert all(torch.equal(held[key], tensor) for key, tensor in hub_tensors(model))


def print_replaced_functions(page: str, number: int, rank: int, world: int, folder: str) -> None:
    """The forkserver has imported the Trainer, so patch() replaces its functions too."""
    patch(tiny())
    with mock.patch("builtins.print") as printed:
        _run(page, number)
    assert "accelerate.accelerator:Accelerator.prepare" in {c.args[0] for c in printed.mock_calls}


def load_in_transformers_sharding(
    page: str, number: int, rank: int, world: int, folder: str
) -> None:
    """Transformers before 5.24 has no registry of implementations, so nothing runs there."""
    if importlib.util.find_spec("transformers.distributed.expert_parallel") is None:
        return
    with _work_in(folder) as inputs:
        model = _run(page, number)["model"]
        assert "HfMoeEp" in repr(model.model.layers[0].mlp.experts.forward.__closure__)
        model(**inputs).loss.backward()
        assert model.model.layers[0].mlp.experts.down_proj.grad is not None


RUNS: dict[tuple[str, int], Callable[..., None]] = {
    ("README.md", 0): run_trainer,
    ("README.md", 1): load_with_stock,
    ("docs/index.md", 0): print_loaded,
    ("docs/quickstart.md", 0): run_trainer,
    ("docs/quickstart.md", 1): load_with_stock,
    ("docs/quickstart.md", 2): print_patched,
    ("docs/training.md", 0): run_accelerate_loop,
    ("docs/training.md", 1): run_own_loop,
    ("docs/training.md", 2): train_a_head,
    ("docs/checkpoints.md", 0): resume_from_checkpoints,
    ("docs/engines.md", 0): send_to_an_engine,
    ("docs/sequence.md", 0): shard_sequences,
    ("docs/long-sequences.md", 0): split_attention,
    ("docs/stages.md", 0): patch_stages,
    ("docs/pictures.md", 0): train_on_images,
    ("docs/lora.md", 0): train_qlora,
    ("docs/muon.md", 0): create_muon,
    ("docs/muon.md", 1): train_by_muon,
    ("docs/muon.md", 2): group_parameters,
    ("docs/muon.md", 3): unfreeze_a_layer,
    ("docs/balance.md", 0): print_expert_load,
    ("docs/balance.md", 1): balance_load,
    ("docs/balance.md", 2): freeze_routers,
    ("docs/trainers.md", 0): load_in_transformers_sharding,
    ("docs/upstream.md", 0): print_replaced_functions,
    ("docs/rl.md", 1): record_and_replay,
    ("docs/rl.md", 2): read_engine_arrays,
}
GRPO = ("docs/rl.md", 0)


def test_every_block_is_run() -> None:
    assert BLOCKS.keys() == RUNS.keys() | {GRPO}


@pytest.mark.parametrize(
    "claim",
    on_ranks(
        2,
        {f"{page}-{number}": partial(run, page, number) for (page, number), run in RUNS.items()},
        slow=True,
    ),
)
def test_a_block_on_two_ranks(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # TRL passes gradient_checkpointing
def test_grpo(tmp_path: Path) -> None:
    """TRL's own trainer runs in one process, for two steps of a model of two layers."""
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    small_config = partial(
        trl.GRPOConfig,
        per_device_train_batch_size=4,
        num_generations=2,
        steps_per_generation=2,
        max_completion_length=5,
        max_steps=2,
        use_cpu=True,
        bf16=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    model = tiny(dtype=torch.float32)
    rows = [{"prompt": text_of_tokens(list(range(3, 4 + index % 4)))} for index in range(8)]
    word_tokenizer = make_tokenizer(model.config.vocab_size)
    trainer_class = partial(trl.GRPOTrainer, processing_class=word_tokenizer)
    with (
        mock.patch.dict(SMALLER, {"ep_size=8": "ep_size=1"}),
        mock.patch("trl.GRPOConfig", small_config),
        mock.patch("trl.GRPOTrainer", trainer_class),
        _work_in(os.fspath(tmp_path)),
    ):
        names = _run(
            *GRPO,
            model=model,
            reward=lambda completions, **_: [float(len(completion)) for completion in completions],
            prompts=datasets.Dataset.from_list(rows),
        )
    assert names["trainer"].state.global_step == 2
