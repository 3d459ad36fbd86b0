"""Measure one layer of each kind of mixer with sequence parallelism, on 4 ranks that share a batch.

    python benchmarks/mixers.py                              prints the table
    python benchmarks/mixers.py --write benchmarks/results   also writes it as Markdown

A mixer is a module that mixes the tokens of a sequence without transformers' attention interface.
Every model has one decoder layer, whose mixer is measured with three methods:

    stock      the unpatched model computes the whole sequence
    gathered   sp_size 4, and the mixer gets whole sequences (sequence/mixers.py)
    divided    sp_size 4, and the mixer is divided as in training: its keys are gathered
               (gathering_cache.py), or its heads are split and its halo is sent (recurrences.py).
               Lightning attention is not divided

The figures of a rank:

    activations    bytes of the storages that autograd saves in the forward of the mixer, without
                   parameters
    peak           the largest number of bytes that are alive at one time among the tensors created
                   in the forward of the mixer
    sent           bytes that the rank sends in the forward of the mixer, counted when torch
                   dispatches the collectives
    seconds        forward and backward of the whole model, on four real ranks, until the slowest
                   rank is done. With --steps 0 they are not measured. Those of Mamba-1 are measured
                   over 512 tokens: in plain PyTorch, each token of its scan has a gradient of the
                   size of the whole sequence

Bytes are counted on rank 1 of a simulated group of 4: the other ranks do not exist, and collectives
return tensors of the right size with arbitrary values. Recurrences and convolutions run in plain
PyTorch, because their kernels need a GPU.
"""

from __future__ import annotations

import argparse
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from benchmark_text import describe_machine, spread
from ranks import KEEP_FREED_MEMORY, reset_peak, spawn
from sequence import saved_storages
from timing import seconds_of_step
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from hf_moe_ep import apply_ep_fsdp2, patch
from hf_moe_ep.architectures import find_parts, find_plan
from hf_moe_ep.sequence import recurrences, split
from hf_moe_ep.upstream.process_groups import fake_group

WORLD = 4
METHODS = ("stock", "gathered", "divided")
RECURRENCE_METHODS = ("all heads", "states")


@dataclass(frozen=True)
class Kind:
    """A kind of mixer: the model type that has it, and the fields of its config.

    `states` is True for a recurrence whose states can be passed to the next rank. `is_divided` is
    False for a mixer that always gets whole sequences. `timed_seq` is the largest number of tokens
    with which seconds are measured, 0 if there is no limit.
    """

    model_type: str
    fields: dict[str, Any]
    states: bool = False
    is_divided: bool = True
    timed_seq: int = 0

    @property
    def methods(self) -> tuple[str, ...]:
        if not self.is_divided:
            return METHODS[:2]
        return METHODS + RECURRENCE_METHODS if self.states else METHODS


