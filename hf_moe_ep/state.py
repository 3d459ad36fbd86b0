"""The state of a patched model, and a table of all state that this package keeps or changes.

`patch` sets the attribute `STATE`: a `ModelState` on the root, and a `MoELayer` on every experts
module. A deep copy of the model therefore copies the state as well, and no state is global.

The table lists the state that outlives a function call or that other code can see. It leaves out
the fields of our own dataclasses, which are described there: `ModelState` and `MoELayer` (below),
`Stage` and `Boundary` (`pipeline/stage.py`), `LayerSlice` (`sequence/mixers.py`). A test reads the
source and fails if a row is missing. NAMES are the attributes, functions, classes or keywords to
search for in FILE. The last column says what they contain, and for how long. "(The) same" refers to
the row above.

    file | names | content, and lifetime
    -- set by patch on a model, until unpatch --
    state.py | _hf_moe_ep replace setattr delattr | attributes of stock modules
    patch.py | STATE | the model's ModelState, on its root
    moe/attach.py | STATE | a MoELayer on every experts module
    mtp/build.py | setattr data | of a new head, a child of the causal LM until unpatch
    moe/recompute.py | _gradient_checkpointing_func checkpoint_fn | wrapped at a forward
    moe/aux_loss.py | load_balancing_loss_func | a switch, in the file of the model's forward
    upstream/experts_interface.py | _experts_implementation_internal register | names our forward
    upstream/attention_interface.py | _attn_implementation_internal register | the same
    upstream/attention_interface.py | _hf_moe_ep_stock _hf_moe_ep_wrapped_attention | the same
    sequence/attach.py | forward | the forwards of delta nets
    routing/bias.py | data | the bias of a layer's router, which is fp32 from patch on
    -- set later, until unpatch --
    placement/hub_order.py | _hf_moe_ep_guarded | ModelState, on experts' parameters and optimizers
    moe/shared_experts.py | forward _input _deferred _computed | while a MoE block runs
    moe/forwards.py | function | the forward of a module, if ours replaced Liger's
    compiled/layers.py | _hf_moe_ep_compiled _hf_moe_ep_layer | of layers and MoE blocks
    compiled/function.py | is_checked warned | if the graphs of a function exist, or are too many
    compiled/subclasses.py | __class__ _hf_moe_ep_stock_class | a subclass of the class of a module
    moe/stacked.py | setattr delattr data | weights of described MoE blocks
    upstream/attention_interface.py | _hf_moe_ep_masks __dict__ | a view of the config of models
    sequence/context_calls.py | _hf_moe_ep_path | the name of an attention module, for errors
    routing/recording.py | ids | the routes of an open record, replaced at each forward
    integrations/shared_batches.py | compute_loss_func | of a Trainer, while stages run its loss
    checkpoints/hub/extra.py | _hf_moe_ep_loaded_files setattr | files of a model that `run` loads
    upstream/conversion.py | _weight_conversions | those of the load, as transformers stores them
    checkpoints/hub/unread.py | setattr | the parameters that replace parameters on meta
    upstream/modules.py | _apply | explains moves of parameters on meta; keeps biases in fp32
    -- for one forward or backward --
    loss/attach.py | _loss_function forward | of the causal LM and its head
    mtp/attach.py | forward embeds args kwargs hidden | what the head gets, during a forward
    pipeline/gradients.py | grad | of parameters: set aside during a forward of all stages
    pipeline/run.py | grad | of a tied weight: the sum of the gradients of two stages
    sequence/slices.py | hf_moe_ep_slice | a keyword argument through the whole model
    sequence/slices.py | transfer | keys, values or their gradients, while they are sent
    sequence/split.py | positions | in a slice: the positions of the whole sequence, for attention
    sequence/split.py | documents part | in a slice, and the slice that runs outside of layers
    sequence/split.py | document_numbers | in a slice of a forward that torch.compile traces
    sequence/mixers.py | _gradient_checkpointing_func | of a layer, wrapped while it runs
    sequence/mask_rows.py | part | the slice, during a forward that builds masks
    sequence/mask_rows.py | has_mask_rows | in a slice: if masks have only the rows of this rank
    sequence/latent_cache.py | keys_are_gathered | in a slice: if a cache has gathered latents
    sequence/ulysses.py | keys_are_gathered | the same, until the attention of the layer
    sequence/packed_rows.py | separated | masks for packed rows
    sequence/mixers.py | current_split | how the arguments of a mixer are gathered
    vision/encoders.py | gathered in_graph | all-gathered encoders, until the decoder begins
    vision/branches.py | _hf_moe_ep_only_others_have_pictures | on the token types of such a rank
    moe/chosen_topk.py | ChosenTopK | replaces torch.topk, while a layer is recomputed or replayed
    moe/aux_loss.py | forward learns undivided returned | the losses of a forward, on marked logits
    moe/routers_alone.py | _recorded | logits of the second run of the routers, during a forward
    moe/dispatch/async_exchange.py | received_grads needs | gradients that autograd does not pass on
    ops/expert_mlp.py | finish | computes weight gradients that a backward has postponed
    sharding/gathered.py | training | False on a rank whose `generate` has ended before others
    -- set by sharding on a model, for its life --
    pipeline/cut.py | _loss_function | replaced on all stages but the last
    pipeline/stage.py | setattr | numbers and strings of the layers that stand-ins replace
    upstream/modules.py | _call_impl | of a model with stages: runs the schedule
    sharding/values.py | data setattr | parameters become DTensors, in place
    sharding/replaced_parameters.py | _hf_moe_ep_replaced | on parameters before sharding
    sharding/whole_experts.py | setattr | parameters of experts that FSDP2 does not shard
    upstream/sharded_models.py | _get_name | the stock class name of a sharded model
    upstream/models.py | support_avx512bf16_for_cpu | bitsandbytes' layers must not repack weights
    sharding/gathered.py | setattr named_modules generate may_be_gathered is_showing_shards | hooks
    sharding/refused_calls.py | setattr resize_token_embeddings | refused methods of models
    upstream/sharded_models.py | _CAN_RECORD_REGISTRY | names of classes that FSDP2 created
    upstream/sharded_models.py | all_gather_outputs | FSDP2's, emptied when a model is cast
    upstream/sharded_models.py | _training_state | FSDP2's, of a module whose backward has ended
    upstream/sharded_models.py | grad _partial_reduce_output | FSDP2's, deleted after an error
    upstream/sharded_models.py | all_gather_state iter_forward_root is_last_backward | the same
    upstream/sharded_models.py | unsharded_accumulated_grad | the same
    integrations/optimizers.py | setattr | `step` of an optimizer that Accelerate prepared
    integrations/optimizers.py | _hf_moe_ep_followed | models whose biases that step updates
    -- of the process --
    upstream/wrap.py | _hf_moe_ep_wrapper _hf_moe_ep_rows | the table of `integrations/install.py`
    upstream/wrap.py | __class__ setattr | the class of an Accelerator or Trainer: a subclass of it
    upstream/wrap.py | _missing _checked _in_force _specialised | wraps that exist or are missing
    upstream/wrap.py | exec_module meta_path | calls a function after the import of a module
    upstream/accelerate_and_trainer.py | __getattr__ __all__ Accelerator | of accelerate, until used
    runner/hook.py | _warn_once propagate name disabled | warnings; the log of `hf-moe-ep run`
    runner/path/sitecustomize.py | exec_module meta_path | installs the hook of `hf-moe-ep run`
    upstream/sharded_models.py | _custom_op_handlers | DTensor's check for infinities, with etp_size
    placement/hub_order.py | _watch_new_optimizers | a hook of torch, from balance_experts on
    sharding/replaced_parameters.py | _handles | the same, until the first step after sharding
    integrations/prepare.py | _hf_moe_ep_taken_sizes | of a ParallelismConfig, for later models
    integrations/prepare.py | fsdp_plugin | Accelerate's state, for FSDP on CPU ranks
    upstream/accelerate_and_trainer.py | distributed_type | the same
    ranks/interpreter_end.py | register | a short wait at the interpreter's end
    ops/self_check.py | check_both_sizes check_once warn_once | results of checks of the kernels
    ops/operators.py | _make_formula | formulas of experts, by their parameters
    ops/kernels/blocks.py | _find_generation | the row of the table that a GPU uses
    ops/kernels/dgated.py | _list_constants _list_bias_constants | constants of launches, and builds
    ops/kernels/gate_up.py | _list_constants | the same
    ops/kernels/grouped_mm.py | _list_constants | the same
    ops/kernels/outer.py | _list_constants | the same
    ops/kernels/reduce.py | _list_combine_constants _list_sum_constants | the same
    ops/kernels/sort_pairs.py | _list_constants | the same
    ops/autograd.py | _zero | the element of placeholder gradients, by dtype and device
    ops/sum_check.py | check_sums_once | results of checks of compiled sums
    ops/permute.py | _warn_once | the warnings that torch computes these sums
    ops/quantised.py | _make_nested_codes | values of the bytes of nested scales, by device
    compiled/subclasses.py | _create_class_of_forward _create_class_of_call | subclasses of classes
    sequence/partial_attention.py | _compiled_flex_attention | the compiled kernel of FlexAttention
    plan.py | _compiled | patterns of module names
    upstream/gloo.py | _list_devices | network devices of a process
    upstream/models.py | list_cache_methods | names of the methods of Transformers' caches
    upstream/requirements.py | list_version_problems | packages outside their allowed ranges
    upstream/code.py | _find_used_names _list_arguments | names and arguments in the code of a class
    upstream/causal_loss.py | _find_other_use _passes_arguments | logits and loss of a forward
    __init__.py | __class__ | the package: its names are imported at first use
    -- in objects of Accelerate and the Trainer, for a run --
    integrations/shared_batches.py | _hf_moe_ep_sharing scheduler | the number of ranks per batch
    integrations/shared_batches.py | _hf_moe_ep_batch_sizes | their sizes, for errors
    integrations/shared_batches.py | _hf_moe_ep_stages | the number of pipeline stages
    upstream/accelerate_and_trainer.py | dp_shard_size setattr | of a ParallelismConfig, taken over
    upstream/grpo.py | setattr | methods of one GRPO trainer and its engine, which replay routing
    integrations/install.py | setattr | methods of one trainer of TRL or ms-swift
    upstream/accelerate_and_trainer.py | gather_function | of one Trainer, set to its Accelerator's
    integrations/axolotl.py | experts_implementation | of axolotl's configuration, before loading
    integrations/engines.py | _hf_moe_ep_sent setattr | of TRL's objects that sent extra tensors
    integrations/new_adapters.py | target_parameters | of a LoraConfig that --lora-experts extends
    integrations/saving.py | replaced | Accelerate's functions that save, during a save
    integrations/references.py | _hf_moe_ep_policy | the policy of a reference model
    integrations/references.py | _hf_moe_ep_meshes | of all models of an Accelerator
    integrations/shared_batches.py | dataset generator initial_seed | of a data loader
    integrations/shared_batches.py | worker_init_fn remainder | of a data loader
    integrations/shared_batches.py | setattr | attributes that Accelerate sets on a scheduler
    upstream/frameworks.py | tp_size total_samples | of the sampler of a loader of ms-swift
    upstream/frameworks.py | setattr | the arguments of a Trainer whose steps axolotl has counted
    integrations/optimizers.py | grad | of parameters, None in a step that ms-swift would skip
    integrations/shared_batches.py | num_input_tokens_seen | counted once per data rank
    upstream/hub.py | generation_config data | of a model loaded by `from_pretrained`
    upstream/models.py | name_or_path _name_or_path | the same
    integrations/accelerate_states.py | step | an Accelerator's, which load_state sets to rank 0's
    -- replaced during one call --
    runner/hook.py | _is_building | true while transformers builds a model
    upstream/loading.py | _load_pretrained_model force_cpu | transformers', until a model is read
    integrations/prepare.py | auto_wrap_policy activation_checkpointing | of the user's FSDP plugin,
        while Accelerate prepares
    integrations/prepare.py | transformer_cls_names_to_wrap | the same
    integrations/prepare.py | backend | of Accelerate's compilation, the same
    upstream/accelerate_and_trainer.py | data_ptr | of parameters without memory, the same
    upstream/captured_outputs.py | compiling global_var | transformers' collector, in a layer
    upstream/compiler.py | force_non_lazy_backward_lowering | torch's setting, in a compiled layer
    upstream/compiler.py | skip_nnmodule_hook_guards | torch's setting, in a compiled layer
    integrations/accelerate_states.py | automatic_checkpoint_naming | Accelerate's, while it saves
    integrations/optimizer_states.py | get_optimizer_state_dict | torch's, while Accelerate saves
    integrations/optimizer_states.py | set_optimizer_state_dict | the same, while it loads
    upstream/accelerate_and_trainer.py | has_mixed_dtensor | the Trainer's, while it makes groups
    integrations/trackers.py | trackers | Accelerate's, one at a time while it logs
    integrations/trainer_checkpoints.py | _postponed_calls | calls that wait for a manifest
    upstream/adapters.py | named_modules | of a model, while PEFT collects the tensors to save
    upstream/adapters.py | unmerge | of layers whose adapters were merged before sharding
    upstream/adapters.py | _move_adapter_to_device_of_base_layer setattr | of PEFT, for factors
    upstream/adapters.py | get_peft_model_state_dict | PEFT's, while it saves adapters of stages
    upstream/adapters.py | set_peft_model_state_dict | the same, while an adapter is loaded
    upstream/adapters.py | get_layer_status | PEFT's, for a pipeline stage without adapters
    upstream/sharded_models.py | nn | FSDP2's, while it creates parameters of bytes
    upstream/gloo.py | ProcessGroupGloo | torch's class, while process groups are created
    upstream/gloo.py | _devices _threads _timeout setattr | options of such a group
    checkpoints/hub/configs.py | architectures dtype | of a config, while it is written
    checkpoints/storage/planner.py | DefaultSavePlanner | torch's, which Accelerate saves with
    checkpoints/storage/planner.py | DefaultLoadPlanner | the same, for loads
    checkpoints/convert.py | read_metadata | of one reader, for its life
    upstream/replaced.py | setattr | the rows above; in a plan, functions that need real ranks
    planner/count.py | resize_ | of torch's storages, while tensors are counted
    upstream/host_copies.py | to | of torch's tensors, while copies to the host are counted
    -- threads --
    ranks/background.py | _SaveThread | the list of threads shows which saves still run
"""

