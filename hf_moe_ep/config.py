"""The user's settings: `ParallelConfig`, `RunOptions`, and their environment variables.

    ParallelConfig(ep_size=8)                 experts split over 8 consecutive ranks
    HF_MOE_EP_EP_SIZE=8 python train.py       the same for a script that patches without ep_size
    hf-moe-ep run --ep-size 8 -- COMMAND      the same for a command that does not patch

`resolve_config` replaces a size of None by the value of its environment variable, or by 1. If a
script passes no ParallelConfig, the settings that it leaves out are read from their variables.
`hf-moe-ep run` passes all settings to the processes of its command as variables, which
`read_environment_settings` reads (`runner/`). The variable of the field `ep_size` is
HF_MOE_EP_EP_SIZE; every other field has a variable of the same form.

This file makes the checks that need neither a model nor ranks. `patch` compares the sizes with the
model, and `ranks/mesh.py` compares them with the number of ranks. No other file reads environment
variables, except `cli/progress.py`, which reads the switch of the progress bars.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import Field, dataclass, fields, replace
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any, TypeVar

_PREFIX = "HF_MOE_EP_"
_TRUE, _FALSE = ("true", "1", "yes"), ("false", "0", "no")
# The fields whose sizes divide the ranks.
_SIZES = ("pp_size", "dp_replicate_size", "ep_size", "etp_size", "cp_size", "sp_size")
EXPERTS_DTYPES = ("nf4", "fp8")
# The allowed values of each field that has only a few. Fields of type bool are not listed.
CHOICES: dict[str, tuple[Any, ...]] = {
    "experts_backend": ("auto", "eager", "torch", "triton"),
    "experts_dtype": (None, *EXPERTS_DTYPES),
    "dispatcher": ("all_to_all", "hierarchical", "deepep"),
    "fused_loss": ("auto", True, False),
    "pp_schedule": ("1f1b", "gpipe"),
    "expert_shard_dim": ("auto", 0, 1),
}
# `suggest_name` proposes a known name if difflib's similarity reaches this value (1: equal names).
_MIN_SIMILARITY = 0.7


@dataclass(frozen=True)
class ParallelConfig:
    """The settings of one patched model.

        config = ParallelConfig(ep_size=8, sp_size=2, recompute_activations=True)
        patch(model, config)             # the same as patch(model, ep_size=8, sp_size=2, ...)

    Args:
        ep_size: the number of ranks that share the experts of each layer. It must divide the number
            of experts and `world_size / dp_replicate_size`. None: HF_MOE_EP_EP_SIZE, or 1.
        sp_size: the number of ranks that share each sequence of one batch. It must divide the
            attention heads and `world_size / dp_replicate_size`. None: HF_MOE_EP_SP_SIZE, or 1.
        dp_replicate_size: the number of copies of the sharded model (HSDP). None:
            HF_MOE_EP_DP_REPLICATE_SIZE, or 1.
        cp_size: the number of groups of `sp_size` ranks that share each sequence of one batch. Each
            group keeps its part of the tokens in attention as well, and receives the keys and
            values of the other groups (context parallelism), so the number of heads does not limit
            `cp_size`. A batch belongs to `cp_size * sp_size` consecutive ranks, and this product
            must divide `world_size / dp_replicate_size`. None: HF_MOE_EP_CP_SIZE, or 1.
        etp_size: the number of consecutive ranks that share each expert (expert tensor
            parallelism). Each rank has some of the hidden units of its experts, and the results of
            the ranks are added up. This is for models with few, large experts, on more ranks than
            experts. `etp_size` must divide the hidden size of an expert, and `ep_size * etp_size`
            must divide `world_size / dp_replicate_size`. None: HF_MOE_EP_ETP_SIZE, or 1.
        pp_size: the number of pipeline stages. Each stage holds some of the layers, and all sizes
            above count ranks of one stage. In training, a forward with labels runs the forward and
            the backward of all stages; `loss.backward()` then adds the gradients to the parameters.
            None: HF_MOE_EP_PP_SIZE, or 1.
        pp_microbatches: the number of micro-batches into which `pp_size` > 1 cuts the rows of a
            batch. Each stage waits for (pp_size - 1) / (pp_microbatches + pp_size - 1) of the time.
            None: HF_MOE_EP_PP_MICROBATCHES, or `pp_size`.
        pp_schedule: the order of the micro-batches. "1f1b" keeps the activations of at most
            `pp_size` micro-batches, "gpipe" the activations of all micro-batches. The router's aux
            loss is computed for each micro-batch with "1f1b", and for the whole batch with "gpipe".
        pp_layers: the number of layers of each stage, such as (13, 11). By default, the layers are
            divided evenly.
        experts_backend: the code that computes the experts. "triton" is this package's Triton
            kernels, "torch" its PyTorch code, and "eager" the model's own loop (only with
            `ep_size` 1). "auto" chooses "triton" where the kernels can run, otherwise "torch";
            `describe(model)` shows the choice.
        experts_dtype: the format in which frozen experts (under LoRA) are stored and all-gathered
            once the model is sharded: "nf4", the 4-bit codes of bitsandbytes (0.5625 bytes per
            parameter, scales included), or "fp8", e4m3 with one scale per 128 x 128 block (1.0002
            bytes). The experts are dequantised during the computation, one expert at a time, or one
            tile at a time in the Triton kernels. None: experts keep the dtype of the loaded model.
        experts_double_quant: with "nf4", quantise the scales as well (0.52 bytes per parameter).
        recompute_activations: save only the input of the experts for backward, and recompute all
            activations of size F (the hidden size of an expert). At Qwen3-30B's shape backward then
            needs 4.2 kB per token and layer instead of 28.8 kB, and one more matrix product.
        dispatcher: how tokens reach the ranks of their experts. "all_to_all" runs everywhere and
            sends a token at most once to each rank. "hierarchical" is for an ep group on several
            nodes: it sends a token at most once to each node, where one rank forwards the token to
            other ranks of the node (on a single node "hierarchical" is the same as "all_to_all").
            "deepep" calls the kernels of DeepEP, which must be installed (NVIDIA GPUs, bf16).
        node_size: the number of consecutive ranks that "hierarchical" treats as one node. Every ep
            group must have equally many ranks on each of its nodes. None: LOCAL_WORLD_SIZE, which
            the launcher sets.
        deepep_num_sms: the number of streaming multiprocessors that DeepEP may use; it must be
            even. None: DeepEP's default.
        dispatch_chunks: the number of chunks into which the tokens of a MoE layer are split, so
            that one chunk is transferred while another one is computed. Each chunk costs kernel
            launches and one more message. 1: transfers and experts do not overlap. "auto": the
            first forward of a training run measures the link and the experts. From the second
            forward on, layers use the number of chunks with the shortest estimated time.
        max_tokens_per_rank: the largest number of rows that a rank may receive in one MoE layer. A
            token is one row, however many of its experts are on that rank. If a rank would receive
            more, all ranks of the ep group raise an error before they allocate memory. None: no
            limit, so a rank may receive up to ep_size times the tokens of one rank.
        ep_outside: if True, consecutive ranks form an ep_fsdp group instead of an ep group. The
            ranks of an ep_fsdp group have shards of the same experts.
        expert_shard_dim: the dimension along which FSDP2 shards the expert weights: 0, 1 or "auto".
            "auto" takes the first dimension whose size is divisible by the size of the ep_fsdp
            group: dimension 0 (the experts of a rank), or 1. If neither is divisible, it takes 0.
        reshard_after_forward: as in `torch.distributed.fsdp.fully_shard`.
        fsdp_double_buffer: FSDP2 units of the same size gather their parameters in two fixed
            buffers, which they use in turn, and reduce their gradients in a third buffer. Without
            this option, torch allocates memory for every unit. The buffers are held between steps.
        nccl_ub: FSDP2 gathers and reduces in memory of NCCL's own allocator, which NCCL registers
            (user buffers), so that NVLink SHARP and other transfers without copies can be used
            (NVIDIA GPUs only).
        bias_update_rate: the amount by which each optimizer step moves the routers' correction
            biases, which are added to the scores when experts are chosen. The update favours
            experts that received few tokens (`update_router_bias`). DeepSeek-V3 uses 0.001. With
            Accelerate or the Trainer the update is automatic. None: the biases do not change, as in
            stock.
        aux_loss_per_layer: if True, the router's load-balancing loss is the mean of the layers'
            losses, and only the routers get a gradient from it. If False, it is stock's loss, which
            adds up the loads of all layers first, and whose gradient also reaches the layers in
            front of a router. Both losses need `output_router_logits=True` in the model's config,
            as in stock.
        compile_layers: True compiles every decoder layer with `torch.compile` for training, except
            for its MoE block if `ep_size` is more than 1 (`hf_moe_ep.compile_layers` says what else
            is compiled). A string names the backend, and a dict has keyword arguments of
            `torch.compile`. False: nothing is compiled.
        fused_loss: compute the head and the loss for some tokens at a time, so that the logits of a
            whole batch never exist; `outputs.logits` is None then. "auto" does so where nobody can
            read the logits: in a Trainer, except for evaluations with `compute_metrics`, and with
            sp_size, cp_size or pp_size > 1. True does so in every forward in training mode with
            labels. A model that scales or caps its logits computes them as in stock; True is then
            an error.
        mtp_layers: the number of layers of the head for multi-token prediction that are trained
            with the model (DeepSeek-V3, GLM-4.5, Qwen3-Next, Qwen3.5). They are built from the
            tensors of the loaded checkpoint that transformers ignores, and are saved under the same
            keys. The loss of the head is added to the model's loss in training. 0: the head is not
            trained, and saves copy its tensors.
        mtp_loss_weight: the weight of the mean loss of these layers. DeepSeek-V3 used 0.3, and 0.1
            at the end. 0: the loss is only measured (`mtp_loss`), and the head is not trained.
        mtp_from_scratch: give the head random initial values if the checkpoint has none. If False,
            this is an error.
        gather_logits: with sp_size, cp_size or pp_size > 1, a forward that computes a loss also
            returns the logits of the whole batch. If False, its `outputs.logits` is None.

    Raises:
        ValueError: a value that is invalid for every model and every number of ranks.
    """

    ep_size: int | None = None
    sp_size: int | None = None
    dp_replicate_size: int | None = None
    cp_size: int | None = None
    etp_size: int | None = None
    pp_size: int | None = None
    pp_microbatches: int | None = None
    pp_schedule: str = "1f1b"
    pp_layers: tuple[int, ...] | None = None
    experts_backend: str = "auto"
    experts_dtype: str | None = None
    experts_double_quant: bool = False
    dispatcher: str = "all_to_all"
    node_size: int | None = None
    dispatch_chunks: int | str = 1
    deepep_num_sms: int | None = None
    max_tokens_per_rank: int | None = None
    recompute_activations: bool = False
    compile_layers: bool | str | dict[str, Any] = False
    fused_loss: str | bool = "auto"
    mtp_layers: int = 0
    mtp_loss_weight: float = 0.1
    mtp_from_scratch: bool = False
    gather_logits: bool = False
    bias_update_rate: float | None = None
    aux_loss_per_layer: bool = False
    ep_outside: bool = False
    expert_shard_dim: str | int = "auto"
    reshard_after_forward: bool = True
    fsdp_double_buffer: bool = False
    nccl_ub: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.type == "int | None":
                _check_size(field.name, getattr(self, field.name))
            elif field.type == "bool":
                check_choice(field.name, getattr(self, field.name), (False, True))
        if isinstance(self.dispatch_chunks, str):
            check_choice("dispatch_chunks", self.dispatch_chunks, ("auto", 1, 2, 4))
        else:
            _check_size("dispatch_chunks", self.dispatch_chunks, may_be_none=False)
        _check_bias_update_rate(self.bias_update_rate)
        self._check_mtp()
        for name, allowed in CHOICES.items():
            check_choice(name, getattr(self, name), allowed)
        self._check_pp_layers()
        self._check_dispatcher()
        if self.experts_backend == "eager" and (self.ep_size or 1) > 1:
            raise ValueError(
                f"experts_backend='eager' needs all experts on every rank and cannot run with "
                f"ep_size={self.ep_size}; use experts_backend='auto', or ep_size=1"
            )
        self._check_experts_dtype()
        self._check_etp()
        if not isinstance(self.compile_layers, bool | str | dict):
            raise ValueError(
                f"compile_layers={self.compile_layers!r} is unknown; use False, True, the name of "
                f"a backend such as 'inductor', or a dict of keyword arguments of torch.compile "
                f"such as {{'backend': 'inductor', 'dynamic': True}}"
            )

    def _check_dispatcher(self) -> None:
        if self.node_size is not None and self.dispatcher != "hierarchical":
            raise ValueError(
                f"node_size={self.node_size} is for dispatcher='hierarchical', but the dispatcher "
                f"is {self.dispatcher!r}, which does not use nodes; leave out node_size, or set "
                f"dispatcher='hierarchical'"
            )
        if (self.deepep_num_sms or 0) % 2:
            raise ValueError(
                f"deepep_num_sms must be even, because DeepEP uses pairs of SMs; got "
                f"{self.deepep_num_sms}, try {(self.deepep_num_sms or 0) + 1}"
            )

    def _check_pp_layers(self) -> None:
        """Check `pp_layers`, and store a list as a tuple."""
        layers = self.pp_layers
        if layers is None:
            return
        if not isinstance(layers, list | tuple):
            raise ValueError(
                f"pp_layers={layers!r} must list the number of layers of each stage; try "
                f"pp_layers=(13, 11)"
            )
        for number in layers:
            _check_size("each number of pp_layers", number, may_be_none=False)
        object.__setattr__(self, "pp_layers", tuple(layers))  # a frozen dataclass
        if self.pp_size is not None and self.pp_size != len(layers):
            raise ValueError(
                f"pp_layers={tuple(layers)} has {len(layers)} numbers, one for each stage, but "
                f"pp_size is {self.pp_size}; set pp_size={len(layers)}"
            )

    def _check_experts_dtype(self) -> None:
        if self.experts_double_quant and self.experts_dtype != "nf4":
            raise ValueError(
                f"experts_double_quant=True quantises the scales of experts_dtype='nf4', but "
                f"experts_dtype is {self.experts_dtype!r}; set experts_dtype='nf4' as well"
            )
        if self.experts_dtype is not None and self.experts_backend == "eager":
            raise ValueError(
                f"experts_backend='eager' cannot compute experts that are stored in "
                f"{self.experts_dtype}; use experts_backend='auto', or experts_dtype=None"
            )

    def _check_mtp(self) -> None:
        layers, weight = self.mtp_layers, self.mtp_loss_weight
        if isinstance(layers, bool) or not isinstance(layers, int) or layers < 0:
            raise ValueError(
                f"mtp_layers must be a whole number >= 0, got {layers!r}; try mtp_layers=1"
            )
        is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
        if not is_number or not 0 <= weight < math.inf:
            raise ValueError(
                f"mtp_loss_weight must be a number >= 0, got {weight!r}; try mtp_loss_weight=0.1"
            )
        if self.mtp_from_scratch and not layers:
            raise ValueError(
                "mtp_from_scratch=True needs a number of layers, but mtp_layers is 0; try "
                "mtp_layers=1"
            )
        for name in ("pp_size", "cp_size") if layers else ():
            if (getattr(self, name) or 1) > 1:
                raise ValueError(
                    f"mtp_layers={layers} was not tested with {name}={getattr(self, name)}; use "
                    f"{name}=1, or leave mtp_layers out"
                )
        if layers and self.experts_dtype is not None:
            raise ValueError(
                f"experts_dtype={self.experts_dtype!r} is for LoRA, which does not train the "
                f"{layers} layers of mtp_layers; leave out one of them"
            )

    def _check_etp(self) -> None:
        if (self.etp_size or 1) == 1:
            return
        if self.experts_backend == "eager":
            raise ValueError(
                f"experts_backend='eager' needs whole experts on every rank and cannot run with "
                f"etp_size={self.etp_size}; use experts_backend='auto', or etp_size=1"
            )
        if self.expert_shard_dim == 1:
            raise ValueError(
                f"expert_shard_dim=1 and etp_size={self.etp_size} would both cut dim 1 of expert "
                f"weights; leave out expert_shard_dim, and FSDP2 shards another dim"
            )
        if self.experts_double_quant:
            raise ValueError(
                f"experts_double_quant=True quantises the scales of a whole matrix together, and "
                f"with etp_size={self.etp_size} no rank has a whole matrix; use "
                f"experts_dtype='nf4' without experts_double_quant, or etp_size=1"
            )

    @property
    def compile_kwargs(self) -> dict[str, Any] | None:
        """The keyword arguments for `torch.compile`; None if no layers are to be compiled."""
        if isinstance(self.compile_layers, bool):
            return {} if self.compile_layers else None
        if isinstance(self.compile_layers, str):
            return {"backend": self.compile_layers}
        return dict(self.compile_layers)

    @property
    def needs_sharding(self) -> bool:
        """True if some of these settings have an effect only on a sharded model."""
        return max(self.sizes.values()) > 1 or self.experts_dtype is not None

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes that divide the ranks, by the names of their fields, with 1 for None."""
        return {name: getattr(self, name) or 1 for name in _SIZES}

    @property
    def ranks_per_batch(self) -> int:
        """The number of consecutive ranks of a stage that share each batch."""
        return (self.cp_size or 1) * (self.sp_size or 1)

    @property
    def sequence_sizes(self) -> str:
        """The sizes that split sequences, for errors: "sp_size=2", or "cp_size=2, sp_size=2"."""
        sizes = {"cp_size": self.cp_size or 1, "sp_size": self.sp_size or 1}
        used = [f"{name}={size}" for name, size in sizes.items() if size > 1]
        return ", ".join(used) or "sp_size=1"


