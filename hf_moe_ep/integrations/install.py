"""The seam into Accelerate, the Trainer and PEFT: one table of every function that is wrapped.

`patch` calls `install`, which puts each wrapper of `WRAPPED` in front of its target, once per
process. A wrapper asks first whether it was given a patched model, and otherwise calls what was
there before; those that are given no model say in their row why they are needed all the same.
What a wrapper does stands in its own file: `prepare`, `saving`, `shared_batches`, `optimizers`,
`trackers`, `prompts`, `references`, `engines`, `expert_load`, `trainer_checkpoints`,
`accelerate_states`, `checkpoints/storage/unpickle.py` and `lora/computed.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import transformers

from hf_moe_ep.checkpoints.storage import unpickle
from hf_moe_ep.integrations import (
    accelerate_states,
    engines,
    expert_load,
    features,
    optimizers,
    prepare,
    prompts,
    references,
    saving,
    shared_batches,
    trackers,
    trainer_checkpoints,
)
from hf_moe_ep.lora import computed as adapters
from hf_moe_ep.upstream.wrap import Wrap, find_owner, wrap_all, wrap_imported

# Of a package that nobody has to have, and that takes long to import: each is wrapped once somebody
# has imported its module. A version without one of these names is left as it is.
WRAPPED_WHEN_IMPORTED = (
    Wrap(
        "trl.models.utils:prepare_fsdp",
        references.shard_reference,
        "shards a reference in units, where TRL makes one of all of it",
        features.EVALUATED,
    ),
    Wrap(
        "trl.trainer.callbacks:SyncRefModelCallback._sync_target_model",
        references.mix_shards,
        "mixes shards of a policy into a reference that lies like it, and names what does not",
        features.EVALUATED,
    ),
    *(
        Wrap(
            f"trl.trainer.{name}:{trainer}.compute_ref_log_probs",
            references.shard_before_asked,
            "shards a policy with adapters that is asked as its own reference before training",
            features.EVALUATED,
        )
        for name, trainer in (("dpo_trainer", "DPOTrainer"), ("kto_trainer", "KTOTrainer"))
    ),
    Wrap(
        "trl.generation.vllm_generation:VLLMGeneration._iter_named_params",
        engines.iter_named_params,
        "sends an engine the hub's keys and merged adapters, a tensor at a time",
        features.ENGINES,
    ),
    Wrap(
        "trl.generation.vllm_generation:VLLMGeneration.sync_weights",
        engines.sync_weights,
        "tells all ranks where an engine refuses weights on one of them",
        features.ENGINES,
    ),
)


def create_accelerator(original: Callable[..., Any], self: transformers.Trainer) -> None:
    """Tell the Trainer's new Accelerator of its model; wrap what the Trainer's file has imported.

    Wraps `Trainer.create_accelerator_and_postprocess`, behind which trainers prepare references.
    """
    wrap_imported(WRAPPED_WHEN_IMPORTED)
    shared_batches.create_accelerator(original, self)
    references.remember_policy(self)


WRAPPED = (
    # Sharding, where Accelerate would shard
    *(
        Wrap(
            f"{module}:fsdp2_prepare_model",
            prepare.prepare_model,
            "shards with EP where Accelerate would shard with FSDP2 alone",
            feature,
        )
        for module, feature in (
            ("accelerate.accelerator", features.SHARDING),
            # ms-swift imports it from the first of these.
            ("accelerate.utils.fsdp_utils", features.SHARDING_BY_OTHERS),
            ("accelerate.utils", features.SHARDING_BY_OTHERS),
        )
    ),
    Wrap(
        "accelerate.accelerator:Accelerator.prepare",
        prepare.prepare,
        "refuses launch configs under which nothing would be sharded",
        features.SHARDING,
    ),
    Wrap(
        "accelerate.state:AcceleratorState.__init__",
        prepare.init_state,
        "lets FSDP2 run on CPU ranks, for Accelerators made before any model is known",
        features.CPU_RANKS,
    ),
    Wrap(
        "accelerate.local_sgd:LocalSGD.__init__",
        prepare.local_sgd,
        "says why it cannot be, where Accelerate's error is of DeepSpeed",
        features.LOCAL_SGD,
    ),
    Wrap(
        "accelerate.accelerator:Accelerator.prepare_model",
        references.prepare_evaluated,
        "shards a teacher, which Accelerate leaves whole and a forward of ours refuses",
        features.EVALUATED,
    ),
    # Saving, and loading into what is sharded
    Wrap(
        "transformers.trainer:Trainer.save_model",
        saving.save_model,
        "writes hub layout under SHARDED_STATE_DICT too, where stock writes nothing",
        features.HUB_LAYOUT,
    ),
    Wrap(
        "transformers.modeling_utils:PreTrainedModel.save_pretrained",
        saving.save_in_hub_layout,
        "writes a gathered state dict in hub layout; stock dies in its writer without one",
        features.HUB_LAYOUT,
    ),
    Wrap(
        "accelerate.accelerator:Accelerator.get_state_dict",
        saving.get_state_dict,
        "packs adapters of experts as PEFT does",
        features.HUB_LAYOUT,
    ),
    Wrap(
        "accelerate.utils.fsdp_utils:_get_model_state_dict",
        saving.get_model_state_dict,
        "leaves out experts that are held quantised, whose bytes do not change",
        features.ACCELERATE_STATE,
    ),
    Wrap(
        "accelerate.utils.fsdp_utils:_set_model_state_dict",
        saving.set_model_state_dict,
        "loads into sharded parameters, whatever ran last",
        features.ACCELERATE_STATE,
    ),
    Wrap(
        "accelerate.accelerator:save_fsdp_model",
        saving.save_state_of_model,
        "writes hashes of experts that are held quantised beside what save_state keeps",
        features.ACCELERATE_STATE,
    ),
    Wrap(
        "accelerate.accelerator:load_fsdp_model",
        saving.load_state_of_model,
        "refuses to go on from adapters of another base",
        features.ACCELERATE_STATE,
    ),
    Wrap(
        "peft.peft_model:PeftModel.save_pretrained",
        saving.save_adapters,
        "gathers a sharded model's adapters, on every rank",
        features.ADAPTER_FILES,
        optional=True,
    ),
    Wrap(
        "peft.peft_model:PeftModel.get_prompt_embedding_to_save",
        prompts.prompt_to_save,
        "gathers what makes a prompt, which PEFT calls outside the model's forward",
        features.PROMPTS,
        optional=True,
    ),
    Wrap(
        "peft.peft_model:PeftModel.get_prompt",
        prompts.prompt,
        "gathers what makes a prompt, which `generate` calls outside the model's forward",
        features.PROMPTS,
        optional=True,
    ),
    Wrap(
        "peft.peft_model:PeftModelForCausalLM.prepare_inputs_for_generation",
        prompts.begin_generation,
        "shows FSDP2 its root before the embedding is called alone, as it is with prompts",
        features.PROMPTS,
        optional=True,
    ),
    Wrap(
        "peft.peft_model:PeftModel._get_base_model_class",
        saving.base_model_class,
        "names the stock class in adapter_config.json, not the one that FSDP2 made of it",
        features.ADAPTER_FILES,
        optional=True,
    ),
    # The Trainer's checkpoints: complete, or not there
    Wrap(
        "transformers.trainer:Trainer._save_checkpoint",
        trainer_checkpoints.save_checkpoint,
        "a marker first, a manifest last; older checkpoints are deleted after that",
        features.CHECKPOINTS,
    ),
    Wrap(
        "transformers.trainer:Trainer.train",
        trainer_checkpoints.train,
        "resumes from complete checkpoints alone, read against their manifest",
        features.CHECKPOINTS,
    ),
    Wrap(
        "transformers.trainer:Trainer._load_from_checkpoint",
        trainer_checkpoints.load_model,
        "loads experts into a model that is not sharded, where stock keeps what they were",
        features.CHECKPOINTS,
    ),
    Wrap(
        "transformers.trainer:Trainer._load_best_model",
        trainer_checkpoints.load_model,
        "loads experts into a model that is not sharded, where stock keeps what they were",
        features.CHECKPOINTS,
    ),
    Wrap(
        "transformers.trainer:Trainer._load_optimizer_and_scheduler",
        trainer_checkpoints.load_safely,
        "loads values alone from DCP's pickles, where torch runs what is in them",
        features.CHECKPOINTS,
    ),
    Wrap(
        "torch.distributed.checkpoint.filesystem:FileSystemReader.read_metadata",
        unpickle.read_metadata,
        "builds metadata alone while a patched model is loaded, on the thread that loads it",
        features.CHECKPOINTS,
    ),
    Wrap(
        "torch.distributed.checkpoint.default_planner:DefaultLoadPlanner.load_bytes",
        unpickle.load_bytes,
        "loads values alone while a patched model is loaded, on the thread that loads it",
        features.CHECKPOINTS,
    ),
    Wrap(
        "accelerate.accelerator:Accelerator.save_state",
        accelerate_states.save_state,
        "a marker first, a manifest last, and experts in hub order while it saves",
        features.ACCELERATE_STATE,
    ),
    Wrap(
        "accelerate.accelerator:Accelerator.load_state",
        accelerate_states.load_state,
        "loads complete checkpoints alone, and values alone from DCP's pickles",
        features.ACCELERATE_STATE,
    ),
    # Ranks of an sp group share their batches
    Wrap(
        "transformers.trainer:Trainer.create_accelerator_and_postprocess",
        create_accelerator,
        "tells the Trainer's Accelerator that ranks of an sp group share their batches, and what "
        "a reference is beside",
        features.TRAINER_SLICES,
    ),
    Wrap(
        "transformers.trainer:Trainer.call_model_init",
        shared_batches.call_model_init,
        "tells it of a model that model_init makes later",
        features.TRAINER_SLICES,
    ),
    Wrap(
        "accelerate.accelerator:Accelerator._prepare_device_mesh",
        shared_batches.loader_mesh,
        "shows data loaders a mesh on which ranks share batches",
        features.SLICES,
    ),
    Wrap(
        "accelerate.accelerator:Accelerator.prepare_data_loader",
        shared_batches.prepare_data_loader,
        "gives ranks of an sp group the same samples in the same order, and refuses loaders that "
        "would end on some ranks before they do on others",
        features.SLICES,
    ),
    Wrap(
        "accelerate.accelerator:Accelerator.prepare_scheduler",
        shared_batches.prepare_scheduler,
        "steps a schedule once per data rank, not per process",
        features.SLICES,
    ),
    Wrap(
        "accelerate.accelerator:Accelerator.gather_for_metrics",
        shared_batches.gather_for_metrics,
        "gathers each sample once",
        features.SLICES,
    ),
    Wrap(
        "transformers.trainer:Trainer.get_tp_size",
        shared_batches.get_tp_size,
        "divides loss scale and total batch size by how many ranks share a batch",
        features.TRAINER_SLICES,
    ),
    Wrap(
        "transformers.trainer:Trainer._get_num_items_in_batch",
        shared_batches.get_num_items_in_batch,
        "keeps a token count of this rank alone, which stock divides as well",
        features.TRAINER_SLICES,
    ),
    Wrap(
        "transformers.trainer:Trainer.floating_point_ops",
        shared_batches.floating_point_ops,
        "counts total_flos once per data rank",
        features.TRAINER_SLICES,
    ),
    Wrap(
        "transformers.trainer:Trainer._track_num_input_tokens",
        shared_batches.track_num_input_tokens,
        "counts num_input_tokens_seen once per data rank",
        features.TRAINER_SLICES,
    ),
    Wrap(
        "transformers.trainer:Trainer.prediction_step",
        shared_batches.prediction_step,
        "joins the logits of slices where someone looks at them",
        features.TRAINER_SLICES,
    ),
    Wrap(
        "accelerate.accelerator:Accelerator.log",
        trackers.log,
        "names a tracker that fails, and the rank: the others wait from then on",
        features.TRACKERS,
    ),
    Wrap(
        "transformers.trainer:Trainer.log",
        expert_load.log,
        "puts the values of an ExpertLoadCallback into the logs before any tracker sees them",
        features.EXPERT_LOAD,
    ),
    # Optimizers of any model, whose errors are reworded
    Wrap(
        "torch.optim.optimizer:Optimizer.__init__",
        optimizers.init,
        "the same in loops without Accelerate, for those that are given DTensors; no state dict "
        "of experts that have moved",
        features.OPTIMIZER_NAMES,
    ),
    Wrap(
        "accelerate.optimizer:AcceleratedOptimizer.step",
        optimizers.step,
        "names an optimizer that cannot take DTensors; torch names the operation; moves the "
        "routers' biases of the model that it was prepared with",
        features.BIASES,
    ),
    Wrap(
        "accelerate.accelerator:Accelerator.clip_grad_norm_",
        optimizers.clip_grad_norm,
        "clips gradients on two meshes, which Accelerate before 1.15 gives to torch's clip",
        features.CLIP,
    ),
    # Adapters on experts
    Wrap(
        "peft.tuners.lora.layer:ParamWrapper._activate_lora",
        adapters.activate,
        "leaves the factors beside the stacked weights, where PEFT makes the merged weights",
        features.ADAPTERS_ON_EXPERTS,
        optional=True,
    ),
    Wrap(
        "peft.tuners.tuners_utils:BaseTuner.forward",
        adapters.call_base_model,
        "calls the model, whose hooks gather its parameters; peft 0.20 calls its forward alone",
        features.ADAPTERS,
        optional=True,
    ),
    Wrap(
        "peft.tuners.tuners_utils:BaseTuner.inject_adapter",
        adapters.inject_adapter,
        "refuses a sharded model, in which a new adapter would be neither split nor in step",
        features.ADAPTER_REFUSALS,
        optional=True,
    ),
    Wrap(
        "peft.peft_model:PeftModel.load_adapter",
        adapters.load_adapter,
        "refuses a sharded model, in which a new adapter would be neither split nor in step",
        features.ADAPTER_REFUSALS,
        optional=True,
    ),
    *(
        Wrap(
            f"peft.tuners.tuners_utils:BaseTuner.{name}",
            partial(adapters.merge, name),
            "refuses a sharded model, whose parts would be merged with whole factors",
            features.ADAPTER_REFUSALS,
            optional=True,
        )
        for name in ("merge_and_unload", "unload", "merge_adapter")
    ),
    Wrap(
        "peft.tuners.tuners_utils:BaseTuner.unmerge_adapter",
        adapters.unmerge,
        "refuses a sharded model that was merged before, of which a half would be unmerged",
        features.ADAPTER_REFUSALS,
        optional=True,
    ),
)


def install() -> None:
    """Wrap every function of the table, once per process.

    Warns of those that an installed version lacks; `features.py` says what is lost without them.
    """
    wrap_all(WRAPPED)
    wrap_imported(WRAPPED_WHEN_IMPORTED)


class WrapReport(NamedTuple):
    """One row of the table, as it stands with the installed versions.

    Not resolved and no error: its package is not installed, and need not be.

    Attributes:
        raises: whether using the feature raises, so that nothing goes wrong unseen.
    """

    target: str
    why: str
    feature: str
    resolved: bool
    raises: bool
    error: str


def wraps() -> list[WrapReport]:
    """Look every target of the table up in the installed versions; wraps nothing."""
    reports = []
    for wrap in WRAPPED:
        error = ""
        if wrap.is_needed:
            try:
                find_owner(wrap)
            except ImportError as missing:
                error = str(missing)
        resolved = wrap.is_needed and not error
        raises = bool(wrap.feature.used_by)
        name = wrap.feature.name
        reports.append(WrapReport(wrap.target, wrap.why, name, resolved, raises, error))
    return reports