_LATENT = {"q_lora_rank": 64, "kv_lora_rank": 64, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32}
KINDS = {
    "delta net": Kind("qwen3_next", {"layer_types": ["linear_attention"]}, states=True),
    "KDA": Kind(
        "kimi_linear",
        {"layer_types": ["linear_attention"], "mlp_layer_types": ["sparse"]},
        states=True,
    ),
    "Mamba-2": Kind("granitemoehybrid", {"layer_types": ["linear_attention"]}, states=True),
    "Mamba-1": Kind("jamba", {"attn_layer_period": 2, "attn_layer_offset": 1}, timed_seq=512),
    "short convolution": Kind("lfm2_moe", {"layer_types": ["conv"]}),
    "attention with an indexer": Kind("deepseek_v32", _LATENT | {"v_head_dim": 32}),
    "attention with a compressor": Kind(
        "deepseek_v4",
        {
            "layer_types": ["heavily_compressed_attention"],
            "mlp_layer_types": ["moe"],
            "compress_rates": {"heavily_compressed_attention": 128},
            "num_key_value_heads": 1,
            "head_dim": 32,
            "q_lora_rank": 64,
            "o_lora_rank": 64,
            "o_groups": 2,
        },
    ),
    "lightning attention": Kind("minimax", {"layer_types": ["linear_attention"]}, is_divided=False),
}
# Fields that several of these configs share.
_COMMON: dict[str, Any] = {
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "shared_intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 0,
    "num_dense_layers": 0,
    "n_group": 1,
    "topk_group": 1,
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_num_heads": 8,
    "linear_head_dim": 32,
    "mamba_n_heads": 8,
    "mamba_n_groups": 4,
    "mamba_d_state": 16,
    "mamba_chunk_size": 64,
    "index_n_heads": 4,
    "index_head_dim": 32,
    "index_topk": 256,
    "expert_layer_period": 1,
    "expert_layer_offset": 0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@dataclass(frozen=True)
class Sizes:
    """The length of the sequence, the hidden size, and the number of measured steps."""

    seq: int = 4096
    hidden: int = 256
    vocab: int = 512
    steps: int = 2


@dataclass(frozen=True)
class Measured:
    """The figures of one rank, in bytes."""

    activations: int
    peak: int
    sent: int


def build(kind: Kind, sizes: Sizes) -> nn.Module:
    config_class = CONFIG_MAPPING[kind.model_type]
    fields = config_class.__dataclass_fields__
    values = _COMMON | {"vocab_size": sizes.vocab, "hidden_size": sizes.hidden}
    values |= {"max_position_embeddings": sizes.seq}
    torch.manual_seed(0)
    config = config_class(**{n: x for n, x in values.items() if n in fields} | kind.fields)
    model: nn.Module = AutoModelForCausalLM.from_config(config).train()
    return model


def prepare(model: nn.Module, method: str, world: int) -> nn.Module:
    if method == "stock":
        return model
    plan = find_plan(model)
    if method == "gathered":
        plan = replace(plan, splits_mixers=False, gathers_keys=False)
    return apply_ep_fsdp2(patch(model, plan=plan, sp_size=world))


class SentInForward(TorchDispatchMode):
    """Counts the bytes that all-to-alls and all-gathers send to other ranks.

    FSDP2 gathers the parameters of a layer before the layer's mixer runs, so they are not counted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sent = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if name == "c10d.alltoall_base_.default":
            size = dist.ProcessGroup.unbox(args[2]).size()
            self.sent += args[1].nbytes // size * (size - 1)
        elif name == "c10d._allgather_base_.default":
            self.sent += args[1].nbytes * (dist.ProcessGroup.unbox(args[2]).size() - 1)
        return func(*args, **(kwargs or {}))


class PeakBytes(TorchDispatchMode):
    """Records the largest number of bytes of the tensors that operators have created."""

    def __init__(self) -> None:
        super().__init__()
        self._alive: dict[int, int] = {}
        self._now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {self._key(x) for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and self._key(x) not in known:
                self._add(x.untyped_storage())
        return out

    def _key(self, x: torch.Tensor) -> int:
        return x.untyped_storage()._cdata

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._alive:
            return
        self._alive[key] = storage.nbytes()
        self._now += storage.nbytes()
        self.peak = max(self.peak, self._now)
        weakref.finalize(storage, self._remove, key)

    def _remove(self, key: int) -> None:
        self._now -= self._alive.pop(key, 0)


class MixerWatch:
    """Measures the forward of a mixer with hooks."""

    def __init__(self, model: nn.Module, mixer: nn.Module) -> None:
        self._model = model
        self.activations = self.peak = self.sent = 0
        mixer.register_forward_pre_hook(self._begin, prepend=True)
        mixer.register_forward_hook(self._end)
        self.measures = False

    def _begin(self, module: nn.Module, args: Any) -> None:
        if self.measures:
            self._stack = ExitStack()
            self._sent = self._stack.enter_context(SentInForward())
            self._peak = self._stack.enter_context(PeakBytes())
            self._saved = self._stack.enter_context(saved_storages(self._model))

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.measures:
            self._stack.close()
            self.activations = sum(self._saved.values())
            self.peak, self.sent = self._peak.peak, self._sent.sent


def prepare_step(
    kind: Kind, method: str, sizes: Sizes, *, trains: bool
) -> tuple[MixerWatch, Callable[[], None]]:
    """Build a model. Returns the watch of its mixer, and a function that runs a step.

    With `trains`, the step runs backward as well.
    """
    model = build(kind, sizes)
    (mixers,) = find_parts(model).mixers
    ((_, mixer),) = mixers.items()
    model = prepare(model, method, dist.get_world_size())
    watch = MixerWatch(model, mixer)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, sizes.vocab, (1, sizes.seq), generator=generator)
    batch = {"input_ids": ids, "labels": ids, "use_cache": False}

    def step() -> None:
        with choose(method):
            loss = model(**batch).loss
            if trains:
                loss.backward()
        model.zero_grad()

    return watch, step


@contextmanager
def choose(method: str) -> Iterator[None]:
    """For RECURRENCE_METHODS, keep recurrences from dividing their heads over the ranks."""
    with ExitStack() as stack:
        if method in RECURRENCE_METHODS:
            stack.enter_context(mock.patch.object(recurrences, "_can_split", lambda *args: False))
        if method == "all heads":
            no = mock.patch.object(recurrences, "passes_states", lambda *args: False)
            stack.enter_context(no)
        yield


def measure_bytes(kind: Kind, method: str, sizes: Sizes) -> Measured:
    """Count the bytes of rank 1 of 4 in one process."""
    # Other ranks do not exist, so their batches cannot be compared.
    alone = mock.patch.object(split, "check_same_batch", lambda *args: None)
    with fake_group(1, WORLD), alone:
        watch, step = prepare_step(kind, method, sizes, trains=False)
        watch.measures = True
        step()
    return Measured(watch.activations, watch.peak, watch.sent)


def measure_seconds(
    rank: int, kinds: dict[str, Kind], sizes: Sizes
) -> dict[str, dict[str, list[float]]]:
    """Time the steps of four ranks for each kind and method, after one step to warm up.

    All models are measured by the same processes, because a process needs more time to start than
    most of the steps.
    """
    seconds: dict[str, dict[str, list[float]]] = {name: {} for name in kinds}
    for name, kind in kinds.items():
        timed = replace(sizes, seq=min(sizes.seq, kind.timed_seq or sizes.seq))
        for method in kind.methods:
            _, step = prepare_step(kind, method, timed, trains=True)
            step()
            seconds[name][method] = [seconds_of_step(step) for _ in range(sizes.steps)]
            del step
            reset_peak()  # frees the model, and returns its memory to the system
    return seconds


def report(
    sizes: Sizes,
    found: dict[str, dict[str, Measured]],
    seconds: dict[str, dict[str, list[float]]],
    about: list[str],
) -> str:
    mib = 2**20
    lines = [
        "# One layer of each kind of mixer, on 4 ranks that share a sequence\n",
        *about,
        f"- one decoder layer, hidden {sizes.hidden}, a sequence of {sizes.seq} tokens, fp32\n",
        "| mixer | of | way | activations, MiB | of stock's | peak, MiB | of stock's "
        "| sent, KiB | s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, methods in found.items():
        stock = methods["stock"]
        for method, figures in methods.items():
            timed = seconds.get(name, {}).get(method)
            cells = [
                f"{figures.activations / mib:.1f}",
                f"{figures.activations / stock.activations:.2f}",
                f"{figures.peak / mib:.1f}",
                f"{figures.peak / stock.peak:.2f}",
                f"{figures.sent / 1024:.0f}",
                spread(timed) if timed else "-",
            ]
            lines.append(
                f"| {name} | `{KINDS[name].model_type}` | {method} | {' | '.join(cells)} |"
            )
    lines.append("\nEvery figure is explained at the top of `benchmarks/mixers.py`.")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in vars(Sizes()).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=[*KINDS])
    parser.add_argument("--write", type=Path, help="folder for mixers-cpu.md")
    args = parser.parse_args()
    sizes = Sizes(**{name: getattr(args, name) for name in vars(Sizes())})
    load_before = os.getloadavg()[0]
    torch.set_num_threads(1)
    kinds = {name: KINDS[name] for name in args.kinds}
    found = {
        name: {method: measure_bytes(kind, method, sizes) for method in kind.methods}
        for name, kind in kinds.items()
    }
    seconds: dict[str, dict[str, list[float]]] = {}
    if sizes.steps:
        options = {"timeout": 900.0 * len(kinds), "environment": KEEP_FREED_MEMORY}
        seconds, *_ = spawn(measure_seconds, WORLD, kinds, sizes, **options)
    text = report(
        sizes, found, seconds, describe_machine("benchmarks/mixers.py", load_before, WORLD)
    )
    print(text)
    if args.write:
        args.write.mkdir(parents=True, exist_ok=True)
        (args.write / "mixers-cpu.md").write_text(text)


if __name__ == "__main__":
    main()