from __future__ import annotations

import copy
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from hf_moe_ep.config import ParallelConfig
from hf_moe_ep.dispatcher import Dispatcher, RouteSource
from hf_moe_ep.ops.formula import ExpertFormula
from hf_moe_ep.ops.quantised import BLOCK_SCALE, NESTED_SCALE, Quantisation, Quantised
from hf_moe_ep.plan import ModelPlan
from hf_moe_ep.ranks.background import Saver
from hf_moe_ep.ranks.mesh import Meshes, SharedMeshes, Stages
from hf_moe_ep.upstream.frameworks import how_to_shard
from hf_moe_ep.upstream.sharded_models import inside_ddp_forward

STATE = "_hf_moe_ep"


class WasAbsent:
    """Stands for the old value of an attribute that did not exist.

    This is a class and not an instance, because a deep copy of a model copies instances but not
    classes, and `restore_attributes` compares by identity.
    """


# (object, attribute, old value); the value is `WasAbsent` if there was no such attribute.
Undo = list[tuple[Any, str, Any]]


def replace_attribute(undo: Undo, owner: Any, name: str, value: Any) -> None:
    """Set an attribute, so that `restore_attributes(undo)` can restore the old value."""
    undo.append((owner, name, vars(owner).get(name, WasAbsent)))
    setattr(owner, name, value)


