"""What the user asks for: `ParallelConfig`, and the environment variables that may fill it.

    ParallelConfig(ep_size=8)                 experts split over 8 consecutive ranks
    HF_MOE_EP_EP_SIZE=8 python train.py       the same without touching the script

A size left at None is filled from the environment by `resolve_config` and counts as 1 after that.
Sizes that depend on the model or on the world are checked where those are known: by the wings when
the model is patched, and in `ranks/mesh.py`. This file is the only reader of environment variables.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any

_EXPERTS_DTYPES = (None, "nf4", "fp8")
_EXPERTS_BACKENDS = ("auto", "eager", "torch", "triton")
_DISPATCHERS = ("all_to_all", "hierarchical", "deepep")
_SHARD_DIMS = ("auto", 0, 1)


@dataclass(frozen=True)
class ParallelConfig:
    """Sizes and choices of one patched model.

        config = ParallelConfig(ep_size=8, sp_size=2, recompute_activations=True)
        patch(model, config)             # the same as patch(model, ep_size=8, sp_size=2, ...)

    Args:
        ep_size: ranks that split the experts of a layer between them; divides the number of
            experts and `world / dp_replicate_size`. None = 1, or HF_MOE_EP_EP_SIZE.
        sp_size: ranks that split each sequence of one batch between them; divides the attention
            heads and `world / dp_replicate_size`. None = 1, or HF_MOE_EP_SP_SIZE.
        dp_replicate_size: copies of the sharded model (HSDP). None = 1.
        experts_backend: "auto" takes the Triton kernels where they can run and the plugin's torch
            path elsewhere, as `describe(model)` says; "triton" and "torch" insist; "eager" is the
            model's own loop (`ep_size` 1 only).
        experts_dtype: how frozen experts (under LoRA) are held, and gathered, from sharding on:
            "nf4", bitsandbytes' 4-bit codes (0.57 bytes per parameter with their scales), or "fp8",
            e4m3 with scales of 128 x 128 blocks (1.01). Dequantised where they are computed, by
            experts, or by tiles in the Triton kernels. None = as loaded.
        experts_double_quant: with "nf4", quantise the scales too (0.52 bytes per parameter).
        recompute_activations: experts keep their input for backward and nothing of size F: at
            Qwen3-30B's shape 4.2 kB per token and layer instead of 28.8, for one matrix product
            more in backward.
        dispatcher: "all_to_all" runs everywhere and sends a token to each rank at most once;
            "hierarchical" to each node at most once and there to each rank, for an ep group on
            several nodes (on one it is "all_to_all"); "deepep" takes DeepEP's kernels (NVIDIA GPUs,
            bf16) and wants that package installed.
        node_size: consecutive ranks that "hierarchical" takes for a node; every ep group must have
            equally many ranks on each of its nodes. None = the launcher's LOCAL_WORLD_SIZE.
        deepep_num_sms: streaming multiprocessors that DeepEP may use, even; None = its default.
        dispatch_chunks: parts in which a MoE layer's tokens travel, so that one part is on its way
            while another is computed; each costs kernel launches and one more message. 1 = no
            overlap of rows and experts.
        max_tokens_per_rank: rows that a rank may receive in one MoE layer (a token counts once
            however many of its experts are there). Where the router sends more, every rank of the
            ep group raises before it allocates, instead of one running out of memory. None = no
            limit: at worst ep_size times the tokens of a rank.
        ep_outside: consecutive ranks share an ep_fsdp group instead of an ep group.
        expert_shard_dim: tensor dimension of the expert weights that FSDP2 splits: 0, 1 or
            "auto", which is 0 where the experts of a rank divide evenly, else 1 where that does.
        reshard_after_forward: as in `torch.distributed.fsdp.fully_shard`.
        bias_update_rate: by how much the correction bias of a router moves after each optimizer
            step, towards experts with few tokens (`update_router_bias`); DeepSeek-V3 has 0.001.
            Accelerate and the Trainer do it by themselves. None = not at all, as stock.
        aux_loss_per_layer: the router's load-balancing loss is the mean of each layer's own
            (`output_router_logits=True` in the model's config switches it on, as in stock), and the
            routers alone learn from it. False = stock's formula over all layers together, which
            knows no single layer; whatever feeds the routers learns from it too.
        gather_logits: with sp_size > 1, whole logits beside a loss; else they are None there.

    Raises:
        ValueError: a field has a value that no model and no world could make valid.
    """

    ep_size: int | None = None
    sp_size: int | None = None
    dp_replicate_size: int | None = None
    experts_backend: str = "auto"
    experts_dtype: str | None = None
    experts_double_quant: bool = False
    dispatcher: str = "all_to_all"
    node_size: int | None = None
    dispatch_chunks: int = 1
    deepep_num_sms: int | None = None
    max_tokens_per_rank: int | None = None
    recompute_activations: bool = False
    gather_logits: bool = False
    bias_update_rate: float | None = None
    aux_loss_per_layer: bool = False
    ep_outside: bool = False
    expert_shard_dim: str | int = "auto"
    reshard_after_forward: bool = True

    def __post_init__(self) -> None:
        for name in (
            "ep_size",
            "sp_size",
            "dp_replicate_size",
            "max_tokens_per_rank",
            "node_size",
            "deepep_num_sms",
        ):
            _check_size(name, getattr(self, name))
        if self.dispatch_chunks is None:
            raise ValueError("dispatch_chunks must be a whole number >= 1, got None; try 1")
        _check_size("dispatch_chunks", self.dispatch_chunks)
        for name in (
            "aux_loss_per_layer",
            "ep_outside",
            "experts_double_quant",
            "gather_logits",
            "recompute_activations",
            "reshard_after_forward",
        ):
            check_choice(name, getattr(self, name), (False, True))
        _check_rate("bias_update_rate", self.bias_update_rate)
        check_choice("experts_backend", self.experts_backend, _EXPERTS_BACKENDS)
        check_choice("experts_dtype", self.experts_dtype, _EXPERTS_DTYPES)
        check_choice("dispatcher", self.dispatcher, _DISPATCHERS)
        check_choice("expert_shard_dim", self.expert_shard_dim, _SHARD_DIMS)
        if self.node_size is not None and self.dispatcher != "hierarchical":
            raise ValueError(
                f"node_size={self.node_size} is for dispatcher='hierarchical', and dispatcher is "
                f"{self.dispatcher!r}, which knows no nodes; leave one of them out"
            )
        if (self.deepep_num_sms or 0) % 2:
            raise ValueError(
                f"deepep_num_sms must be even, DeepEP moves rows by pairs of SMs; got "
                f"{self.deepep_num_sms}, try {(self.deepep_num_sms or 0) + 1}"
            )
        if self.experts_backend == "eager" and (self.ep_size or 1) > 1:
            raise ValueError(
                f"experts_backend='eager' indexes all experts on every rank and cannot run with "
                f"ep_size={self.ep_size}; use experts_backend='auto', or ep_size=1"
            )
        self._check_experts_dtype()

    def _check_experts_dtype(self) -> None:
        if self.experts_double_quant and self.experts_dtype != "nf4":
            raise ValueError(
                f"experts_double_quant=True quantises the scales of experts_dtype='nf4', and "
                f"experts_dtype is {self.experts_dtype!r}; write experts_dtype='nf4' beside it"
            )
        if self.experts_dtype is not None and self.experts_backend == "eager":
            raise ValueError(
                f"experts_backend='eager' does not compute experts that are held in "
                f"{self.experts_dtype}; use experts_backend='auto', or experts_dtype=None"
            )

    @property
    def needs_sharding(self) -> bool:
        """True where training without `apply_ep_fsdp2` would silently ignore what is asked for."""
        sizes = (self.ep_size or 1, self.sp_size or 1, self.dp_replicate_size or 1)
        return max(sizes) > 1 or self.experts_dtype is not None


def resolve_config(config: ParallelConfig | None, overrides: dict[str, Any]) -> ParallelConfig:
    """`config` with `overrides` applied and None filled from the environment, then with 1."""
    known = {field.name for field in fields(ParallelConfig)}
    unknown = sorted(set(overrides) - known)
    if unknown:
        raise ValueError(f"unknown option {unknown[0]}; known are: {', '.join(sorted(known))}")
    if config is not None and not isinstance(config, ParallelConfig):
        raise ValueError(
            f"config must be a ParallelConfig, got {type(config).__name__}; "
            f"write patch(model, ep_size=...) or patch(model, ParallelConfig(ep_size=...))"
        )
    config = replace(config or ParallelConfig(), **overrides)
    if config.dispatcher == "hierarchical" and config.node_size is None:
        config = replace(config, node_size=launched_local_world_size())
    return replace(
        config,
        ep_size=config.ep_size or _size_from_environment("HF_MOE_EP_EP_SIZE") or 1,
        sp_size=config.sp_size or _size_from_environment("HF_MOE_EP_SP_SIZE") or 1,
        dp_replicate_size=config.dp_replicate_size or 1,
    )


def launched_world_size() -> int:
    """Number of processes that the launcher started; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def launched_rank() -> int:
    """Rank that the launcher gave to this process; 0 without a launcher."""
    return int(os.environ.get("RANK", "0"))


def launched_local_rank() -> int | None:
    """Number of this process on its machine; None without a launcher that says it."""
    text = os.environ.get("LOCAL_RANK", "")
    return int(text) if text else None


def launched_local_world_size() -> int | None:
    """Number of processes on this machine; None without a launcher that says it."""
    return _size_from_environment("LOCAL_WORLD_SIZE")


def launched_with_fsdp() -> bool:
    """True under `accelerate launch` with `distributed_type: FSDP`."""
    return os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"


# What decides how ranks start and what this package makes of them; `hf-moe-ep doctor` shows them.
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
_OURS = ("HF_MOE_EP_EP_SIZE", "HF_MOE_EP_SP_SIZE")


def gloo_interfaces() -> list[str]:
    """Return the network interfaces that GLOO_SOCKET_IFNAME names; none where it is not set."""
    return [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]


def launch_environment() -> dict[str, str]:
    """Return the variables of a launch that are set, and all that begin with HF_MOE_EP_."""
    ours = sorted(name for name in os.environ if name.startswith("HF_MOE_EP_"))
    return {name: os.environ[name] for name in (*_LAUNCH_VARIABLES, *ours) if name in os.environ}


def check_environment() -> None:
    """Raise ValueError where a variable of ours has a value or a name that means nothing."""
    for name in launch_environment():
        if name.startswith("HF_MOE_EP_") and name not in _OURS:
            raise ValueError(f"{name} is set and is none of {', '.join(_OURS)}; correct its name")
    for name in _OURS:
        _size_from_environment(name)


def _size_from_environment(variable: str) -> int | None:
    text = os.environ.get(variable, "").strip()
    if not text:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{variable}={text!r} is no positive whole number; try {variable}=8")
    return int(text)


def _check_size(name: str, size: int | None) -> None:
    whole = isinstance(size, int) and not isinstance(size, bool)
    if size is not None and not (whole and size >= 1):
        raise ValueError(f"{name} must be None or a whole number >= 1, got {size!r}; try {name}=1")


def _check_rate(name: str, rate: float | None) -> None:
    number = isinstance(rate, int | float) and not isinstance(rate, bool)
    if rate is not None and not (number and 0 < rate < math.inf):
        raise ValueError(f"{name} must be None or a number > 0, got {rate!r}; try {name}=0.001")


def check_choice(name: str, value: object, allowed: Iterable[Any]) -> None:
    """Raise ValueError where `value` is none of `allowed`; True is not 1."""
    allowed = tuple(allowed)
    if not any(value == choice and type(value) is type(choice) for choice in allowed):
        choices = ", ".join(repr(choice) for choice in allowed)
        raise ValueError(f"{name}={value!r} is not known; use {choices}")
