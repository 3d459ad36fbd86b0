"""Define the features that depend on wrapped functions, and the calls that use each feature.

Every row of the table in `install.py` belongs to one feature. If an installed version lacks the
function of a row, a warning names the function and the feature when the row is installed. Calls
that would use the feature raise an error with the same text. If, for example, Accelerate had no
`fsdp2_prepare_model`:

    patch(model)                    warns, in a script that uses Accelerate
    accelerator.prepare(model)      raises an error on 2 ranks
    apply_ep_fsdp2(model)           works, because it does not use the function

Some features list no calls, because a run without one of them cannot silently give wrong results:
the feature only improves an error message, or no call can use it if its function is missing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers
from accelerate import Accelerator
from torch import nn

from hf_moe_ep.state import ModelState, find_state
from hf_moe_ep.upstream.accelerate_and_trainer import list_prepared_models
from hf_moe_ep.upstream.adapters import iterate_parameter_factors
from hf_moe_ep.upstream.wrap import Feature


def _find_states(value: Any) -> list[ModelState]:
    """Return the states of patched models. `value` may be a model, a trainer or an Accelerator."""
    models = [value, getattr(value, "model", None)]
    if isinstance(value, Accelerator):
        models = list_prepared_models(value)
    states = [find_state(model) for model in models if isinstance(model, nn.Module)]
    return [state for state in states if state is not None]


def _has_patched_model(*args: Any, **kwargs: Any) -> bool:
    return any(_find_states(value) for value in (*args, *kwargs.values()))


def _has_sharded_model(*args: Any, **kwargs: Any) -> bool:
    states = [state for value in (*args, *kwargs.values()) for state in _find_states(value)]
    return any(state.meshes is not None for state in states)


def _prepares_unsharded(accelerator: Accelerator, *args: Any, **kwargs: Any) -> bool:
    """Return True if this call of `Accelerator.prepare` would shard a patched model."""
    states = [state for value in args for state in _find_states(value)]
    return accelerator.num_processes > 1 and any(state.meshes is None for state in states)


def _prepares_sp_model(accelerator: Accelerator, *args: Any, **kwargs: Any) -> bool:
    return any(_shares_batches(state) for value in args for state in _find_states(value))


def _trains_sp_model(trainer: transformers.Trainer, *args: Any, **kwargs: Any) -> bool:
    return any(map(_shares_batches, _find_states(trainer)))


def _shares_batches(state: ModelState) -> bool:
    return state.config.ranks_per_batch * (state.config.pp_size or 1) > 1


def _has_stages(trainer: transformers.Trainer, *args: Any, **kwargs: Any) -> bool:
    return any((state.config.pp_size or 1) > 1 for state in _find_states(trainer))


def _prepares_biases(accelerator: Accelerator, *args: Any, **kwargs: Any) -> bool:
    states = [state for value in args for state in _find_states(value)]
    return any(state.config.bias_update_rate is not None for state in states)


def _uses_checkpoints(
    trainer: transformers.Trainer, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any
) -> bool:
    """Return True if this call of `Trainer.train` uses checkpoints of a patched model."""
    saves = trainer.args.save_strategy != "no"
    return _has_patched_model(trainer) and bool(saves or resume_from_checkpoint)


def _has_load_callback(trainer: transformers.Trainer, *args: Any, **kwargs: Any) -> bool:
    from hf_moe_ep.integrations.expert_load import ExpertLoadCallback

    return any(isinstance(c, ExpertLoadCallback) for c in trainer.callback_handler.callbacks)


def _adapts_experts(tuner: Any, *args: Any, **kwargs: Any) -> bool:
    """Return True if PEFT's tuner has an adapter on stacked experts of a patched model."""
    return _has_patched_model(tuner) and any(True for _ in iterate_parameter_factors(tuner.model))