def restore_attributes(undo: Undo) -> None:
    """Restore all attributes in `undo`, the last one first.

    After Ctrl-C at any line of this function or of `replace_attribute`, another call restores the
    rest.
    """
    while undo:
        owner, name, value = undo[-1]
        if value is not WasAbsent:
            setattr(owner, name, value)
        elif name in vars(owner):
            delattr(owner, name)
        undo.pop()


@dataclass
class ModelState:
    """The state of a patched model. The model and its MoE layers share this object."""

    # Accelerate's compilation may add `compile_layers` to the config (integrations/prepare.py).
    config: ParallelConfig
    plan: ModelPlan
    num_experts: int
    # Set by sharding, like `policy`: a model is sharded if it has meshes.
    meshes: Meshes | None = None
    policy: MixedPrecisionPolicy | None = None
    # The dtypes of the parameters before fp32 masters replaced them, by name. Saved weights have
    # these dtypes.
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    forward_number: int = 0
    # True if gradients were enabled when the current forward was called.
    leads_to_gradients: bool = False
    # The `RealTokens` (moe/padding.py) of the current forward, which are not padding; None if the
    # experts compute all tokens.
    real_tokens: Any = None
    # [T], 1 for the tokens of the current forward that are counted, 0 for others (moe/counting.py);
    # None if all are counted.
    counted_tokens: Tensor | None = None
    # True during a training forward whose tokens were among the arguments of the causal LM
    # (moe/counting.py).
    batch_is_known: bool = False
    # [layers, E], how often this rank's tokens chose each expert (moe/counting.py); None before the
    # first counted forward.
    choice_counts: Tensor | None = None
    # The counts at the last reset of each reader, such as `expert_load` (routing/counts.py).
    count_baselines: dict[str, Tensor] = field(default_factory=dict)
    # True if losses computed with num_items_in_batch are summed over data ranks; False if such a
    # loss is the mean of one rank.
    sums_losses: bool = True
    # True while the Trainer predicts: logits are then gathered even if config.gather_logits is
    # False.
    gather_logits: bool = False
    # True while a Trainer runs a forward of which it reads only the loss (loss/attach.py).
    only_loss_is_read: bool = False
    # With pipeline stages: the number by which the sum of token losses is divided before the aux
    # loss is added, so that both have the weights that TRL's SFTTrainer gives them
    # (integrations/shared_batches.py). None: the number of tokens of the batch.
    loss_divisor: Any = None
    # With pp_size > 1, during a training step of a Trainer with a compute_loss_func: the
    # `CallerLoss` (pipeline/caller_loss.py).
    caller_loss: Any = None
    # True during a forward whose loss is computed without logits (loss/attach.py).
    loss_is_fused: bool = False
    # With pp_size > 1, from sharding on: the `Stage` (pipeline/stage.py) that this rank holds.
    stage: Any = None
    # The modules that compute embeddings of pictures and sound. Set by sharding. Each module is an
    # FSDP2 unit: FSDP2 all-gathers its parameters together.
    encoders: list[Any] = field(default_factory=list)
    # With fsdp_double_buffer, from sharding on: the `FixedBuffers` (sharding/buffers.py).
    buffers: Any = None
    # Sends tokens to the ranks of their experts. Set by sharding with ep_size or etp_size > 1.
    dispatcher: Dispatcher | None = None
    # With dispatch_chunks="auto": the number that the first forward in training has chosen.
    num_chunks: int | None = None
    # The `CheckpointedRouting` (moe/recompute.py) of the checkpointed layer that runs now, or None.
    checkpointed_routing: Any = None
    # True once the recompute of a layer has needed the output of its experts (moe/layer.py).
    recomputes_outputs: bool = False
    # The arguments of torch.compile with which `compile_layers` has compiled the layers
    # (compiled/layers.py); None if they are not compiled.
    compile_options: dict[str, Any] | None = None
    # With compiled layers: the `CompiledFunction` (compiled/function.py) for the cross-entropy of a
    # fused loss.
    compiled_cross_entropy: Any = None
    # True if the graphs of compiled layers may include MoE blocks (`MoELayer.can_be_traced`). The
    # flag is set before each forward.
    blocks_are_traced: bool = False
    # A tensor of one boolean: whether compiled layers count tokens in the current forward. None
    # before the first forward of compiled layers.
    is_counted: Tensor | None = None
    # True if sharding has put the experts into the FSDP2 units of their layers.
    experts_in_layer_units: bool = False
    # If ranks share a batch: the mixers as (pattern of their names, class). The key says how these
    # ranks divide them (`MixerSplit` in sequence/mixers.py).
    mixers: dict[str, tuple[tuple[str, str], ...]] = field(default_factory=dict)
    # With cp_size > 1: (True if tokens are in zigzag order, how attention gets the keys and values
    # of other ranks: `KeyValueExchange` in sequence/kv_exchange.py).
    context: tuple[bool, tuple[Any, ...]] | None = None
    # The open `record` or `replay` of routing.
    routing: RoutingSession | None = None
    # Runs saves in the background. Set by the first such save.
    saver: Saver | None = None
    # True if hooks refuse state dicts while the experts are not in hub order. In hub order, row e
    # of a stacked tensor is expert e, as in files.
    guards_state_dicts: bool = False
    # In a block of `experts_in_hub_order`: the optimizers that the block has put into hub order.
    # None outside of a block.
    optimizers_in_order: list[Any] | None = None
    # The parameters that are read when the model is sharded (checkpoints/hub/unread.py), or None.
    unread: Any = None
    # The sum of the losses of the head for multi-token prediction and the number of its labels on
    # this rank since the last reset (mtp/attach.py); None if there were none.
    mtp_sums: Tensor | None = None
    # On rank 0: references to the extra tensors of the checkpoint, which the model's class ignores
    # (checkpoints/hub/extra.py). None if there are none.
    extra: Any = None
    # True if a Trainer prints a report of the model and logs its tokens per second.
    is_reported: bool = False
    # True if LoRA adapters also adapt the experts, even if their config does not target experts.
    adapts_experts: bool = False
    # Checksums of the bytes of quantised experts, by parameter name.
    known_sums: dict[str, KnownSums] = field(default_factory=dict)
    # Calls `patch` with the config and plan of this model, to patch a reference, or this model with
    # other settings.
    patch_alike: Callable[..., nn.Module] | None = None
    # The id of the process that patched the model. If another process has unpickled the model, the
    # model must be patched again, because that process lacks our wrappers of Accelerate, of
    # Transformers and of PEFT.
    process: int = field(default_factory=os.getpid)
    # With pp_size > 1, the meshes of a model that was cut into stages, but not sharded yet.
    meshes_of_stage: Meshes | None = None
    # The meshes of the models that the same Accelerator shards. Two models share their process
    # groups if their layouts are the same.
    shared_meshes: SharedMeshes = field(default_factory=SharedMeshes)
    # The states of all experts modules, in order. Each is also the attribute STATE of its module.
    moe_layers: list[MoELayer] = field(default_factory=list)
    # False while modules run that may call topk, but do not route: attention with an indexer, and
    # everything outside of the MoE blocks that a plan describes (`ModelPlan.block`).
    may_route: bool = True
    # The forwards that other packages must not replace (moe/forwards.py).
    relied_on: list[ReliedOn] = field(default_factory=list)
    # The attributes that `replace` has set, with their old values.
    undo: Undo = field(default_factory=list)

    def replace(self, module: nn.Module, name: str, value: Any) -> None:
        """Set an attribute of a module; `unpatch` restores the old value."""
        replace_attribute(self.undo, module, name, value)

    def has_replaced(self, module: nn.Module, name: str) -> bool:
        """Return True if `replace` has set this attribute of a module."""
        return any(owner is module and name == other for owner, other, _ in self.undo)

    def restore(self) -> None:
        """Restore all attributes that `replace` has set."""
        restore_attributes(self.undo)

    @property
    def mesh_device(self) -> torch.device:
        """The device of the ranks' meshes; the CPU if the model is not sharded."""
        return torch.device("cpu") if self.meshes is None else self.meshes.device

    @property
    def exchanges_rows(self) -> bool:
        """True if MoE layers send rows to other ranks: if ep_size or etp_size is more than 1."""
        return self.meshes is not None and self.meshes.dispatch.size() > 1

    def make_never_sharded_error(self) -> ValueError:
        """Return the error of a model that runs, or is moved to a device, without being sharded."""
        setting, effect = "", ""
        for name in ("cp_size", "etp_size"):
            if (size := getattr(self.config, name) or 1) > 1:
                setting += f", {name}={size}"
        if self.config.experts_dtype is not None:
            setting += f", experts_dtype={self.config.experts_dtype!r}"
            effect = ", and experts would not be quantised"
        return ValueError(
            f"this model was patched with ep_size={self.config.ep_size}, "
            f"sp_size={self.config.sp_size}, "
            f"dp_replicate_size={self.config.dp_replicate_size}, "
            f"pp_size={self.config.pp_size}{setting} but never sharded: "
            f"every process would train alone{effect}. {how_to_shard()}"
        )

    def check_ready(self) -> None:
        """Raise ValueError if training would silently ignore a setting of the config."""
        if self.meshes is None and (self.config.needs_sharding or self.unread is not None):
            raise self.make_never_sharded_error()
        if inside_ddp_forward():
            raise ValueError(
                f"this patched model is wrapped in DistributedDataParallel, which does not shard "
                f"experts. {how_to_shard()}"
            )


