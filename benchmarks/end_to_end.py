"""Time training steps of Qwen3-MoE, full and LoRA, with hf_moe_ep and with stock Transformers.

    python benchmarks/end_to_end.py                            tiny on a CPU; six layers on a GPU
    python benchmarks/end_to_end.py --mode lora --layers 48 --vocab 151936 --rows 1 --checkpointing
    python benchmarks/end_to_end.py --ranks 2                  CPU processes: FSDP2, ours with ep 2

The model has the shape of Qwen3-30B-A3B and random weights, in bf16 on a GPU. By default it has six
of the 48 layers and an eighth of the vocabulary, so that head and layers keep their proportion.

    ours             `patch(model)`; `ours_recompute` uses `recompute_activations=True`
    grouped_mm       stock with torch's grouped matrix product, which is its default
    eager            stock with its loop over experts

LoRA needs PEFT. Each side runs in a separate process. If the process dies, hangs or runs out of
memory, the side's line of JSON says so, and the next side runs. All sides have the same seed and
data, so their first losses must agree with stock's losses. Further lines of JSON compare them.

    step_s           forward, backward and AdamW, until the device is done; median and spread
    mfu              FLOP/s of the model / FLOP/s in the GPU's data sheet. A token has 6 FLOPs per
                     trained weight, 4 FLOPs per frozen weight, and the FLOPs of causal attention.
                     Recomputation does not count
    peak_gib         peak of allocated memory in these steps; on a CPU, peak of resident memory
    kept             bytes per token that autograd keeps between forward and backward, without the
                     parameters
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from importlib.util import find_spec
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from ranks import peak_mib, reset_peak, spawn
from sequence import saved_storages
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from hf_moe_ep import apply_ep_fsdp2, compile_layers, patch

SIDES = ("ours", "grouped_mm", "eager", "ours_recompute")
# The stock sides. The first stock side that ran provides the losses for all comparisons.
STOCK = ("grouped_mm", "eager")
MODES = ("full", "lora")
WARMUP_STEPS = 3
COMPARED_STEPS = 3
# This is large enough to change weights of 0.02 in bf16, and small enough that rounding differences
# between the sides do not grow.
LEARNING_RATE = 1e-4
# Relative difference of losses. A loss is a mean over thousands of tokens, so one rounding of the
# dtype is enough.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2.0**-8}
# TFLOP/s of dense bf16 products, from NVIDIA's data sheets.
DATA_SHEET = {"H100 PCIe": 756.0, "H100": 989.4, "H200": 989.4, "A100": 312.0, "B200": 2250.0}
# The fork server imports these modules once for all sides. No import may initialise a GPU.
PRELOADED = ["end_to_end", "transformers.models.qwen3_moe.modeling_qwen3_moe", "peft"]
Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Sizes:
    """The sizes of the model, and the tokens of each process."""

    layers: int = 6
    hidden: int = 2048
    ffn: int = 768
    experts: int = 128
    top_k: int = 8
    heads: int = 32
    kv_heads: int = 4
    head_dim: int = 128
    vocab: int = 18992
    rows: int = 4
    length: int = 4096
    adapter_rank: int = 16


TINY = Sizes(2, 64, 32, 8, 2, 4, 2, 16, 128, 2, 32, 4)


@dataclass(frozen=True)
class Cell:
    """One measurement, by one process or by one group of ranks."""

    side: str
    mode: str
    sizes: Sizes
    steps: int
    checkpointing: bool = False
    profile: bool = False
    ranks: int = 1
    compiled: bool = False

    def line(self) -> dict[str, Any]:
        """Return the settings, with which the JSON line of a measurement begins."""
        names = ("mode", "checkpointing", "compiled", "ranks", "steps")
        settings = {name: getattr(self, name) for name in names}
        return {"end_to_end": self.side, **settings, "sizes": asdict(self.sizes)}


def build(cell: Cell, device: torch.device) -> nn.Module:
    sizes = cell.sizes
    config = Qwen3MoeConfig(
        vocab_size=sizes.vocab,
        hidden_size=sizes.hidden,
        intermediate_size=3 * sizes.hidden,
        moe_intermediate_size=sizes.ffn,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        num_experts=sizes.experts,
        num_experts_per_tok=sizes.top_k,
        norm_topk_prob=True,
        max_position_embeddings=max(sizes.length, 4096),
        use_cache=False,
        experts_implementation="eager" if cell.side == "eager" else "grouped_mm",
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            config, dtype=choose_dtype(device), attn_implementation="sdpa"
        )
    if cell.mode == "lora":
        model = attach_adapters(model, sizes.adapter_rank)
    if cell.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    model = distribute(model, cell).train()
    if cell.compiled and cell.side.startswith("ours"):
        compile_layers(model)
    elif cell.compiled:
        for layer in find_decoder(model, cell).layers:
            layer.compile()
    return model


def find_decoder(model: nn.Module, cell: Cell) -> Any:
    """Return the module that has the decoder layers."""
    base: Any = model.get_base_model() if cell.mode == "lora" else model
    return base.model


def choose_dtype(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def attach_adapters(model: nn.Module, rank: int) -> nn.Module:
    """Attach LoRA to attention and experts, in the dtype of the model."""
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    )
    return get_peft_model(model, lora, autocast_adapter_dtype=False)


def distribute(model: nn.Module, cell: Cell) -> nn.Module:
    """Patch the model if the side is ours. On several ranks, shard the model of every side."""
    recompute = cell.side == "ours_recompute"
    if cell.side.startswith("ours"):
        if cell.ranks == 1:
            return patch(model, recompute_activations=recompute)
        return apply_ep_fsdp2(model, ep_size=cell.ranks, recompute_activations=recompute)
    if cell.ranks > 1:
        for layer in find_decoder(model, cell).layers:
            fully_shard(layer)
        fully_shard(model)
    return model


def count_model_flops(cell: Cell, model: nn.Module) -> float:
    """Return the FLOPs of one token, forward and backward."""
    sizes = cell.sizes
    active_share = sizes.top_k / sizes.experts
    flops = 0.0
    for name, parameter in model.named_parameters():
        if "embed_tokens" in name:
            continue
        num_active = parameter.numel() * (active_share if ".experts." in name else 1)
        flops += num_active * (6 if parameter.requires_grad else 4)
    # Forward has two products of length x heads x head_dim, backward four. Half is masked.
    attention = 6 * sizes.length * sizes.heads * sizes.head_dim
    return flops + sizes.layers * attention


def find_data_sheet_flops() -> float | None:
    """Return the FLOP/s in the data sheet of this GPU, or None if DATA_SHEET lacks the GPU."""
    if torch.cuda.is_available():
        device = torch.cuda.get_device_name()
        for name, tflops in DATA_SHEET.items():
            if name in device:
                return 1e12 * tflops
    return None


def measure(cell: Cell, note: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Measure one process. `note` is called with each figure as soon as it is known."""
    cuda = torch.cuda.is_available() and cell.ranks == 1
    device = torch.device("cuda" if cuda else "cpu")
    start = time.perf_counter()
    model = build(cell, device)
    # Each rank has its own data, because with equal data a missing reduction of gradients would not
    # change the losses.
    generator = torch.Generator().manual_seed(dist.get_rank() if cell.ranks > 1 else 0)
    shape = (cell.sizes.rows, cell.sizes.length)
    input_ids = torch.randint(cell.sizes.vocab, shape, generator=generator).to(device)
    batch = {"input_ids": input_ids, "labels": input_ids}
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, fused=cuda)
    wait = torch.cuda.synchronize if cuda else lambda: None
    wait()
    note({"build_s": round(time.perf_counter() - start, 2)})
    line = time_steps(cell, model, optimizer, batch, wait, note)
    flops = find_data_sheet_flops()
    if flops and cuda:
        line["mfu"] = round(count_model_flops(cell, model) * line["tok_per_s"] / flops, 4)
    if cuda:
        line["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 3)
        line["reserved_gib"] = round(torch.cuda.max_memory_reserved() / 2**30, 3)
    else:
        line["peak_gib"] = round(peak_mib() / 1024, 3)
    note(line)
    with saved_storages(model) as saved:
        loss = model(**batch).loss
    line["kept_bytes_per_token"] = round(sum(saved.values()) / input_ids.numel())
    saved.clear()
    loss.backward()
    optimizer.zero_grad()
    if cell.profile:
        line["profile"] = profile(model, batch, cuda)
    note(line)
    return line


def time_steps(
    cell: Cell,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    wait: Callable[[], None],
    note: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """Time the steps after the warm-up, and record the loss of every step."""
    seconds: list[float] = []
    losses: list[float] = []
    for step in range(WARMUP_STEPS + cell.steps):
        if step == WARMUP_STEPS:
            if batch["input_ids"].is_cuda:
                torch.cuda.reset_peak_memory_stats()
            else:
                reset_peak()
        if cell.ranks > 1:
            dist.barrier()
        wait()
        start = time.perf_counter()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        wait()
        if cell.ranks > 1:
            dist.barrier()
        seconds.append(time.perf_counter() - start)
        losses.append(loss.item())
        note({"first_step_s": round(seconds[0], 3), "losses": losses})
    timed = seconds[WARMUP_STEPS:]
    median = statistics.median(timed)
    return {
        "step_s": round(median, 5),
        "step_spread_s": [round(min(timed), 5), round(max(timed), 5)],
        "tokens": cell.ranks * batch["input_ids"].numel(),
        "tok_per_s": round(cell.ranks * batch["input_ids"].numel() / median, 1),
    }


def profile(model: nn.Module, batch: Batch, cuda: bool, most: int = 25) -> dict[str, Any]:
    """List the longest kernels of one forward and backward: name, ms, calls."""
    # On a GPU only kernels are recorded, because recording operators would slow down the host.
    kinds = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[kinds.CUDA if cuda else kinds.CPU]) as profiler:
        start = time.perf_counter()
        model(**batch).loss.backward()
        if cuda:
            torch.cuda.synchronize()
        ms = 1e3 * (time.perf_counter() - start)
    events = profiler.key_averages()

    def self_ms(event: Any) -> float:
        return (event.self_device_time_total if cuda else event.self_cpu_time_total) / 1e3

    device_type = torch.autograd.DeviceType.CUDA if cuda else torch.autograd.DeviceType.CPU
    events = sorted((e for e in events if e.device_type == device_type), key=self_ms, reverse=True)
    top = [[event.key[:90], round(self_ms(event), 3), event.count] for event in events[:most]]
    return {"wall_ms": round(ms, 2), "busy_ms": round(sum(map(self_ms, events)), 2), "top": top}


def measure_rank(rank: int, cell: Cell) -> dict[str, Any]:
    line: dict[str, Any] = {}
    measure(cell, line.update)
    return line


def measure_on_ranks(cell: Cell, seconds: float) -> dict[str, Any]:
    """Measure on several ranks. Returns rank 0's results, mean losses, and the largest peaks."""
    try:
        lines = spawn(measure_rank, cell.ranks, cell, timeout=seconds)
    except Exception as error:  # noqa: BLE001  the next side runs in other processes
        return {"error": f"{type(error).__name__}: {str(error)[-600:]}"}
    means = [statistics.fmean(losses) for losses in zip(*(line["losses"] for line in lines))]
    names = ("peak_gib", "kept_bytes_per_token")
    largest = {name: max(line[name] for line in lines) for name in names}
    return {**lines[0], "losses": means, **largest}


def measure_in_process(
    cell: Cell, seconds: float, measure: Callable[..., Any] = measure
) -> dict[str, Any]:
    """Measure in a new process. Returns its figures, with "error" if it fails or takes too long."""
    context = multiprocessing.get_context("forkserver")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_measure_and_send, args=(sender, cell, measure))
    process.start()
    sender.close()
    line: dict[str, Any] = {}
    deadline = time.monotonic() + seconds
    try:
        while receiver.poll(max(deadline - time.monotonic(), 0)):
            line |= receiver.recv()
        line["error"] = f"stopped after {seconds:.0f} s"
    except EOFError:
        process.join(10)
        if process.exitcode:
            line.setdefault("error", f"died with exit code {process.exitcode}")
    finally:
        process.kill()
        process.join()
    return line