@dataclass(frozen=True)
class RunOptions:
    """The settings of `hf-moe-ep run` that are not settings of a model.

    Args:
        lora_experts: add the weights of all experts to each LoraConfig that the command uses. This
            is for trainers without an option for PEFT's target_parameters.
        stock_load: let stock code load the whole model in every process. By default each rank reads
            only its own shards of the decoder layers, when the model is sharded.
        report: print `describe(model)` when training starts, and log tokens per second and the
            expert load with the loss.
    """

    lora_experts: bool = False
    stock_load: bool = False
    report: bool = True


Settings = TypeVar("Settings", ParallelConfig, RunOptions)


def get_variable(name: str) -> str:
    """Return the environment variable of a field of ParallelConfig or RunOptions."""
    return f"{_PREFIX}{name.upper()}"


def read_environment_settings(
    kind: type[Settings],
    *,
    without: Collection[str] = (),
    given: Mapping[str, Any] = MappingProxyType({}),
) -> Settings:
    """Build `kind` from environment variables. A field whose variable is not set has its default.

    Args:
        without: fields whose variables are not read.
        given: fields and their values, whose variables are not read either.

    Raises:
        ValueError: the value of a variable is invalid.
    """
    texts = {
        field: os.environ.get(get_variable(field.name), "").strip()
        for field in fields(kind)
        if field.name not in without and field.name not in given
    }
    values = {
        field.name: parse_setting(field, text, f"{get_variable(field.name)}=")
        for field, text in texts.items()
        if text
    }
    return kind(**values, **given)


