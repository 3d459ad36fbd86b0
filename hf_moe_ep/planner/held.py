"""Plan the memory that each rank holds between two training steps, without a GPU.

    plan = plan_memory("Qwen/Qwen3-30B-A3B", ParallelConfig(ep_size=8), world_size=64)
    plan.largest.held + plan.gathered

The code of training patches the model on the meta device, and shards it over torch's fake process
group of `world_size` ranks. The plan sums the sizes of the rank's shards. The sum is exact, and
includes the padding of FSDP2:

    5 rows over 4 ranks          rank 0   rank 1   rank 2   rank 3
    rows of the parameter           2        2        1        0
    rows of its memory              2        2        2        2    dim 0 is padded to equal chunks
    rows of its reduced gradient    2        2        2        2    the gradient is padded as well
    rows of each AdamW moment       2        2        1        0    moments are not padded

Because of the padding, parameters and gradients have the same size on all ranks, and ranks differ
only in their optimizer state. Ranks whose shards have the same sizes form one kind. Every replica
(HSDP) has the same kinds. `plan_memory` shards the model for rank 0, which holds most, and computes
the other kinds from their chunk sizes. As a check, it also shards the model for the last rank of a
replica, which holds least.

If the ep_fsdp axis has one rank, FSDP2 does not manage the experts' weights: a layer casts them
while it runs.

During a step, a rank also gathers FSDP2 units (modules whose parameters FSDP2 gathers and frees
together) in the compute dtype, one part of the model after the other. A part is a decoder layer
with its experts, the embedding, or the head. FSDP2 prefetches the next part, so two neighbouring
parts are gathered at a time. The root unit stays gathered. If embedding and head share a weight,
their unit stays gathered as well. Quantised experts (`ParallelConfig.experts_dtype`) are gathered
as bytes. Their adapters are gathered in the dtype of the adapters.

`options.NOT_COUNTED` lists memory that depends on the batch, the allocator or the machine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
)
from torch.distributed.tensor import DTensor

from hf_moe_ep.architectures import find_parts, read_experts_per_token
from hf_moe_ep.config import ParallelConfig, check_choice
from hf_moe_ep.mtp.build import build_head, check_head_is_supported, check_no_adapters
from hf_moe_ep.ops.quantised import BLOCK_SCALE, NESTED_SCALE
from hf_moe_ep.patch import patch
from hf_moe_ep.planner.config import attach_lora, build_meta_model, find_config
from hf_moe_ep.planner.options import MASTERS, OPTIMIZERS
from hf_moe_ep.ranks.mesh import EP, EP_FSDP, FSDP, Meshes, build_meshes
from hf_moe_ep.sharding.options import ShardOptions, choose_default_policy
from hf_moe_ep.sharding.shard import shard_units
from hf_moe_ep.sharding.units import Units, find_units
from hf_moe_ep.state import STATE, ModelState, iterate_experts_modules, iterate_quantised_matrices
from hf_moe_ep.upstream.models import text_config
from hf_moe_ep.upstream.process_groups import fake_group


@dataclass(frozen=True)
class RankMemory:
    """The bytes that each of the ranks in `ranks` holds between steps."""

    ranks: tuple[int, ...]
    parameters: int
    gradients: int
    optimizer: int

    @property
    def held(self) -> int:
        return self.parameters + self.gradients + self.optimizer


@dataclass(frozen=True)
class MemoryPlan:
    """The plan of one model at one layout. Bytes are bytes of one rank unless stated otherwise.

    Attributes:
        world_size, parallel, ep_fsdp_size: the layout with its resolved sizes.
        total: the number of parameters, with adapters.
        trained: the number of parameters that get gradients.
        active: the number of parameters that one token uses: the experts that the token chooses,
            and all parameters outside experts.
        expert_bytes: the bytes per parameter of the experts' matrices: their bytes on all ranks of
            a replica, with scales and padding, divided by the number of their parameters.
        kinds: the kinds of ranks, in the order of their first ranks.
        gathered: the largest number of bytes that are gathered at a time: two neighbouring parts
            and the units that stay gathered.
        unit_gradients: bytes of the unsharded gradients of the largest FSDP2 unit.
        unit_reduction: bytes of these gradients in the dtype of the reduce-scatter.
        buffers: bytes of the fixed buffers of `fsdp_double_buffer`, which are held between steps.
    """

    world_size: int
    parallel: ParallelConfig
    ep_fsdp_size: int
    total: int
    trained: int
    active: int
    expert_bytes: float
    kinds: tuple[RankMemory, ...]
    gathered: int
    unit_gradients: int
    unit_reduction: int
    buffers: int = 0

    @property
    def largest(self) -> RankMemory:
        return max(self.kinds, key=lambda kind: kind.held)

    @property
    def smallest(self) -> RankMemory:
        return min(self.kinds, key=lambda kind: kind.held)

    def of_rank(self, rank: int) -> RankMemory:
        return next(kind for kind in self.kinds if rank in kind.ranks)

    def all_ranks(self, name: str) -> int:
        """Sum `parameters`, `gradients`, `optimizer` or `held` over all ranks."""
        return sum(len(kind.ranks) * int(getattr(kind, name)) for kind in self.kinds)


def plan_memory(
    model: Any,
    parallel: ParallelConfig | None = None,
    *,
    world_size: int,
    dtype: torch.dtype = torch.bfloat16,
    masters: str = "fp32",
    optimizer: str = "adamw_fused",
    lora_rank: int | None = None,
    lora_targets: str = "both",
) -> MemoryPlan:
    """Plan the bytes that each of `world_size` ranks holds between steps; no weights are loaded.

    Args:
        model: the model: a hub name, a folder, a config.json, a dict with `model_type`, or a
            config object.
        parallel: the arguments of `patch`.
        dtype: the dtype in which the model is loaded and computes.
        masters: the dtype of trained parameters, gradients and optimizer state. "fp32" is the
            default of `apply_ep_fsdp2`. "model" uses `dtype`, also for adapters, as PEFT does with
            autocast_adapter_dtype=False.
        optimizer: "adamw", "adamw_fused" (holds as much as "adamw" between steps), "sgd" (with
            momentum), or "none" for an optimizer without state.
        lora_rank: train only adapters of this rank on `lora_targets`: "experts", "attention" or
            "both". Required if `parallel.experts_dtype` quantises the experts.

    Raises:
        ValueError: a choice is unknown, a process group exists already, or `patch` or sharding
            refuses a size.
    """
    request = PlanRequest(
        find_config(model), parallel, world_size, dtype, masters, optimizer, lora_rank, lora_targets
    )
    with torch.random.fork_rng(devices=[]):
        first = _Sharded(request, 0)
        kinds = [first.sum_held(ranks) for ranks in _group_ranks_by_kind(first)]
        if len(kinds) > 1:
            last = first.replica - 1
            kind = next(kind for kind in kinds if last in kind.ranks)
            assert _Sharded(request, last).sum_held(kind.ranks, from_shards=True) == kind
    return MemoryPlan(
        world_size=world_size,
        parallel=first.state.config,
        ep_fsdp_size=first.ep_fsdp_size,
        total=first.count_parameters(first.parameters),
        trained=first.count_parameters(p for p in first.parameters if p.requires_grad),
        active=first.count_active_parameters(),
        expert_bytes=first.compute_expert_bytes(),
        kinds=tuple(kinds),
        gathered=first.find_most_gathered(),
        unit_gradients=first.find_largest_unit(first.policy.param_dtype),
        unit_reduction=first.find_largest_unit(first.policy.reduce_dtype),
        buffers=first.sum_fixed_buffers() if first.state.config.fsdp_double_buffer else 0,
    )


@dataclass(frozen=True)
class PlanRequest:
    """The checked arguments of `plan_memory`."""

    config: Any
    parallel: ParallelConfig | None
    world_size: int
    dtype: torch.dtype = torch.bfloat16
    masters: str = "fp32"
    optimizer: str = "adamw_fused"
    lora_rank: int | None = None
    lora_targets: str = "both"
    offload: bool = False

    @property
    def mtp_layers(self) -> int:
        """The number of decoder layers of the head for multi-token prediction."""
        return 0 if self.parallel is None else self.parallel.mtp_layers

    def __post_init__(self) -> None:
        check_choice("masters", self.masters, MASTERS)
        check_choice("optimizer", self.optimizer, OPTIMIZERS)
        pp_size = 1 if self.parallel is None else self.parallel.pp_size or 1
        if pp_size > 1:
            raise ValueError(
                f"pp_size is {pp_size}, but this plan is for one pipeline stage; use `hf-moe-ep "
                f"plan --pp-size {pp_size}`, or plan a config with num_hidden_layers / {pp_size} "
                f"layers on {self.world_size // pp_size or 1} GPUs, with pp_size=1"
            )
        if self.world_size < 1:
            raise ValueError(f"world_size ({self.world_size}) must be 1 or more; try 8")
        if dist.is_initialized():
            raise ValueError(
                f"a plan makes a fake process group, and a real one of {dist.get_world_size()} "
                f"ranks exists; make the plan before init_process_group"
            )


@dataclass(frozen=True)
class Unsharded:
    """The patched model of a request on the meta device, with adapters, before sharding."""

    model: nn.Module
    state: ModelState
    units: Units
    options: ShardOptions

    @classmethod
    def of(cls, request: PlanRequest) -> Unsharded:
        """Build the model as training would."""
        model = build_meta_model(request.config, request.dtype)
        if request.mtp_layers:
            parts = find_parts(model)
            check_head_is_supported(parts, request.mtp_layers)
            build_head(parts, request.mtp_layers)
        patch(model, request.parallel, pp_size=1)  # 1 overrides HF_MOE_EP_PP_SIZE
        state: ModelState = getattr(model, STATE)
        if request.lora_rank is not None:
            model = attach_lora(
                model,
                state.plan,
                request.lora_rank,
                request.lora_targets,
                fp32=request.masters == "fp32",
            )
            if request.mtp_layers:
                check_no_adapters(model, request.mtp_layers)
        policy, fp32_masters = MixedPrecisionPolicy(), False
        if request.masters == "fp32":
            policy, fp32_masters = choose_default_policy(model)
        # No device exists for which memory could be pinned.
        offload = CPUOffloadPolicy(pin_memory=False) if request.offload else OffloadPolicy()
        options = ShardOptions(
            mp_policy=policy,
            offload_policy=offload,
            fp32_masters=fp32_masters,
            reshard_after_forward=state.config.reshard_after_forward,
            empty_params=frozenset(model.parameters()),
        )
        return cls(model, state, find_units(model, state.plan), options)

    def shard(self) -> Meshes:
        """Shard the model in place; a fake process group must exist."""
        meshes = build_meshes(self.state.config, torch.device("cpu"))
        shard_units(self.model, self.state, self.options, meshes)
        return meshes


class _Sharded:
    """The model of a request, sharded for one rank, and the sizes of its shards.

    Attributes:
        axes: the mesh axis over which FSDP2 splits each parameter, by the parameter's id.
        num_values: the number of values in each tensor of quantised experts, by the tensor's id.
        ungathered: the ids of expert weights that FSDP2 does not gather.
        routers: the routers that are separate units, which FSDP2 gathers in fp32.
    """

    def __init__(self, request: PlanRequest, rank: int) -> None:
        self.request = request
        unsharded = Unsharded.of(request)
        model, self.state, self.units = unsharded.model, unsharded.state, unsharded.units
        self.policy = unsharded.options.mp_policy
        self.top_k = read_experts_per_token(model, self.state.plan, text_config(request.config))
        with fake_group(rank, request.world_size):
            meshes = unsharded.shard()
            self.ep_fsdp_size = meshes.ep_fsdp_size
            self.parameters: list[DTensor] = _list_dtensors([model])
            self.axes = {id(p): _find_axis(p, meshes.ep_size) for p in self.parameters}
            self.num_values = _count_quantised_values(model)
            self.ungathered = _find_ungathered(model)
        others = {*self.units.layers, *self.units.all_experts}
        self.routers = [
            module
            for layer in self.units.layers
            for module in layer.modules()
            if isinstance(module, FSDPModule) and module not in others
        ]
        self.in_routers = {id(p) for p in _list_dtensors(self.routers)}

    @property
    def replica(self) -> int:
        """The number of ranks of one replica."""
        return self.request.world_size // (self.state.config.dp_replicate_size or 1)

    def sum_held(self, ranks: tuple[int, ...], *, from_shards: bool = False) -> RankMemory:
        """Sum the bytes that each rank of one kind holds.

        The bytes of the optimizer are computed from chunk sizes. With `from_shards`, they are read
        from the shards of this rank, which must be one of `ranks`.
        """
        trained = [p for p in self.parameters if p.requires_grad]
        moments, scalars = OPTIMIZERS[self.request.optimizer]
        coordinates = self.find_coordinates(ranks[0])
        optimizer = 0
        for p in trained:
            axis = self.axes[id(p)]
            nbytes = _allocated_bytes(p) // axis.share(0) * axis.share(coordinates[axis.name])
            optimizer += moments * (p.to_local().nbytes if from_shards else nbytes) + 4 * scalars
        return RankMemory(
            ranks=ranks,
            parameters=sum(_allocated_bytes(p) for p in self.parameters),
            gradients=sum(_allocated_bytes(p) for p in trained),
            optimizer=optimizer,
        )

    def find_coordinates(self, rank: int) -> dict[str, int]:
        """Return a rank's coordinates on the axes over which FSDP2 shards (`ranks/mesh.py`)."""
        config = self.state.config
        in_replica = rank % self.replica
        etp_size = config.etp_size or 1
        if config.ep_outside:
            ep_fsdp = in_replica // etp_size % self.ep_fsdp_size
        else:
            ep_fsdp = in_replica // ((config.ep_size or 1) * etp_size)
        return {FSDP: in_replica, EP_FSDP: ep_fsdp}

    def sum_gathered_bytes(self, parameters: Iterable[DTensor], dtype: torch.dtype | None) -> int:
        """Sum the bytes of the padded parameters that FSDP2 gathers in `dtype`.

        With `dtype` None, parameters are gathered in their own dtypes. Quantised experts, their
        adapters and `routers` are always gathered in their own dtypes.
        """
        total = 0
        for p in parameters:
            if id(p) in self.ungathered:
                continue
            axis = self.axes[id(p)]
            keeps_dtype = dtype is None or (self.num_values and axis.name == EP_FSDP)
            keeps_dtype = keeps_dtype or id(p) in self.in_routers
            gathered_dtype = p.dtype if keeps_dtype else dtype
            assert gathered_dtype is not None
            total += _allocated_bytes(p) // p.dtype.itemsize * axis.size * gathered_dtype.itemsize
        return total

    def find_largest_cast(self, dtype: torch.dtype | None) -> int:
        """Return the bytes of the casts of one layer's ungathered weights; the largest layer."""
        if dtype is None:
            return 0
        return max(
            sum(
                p.to_local().numel() * dtype.itemsize
                for p in _list_dtensors([layer])
                if id(p) in self.ungathered and p.dtype.is_floating_point and p.dtype != dtype
            )
            for layer in self.units.layers
        )

    def count_parameters(self, parameters: Iterable[DTensor]) -> int:
        """Count parameters. A quantised matrix counts its values, not its bytes."""
        return sum(self.num_values.get(id(p), p.numel()) for p in parameters)

    def count_active_parameters(self) -> int:
        """Count the parameters that one token uses."""
        in_experts = self.count_parameters(_list_dtensors(self.units.all_experts))
        used_in_experts = in_experts * self.top_k // self.state.num_experts
        return self.count_parameters(self.parameters) - in_experts + used_in_experts

    def compute_expert_bytes(self) -> float:
        """Return the bytes per parameter of the experts' matrices, over one replica."""
        weights, suffixes = self.state.plan.expert_weights, ("", BLOCK_SCALE, NESTED_SCALE)
        own_names = {weight + suffix for weight in weights for suffix in suffixes}
        matrices = {
            id(p): p
            for module in self.units.all_experts
            for name, p in module.named_parameters()
            if isinstance(p, DTensor) and name.rpartition(".")[2] in own_names
        }
        held = sum(map(_allocated_bytes, matrices.values()))
        return held * self.replica / self.count_parameters(matrices.values())

    def find_most_gathered(self) -> int:
        """Return the largest number of bytes that are gathered at a time in the compute dtype."""
        compute, units = self.policy.param_dtype, self.units
        cast = self.find_largest_cast(compute)
        if not self.state.config.reshard_after_forward:
            return self.sum_gathered_bytes(self.parameters, compute) + cast

        def sum_part(modules: Iterable[nn.Module | None]) -> int:
            return self.sum_gathered_bytes(_list_dtensors(modules), compute)

        parts = [[layer] for layer in units.layers[: units.num_main_layers]]
        if units.embedding is not None and not units.tied:
            parts.insert(0, [units.embedding])
        if not units.tied:
            parts.append(units.tail)
        all_parts = [*units.layers, *units.vision, units.mtp, units.embedding, *units.tail]
        always = _exclude_modules(self.parameters, all_parts)
        if units.tied:
            always += _list_dtensors(units.tail)
        largest_pair = _find_largest_pair([sum_part(part) for part in parts])
        if units.vision:
            *blocks, tower = units.vision
            outside = _exclude_modules(_list_dtensors([tower]), blocks)
            in_tower = _find_largest_pair([sum_part([block]) for block in blocks])
            in_tower += self.sum_gathered_bytes(outside, compute)
            largest_pair = max(largest_pair, in_tower)
        if units.mtp is not None:
            blocks = units.layers[units.num_main_layers :]
            in_mtp = _find_largest_pair([sum_part([block]) for block in blocks])
            in_mtp += self.sum_gathered_bytes(
                _exclude_modules(_list_dtensors([units.mtp]), blocks), compute
            )
            tail = 0 if units.tied else sum_part(units.tail)  # it stays gathered
            largest_pair = max(largest_pair, in_mtp + tail)
        return self.sum_gathered_bytes(always, compute) + largest_pair + cast

    def find_largest_unit(self, dtype: torch.dtype | None) -> int:
        """Return the bytes of the largest FSDP2 unit's trained parameters in `dtype`."""
        # The gradients of all encoders are reduced together at the end of backward.
        units = [*self._list_unit_parameters(), _list_dtensors(self.units.encoders)]
        trained = [[p for p in parameters if p.requires_grad] for parameters in units]
        return max(self.sum_gathered_bytes(parameters, dtype) for parameters in trained)

    def sum_fixed_buffers(self) -> int:
        """Return the bytes of the fixed buffers of `fsdp_double_buffer`.

        Units of the same size share two buffers for all-gathers. They share only one buffer for
        reduce-scatters, because FSDP2 waits for a reduce-scatter before it begins the next one. A
        single rank gathers nothing, but FSDP2 copies its gradients as if it reduced them.
        """
        units = [*self._list_unit_parameters(), *(_list_dtensors([e]) for e in self.units.encoders)]
        num_units: Counter[tuple[str, str, int]] = Counter()
        for parameters in units:
            moved = [p for p in parameters if id(p) not in self.ungathered]
            trained = [p for p in moved if p.requires_grad]
            if moved and self.axes[id(moved[0])].size > 1:
                num_bytes = self.sum_gathered_bytes(moved, self.policy.param_dtype)
                num_units["gathered", self.axes[id(moved[0])].name, num_bytes] += 1
            if trained:
                num_bytes = self.sum_gathered_bytes(trained, self.policy.reduce_dtype)
                num_units["reduced", self.axes[id(trained[0])].name, num_bytes] += 1
        most = {"gathered": 2, "reduced": 1}
        return sum(min(most[use], n) * size for (use, _, size), n in num_units.items())

    def _list_unit_parameters(self) -> list[list[DTensor]]:
        """List the parameters of each FSDP2 unit, without the parameters of units inside it."""
        units = self.units
        experts = [] if self.state.experts_in_layer_units else units.all_experts
        blocks, tower = units.vision[:-1], units.vision[-1:]
        embedding = [] if units.tied else [units.embedding]
        inner = [*experts, *self.routers]
        return [
            *(_list_dtensors([module]) for module in inner),
            *(_exclude_modules(_list_dtensors([layer]), inner) for layer in units.layers),
            _exclude_modules(_list_dtensors([units.mtp]), units.layers),
            *(_list_dtensors([block]) for block in blocks),
            _exclude_modules(_list_dtensors(tower), blocks),
            _list_dtensors(units.tail),
            _list_dtensors(embedding),
        ]


