"""Run a table of cases with the stock Trainer, one after the other in the same processes.

`launch(cases, folder, config_file)` starts this file under `accelerate launch`. `launch(cases,
folder)` starts it in one plain process, which is the reference: it gets the same rows in the same
order. One launch runs many cases, because starting ranks takes most of the time. Each case returns
a `Result` per rank.
"""

import gc
import os
import re
import signal
import sys
import traceback
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from hf_moe_ep import Muon, from_pretrained, patch
from hf_moe_ep.etp import restore_stock_shapes
from hf_moe_ep.lora.factors import pack_factors
from hf_moe_ep.state import find_state
from support.adapters import TARGETS, with_lora
from support.fakes.axolotl_steps import train_by_axolotl
from support.fp64 import FP64
from support.generation import continuations
from support.muon_by_matrix import ByMatrix
from support.poison import poison_empty
from support.quantised import dequantise_experts, in_place_of_bytes
from support.scripts import run_script
from support.tiny_models import Row as VisionRow
from support.tiny_models import batch, tiny, vision_batch

GLOBAL_BATCH = 8
STEPS = 6
SEQ_LEN = 12
MAX_GRAD_NORM = 0.5
NUM_ROWS = 96
_WRAPPERS = re.compile(r"_checkpoint_wrapped_module\.|_orig_mod\.")
Row = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """A model, its data and the steps that a Trainer runs with them.

    Attributes:
        steps: names of functions in `_STEPS` below, which are called in order with one Trainer.
        ep: the ep_size; with 0 the model stays stock.
        sp, cp, pp: the sp_size, cp_size and pp_size, by which the per-device batch is multiplied.
        microbatches: the pp_microbatches; with 0 as many as stages.
        shares: the number of ranks per batch, if the launch config sets it.
        lora: the rank of random adapters; 0 for none.
        lora_on: a name in `support.adapters.TARGETS`.
        lora_after: attach the adapters after `patch`.
        own_loss: give the Trainer a `compute_loss_func`.
        held: the format of quantised experts. A stock model gets their dequantised values.
        exact: compute everything in fp64, as `support.fp64.FP64` explains.
        split: a factor that divides the batch size and multiplies the number of micro-batches.
        load: the folder for `from_pretrained`; if None, `tiny` builds the model. Ranks other than 0
            get other weights.
        in_shards: load `load` with hf_moe_ep.from_pretrained, which shards the model at once.
        muon: train by Muon; a stock model gets torch.optim.Muon on every matrix.
        arguments: arguments of TrainingArguments, which override those of `_arguments`.
        environment: variables that a launch config would set.
        folder: the output_dir, if a case resumes from the folder of another case.
        stop_after: the step after which training stops, as if interrupted.
        kill_after: the step after whose checkpoint every rank kills itself.
        fails: the case must raise an error, which is then in the result.
    """

    name: str
    steps: tuple[str, ...] = ("train",)
    ep: int = 0
    sp: int = 1
    cp: int = 1
    shares: int = 1
    pp: int = 1
    microbatches: int = 0
    lora: int = 0
    lora_on: str = "both"
    lora_after: bool = False
    own_loss: bool = False
    held: str = ""
    exact: bool = False
    split: int = 1
    seed: int = 0
    dtype: torch.dtype = torch.float32
    load: Path | None = None
    in_shards: bool = False
    model: dict[str, Any] = field(default_factory=dict)
    rows: str = "uneven"
    muon: bool = False
    arguments: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    folder: Path | None = None
    stop_after: int | None = None
    kill_after: int | None = None
    fails: bool = False


def focal_loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """Weigh the loss of each token by (1 - p)^2, which no model does itself."""
    logits = outputs.logits[:, :-1].flatten(0, 1)
    losses = cross_entropy(logits, labels[:, 1:].flatten(), reduction="none")
    total = ((1 - (-losses).exp()) ** 2 * losses).sum()
    return total / (num_items_in_batch or labels[:, 1:].ne(-100).sum())


