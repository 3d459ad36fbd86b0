"""Count the work around the experts in a training step: launches, transfers, copies, optimizer.

    python benchmarks/around_experts.py                                 prints the table
    python benchmarks/around_experts.py --json figures.json             also stores the figures
    python benchmarks/around_experts.py --before figures.json           compares with stored figures
    python benchmarks/around_experts.py --write benchmarks/results      also writes the Markdown

Most figures are counts, which a busy machine does not change. A small Qwen3-MoE runs one step on
two gloo ranks with ep_size 2 and bf16 compute:

    launches     operators outside the experts' computation that launch kernels; per MoE block in
                 forward, and per decoder layer in backward (the difference of two depths)
    collectives  collectives of the ep group per MoE layer, in forward and backward
    sent         bytes of rows in these collectives, per token and MoE layer
    copies       bytes of expert weights and their gradients that operators outside the experts'
                 computation read and write, per weight and micro-batch

Clipping and AdamW run once on a model with 20 layers, over torch's fake process group of 4 ranks
with ep_size 2, so that parameters have two meshes. Host work is the time from the arrival of a
layer's counts until its rows can be sent, without waiting for other ranks. The clipping of torch,
which cannot clip two meshes at once, is called for each mesh, and for each tensor in turn.

Peak memory is planned (`hf-moe-ep plan`) for a step of Qwen3-30B-A3B on 8 GPUs with fused AdamW. It
is measured on the CPU for a forward and backward of a small model whose vocabulary is as many times
its hidden size: the bytes of all tensors that are alive, without the parameters. The errors of bf16
gradients are measured against fp64, for stock's loss, for the loss in chunks and for
torch.nn.functional.linear_cross_entropy.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from benchmark_text import describe_machine
from ranks import spawn
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from hf_moe_ep import ParallelConfig, apply_ep_fsdp2, clip_grad_norm_, patch
from hf_moe_ep.dispatcher import Header, RouteSource
from hf_moe_ep.moe.dispatch.all_to_all import AllToAll
from hf_moe_ep.planner.count import count_tensors
from hf_moe_ep.upstream.operators import count_moved_bytes, count_payload_bytes, find_collective
from hf_moe_ep.upstream.process_groups import fake_group

HIDDEN, FFN, EXPERTS, TOP_K, TOKENS = 64, 64, 8, 2, (2, 20)
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
Figures = dict[str, float]


def build_small_model(layers: int, vocab_size: int = 128) -> Qwen3MoeForCausalLM:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=vocab_size,
        hidden_size=HIDDEN,
        intermediate_size=96,
        moe_intermediate_size=FFN,
        num_hidden_layers=layers,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
    )
    return Qwen3MoeForCausalLM(config).train()


class Work(TorchDispatchMode):
    """Counts operators outside the experts' computation while `is_counting` is True.

    Attributes:
        launches: operators that launch kernels, without collectives.
        collectives: all-to-alls, and other collectives of integers. FSDP2 sends no integers.
        sent: bytes of floating point rows in all-to-alls.
        copied: bytes of operators on tensors of at least `large` elements.
    """

    def __init__(self, large: int) -> None:
        super().__init__()
        self.large, self.is_counting = large, True
        self.launches = self.collectives = self.sent = self.copied = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if self.is_counting:
            self._count(func, args, kwargs, out)
        return out

    def _count(self, func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        if (kind := find_collective(func)) is not None:
            tensors = [x for x in torch.utils._pytree.tree_leaves(args) if isinstance(x, Tensor)]
            is_integer = tensors[0].dtype == torch.int64
            self.collectives += kind == "all_to_all" or is_integer
            if kind == "all_to_all" and not is_integer:
                self.sent += count_payload_bytes(func, args)
            return
        if func.namespace not in ("aten", "fsdp") or _is_called_by_experts():
            return
        nbytes = count_moved_bytes(func, args, kwargs, out)
        if nbytes == 0:
            return
        self.launches += 1
        leaves = torch.utils._pytree.tree_leaves((args, kwargs, out))
        if any(isinstance(x, Tensor) and x.numel() >= self.large for x in leaves):
            self.copied += nbytes


def _is_called_by_experts() -> bool:
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename.endswith(("torch_mlp.py", "triton_mlp.py")):
            return True
        frame = frame.f_back
    return False


@contextmanager
def only_in(modules: list[nn.Module], work: Work) -> Iterator[None]:
    """Count only operators inside `modules`."""
    work.is_counting = False

    def switch(on: bool) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            work.is_counting = on

        return hook

    hooks = [module.register_forward_pre_hook(switch(True)) for module in modules]
    hooks += [module.register_forward_hook(switch(False)) for module in modules]
    yield
    for hook in hooks:
        hook.remove()
    work.is_counting = True


def step(layers: int, rank: int, *, padding: float = 0.0, autocast: bool = False) -> Figures:
    """Run one step on this rank. Returns its counts, summed over all layers."""
    model = build_small_model(layers)
    policy = None if autocast else BF16
    apply_ep_fsdp2(model, ep_size=2, experts_backend="torch", mp_policy=policy)
    ids = torch.randint(128, TOKENS, generator=torch.Generator().manual_seed(rank))
    mask = torch.ones_like(ids)
    mask[:, round(TOKENS[1] * (1 - padding)) :] = 0
    labels = ids.masked_fill(mask == 0, -100)
    inputs = {"input_ids": ids, "attention_mask": mask, "labels": labels, "use_cache": False}
    blocks = [layer.mlp for layer in model.model.layers]
    cast = torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext()
    with cast:
        model(**inputs).loss.backward()  # FSDP2 initialises itself
    model.zero_grad()
    large = EXPERTS // 2 * FFN * HIDDEN
    with Work(large) as forward, only_in(blocks, forward), cast:
        loss = model(**inputs).loss
    with Work(large) as backward:
        loss.backward()
    model.zero_grad()
    with Work(large) as whole, cast:
        model(**inputs).loss.backward()
    return {
        "forward": forward.launches,
        "backward": backward.launches,
        "collectives": whole.collectives,
        "sent": whole.sent,
        "copied": whole.copied,
    }


def measure_on_two_ranks(rank: int) -> Figures:
    """Measure the figures of a step, per layer."""
    figures: Figures = {}
    for name, options in {"bf16": {}, "autocast": {"autocast": True}}.items():
        two, three = step(2, rank, **options), step(3, rank, **options)
        figures[f"launches of a MoE block in forward, {name}"] = two["forward"] / 2
        figures[f"launches of a layer in backward, {name}"] = three["backward"] - two["backward"]
        figures[f"collectives of the ep group per layer, {name}"] = two["collectives"] / 2
        figures[f"bytes sent per token and layer, {name}"] = _divide_by_tokens(two["sent"])
        if name == "bf16":
            weights = 3 * EXPERTS // 2 * FFN * HIDDEN
            figures["bytes copied per expert weight and micro-batch"] = (
                three["copied"] - two["copied"]
            ) / weights
    padded = step(2, rank, padding=0.4, autocast=True)
    figures["bytes sent per token and layer, autocast, 40 % padding"] = _divide_by_tokens(
        padded["sent"]
    )
    return figures


def _divide_by_tokens(sent: float) -> float:
    return sent / 2 / (TOKENS[0] * TOKENS[1])


def count_optimizer_calls() -> Figures:
    """Count the operators that clipping and AdamW call for all parameters."""
    figures: Figures = {}
    with fake_group(0, 4):
        for name in ("full", "LoRA"):
            model: Any = build_small_model(20)
            if name == "LoRA":
                model = _attach_adapters(model)
            apply_ep_fsdp2(model, ep_size=2, experts_backend="torch")
            trained = [p for p in model.parameters() if p.requires_grad]
            for parameter in trained:
                parameter.grad = torch.ones_like(parameter)
            title = f"{name}, {len(trained)} parameters"
            figures[f"operators of clip_grad_norm_, {title}"] = _count_operators(
                lambda model=model: clip_grad_norm_(model, 1.0)
            )
            figures[f"operators of torch's clipping by tensor, {title}"] = _count_operators(
                lambda trained=trained: _clip_each_tensor(trained)
            )
            for options in ({"fused": True}, {"foreach": False}):
                optimizer = torch.optim.AdamW(trained, lr=1e-3, **options)
                optimizer.step()  # allocates its state
                label = ", ".join(f"{key}={value}" for key, value in options.items())
                figures[f"operators of AdamW({label}), {title}"] = _count_operators(optimizer.step)
    return figures


def _clip_each_tensor(parameters: list[Any]) -> None:
    meshes = {parameter.device_mesh for parameter in parameters}
    for mesh in meshes:
        of_mesh = [parameter for parameter in parameters if parameter.device_mesh == mesh]
        nn.utils.clip_grad_norm_(of_mesh, 1.0, foreach=False)


def _count_operators(function: Callable[[], Any]) -> int:
    class Count(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            self.calls += "profiler" not in str(func)
            return func(*args, **(kwargs or {}))

    with Count() as count:
        function()
    return count.calls


def _attach_adapters(model: nn.Module) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], target_parameters=experts)
    return get_peft_model(model, config)


def time_host_work(rounds: int = 30) -> Figures:
    """Time the host's work after the counts of one layer with 256 experts have arrived."""
    figures: Figures = {}
    ids = torch.stack([torch.randperm(256)[:8] for _ in range(512)])
    header = Header(1, 0, True, True, False, False, 8, 2, RouteSource.LIVE)
    for num_ranks in (8, 64, 256):
        seconds = []
        with fake_group(0, num_ranks):
            dispatcher = AllToAll(dist.group.WORLD, 256)
            for _ in range(rounds):
                planning = dispatcher.start_plan(ids, header, hidden_bytes=4096)
                start = time.perf_counter()
                planning.finish()
                seconds.append(time.perf_counter() - start)
        name = f"ms of the host behind the counts, {num_ranks} ranks"
        figures[name] = 1e3 * statistics.median(seconds)
    return figures


