"""What a patched model remembers, and every place where this package keeps or changes state.

`patch` hangs one `ModelState` on the root and one `MoELayer` on every experts module, as the plain
attribute `STATE`: a deep copy of the model copies both consistently, and nothing is global.

Whatever outlives a function call, or is seen by code of others, is in this table; a test reads the
source and fails where a place is missing here. NAMES are the attributes (or the class, function or
keyword) to search for in FILE.

    file | names | what, and how long
    -- what patch hangs on a model, until unpatch --
    state.py | _hf_moe_ep replace restore | attributes of stock modules, what was there is kept
    patch.py | STATE patch_alike | the model's ModelState, on its root
    moe/attach.py | STATE | a MoELayer on every experts module
    moe/recompute.py | _gradient_checkpointing_func checkpoint_fn | wrapped at a forward
    moe/aux_loss.py | load_balancing_loss_func | a switch, in the file of the model's forward
    upstream/experts_interface.py | _experts_implementation_internal register | a copied config
    upstream/attention_interface.py | _attn_implementation_internal _hf_moe_ep_stock register | same
    -- what a ModelState or MoELayer is told later --
    sharding/shard.py | meshes policy dtypes dispatcher encoders grad_divisor | from sharding on
    moe/layer.py | forward_number | counts forwards
    placement/move.py | placement | where experts lie, from the first balance_experts on
    placement/hub_order.py | guards_state_dicts optimizers_in_order | until unpatch; in a block
    placement/hub_order.py | _hf_moe_ep_guarded | on parameters of experts and their optimizers
    moe/counting.py | choice_counts | how many tokens chose each expert, from the first one on
    moe/counting.py | leads_to_gradients | of the forward that runs
    routing/bias.py | correction data | the bias of a layer's router; in fp32 from patch on
    moe/forwards.py | function | the forward of a module, where ours took Liger's place
    moe/recompute.py | frame | the checkpointed layer that runs, during its run
    routing/sessions.py | routing | the record or replay that is open
    routing/recording.py | ids | of the routes of an open record, anew at each forward
    lora/computed.py | adapters | the active ones, one forward
    integrations/shared_batches.py | sums_losses gather_logits | a Trainer; one prediction
    checkpoints/training/save.py | saver | from the first save in the background on
    checkpoints/training/base.py | known_sums | of bytes that were hashed, until they change
    -- what travels with one forward or backward --
    sequence/slices.py | hf_moe_ep_slice | a keyword argument through the whole model
    sequence/split.py | positions | of a slice: those of the whole sequence, for attention
    vision/encoders.py | gathered in_graph | units of encoders, from their run to the decoder
    vision/branches.py | _hf_moe_ep_others_see | on the tensor of token types, through the decoder
    moe/chosen_topk.py | ChosenTopK | torch.topk repeats a choice, while a layer is recomputed
    moe/aux_loss.py | forward learns undivided returned | of a forward, which marks its logits
    moe/routers_alone.py | _recorded | logits of the routers' second runs, during a forward
    moe/dispatch/async_exchange.py | received_grads needs | gradients that pass autograd's edges by
    ops/expert_mlp.py | finish | weight gradients that a backward left for later
    -- what sharding leaves on a model, for its life --
    sharding/values.py | data setattr | parameters become DTensors, in place
    upstream/sharded_models.py | _is_fsdp_managed_module _get_name | marks that others read
    upstream/models.py | support_avx512bf16_for_cpu | bitsandbytes' layers stay packed as they are
    upstream/sharded_models.py | _CAN_RECORD_REGISTRY | names of classes that FSDP2 made
    upstream/sharded_models.py | _training_state | FSDP2's, of a unit whose backward is done
    integrations/optimizers.py | setattr | `step` of an optimizer that Accelerate prepared
    integrations/optimizers.py | _hf_moe_ep_followed | whose biases move with Accelerate's steps
    -- what belongs to the process --
    upstream/wrap.py | _hf_moe_ep_wrapper _hf_moe_ep_rows | what `integrations/install.py` lists
    upstream/wrap.py | __class__ setattr | of an Accelerator or Trainer: a subclass of ours
    upstream/wrap.py | _missing _checked _in_force _specialised | which wraps there are, and lack
    upstream/wrap.py | exec_module meta_path | calls us after the import of a module
    upstream/training_frameworks.py | __getattr__ Accelerator | of accelerate, until its first use
    placement/hub_order.py | _watch_new_optimizers | a hook of torch, from balance_experts on
    integrations/prepare.py | fsdp_plugin | Accelerate's state, for FSDP on CPU ranks
    upstream/training_frameworks.py | distributed_type | the same
    ranks/interpreter_end.py | register | a short wait at the interpreter's end
    ops/self_check.py | check_both_sizes check_once warn_once | whether kernels run here
    ops/sum_check.py | check_sums_once | whether compiled sums are right here
    ops/quantised.py | _nested_codes | what bytes of nested scales stand for, by device
    plan.py | _compiled | patterns of module names
    upstream/code.py | _names_used _arguments | what the code of a class says
    __init__.py | __class__ | the package: its names are imported at first use
    -- what Accelerate and the Trainer are told, for a run --
    integrations/shared_batches.py | _hf_moe_ep_sharing scheduler | how many ranks share a batch
    upstream/grpo.py | setattr | functions of one GRPO trainer and its engine, which replay routing
    integrations/install.py | setattr | compute_ref_log_probs of one trainer of TRL
    upstream/training_frameworks.py | gather_function | of one Trainer: its Accelerator's, again
    integrations/references.py | _hf_moe_ep_policy meshes_beside | what a reference stands beside
    integrations/shared_batches.py | dataset generator initial_seed | of a data loader
    integrations/shared_batches.py | worker_init_fn remainder | of a data loader
    integrations/shared_batches.py | num_input_tokens_seen | counted once per data rank
    upstream/hub.py | generation_config data | of a model loaded by `from_pretrained`
    upstream/models.py | name_or_path _name_or_path | the same
    -- swapped for one call, and put back --
    integrations/prepare.py | auto_wrap_policy | the user's, while Accelerate prepares
    integrations/accelerate_states.py | automatic_checkpoint_naming | Accelerate's, while it saves
    integrations/trackers.py | trackers | Accelerate's, one at a time while it logs
    integrations/trainer_checkpoints.py | _held_back | calls that wait for a manifest
    upstream/adapters.py | named_modules | of a model, while PEFT saves it
    upstream/sharded_models.py | nn | what FSDP2 makes parameters with, while it takes bytes
    upstream/gloo.py | ProcessGroupGloo | torch's class, while groups of ours are created
    upstream/gloo.py | _devices _threads _timeout setattr | options of such a group
    checkpoints/hub/configs.py | architectures dtype | of a config, while it is written
    checkpoints/storage/planner.py | DefaultSavePlanner | torch's, which Accelerate makes to save
    checkpoints/convert.py | read_metadata | of one reader, for its life
    planner/fake.py | setattr | who gathers counts, blocks and codes, torch.chunk: in a plan
    planner/count.py | resize_ | torch's, for storages, while tensors are counted
    upstream/host_copies.py | to | torch's, for tensors, while those on the host are counted
    -- threads --
    ranks/background.py | _SaveThread | the list of threads tells which saves still run
"""

