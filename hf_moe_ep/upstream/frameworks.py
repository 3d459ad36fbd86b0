"""Adapt to frameworks that call the Trainer: axolotl, ms-swift, LLaMA-Factory and TRL's commands.

The functions look for a framework among the imported modules, and never import one. Most of them
choose the words of errors, because the users of such a framework write a YAML file or options
instead of Python. The names come from the frameworks' own options, and from
swift/sequence_parallel/, swift/dataloader/ and axolotl/train.py.
"""

from __future__ import annotations

import inspect
import math
import sys
from dataclasses import dataclass, field
from types import FrameType, SimpleNamespace
from typing import Any

from accelerate import Accelerator
from packaging.version import Version

from hf_moe_ep.upstream.requirements import get_installed_version


@dataclass(frozen=True)
class _Framework:
    """A framework, and the options with which its users ask for a feature.

    Attributes:
        name: the name of the framework.
        module: the module that is imported if the framework runs.
        to_shard: a sentence that tells users how to ask for FSDP2.
        sizes: the framework's option for each size of Accelerate's ParallelismConfig.
        all_logits: tells users how to ask for the logits of all tokens, or "" if they always get
            these logits.
        experts: names the options that choose an implementation of experts, or "" without options.
        package: the name of the installed package.
        tested: the oldest version that `make test-trainers` has run, or "" if setup.cfg has a
            range.
    """

    name: str
    module: str
    to_shard: str
    sizes: dict[str, str] = field(default_factory=dict)
    all_logits: str = ""
    experts: str = ""
    package: str = ""
    tested: str = ""


# All frameworks except TRL import trl themselves, so TRL is looked for last.
_FRAMEWORKS = (
    _Framework(
        "axolotl",
        "axolotl",
        "Add `fsdp_version: 2` and `fsdp_config: {auto_wrap_policy: TRANSFORMER_BASED_WRAP, "
        "state_dict_type: FULL_STATE_DICT}` to the YAML file",
        {
            "cp_size": "context_parallel_size",
            "ep_size": "expert_parallel_size",
            "tp_size": "tensor_parallel_size",
            "dp_replicate_size": "dp_replicate_size",
        },
        experts="experts_implementation, expert_backend, use_scattermoe and use_sonicmoe",
        package="axolotl",
        tested="0.19.0",
    ),
    _Framework(
        "ms-swift",
        "swift.arguments",
        "Add --fsdp fsdp2 to the command",
        all_logits="add --use_logits_to_keep false to the command",
        package="ms-swift",
        tested="4.6.0",
    ),
    _Framework(
        "LLaMA-Factory",
        "llamafactory",
        "Add `fsdp: full_shard auto_wrap` and `fsdp_config: {fsdp_version: 2}` to the YAML file",
        package="llamafactory",
        tested="0.9.5",
    ),
    _Framework(
        "TRL",
        "trl.scripts",
        "Add --accelerate_config fsdp2 to the command",
    ),
)
_GENERAL = (
    "Launch with `accelerate launch --config_file` and `distributed_type: FSDP`, `fsdp_version: 2` "
    "(examples/accelerate/), or call apply_ep_fsdp2(model) in your own loop"
)


def how_to_shard() -> str:
    """Return a sentence that tells users of the running framework how to ask for FSDP2."""
    framework = _find_running()
    return _GENERAL if framework is None else f"{framework.name}: {framework.to_shard}"


def describe_version_problem() -> str:
    """Return a sentence if the running framework is older than the tested versions, else ""."""
    framework = _find_running()
    if framework is None or not framework.tested:
        return ""
    found = get_installed_version(framework.package)
    if found is None or Version(found) >= Version(framework.tested):
        return ""
    return (
        f"{framework.name} {found} is installed, and {framework.tested} is the oldest version that "
        f"was tested; if it fails, upgrade it"
    )


def how_to_keep_all_logits() -> str:
    """Return how to call a model without `logits_to_keep`, in the running framework's words."""
    framework = _find_running()
    if framework is None or not framework.all_logits:
        return "leave logits_to_keep out"
    return f"{framework.name}: {framework.all_logits}"


def how_to_compute_experts() -> str:
    """Return how to leave the experts to hf_moe_ep, in the running framework's words."""
    framework = _find_running()
    if framework is None or not framework.experts:
        return "use patch(model, experts_backend=...), or call unpatch(model) first"
    return f"{framework.name}: leave {framework.experts} out of the YAML file"