def plan_memory_of_head(shape: str = "Qwen/Qwen3-30B-A3B", tokens: int = 8192) -> Figures:
    """Plan the peak memory of a step with activation checkpointing and of its head, in GiB."""
    from hf_moe_ep.planner.step import Batch, plan_step

    figures: Figures = {}
    settings = {"": {}, ", fused loss": {"fused_loss": True}}
    if not hasattr(ParallelConfig(), "fused_loss"):
        settings = {"": {}}
    for lora_rank in (None, 16):
        for name, options in settings.items():
            config = ParallelConfig(ep_size=8, **options)
            batch = Batch(tokens, checkpointing=True)
            plan = plan_step(
                shape,
                config,
                world_size=8,
                batch=batch,
                optimizer="adamw_fused",
                lora_rank=lora_rank,
            )
            kind = "full" if lora_rank is None else "LoRA"
            title = f"{kind}, {tokens} tokens{name}"
            in_head = max(peak for phase, peak in plan.peaks.items() if "head" in phase)
            figures[f"GiB at the peak of head and loss, {title}"] = in_head / 2**30
            figures[f"GiB at the peak of the step, {title}"] = plan.peak / 2**30
    return figures


def measure_memory_of_loss(rows: int = 2, length: int = 1024) -> Figures:
    """Measure the peak memory of a forward and backward of a small fp32 model, in MiB."""
    figures: Figures = {}
    if not hasattr(ParallelConfig(), "fused_loss"):
        return figures
    vocab = 74 * HIDDEN  # as in Qwen3-30B-A3B
    ids = torch.randint(vocab, (rows, length), generator=torch.Generator().manual_seed(0))
    for name, fused in {"": False, ", fused loss": True}.items():
        model: Any = build_small_model(1, vocab_size=vocab)
        patch(model, experts_backend="torch", fused_loss=fused)
        with count_tensors() as memory:
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        title = f"{rows * length} tokens, vocabulary {vocab}{name}"
        figures[f"MiB at the measured peak of a step, {title}"] = memory.peak / 2**20
    return figures