@dataclass
class Result:
    """The results of one rank. `params`, `grads` and `params_at` are on rank 0 only, gathered.

    Attributes:
        log: the Trainer's log_history.
        grads: the gradients of the first optimizer step, after clipping.
        params: the parameters at the end.
        params_at: step -> parameters at its evaluation, with load_best_model_at_end.
        values: name in `_STEPS` -> returned value.
        error: the traceback of a case that failed.
    """

    log: list[dict[str, float]] = field(default_factory=list)
    grads: dict[str, Tensor] = field(default_factory=dict)
    params: dict[str, Tensor] = field(default_factory=dict)
    params_at: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    error: str = ""

    def series(self, key: str) -> Tensor:
        """Return the values that were logged under `key`, in order."""
        return torch.tensor([entry[key] for entry in self.log if key in entry])


def launch(
    cases: list[Case],
    folder: Path,
    config_file: Path | None = None,
    *,
    timeout: float = 240.0,
) -> dict[str, list[Result]]:
    """Run the cases, and return case name -> results of all ranks.

    Raises AssertionError with the output of the launch if it fails or hangs.
    """
    folder.mkdir()
    torch.save(cases, folder / "cases.pt")
    output = folder / "output.txt"
    options: Any = {"output": output, "config_file": config_file, "timeout": timeout}
    run_script(Path(__file__), os.fspath(folder), **options)
    return {case.name: _load(folder, case) for case in cases}


def _load(folder: Path, case: Case) -> list[Result]:
    files = sorted(folder.glob(f"{case.name}.rank*.pt"))
    return [torch.load(file, weights_only=False) for file in files]


def load_stock(folder: Path) -> PreTrainedModel:
    """Load the stock model in `folder`, with eager experts like those of the tiny models."""
    return AutoModelForCausalLM.from_pretrained(folder, experts_implementation="eager")


def _build(case: Case, rank: int) -> PreTrainedModel:
    """Build the stock model of a case. Ranks other than 0 get other weights or NaN."""
    if case.load is None:
        return tiny(seed=case.seed + 100 * rank, dtype=case.dtype, **case.model)
    model = load_stock(case.load)
    if rank:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(float("nan"))
    return model


def training_rows(kind: str) -> list[Row]:
    """Make rows of one length with very different numbers of labels; "padded" ones have padding."""
    model = tiny()
    if kind == "padded":
        all_rows = batch(model, NUM_ROWS, SEQ_LEN, seed=1, pad=SEQ_LEN - 3)
        # In a batch the padding grows from row to row, so rows are taken in a mixed order.
        order = [37 * index % NUM_ROWS for index in range(NUM_ROWS)]
        return [{name: value[index] for name, value in all_rows.items()} for index in order]
    return [
        _row(batch(model, 1, SEQ_LEN, seed=index, ignore=0.1 + 0.1 * (index % 9)))
        for index in range(NUM_ROWS)
    ]