def chooses_no_experts(implementation: str) -> bool:
    """Return True if the running framework passes `implementation` although the user chose none.

    In this case axolotl's plugin for kernels sets "eager" (axolotl/integrations/kernels/args.py),
    and the loader passes the value to the model (axolotl/loaders/model.py).
    """
    framework = _find_running()
    return implementation == "eager" and framework is not None and bool(framework.experts)


def has_option_of_size(name: str) -> bool:
    """Return True if the running framework has an option of its own for the size `name`.

    If a user has set axolotl's option, axolotl splits sequences itself.
    """
    framework = _find_running()
    return framework is not None and name in framework.sizes


def name_option_of_size(name: str) -> str:
    """Return the beginning of a sentence that names the option for a size of ParallelismConfig.

    This is the running framework's own option. Without a framework, or if it has no such option,
    the sentence names the launch config.
    """
    framework = _find_running()
    if framework is None or name not in framework.sizes:
        return f"the launch config's parallelism_config has {name}"
    return f"{framework.name} was given {framework.sizes[name]}"


def check_sequence_parallelism() -> None:
    """Raise ValueError if a framework splits sequences over ranks by its own code.

    ms-swift replaces attention functions for this, and stores the number of ranks in an object of
    the process (swift/sequence_parallel/sequence_parallel.py).
    """
    module = sys.modules.get("swift.sequence_parallel")
    size = getattr(getattr(module, "sequence_parallel", None), "world_size", None) or 1
    if size > 1:
        raise ValueError(
            f"ms-swift was given --sequence_parallel_size {size}, which does not combine with a "
            f"patched model; leave it out, and write hf-moe-ep run --sp-size {size}"
        )


def check_reads_no_logits(trainer: Any) -> None:
    """Raise ValueError if a trainer of ms-swift reads the logits of whole sequences.

    Only the trainer of `swift sft` and `swift pt` does not read them
    (swift/trainers/seq2seq_trainer.py).
    """
    module = type(trainer).__module__
    if module.partition(".")[0] == "swift" and module != "swift.trainers.seq2seq_trainer":
        raise ValueError(
            f"ms-swift's {type(trainer).__name__} reads the logits of whole sequences, but with "
            f"sp_size > 1 each rank computes a slice of them; leave --sp-size out (swift sft and "
            f"swift pt work with it)"
        )


def multiplies_by_processes(trainer: Any, num_items: Any) -> bool:
    """Return True if ms-swift multiplies a loss by the number of processes.

    ms-swift does this if the loss was divided by the number of tokens of all ranks
    (swift/trainers/seq2seq_trainer.py).
    """
    averages = getattr(trainer.args, "average_tokens_across_devices", False)
    return bool(averages and trainer.model_accepts_loss_kwargs and num_items is not None)


def split_over_data_ranks(loader: Any, ranks_per_batch: int) -> None:
    """Let `ranks_per_batch` consecutive ranks draw the same samples from a loader of ms-swift.

    ms-swift's sampler draws the same samples for the ranks of a tensor-parallel group. The sampler
    takes the size of this group from a DeepSpeed config (swift/dataloader/shard.py), and this
    function replaces the size.

    Raises:
        ValueError: the loader reads a stream and sends each rank another batch
            (swift/dataloader/dispatcher.py).
    """
    sampler: Any = getattr(loader, "batch_sampler", None)
    sampler = getattr(sampler, "batch_sampler", sampler)  # Accelerate's SkipBatchSampler, to resume
    if not hasattr(sampler, "tp_size"):
        raise ValueError(
            f"ms-swift sends each rank a batch of its own from a stream, but with sp_size="
            f"{ranks_per_batch} the ranks of an sp group share one batch; leave out --streaming, "
            f"or --sp-size"
        )
    sampler.tp_size = ranks_per_batch
    sampler.total_samples = len(loader.dataset) // sampler.world_size


def drops_nan_gradients() -> bool:
    """Return True while ms-swift trains: it drops all gradients of a step whose norm is NaN.

    For this, ms-swift replaces a method of Accelerate's class (swift/trainers/mixin.py).
    """
    return Accelerator.clip_grad_norm_.__module__.startswith("swift.")