@dataclass(frozen=True)
class KnownSums:
    """Checksums of this rank's shard of a frozen parameter, and fields that reveal later changes.

    Attributes:
        parameter: the parameter.
        address: the memory address of this rank's shard.
        written: how often the parameter and its shard had been written in place (`count_writes`).
        sums: the checksums of `checkpoints/training/base.py`.
    """

    parameter: weakref.ref[Tensor]
    address: int
    written: tuple[int, ...]
    sums: Tensor

    def still_hold(self, parameter: Tensor, part: Tensor, written: tuple[int, ...]) -> bool:
        """Return True if neither the parameter nor its shard `part` has changed."""
        same_memory = self.parameter() is parameter and self.address == part.data_ptr()
        return same_memory and self.written == written


@dataclass(frozen=True)
class Compute:
    """The settings with which the experts of one module are computed.

    Attributes:
        formula: the computation of an expert between its two matrices.
        transposed: True if the module stores the transposes of its matrices.
        backend: "torch" or "triton".
        reason: why the backend is "torch"; empty if the backend is "triton".
        required: True if the user chose "triton". Tensors that the kernels do not support then
            raise an error; otherwise PyTorch computes them.
        recompute: True if backward recomputes the pre-activations.
        quantisation: the format of the matrices from sharding on; None if they are not quantised.
        weights_inputs: True if the routing weight of an expert multiplies its input, and not its
            output.
        turns_factors: True if PEFT treats the transposed matrices [in, out] as [out, in]. Its
            factor lora_A is then the transpose of lora_B of the right matrix, and vice versa.
    """

    formula: ExpertFormula
    transposed: bool
    backend: str
    reason: str
    required: bool
    recompute: bool
    quantisation: Quantisation | None = None
    weights_inputs: bool = False
    turns_factors: bool = False

    @property
    def parameters(self) -> tuple[str, str]:
        """The names of the two stacked matrices: up (or gate and up joined), and down."""
        return "gate_up_proj" if self.formula.gated else "up_proj", "down_proj"