def parse_setting(field: Field[Any], text: str, name: str) -> Any:
    """Convert the text of an option or of a variable to the type of a field.

    Args:
        name: the name of the option or variable in errors, with the separator before its value.

    Raises:
        ValueError: the text is not a value of this type.
    """
    kind = str(field.type)
    if "bool" in kind and text.lower() in (*_TRUE, *_FALSE):
        return text.lower() in _TRUE
    if kind == "bool":
        raise ValueError(f"{name}{text} is neither true nor false; try {name}true")
    try:
        if "tuple" in kind:
            return tuple(int(number) for number in text.split(","))
        if "int" in kind:
            return int(text)
        if "float" in kind:
            return float(text)
    except ValueError:
        if "str" not in kind:
            number = "whole number" if "int" in kind else "number"
            example = "13,11" if "tuple" in kind else 8 if "int" in kind else 0.001
            raise ValueError(f"{name}{text} is no {number}; try {name}{example}") from None
    return text


def environment() -> dict[str, str]:
    """Return a copy of the environment variables of this process."""
    return dict(os.environ)


def suggest_name(name: str, known: Iterable[str], prefix: str = "") -> str:
    """Return " (did you mean ep_size?)" for a misspelt `name`, or "" if no known name is similar.

    A size may also be named without its ending: "ep" stands for "ep_size".

    Args:
        prefix: the beginning of all names, which does not count as a similarity.
    """
    name = name.removeprefix(prefix)
    endings = sorted(known_name.removeprefix(prefix) for known_name in known)
    similar = [f"{name}_size"] if f"{name}_size" in endings else []
    similar += get_close_matches(name, endings, 1, _MIN_SIMILARITY)
    return f" (did you mean {prefix}{similar[0]}?)" if similar else ""