@dataclass(frozen=True)
class _Axis:
    """A mesh axis over which FSDP2 splits a parameter: `size` ranks share `length` rows."""

    name: str
    size: int
    length: int

    def share(self, coordinate: int) -> int:
        """Count the rows that torch.chunk gives to a rank: 2, 2, 1, 0 for 5 rows over 4 ranks."""
        chunk = -(-self.length // self.size)
        return max(0, min(chunk, self.length - coordinate * chunk))


def _find_axis(parameter: DTensor, ep_size: int) -> _Axis:
    mesh = parameter.device_mesh
    names = mesh.mesh_dim_names or ()
    name = EP_FSDP if EP_FSDP in names else FSDP
    index = names.index(name)
    # Shard and _StridedShard both have a `dim`.
    dim: int = getattr(parameter.placements[index], "dim")  # noqa: B009
    is_split_over_ep = EP in names and dim == 0
    length = parameter.shape[dim] // (ep_size if is_split_over_ep else 1)
    return _Axis(name, mesh.size(index), length)


def _group_ranks_by_kind(sharded: _Sharded) -> list[tuple[int, ...]]:
    """Group all ranks by kind. The kind of rank 0 comes first."""
    axes = sorted(set(sharded.axes.values()), key=str)
    kinds: dict[tuple[int, ...], list[int]] = {}
    for rank in range(sharded.request.world_size):
        coordinates = sharded.find_coordinates(rank)
        shares = tuple(axis.share(coordinates[axis.name]) for axis in axes)
        kinds.setdefault(shares, []).append(rank)
    return [tuple(ranks) for ranks in kinds.values()]


def _list_dtensors(modules: Iterable[nn.Module | None]) -> list[DTensor]:
    """List the sharded parameters of modules, a tied parameter once."""
    by_id = {id(p): p for module in modules if module is not None for p in module.parameters()}
    return [p for p in by_id.values() if isinstance(p, DTensor)]


def _exclude_modules(
    parameters: Iterable[DTensor], modules: Iterable[nn.Module | None]
) -> list[DTensor]:
    inside = {id(p) for p in _list_dtensors(modules)}
    return [p for p in parameters if id(p) not in inside]


def _find_ungathered(model: nn.Module) -> set[int]:
    """Return the ids of the expert weights that FSDP2 does not manage."""
    modules = iterate_experts_modules(model)
    return {id(getattr(module, n)) for _, module, layer in modules for n in layer.whole_weights}


def _count_quantised_values(model: nn.Module) -> dict[int, int]:
    """Count the values in each tensor of quantised experts, by its id. Scales count 0."""
    num_values: dict[int, int] = {}
    for name, matrix, quantisation in iterate_quantised_matrices(model):
        for tensor in matrix.by_name(name).values():
            num_values[id(tensor)] = 0
        num_values[id(matrix.values)] = quantisation.num_values(matrix.values)
    return num_values


def _allocated_bytes(parameter: DTensor) -> int:
    return parameter.to_local().untyped_storage().nbytes()


def _find_largest_pair(sizes: Sequence[int]) -> int:
    """Return the largest sum of two neighbours, or the only size."""
    return max((sum(pair) for pair in pairwise(sizes)), default=sum(sizes))