@dataclass
class CorrectionBias:
    """A bias that a router adds to its scores when it chooses experts.

    The routing weights are computed from the scores without this bias. Sharding replaces the
    tensor, so the tensor is looked up by name.

    Attributes:
        owner, name: the module that owns the tensor, and the name of the tensor in that module.
        stock_dtype: the dtype before `patch`, which `unpatch` restores.
    """

    owner: nn.Module
    name: str
    stock_dtype: torch.dtype

    @property
    def tensor(self) -> Tensor:
        """The bias: one number per expert, the same on every rank."""
        bias = getattr(self.owner, self.name)
        assert isinstance(bias, Tensor)
        return bias


@dataclass
class MoELayer:
    """The state of one experts module.

    Attributes:
        index: the number of the module among all experts modules of the model.
        model: the state of the model.
        compute: the settings of the computation; None if the model's own loop computes the experts.
        adapters: the active adapters (`lora.factors.Adapter`) by the name of the parameter that
            they adapt, during a forward; empty between forwards.
        grad_divisor: our backward divides the gradients of the experts by this number
            (`sharding/options.py`).
        whole_weights: the names of the module's parameters that FSDP2 does not hold
            (`sharding/whole_experts.py`).
        weights_dtype: the dtype to which `whole_weights` are cast before the products; None if they
            are not cast.
        correction: the bias of the router, if `bias_update_rate` is set.
        slots_E: [E] int64, the row of each expert in the stacked tensors; None in hub order (row
            e is expert e).
        shared: the shared experts of the layer's block (`moe/shared_experts.py`), or None.
        may_choose_no_expert: True if expert ids may also be the number of experts, which means "no
            expert".
        can_be_traced: True if no hook or adapter inside of the MoE block keeps torch.compile from
            tracing the block. `compiled/layers.py` sets it before each forward.
        index_tensor: `index` as a tensor. torch.compile makes one graph for all layers if they
            differ in a tensor, but one graph per layer if they differ in a number.
    """

    index: int
    model: ModelState
    compute: Compute | None
    adapters: dict[str, Sequence[Any]] = field(default_factory=dict)
    grad_divisor: int = 1
    whole_weights: frozenset[str] = frozenset()
    weights_dtype: torch.dtype | None = None
    correction: CorrectionBias | None = None
    slots_E: Tensor | None = None
    shared: Any = None
    may_choose_no_expert: bool = False
    can_be_traced: bool = False
    index_tensor: Tensor = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.index_tensor = torch.tensor(self.index, device="cpu")