def _make_feature(name: str, **used_by: Callable[..., bool]) -> Feature:
    """Build a feature.

    Args:
        name: the name of the feature in warnings and errors.
        used_by: for keys of `_CALLS`: a function that takes the arguments of such a call and
            returns True if the call uses the feature.
    """
    return Feature(name, {_CALLS[call]: uses_feature for call, uses_feature in used_by.items()})


_CALLS = {
    "prepare": "accelerate.accelerator:Accelerator.prepare",
    "get_state_dict": "accelerate.accelerator:Accelerator.get_state_dict",
    "save_state": "accelerate.accelerator:Accelerator.save_state",
    "load_state": "accelerate.accelerator:Accelerator.load_state",
    "train": "transformers.trainer:Trainer.train",
    "save_model": "transformers.trainer:Trainer.save_model",
    "save_checkpoint": "transformers.trainer:Trainer._save_checkpoint",
    "load_checkpoint": "transformers.trainer:Trainer._load_from_checkpoint",
    "load_best": "transformers.trainer:Trainer._load_best_model",
    "save_pretrained": "transformers.modeling_utils:PreTrainedModel.save_pretrained",
    "save_adapters": "peft.peft_model:PeftModel.save_pretrained",
    "get_prompt": "peft.peft_model:PeftModel.get_prompt",
    "tuner_forward": "peft.tuners.tuners_utils:BaseTuner.forward",
}

SHARDING = _make_feature(
    "sharding a patched model in accelerator.prepare", prepare=_prepares_unsharded
)
CPU_RANKS = _make_feature("FSDP2 on CPU ranks for an Accelerator that is created before patch()")
EVALUATED = _make_feature("sharding models that are evaluated and never trained")
HUB_LAYOUT = _make_feature(
    "saving a sharded model in the hub's layout",
    save_model=_has_sharded_model,
    save_pretrained=_has_sharded_model,
    get_state_dict=_has_sharded_model,
)
ACCELERATE_STATE = _make_feature(
    "checkpoints of a sharded model by Accelerate",
    save_state=_has_sharded_model,
    load_state=_has_sharded_model,
    save_checkpoint=_has_sharded_model,
    load_checkpoint=_has_sharded_model,
)
ADAPTER_FILES = _make_feature(
    "saving the adapters of a sharded model", save_adapters=_has_sharded_model
)
PROMPTS = _make_feature(
    "prompt and prefix tuning of a sharded model", get_prompt=_has_sharded_model
)
CHECKPOINTS = _make_feature(
    "the Trainer's checkpoints of a patched model",
    train=_uses_checkpoints,
    load_checkpoint=_has_patched_model,
    load_best=_has_patched_model,
)
SLICES = _make_feature(
    "sp_size, cp_size or pp_size > 1 under Accelerate", prepare=_prepares_sp_model
)
TRAINER_SLICES = _make_feature(
    "sp_size, cp_size or pp_size > 1 in the Trainer", train=_trains_sp_model
)
STAGES = _make_feature("gradient norms over pipeline stages in the Trainer", train=_has_stages)
LOGITS = _make_feature("a loss without the logits of whole batches in the Trainer")
FULL_EVAL = _make_feature("bf16_full_eval and fp16_full_eval of a model that is not sharded yet")
TRACKERS = _make_feature("the error that names a failing tracker")
EXPERT_LOAD = _make_feature("ExpertLoadCallback", train=_has_load_callback)
BIASES = _make_feature(
    "bias_update_rate under Accelerate and the Trainer", prepare=_prepares_biases
)
CLIP = _make_feature("Accelerator.clip_grad_norm_ over experts and all other parameters")
ADAPTERS_ON_EXPERTS = _make_feature("LoRA on stacked experts", tuner_forward=_adapts_experts)
ADAPTERS = _make_feature("adapters in a sharded model")
ADAPTER_REFUSALS = _make_feature("the refusal to attach or merge adapters of a sharded model")
ENGINES = _make_feature("sending a sharded model's weights to a generation engine")