def resolve_config(config: ParallelConfig | None, overrides: dict[str, Any]) -> ParallelConfig:
    """Apply `overrides` to `config`, and fill sizes of None from the environment or with 1.

    Without a config, every field that `overrides` do not set has the value of its variable.

    Raises:
        ValueError: an option, a value or a variable HF_MOE_EP_... is unknown or invalid.
    """
    known = {field.name for field in fields(ParallelConfig)}
    unknown = sorted(set(overrides) - known)
    if unknown:
        raise ValueError(
            f"unknown option {unknown[0]}{suggest_name(unknown[0], known)}; options are: "
            f"{', '.join(sorted(known))}"
        )
    if config is not None and not isinstance(config, ParallelConfig):
        raise ValueError(
            f"config must be a ParallelConfig, got {type(config).__name__}; "
            f"write patch(model, ep_size=...) or patch(model, ParallelConfig(ep_size=...))"
        )
    check_variable_names()
    if config is None:
        # Sizes are read below, with an error that names the variable.
        config = read_environment_settings(ParallelConfig, without=_SIZES, given=overrides)
    else:
        config = replace(config, **overrides)
    if config.dispatcher == "hierarchical" and config.node_size is None:
        config = replace(config, node_size=get_launched_local_world_size())
    if config.pp_layers:
        config = replace(config, pp_size=len(config.pp_layers))
    sizes: dict[str, Any] = {
        name: getattr(config, name) or _read_size_from_environment(get_variable(name)) or 1
        for name in _SIZES
    }
    if config.pp_microbatches is None:
        sizes["pp_microbatches"] = _read_size_from_environment(get_variable("pp_microbatches"))
    return replace(config, **sizes)