def vision_rows() -> list[Row]:
    """Make rows of 14 tokens with different numbers of labels: 4 with text, 4 with an image, .."""
    model = tiny("qwen3_vl_moe")
    kinds: list[VisionRow] = [[14], [3, (4, 6), 5], [2, (2, 4), 3, (4, 2), 5], [2, (3, 4, 2), 3]]
    return [vision_batch(model, [kinds[i // 4 % 4]], seed=i) for i in range(NUM_ROWS)]


def collate_vision(rows: list[Row]) -> Row:
    names = {name: None for row in rows for name in row}
    return {name: torch.cat([row[name] for row in rows if name in row]) for name in names}


def evaluation_rows() -> list[Row]:
    """Make three global batches whose rows all have the same number of labels.

    So the mean over the batches' mean losses is the mean over all labels.
    """
    model = tiny()
    return [
        _row(batch(model, 1, SEQ_LEN, seed=1000 + index, ignore=0.0))
        for index in range(3 * GLOBAL_BATCH)
    ]


def _row(rows: Row) -> Row:
    return {name: value[0] for name, value in rows.items()}


def _train(trainer: Trainer, folder: Path) -> None:
    trainer.train()


def _train_by_axolotl(trainer: Trainer, folder: Path) -> dict[str, Any]:
    """Train one epoch with axolotl's count of steps. Returns the arguments that depend on it."""
    train_by_axolotl(trainer, num_epochs=1, warmup_ratio=0.5, logging_steps=1)
    names = ("max_steps", "warmup_steps", "logging_steps")
    return {name: getattr(trainer.args, name) for name in names}


def _resume(trainer: Trainer, folder: Path) -> None:
    trainer.train(resume_from_checkpoint=True)


def _resume_3(trainer: Trainer, folder: Path) -> None:
    trainer.train(resume_from_checkpoint=os.fspath(folder / "checkpoint-3"))


def _evaluate(trainer: Trainer, folder: Path) -> float:
    return trainer.evaluate()["eval_loss"]


def _predict(trainer: Trainer, folder: Path) -> Any:
    prediction = trainer.predict(evaluation_rows())
    logits = prediction.predictions
    logits = logits[0] if isinstance(logits, tuple) else logits
    return {"loss": prediction.metrics["test_loss"], "logits": torch.from_numpy(logits)}


def _predict_21(trainer: Trainer, folder: Path) -> Tensor:
    """Return the predicted logits of 21 rows, which do not divide evenly over the ranks."""
    logits = trainer.predict(evaluation_rows()[:21]).predictions
    return torch.from_numpy(logits[0] if isinstance(logits, tuple) else logits)


def _save(trainer: Trainer, folder: Path) -> Path:
    trainer.save_model(os.fspath(folder / "saved"))
    return folder / "saved"


def _generate(trainer: Trainer, folder: Path) -> dict[str, Tensor]:
    return continuations(trainer.model, trainer.args.process_index)


def _inspect(trainer: Trainer, folder: Path) -> dict[str, Any]:
    """Report whether the options of a case took effect. Equal losses alone would not show it."""
    modules = [trainer.model, *trainer.model.modules()]
    units = [module for module in modules if isinstance(module, FSDPModule)]
    groups = [unit._get_fsdp_state()._fsdp_param_group for unit in units]
    return {
        "classes": {type(module).__name__ for module in modules},
        "graphs": counters["stats"]["unique_graphs"],
        "offload": {type(group.offload_policy).__name__ for group in groups if group},
        "gradient_checkpointing": trainer.model.is_gradient_checkpointing,
        "state_dict_type": str(trainer.accelerator.state.fsdp_plugin.state_dict_type),
    }


_STEPS = {
    "train": _train,
    "train by axolotl": _train_by_axolotl,
    "resume": _resume,
    "resume 3": _resume_3,
    "evaluate": _evaluate,
    "predict": _predict,
    "predict 21": _predict_21,
    "save": _save,
    "generate": _generate,
    "inspect": _inspect,
}


class _Recorder(TrainerCallback):
    def __init__(self, case: Case, result: Result) -> None:
        self.case, self.result = case, result

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self.result.grads:
            self.result.grads = whole(kwargs["model"], grads=True)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop |= state.global_step == self.case.stop_after

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.case.kill_after:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if args.load_best_model_at_end:
            self.result.params_at.setdefault(state.global_step, whole(kwargs["model"]))


def whole(model: nn.Module, *, grads: bool = False) -> dict[str, Tensor]:
    """Return gathered copies of all parameters or gradients by stock name. All ranks call this."""
    tensors = {}
    for name, parameter in model.named_parameters():
        tensor = parameter.grad if grads else parameter.detach()
        if tensor is None:  # frozen
            continue
        tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        tensors[name] = tensor.cpu().clone()
    packed = pack_factors(model, restore_stock_shapes(model, in_place_of_bytes(model, tensors)))
    own = {_WRAPPERS.sub("", name): tensor for name, tensor in packed.items()}
    state = find_state(model)
    return own if state is None or state.stage is None else _of_all_stages(own, state.stage.aliases)


def _of_all_stages(own: dict[str, Tensor], aliases: dict[str, str]) -> dict[str, Tensor]:
    """Join the tensors of all pipeline stages. Copies of a tied weight must be equal."""
    by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, {aliases.get(name, name): own[name] for name in own})
    joined: dict[str, Tensor] = {}
    for tensors in by_rank:
        for name, tensor in tensors.items():
            assert torch.equal(joined.setdefault(name, tensor), tensor), f"{name} differs"
    return joined


def _arguments(case: Case, folder: Path) -> TrainingArguments:
    sharing = case.sp * case.cp * case.pp * case.shares
    batch_size = GLOBAL_BATCH * sharing // int(os.environ.get("WORLD_SIZE", "1")) // case.split
    defaults = {
        "output_dir": os.fspath(folder),
        "use_cpu": True,
        "per_device_train_batch_size": batch_size,
        "per_device_eval_batch_size": batch_size,
        "gradient_accumulation_steps": 2 * case.split,
        "max_steps": STEPS,
        "logging_steps": 1,
        "max_grad_norm": MAX_GRAD_NORM,
        "learning_rate": 3e-3,
        "train_sampling_strategy": "sequential",
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
    }
    return TrainingArguments(**(defaults | case.arguments))


def _run(case: Case, folder: Path) -> Result:
    result = Result()
    folder = case.folder or folder / case.name
    arguments = _arguments(case, folder)  # makes the process group that from_pretrained looks for
    sizes = {"ep_size": case.ep, "sp_size": case.sp, "cp_size": case.cp, "pp_size": case.pp}
    sizes |= {"pp_microbatches": case.microbatches} if case.microbatches else {}
    if case.in_shards:
        assert case.load is not None
        model = from_pretrained(case.load, **sizes)
    else:
        model = _build(case, arguments.process_index)
    if case.ep and case.lora_after:
        patch(model, **sizes)
    if case.lora:
        seed = case.seed + 100 * arguments.process_index
        model = with_lora(model, case.lora, seed=seed, **TARGETS[case.lora_on])
    if case.ep and not case.lora_after and not case.in_shards:
        options = {"experts_dtype": case.held} if case.held else {}
        patch(model, **sizes, **options)
    elif case.held:
        dequantise_experts(model, case.held)
    vision = case.rows == "vision"
    muon = (Muon if case.ep else ByMatrix, {"model": model, "lr": 3e-3})
    trainer = Trainer(
        model=model,
        args=arguments,
        data_collator=collate_vision if vision else None,
        train_dataset=vision_rows() if vision else training_rows(case.rows),
        eval_dataset=None if vision else evaluation_rows(),
        callbacks=[_Recorder(case, result)],
        compute_loss_func=focal_loss if case.own_loss else None,
        optimizer_cls_and_kwargs=muon if case.muon else None,
    )
    for step in case.steps:
        result.values[step] = _STEPS[step](trainer, folder)
    result.log = trainer.state.log_history
    result.params = whole(trainer.model)
    return result


def main(folder: Path) -> None:
    poison_empty()
    torch.set_num_threads(1)
    gc.freeze()  # Trainer.train() collects garbage, which would take longer than these trainings
    rank = int(os.environ.get("RANK", "0"))
    for case in torch.load(folder / "cases.pt", weights_only=False):
        print(f"rank {rank}: {case.name}", flush=True)
        with mock.patch.dict(os.environ, case.environment):
            try:
                with FP64() if case.exact else nullcontext():
                    result = _run(case, folder)
            except Exception:
                if not case.fails:
                    raise
                result = Result(error=traceback.format_exc())
        if rank:
            result.grads, result.params, result.params_at = {}, {}, {}
        torch.save(result, folder / f"{case.name}.rank{rank}.pt")
    if dist.is_initialized():
        dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    # Skip destructors: a thread of torch that nobody joins sometimes aborts the exit (SIGABRT).
    os._exit(0)


if __name__ == "__main__":
    # The parent process pickled the cases as classes of support.jobs.trainer, not of __main__.
    from support.jobs.trainer import main as run_cases

    run_cases(Path(sys.argv[1]))