def recount_steps(trainer: Any, ranks_per_batch: int, sizes: str) -> None:
    """Correct the steps of a run of axolotl in which several ranks share a batch.

    axolotl counts the steps while it prepares the data, with a batch for each process. It passes
    the count as max_steps, and derives warm-up steps and the logging interval from it. This
    function counts again, with the batch size that axolotl would use for a context_parallel_size of
    `ranks_per_batch`. Arguments that the YAML file sets are not changed.

        8,000 samples, 8 processes, micro_batch_size 1    1,000 steps
        sp_size 2: a step takes 4 samples                 2,000 steps

    Args:
        trainer: a Trainer that is about to train.
        ranks_per_batch: the number of processes that share a batch.
        sizes: the sizes that make them share it, for the error.

    Raises:
        ValueError: the count comes from a plugin of axolotl, which counts in its own way; or
            axolotl.train.train does not run.
    """
    if ranks_per_batch == 1 or "axolotl" not in sys.modules or trainer.args.max_steps <= 0:
        return
    call = _find_call_of_axolotl_train()
    if call is None:
        if any(kind.__module__.startswith("axolotl.") for kind in type(trainer).__mro__):
            raise ValueError(
                f"axolotl counts max_steps with a batch for each process, but with {sizes} "
                f"{ranks_per_batch} ranks share one batch; start the training by "
                f"axolotl.train.train (axolotl 0.19), from whose arguments hf_moe_ep corrects it"
            )
        return  # a Trainer of the user's own script
    cfg, data = call["cfg"], call["dataset_meta"]
    counted = data.total_num_steps
    # Without a count, and for streams, max_steps comes from the YAML file.
    if not counted or counted == cfg.max_steps or _sets_all_steps(cfg):
        return
    changes: dict[str, Any] = {}
    if _count_steps(cfg, data.train_dataset) != counted:
        # axolotl counts packed batches, and then stores their efficiency in the configuration,
        # from which it would count in another way.
        changes["sample_packing_eff_est"] = None
        if cfg.rl or not cfg.sample_packing:
            raise _make_steps_error(counted, ranks_per_batch, sizes)
    changes["batch_size"] = cfg.batch_size // ranks_per_batch
    right = _count_steps(type(cfg)({**cfg, **changes}), data.train_dataset)
    old, new = _derive_arguments(cfg, counted), _derive_arguments(cfg, right)
    for name, value in old.items():
        if getattr(trainer.args, name) == value:
            setattr(trainer.args, name, new[name])


def _find_call_of_axolotl_train() -> dict[str, Any] | None:
    """Return the variables of the running call of axolotl.train.train, or None if none runs."""
    frame: FrameType | None = inspect.currentframe()
    while frame is not None:
        module = frame.f_globals.get("__name__")
        if frame.f_code.co_name == "train" and module == "axolotl.train":
            return frame.f_locals
        frame = frame.f_back
    return None


def _sets_all_steps(cfg: Any) -> bool:
    return bool(cfg.max_steps and cfg.logging_steps) and cfg.warmup_steps is not None


def _count_steps(cfg: Any, dataset: Any) -> int:
    """Count the steps as axolotl does (axolotl/utils/data/sft.py, axolotl/common/datasets.py)."""
    if cfg.rl:
        return math.ceil(len(dataset) * cfg.num_epochs / cfg.batch_size)
    count = sys.modules["axolotl.utils.trainer"].calculate_total_num_steps
    steps: int = count(cfg, dataset, update=False)
    return min(steps, cfg.max_steps) if cfg.max_steps else steps


def _derive_arguments(cfg: Any, steps: int) -> dict[str, Any]:
    """Return the arguments that axolotl derives from the count (axolotl/core/builders/base.py)."""
    builder = sys.modules["axolotl.core.builders.base"].TrainerBuilderBase
    arguments: dict[str, Any] = {"max_steps": cfg.max_steps or steps}
    builder._configure_warmup_and_logging(SimpleNamespace(cfg=cfg), steps, arguments)
    # TrainingArguments evaluates as often as it logs if no interval is set.
    return arguments if cfg.eval_steps else arguments | {"eval_steps": arguments["logging_steps"]}


def _make_steps_error(counted: int, ranks_per_batch: int, sizes: str) -> ValueError:
    return ValueError(
        f"axolotl has counted {counted} steps with a batch for each process, but with {sizes} "
        f"{ranks_per_batch} ranks share one batch; write `max_steps: {counted * ranks_per_batch}`, "
        f"`warmup_steps` and `logging_steps` into the YAML file"
    )


def _find_running() -> _Framework | None:
    return next((entry for entry in _FRAMEWORKS if entry.module in sys.modules), None)