from __future__ import annotations

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
from hf_moe_ep.ranks.mesh import Meshes
from hf_moe_ep.upstream.sharded_models import inside_ddp_forward

STATE = "_hf_moe_ep"


class WasAbsent:
    """Marks an attribute that a module did not have; a class, because copies keep its identity."""


@dataclass
class ModelState:
    """What a patched model remembers; one object, shared by the model and its MoE layers."""

    config: ParallelConfig
    plan: ModelPlan
    num_experts: int
    meshes: Meshes | None = None
    policy: MixedPrecisionPolicy | None = None
    # Of parameters before fp32 masters were made, by name: what they are saved in.
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    forward_number: int = 0
    # Whether gradients were enabled where the forward that runs was called.
    leads_to_gradients: bool = False
    # [layers, E], how often this rank's tokens chose each expert (moe/counting.py); None at first.
    choice_counts: Tensor | None = None
    # By who reads them: these counts as they were when its own began.
    counted: dict[str, Tensor] = field(default_factory=dict)
    # Whether a loss with num_items_in_batch is added up over data ranks, or is a rank's own mean.
    sums_losses: bool = True
    # Besides config.gather_logits: while the Trainer predicts.
    gather_logits: bool = False
    # Units of FSDP2 that make embeddings of pictures and sound; from sharding on.
    encoders: list[Any] = field(default_factory=list)
    # Set when sharded with ep_size > 1.
    dispatcher: Dispatcher | None = None
    # The `Frame` (moe/recompute.py) of the checkpointed layer that runs now, or None.
    frame: Any = None
    # While a `record` or `replay` of routing is open.
    routing: RoutingSession | None = None
    # Of saves in the background, from the first one on.
    saver: Saver | None = None
    # Whether state dicts are refused while experts lie elsewhere than in hub order.
    guards_state_dicts: bool = False
    # Optimizers whose state is in hub order, inside of `experts_in_hub_order`; None outside.
    optimizers_in_order: list[Any] | None = None
    # Of experts that are held quantised, by name.
    known_sums: dict[str, KnownSums] = field(default_factory=dict)
    # `patch` with this config, for a model that is to stand beside this one.
    patch_alike: Callable[[nn.Module], nn.Module] | None = None
    # Of a model beside this one: process groups to share where both are laid out alike.
    meshes_beside: Meshes | None = None
    # One per experts module, in order; each of them has its own as STATE.
    moe_layers: list[MoELayer] = field(default_factory=list)
    # Forwards that must stay what they are: see moe/forwards.py.
    relied_on: list[ReliedOn] = field(default_factory=list)
    # (module, attribute, the value before; `WasAbsent` if the module had no such attribute)
    undo: list[tuple[Any, str, Any]] = field(default_factory=list)

    def replace(self, module: nn.Module, name: str, value: Any) -> None:
        """Set an attribute of a module until `unpatch`, which puts back what was there."""
        self.undo.append((module, name, vars(module).get(name, WasAbsent)))
        setattr(module, name, value)

    def restore(self) -> None:
        """Put back whatever `replace` replaced."""
        while self.undo:
            module, name, value = self.undo.pop()
            if value is WasAbsent:
                delattr(module, name)
            else:
                setattr(module, name, value)

    @property
    def device(self) -> torch.device:
        """Where a rank computes; the host for a model that is not sharded."""
        return torch.device("cpu") if self.meshes is None else self.meshes.device

    def check_ready(self) -> None:
        """Raise where training would silently ignore what the config asks for."""
        if self.meshes is None and self.config.needs_sharding:
            held = self.config.experts_dtype
            asked, so = "", ""
            if held is not None:
                asked, so = f", experts_dtype={held!r}", ", and experts stay as they were loaded"
            raise ValueError(
                f"this model was patched with ep_size={self.config.ep_size}, "
                f"sp_size={self.config.sp_size}, "
                f"dp_replicate_size={self.config.dp_replicate_size}{asked} but never sharded: "
                f"every process would train alone{so}. Launch with `accelerate launch "
                f"--config_file` and `distributed_type: FSDP`, `fsdp_version: 2` "
                f"(examples/accelerate/), or call apply_ep_fsdp2(model) in your own loop"
            )
        if inside_ddp_forward():
            raise ValueError(
                "this patched model sits inside DistributedDataParallel, which knows nothing of "
                "its experts. Launch with `distributed_type: FSDP`, `fsdp_version: 2` "
                "(examples/accelerate/) instead of MULTI_GPU or MULTI_CPU"
            )