@dataclass
class ReliedOn:
    """A module whose forward must be `function`, or a wrapper of that function."""

    name: str
    module: nn.Module
    function: Callable[..., Any]
    is_experts: bool


class RoutingSession:
    """An open `record` or `replay` of `routing/`.

    Attributes:
        route_source: the source of the expert ids of the current forward.
        refusal: the error of routes that cannot be replayed. This error is raised after the other
            ranks have received `route_source`, so that all ranks raise an error.
    """

    refusal: ValueError | None = None

    def begin_batch(self, num_rows: int, num_tokens: int) -> None:
        """Begin a call of a model with pipeline stages, whose micro-batches are forwards."""

    def end_batch(self, stages: Stages, device: torch.device) -> None:
        """End a call of a model with pipeline stages; every rank of the pipeline calls this."""

    @property
    def route_source(self) -> RouteSource:
        return RouteSource.LIVE

    def tensors(self, device: torch.device) -> dict[str, Tensor]:
        """Return the tensors, by name, that must be equal on all ranks that share a sequence."""
        raise NotImplementedError

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy of the model has no open session."""
        return


class PackageHook:
    """Base class of all hooks of this package. `unpatch` removes the hooks that inherit it."""

    def end_interrupted(self, module: nn.Module) -> None:
        """Restore what the hook has changed on `module` for a forward that Ctrl-C has ended.

        After Ctrl-C torch skips the forward hooks. `unpatch` and `patch` call this function before
        they examine the model.
        """


class OfModel(PackageHook):
    """A hook that shares an object with other hooks of its model.

    PEFT copies single modules (modules_to_save). Such a copy belongs to the same model, and keeps
    the hook itself: a copied hook would lead to a copy of the whole model.
    """

    def __init__(self, root: nn.Module) -> None:
        self.root = root

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self.root) not in memo:  # a copy of a whole model begins with its root
            return self
        copied = memo[id(self)] = type(self).__new__(type(self))
        vars(copied).update({name: copy.deepcopy(x, memo) for name, x in vars(self).items()})
        return copied


class StateHook(PackageHook):
    """A hook that reads or changes the state of a model."""

    def __init__(self, state: ModelState) -> None:
        self.state = state


class ShardedOnly(StateHook):
    """A hook that does nothing on a model that is not sharded.

    torch.compile can trace such a model through the hook. On a sharded model the hook calls `run`,
    which is not traced.
    """

    def __call__(self, *args: Any) -> Any:
        return None if self.state.meshes is None else _not_traced(self.run, *args)

    def run(self, *args: Any) -> Any:
        """Run the hook, with the arguments and the return value of a torch hook."""
        raise NotImplementedError


@torch.compiler.disable
def _not_traced(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


def check_is_model(model: object) -> None:
    """Raise ValueError if `model` is not a model, but for example a class or a name."""
    if isinstance(model, nn.Module):
        return
    got = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
    shown = f" {str(model)!r}" if isinstance(model, str | os.PathLike) else ""
    raise ValueError(
        f"a model is needed, that is an nn.Module, got {got}{shown}; load the model first: "
        f"model = AutoModelForCausalLM.from_pretrained(...)"
    )


def find_state(model: nn.Module) -> ModelState | None:
    """Return the state of a patched model, wrapped or not; None if the model is not patched.

    Raises:
        ValueError: `model` is not a model.
    """
    check_is_model(model)
    for module in model.modules():
        state = getattr(module, STATE, None)
        if isinstance(state, MoELayer):
            return state.model
        if isinstance(state, ModelState):
            return state
    return None


def iterate_experts_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module, MoELayer]]:
    """Yield (name, module, state) of every experts module of a patched model, without wrappers."""
    for name, module in model.named_modules():
        layer = vars(module).get(STATE)
        if isinstance(layer, MoELayer):
            yield name, module, layer


def iterate_quantised_matrices(model: nn.Module) -> Iterator[tuple[str, Quantised, Quantisation]]:
    """Yield (name, tensors, format) of the quantised stacked matrices of a sharded model."""
    for path, module, layer in iterate_experts_modules(model):
        compute = layer.compute
        if compute is None or compute.quantisation is None:
            continue
        for name in compute.parameters:
            scale = getattr(module, name + BLOCK_SCALE, None)
            # Sharding quantises the matrices and adds the scales.
            if scale is not None:
                nested = getattr(module, name + NESTED_SCALE, None)
                stored = Quantised(getattr(module, name), scale, nested)
                yield f"{path}.{name}", stored, compute.quantisation


def holds_quantised_experts(model: nn.Module) -> bool:
    """Return True if the experts of a sharded model are quantised, on any pipeline stage."""
    state = find_state(model)
    if state is None or state.meshes is None:
        return False
    return state.config.experts_dtype is not None


def refuse_quantised_experts(model: nn.Module, function_name: str) -> None:
    """Raise ValueError if experts are stored quantised, because their values were rounded."""
    if holds_quantised_experts(model):
        kind = patched_state(model).config.experts_dtype
        raise ValueError(
            f"{function_name} cannot export experts that are held quantised "
            f"(experts_dtype={kind!r}); their original values are in the checkpoint from which "
            f"they were loaded. Save the adapter with save_pretrained(model, directory), which "
            f"PEFT and inference engines load together with that checkpoint, or merge both: "
            f"hf-moe-ep merge-adapter BASE ADAPTER OUT"
        )


def get_computing_device(model: nn.Module) -> torch.device:
    """Return the device on which this rank computes.

    This is the device of the parameters if the model is not sharded.
    """
    meshes = patched_state(model).meshes
    return next(model.parameters()).device if meshes is None else meshes.device


def patched_state(model: nn.Module) -> ModelState:
    """Return the state of a model; raise ValueError if the model is not patched."""
    state = find_state(model)
    if state is None:
        raise ValueError("this model is not patched; call patch(model) or apply_ep_fsdp2(model)")
    return state