def measure_loss_errors(tokens: int = 512, hidden: int = 64, vocab: int = 4736) -> Figures:
    """Measure the errors of bf16 losses and their gradients, relative to fp64.

    The vocabulary is 74 times the hidden size, as in Qwen3-30B-A3B.
    """
    torch.manual_seed(0)
    x_TH = torch.randn(tokens, hidden).bfloat16()
    weight_VH = (torch.randn(vocab, hidden) / hidden**0.5).bfloat16()
    labels_T = torch.randint(vocab, (tokens,))
    labels_T[::7] = -100

    def results(loss: Callable[[Tensor, Tensor], Tensor], wide: bool = False) -> list[Tensor]:
        inputs = [x.detach().double() if wide else x.detach().clone() for x in (x_TH, weight_VH)]
        inputs = [x.requires_grad_() for x in inputs]
        value = loss(*inputs)
        value.backward()
        return [x.double() for x in (value.detach(), *(x.grad for x in inputs))]

    truth = results(lambda x, w: functional.cross_entropy(x @ w.t(), labels_T), wide=True)
    losses: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "stock": lambda x, w: functional.cross_entropy((x @ w.t()).float(), labels_T)
    }
    if hasattr(functional, "linear_cross_entropy"):
        options = nn.LinearCrossEntropyOptions()
        losses["torch's linear_cross_entropy"] = lambda x, w: functional.linear_cross_entropy(
            x, w, labels_T, options=options
        )
    if hasattr(ParallelConfig(), "fused_loss"):
        losses["in chunks of 16 tokens"] = lambda x, w: _compute_loss_in_chunks(x, w, labels_T, 16)
    figures: Figures = {}
    for name, loss in losses.items():
        found = results(loss)
        for part, got, want in zip(("loss", "hidden states", "weight"), found, truth, strict=True):
            error = ((got - want).norm() / want.norm()).item()
            figures[f"error of the {part}, bf16, {name}"] = error
    return figures