@dataclass(frozen=True)
class KnownSums:
    """Sums of this rank's part of a frozen parameter, and what it was when they were formed.

    Attributes:
        parameter, address: itself, and where this rank's part of it lies.
        written: how often both had been written in place.
        sums: as `checkpoints/training/base.py` forms them.
    """

    parameter: weakref.ref[Tensor]
    address: int
    written: tuple[int, ...]
    sums: Tensor

    def still_hold(self, parameter: Tensor, part: Tensor, written: tuple[int, ...]) -> bool:
        """Tell whether all is as it was."""
        same = self.parameter() is parameter and self.address == part.data_ptr()
        return same and self.written == written


@dataclass(frozen=True)
class Compute:
    """How one experts module is computed.

    Attributes:
        formula: what an expert computes between its two matrices.
        transposed: whether the module keeps the transposes of its matrices.
        backend: "torch" or "triton".
        reason: why not triton; empty where it is.
        required: asked for by name, so tensors that Triton cannot take are an error.
        recompute: pre-activations are computed again in backward.
        quantisation: how the matrices are held from sharding on; None as they were loaded.
    """

    formula: ExpertFormula
    transposed: bool
    backend: str
    reason: str
    required: bool
    recompute: bool
    quantisation: Quantisation | None = None

    @property
    def parameters(self) -> tuple[str, str]:
        """The stacked matrices of the module: up (gate and up in one) and down."""
        return "gate_up_proj" if self.formula.gated else "up_proj", "down_proj"