def _measure_and_send(sender: Connection, cell: Cell, measure: Callable[..., Any]) -> None:
    try:
        measure(cell, sender.send)
    except torch.OutOfMemoryError:
        sender.send({"error": "out of memory"})
    except Exception as error:
        sender.send({"error": f"{type(error).__name__}: {str(error)[:600]}"})
        raise


def compare(lines: list[dict[str, Any]], dtype: torch.dtype) -> list[dict[str, Any]]:
    """Compare the first losses of each side with stock's losses. Returns a line for each side."""
    with_losses = {line["end_to_end"]: line for line in lines if line.get("losses")}
    truth = next((name for name in STOCK if name in with_losses), None)
    comparisons = []
    for name, line in with_losses.items():
        if truth is None or name == truth:
            continue
        pairs = list(zip(line["losses"], with_losses[truth]["losses"]))[:COMPARED_STEPS]
        errors = [abs(loss - true_loss) / abs(true_loss) for loss, true_loss in pairs]
        allowed = TOLERANCE[dtype]
        equal = all(error <= allowed for error in errors)  # NaN is not equal
        comparisons.append(
            {"losses_of": name, "against": truth, "differences": errors, "allowed": allowed}
            | {"equal": equal, "mode": line["mode"]}
        )
    return comparisons