def _compute_loss_in_chunks(
    x_TH: Tensor, weight_VH: Tensor, labels_T: Tensor, chunk: int
) -> Tensor:
    from hf_moe_ep.loss.chunks import HeadLoss

    count = (labels_T != -100).sum()
    return HeadLoss(
        lambda rows: functional.linear(rows, weight_VH),
        lambda: None,
        (weight_VH,),
        labels_T,
        len(weight_VH),
        -100,
        count,
        chunk,
    ).compute(x_TH)


def run() -> Figures:
    """Measure all figures. Returns them by name."""
    (figures, _) = spawn(measure_on_two_ranks, 2, timeout=300.0)
    return (
        figures
        | time_host_work()
        | count_optimizer_calls()
        | measure_loss_errors()
        | plan_memory_of_head()
        | measure_memory_of_loss()
    )


def report(figures: Figures, before: Figures) -> str:
    """Format the figures as a Markdown table."""
    lines = ["| figure | before | now |", "|---|---|---|"]
    for name, value in figures.items():
        lines.append(f"| {name} | {_format_value(before.get(name))} | {_format_value(value)} |")
    return "\n".join(lines)


def _format_value(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if value == round(value) else f"{value:.3g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="store the figures in this file")
    parser.add_argument("--before", type=Path, help="figures that another commit has stored")
    parser.add_argument("--write", type=Path, help="write around-experts-cpu.md to this folder")
    args = parser.parse_args()
    load = os.getloadavg()[0]
    torch.set_num_threads(1)
    figures = run()
    before = {} if args.before is None else json.loads(args.before.read_text())
    text = "\n".join(
        [
            "# What surrounds the experts",
            "",
            *describe_machine("benchmarks/around_experts.py", load, 2),
            "",
            "`benchmarks/around_experts.py` explains each figure. Before: the same script on the",
            "commit before this work.",
            "",
            report(figures, before),
        ]
    )
    print(text)
    if args.json is not None:
        args.json.write_text(json.dumps(figures))
    if args.write is not None:
        (args.write / "around-experts-cpu.md").write_text(text + "\n")


if __name__ == "__main__":
    main()