@dataclass
class CorrectionBias:
    """What a router adds to its scores for the choice alone; sharding replaces the tensor.

    Attributes:
        owner, name: the module that holds the tensor, and the tensor's name there.
        stock_dtype: the dtype before `patch`, which `unpatch` restores.
    """

    owner: nn.Module
    name: str
    stock_dtype: torch.dtype

    @property
    def tensor(self) -> Tensor:
        """The bias as it is now: as many numbers as experts, whole on every rank."""
        bias = getattr(self.owner, self.name)
        assert isinstance(bias, Tensor)
        return bias


@dataclass
class MoELayer:
    """One experts module's place in its model.

    Attributes:
        compute: None for the model's own loop.
        adapters: by the parameter that they adapt, while a forward runs; empty between forwards.
        grad_divisor: what our backward divides the experts' gradients by (`sharding/options.py`).
        correction: the router's bias, where it is to be updated.
        placement: [E] int64, where each expert lies in its stacked tensors; None is in hub order.
    """

    index: int
    model: ModelState
    compute: Compute | None
    adapters: dict[str, Sequence[Any]] = field(default_factory=dict)
    grad_divisor: int = 1
    correction: CorrectionBias | None = None
    placement: Tensor | None = None


@dataclass
class ReliedOn:
    """A module whose forward must stay `function`, or wrap it."""

    name: str
    module: nn.Module
    function: Callable[..., Any]
    is_experts: bool


class RoutingSession:
    """An open `record` or `replay` of `routing/`.

    Attributes:
        route_source: where the expert ids of the present forward come from.
        refusal: the error of routes that cannot be replayed. It is raised after the other ranks
            have received `route_source`, so that all ranks raise an error.
    """

    refusal: ValueError | None = None

    @property
    def route_source(self) -> RouteSource:
        return RouteSource.LIVE

    def tensors(self, device: torch.device) -> dict[str, Tensor]:
        """Return the tensors, by name, that must be equal on all ranks of an sp group."""
        raise NotImplementedError

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy of the model has no open session."""
        return


class Ours:
    """Marks a hook on a module as one of ours: `unpatch` takes off whatever inherits it."""


class ShardedOnly(Ours):
    """A hook with nothing to do on a model that is not sharded.

    torch.compile traces through it there, and leaves `run` out of its graphs otherwise.
    """

    state: ModelState

    def __call__(self, *args: Any) -> Any:
        return None if self.state.meshes is None else _not_traced(self.run, *args)

    def run(self, *args: Any) -> Any:
        """Do what the hook is for; called and answered as torch calls the hook."""
        raise NotImplementedError


@torch.compiler.disable
def _not_traced(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


def find_state(model: nn.Module) -> ModelState | None:
    """Find the state of a patched model, also behind torch.compile's or PEFT's wrapper."""
    for module in model.modules():
        state = getattr(module, STATE, None)
        if isinstance(state, MoELayer):
            return state.model
        if isinstance(state, ModelState):
            return state
    return None


def quantised_matrices(model: nn.Module) -> Iterator[tuple[str, Quantised, Quantisation]]:
    """Yield the stacked matrices that a sharded model holds as bytes, each with its name."""
    for path, module in model.named_modules():
        layer = vars(module).get(STATE)
        compute = layer.compute if isinstance(layer, MoELayer) else None
        if compute is None or compute.quantisation is None:
            continue
        for name in compute.parameters:
            scale = getattr(module, name + BLOCK_SCALE, None)
            # Without one it is not sharded yet.
            if scale is not None:
                nested = getattr(module, name + NESTED_SCALE, None)
                held = Quantised(getattr(module, name), scale, nested)
                yield f"{path}.{name}", held, compute.quantisation


def patched_state(model: nn.Module) -> ModelState:
    """Find the state of a model; ValueError where it is not patched."""
    state = find_state(model)
    if state is None:
        raise ValueError("this model is not patched; call patch(model) or apply_ep_fsdp2(model)")
    return state