def get_launched_world_size() -> int:
    """Return the number of processes that the launcher started, or 1 if there is no launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def get_launched_rank() -> int:
    """Return the rank that the launcher gave to this process, or 0 if there is no launcher."""
    return int(os.environ.get("RANK", "0"))


def get_launched_local_rank() -> int | None:
    """Return the rank of this process on its machine; None if the launcher did not set it."""
    text = os.environ.get("LOCAL_RANK", "")
    return int(text) if text else None


def get_launched_local_world_size() -> int | None:
    """Return the number of processes on this machine; None if the launcher did not set it."""
    return _read_size_from_environment("LOCAL_WORLD_SIZE")


def is_launched_with_fsdp() -> bool:
    """Return True under `accelerate launch` with `distributed_type: FSDP`."""
    return os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"


# Variables that determine how the ranks start and what this package does; `hf-moe-ep doctor` prints
# them.
_LAUNCH_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "CUDA_VISIBLE_DEVICES",
    "TRITON_INTERPRET",
    "ACCELERATE_USE_FSDP",
    "ACCELERATE_MIXED_PRECISION",
    "FSDP_VERSION",
)


def list_gloo_interfaces() -> list[str]:
    """Return the network interfaces in GLOO_SOCKET_IFNAME, or [] if the variable is not set."""
    return [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]


def read_launch_environment() -> dict[str, str]:
    """Return the launch variables that are set, and all variables that begin with HF_MOE_EP_."""
    prefixed = sorted(name for name in os.environ if name.startswith(_PREFIX))
    names = (*_LAUNCH_VARIABLES, *prefixed)
    return {name: os.environ[name] for name in names if name in os.environ}


def check_variable_names() -> None:
    """Raise ValueError if a variable HF_MOE_EP_... has an unknown name."""
    kinds = (ParallelConfig, RunOptions)
    known = [get_variable(field.name) for kind in kinds for field in fields(kind)]
    for name in read_launch_environment():
        if name.startswith(_PREFIX) and name not in known:
            raise ValueError(
                f"{name} is set{suggest_name(name, known, _PREFIX)}, but only {', '.join(known)} "
                f"exist; correct its name"
            )


def check_environment() -> None:
    """Raise ValueError if a variable HF_MOE_EP_... has an unknown name or an invalid value."""
    check_variable_names()
    read_environment_settings(ParallelConfig)
    read_environment_settings(RunOptions)


def _read_size_from_environment(variable: str) -> int | None:
    text = os.environ.get(variable, "").strip()
    if not text:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{variable}={text!r} is not a positive whole number; try {variable}=8")
    return int(text)


def _check_size(name: str, size: int | None, *, may_be_none: bool = True) -> None:
    if size is None and may_be_none:
        return
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        allowed = "None or a whole number" if may_be_none else "a whole number"
        raise ValueError(
            f"{name} must be {allowed} >= 1, got {size!r}; try {name}={_suggest_size(size)}"
        )


def _suggest_size(value: object) -> int:
    """Return the size that a text like "8" or a float like 8.0 stands for, or else 1."""
    if isinstance(value, str) and value.isdecimal():
        return max(int(value), 1)
    return max(int(value), 1) if isinstance(value, float) and value.is_integer() else 1


def _check_bias_update_rate(rate: float | None) -> None:
    is_number = isinstance(rate, int | float) and not isinstance(rate, bool)
    if rate is not None and not (is_number and 0 < rate < math.inf):
        raise ValueError(
            f"bias_update_rate must be None or a number > 0, got {rate!r}; try "
            f"bias_update_rate=0.001"
        )


def check_choice(name: str, value: object, allowed: Iterable[Any]) -> None:
    """Raise ValueError if `value` is not one of `allowed`; True does not count as 1."""
    allowed = tuple(allowed)
    if not any(value == choice and type(value) is type(choice) for choice in allowed):
        choices = ", ".join(repr(choice) for choice in allowed)
        raise ValueError(f"{name}={value!r} is unknown; use {choices}")