def run(cells: list[Cell], seconds: float) -> int:
    """Measure and print all sides. Returns 1 if a side fails or its losses differ from stock's."""
    cuda = torch.cuda.is_available() and cells[0].ranks == 1
    lines = []
    for cell in cells:
        figures = (
            measure_on_ranks(cell, seconds) if cell.ranks > 1 else measure_in_process(cell, seconds)
        )
        lines.append({**cell.line(), **figures})
        print(json.dumps(lines[-1]), flush=True)
    comparisons = compare(lines, choose_dtype(torch.device("cuda" if cuda else "cpu")))
    for line in comparisons:
        print(json.dumps(line), flush=True)
    failed = any(line.get("error", "out of memory") != "out of memory" for line in lines)
    return int(failed or not all(line["equal"] for line in comparisons))


def parse(arguments: list[str] | None = None) -> tuple[list[Cell], float]:
    """Parse the options. Returns the cells to measure, and the limit of each cell in seconds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=["ours", "grouped_mm"])
    parser.add_argument("--mode", choices=MODES, default="full")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument(
        "--compiled",
        action="store_true",
        help="compile decoder layers: ours with compile_layers, stock with layer.compile()",
    )
    parser.add_argument("--profile", action="store_true", help="print the longest kernels as well")
    parser.add_argument("--ranks", type=int, default=1, help="number of CPU processes")
    parser.add_argument("--steps", type=int, default=5, help="timed steps, after three of warm-up")
    parser.add_argument("--seconds", type=float, default=300.0, help="time limit of each side")
    parser.add_argument("--tiny", action="store_true", help="use the sizes for a CPU on a GPU too")
    for size in fields(Sizes):
        parser.add_argument(f"--{size.name.replace('_', '-')}", type=int)
    args = parser.parse_args(arguments)
    if args.mode == "lora" and find_spec("peft") is None:
        parser.error("--mode lora needs PEFT, and there is no package peft on this machine")
    on_gpu = torch.cuda.is_available() and args.ranks == 1 and not args.tiny
    options = {f.name: getattr(args, f.name) for f in fields(Sizes)}
    options = {name: value for name, value in options.items() if value is not None}
    sizes = replace(Sizes() if on_gpu else TINY, **options)
    names = ("checkpointing", "compiled", "profile", "ranks")
    flags = {name: getattr(args, name) for name in names}
    return [Cell(side, args.mode, sizes, args.steps, **flags) for side in args.sides], args.seconds


def main() -> int:
    """Run the benchmark. Returns 1 if a side fails or its losses differ from stock's."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)
    return run(*parse())


if __name__ == "__main__":
    sys.exit(main())
