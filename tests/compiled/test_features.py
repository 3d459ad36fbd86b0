"""Compiled layers with every feature of a plan: losses and gradients equal those of stock code.

`test_layers.py` counts graphs, and compares compiled layers with uncompiled ones.
"""

from functools import partial
from typing import Any

import pytest
import torch
from support.adapters import with_lora
from support.architectures import models
from support.checks import PATIENT, Check, Found, on_ranks
from support.modalities import modality_by_step
from support.parity import Batch, Case, checkpointing, run_case
from support.quantised import SIZES, dequantise_experts
from support.split_rows import packed
from support.tiny_models import Row, batch, tiny, vision_batch
from torch import nn
from torch._dynamo.utils import counters

from hf_moe_ep import apply_ep_fsdp2, patch, update_router_bias

CONFIG = {"compile_layers": "aot_eager"}
CHECKPOINTED = partial(checkpointing, use_reentrant=False)


def _make_batches(model: nn.Module, rank: int, world: int, step: int) -> list[Batch]:
    """Make batches whose sizes all differ and are not 1.

    torch.compile would make a separate graph for equal sizes and for 1.
    """
    return [batch(model, 2 + rank, 11 + 2 * rank + step, seed=100 * step + rank)]


def _make_packed_and_padded(model: nn.Module, rank: int, world: int, step: int) -> list[Batch]:
    """Make a row of three packed documents, and rows with padding behind the text."""
    (documents,) = packed((5, 7 + step, 4 + rank), model, rank, world, step)
    return [documents, batch(model, 3, 13 + 2 * step, seed=100 * step + rank, pad=6)]


BASE = Case(
    "base", 2, ep=2, config=CONFIG, model={"num_hidden_layers": 5}, micro_batches=_make_batches
)
PICTURES = BASE.with_(model={"name": "qwen3_vl_moe"}, micro_batches=modality_by_step)
QUANTISED = BASE.with_(
    model=SIZES["nf4"],
    wrap=with_lora,
    change_reference=partial(dequantise_experts, kind="nf4"),
    config=CONFIG | {"experts_dtype": "nf4"},
)
PACKED = BASE.with_(micro_batches=_make_packed_and_padded)

CASES = {
    "LoRA": BASE.with_(wrap=with_lora, prepare=CHECKPOINTED),
    "LoRA, reentrant checkpoints": BASE.with_(
        wrap=with_lora, prepare=partial(checkpointing, use_reentrant=True)
    ),
    "LoRA, ep 1": BASE.with_(wrap=with_lora, ep=1),
    "pictures": PICTURES,
    "pictures, checkpoints": PICTURES.with_(prepare=CHECKPOINTED),
    "pictures, reentrant checkpoints": PICTURES.with_(
        prepare=partial(checkpointing, use_reentrant=True)
    ),
    "pictures, ep 1": PICTURES.with_(ep=1),
    "sequence parallelism": BASE.with_(sp=2, prepare=CHECKPOINTED),
    "quantised experts": QUANTISED,
    "quantised experts, ep 1": QUANTISED.with_(ep=1),
    "packed rows and padding": PACKED,
    "packed rows and padding, checkpoints": PACKED.with_(prepare=CHECKPOINTED),
    "packed rows and padding, ep 1": PACKED.with_(ep=1),
}
# The number of graphs on each rank. LoRA needs three graphs in front of the MoE block (the first
# layer, whose input has no gradient; other layers; layers without gradients) and two graphs behind
# it (with and without gradients). With sequence parallelism attention splits a layer into five
# graphs, each with and without gradients, and the loss is fused, whose cross-entropy is one graph.
# Pictures need three more graphs on rank 1, where some batches have no mask. With ep_size 1 a
# decoder layer is one graph instead of two, each with and without gradients. Under checkpoints the
# input of the first layer requires a gradient even in a forward without gradients, which is one
# more graph. A packed row is a batch of one row without a mask, so it needs other graphs than
# padded rows, which the test runs only with gradients. A reentrant checkpoint first runs each layer
# of a training batch without gradients, which makes further graphs.
_LORA = 3 + 2
GRAPHS = {
    "LoRA": (_LORA, _LORA),
    "LoRA, reentrant checkpoints": (_LORA + 1, _LORA + 1),
    "LoRA, ep 1": (_LORA, _LORA),
    "pictures": (10, 13),
    "pictures, checkpoints": (11, 14),
    "pictures, reentrant checkpoints": (14, 18),
    "pictures, ep 1": (8, 11),
    "sequence parallelism": (5 * 2 + 1, 5 * 2 + 1),
    "quantised experts": (_LORA, _LORA),
    "quantised experts, ep 1": (_LORA, _LORA),
    "packed rows and padding": (3 * 2, 3 * 2),
    "packed rows and padding, checkpoints": (3 * 2 + 1, 3 * 2 + 1),
    "packed rows and padding, ep 1": (3, 3),
}


def _run(name: str, rank: int, world: int) -> None:
    torch.compiler.reset()  # forgets the sizes that earlier checks of this process have seen
    counters.clear()
    run_case(CASES[name].with_(name=name), rank, world)
    graphs = counters["stats"]["unique_graphs"]
    assert graphs == GRAPHS[name][rank], (graphs, dict(counters["graph_break"]))


def _make_random_text(model: nn.Module, rank: int, step: int) -> Batch:
    """Make two to four rows of random length. Each batch has padding, so each one has a mask."""
    length = int(torch.randint(5, 60, (), generator=torch.Generator().manual_seed(2 * step + rank)))
    return batch(model, 2 + step % 3, length, seed=step, pad=1 + step % 2)


def _make_random_pictures(model: nn.Module, rank: int, step: int) -> Batch:
    """Make two rows of random length, each with a picture of random size.

    The shorter row is padded, so each batch has a mask.
    """
    draw = torch.Generator().manual_seed(2 * step + rank)
    words = torch.randint(5, 30, (4,), generator=draw).tolist()
    sides = (2 * torch.randint(1, 5, (4,), generator=draw)).tolist()
    first: Row = [words[0], (sides[0], sides[1]), words[1]]
    second: Row = [words[2], (sides[2], sides[3]), words[3]]
    if _count_tokens(first) == _count_tokens(second):
        second.append(1)
    return vision_batch(model, [first, second], seed=step)


def _count_tokens(row: Row) -> int:
    return sum(item if isinstance(item, int) else item[0] * item[1] // 4 for item in row)


STEPS = 200
MIXED = BASE.with_(model={"num_hidden_layers": 3, "mlp_only_layers": [1]})
LENGTHS = {
    "ep 1": (MIXED.with_(ep=1), _make_random_text),
    "ep 2": (MIXED, _make_random_text),
    "ep 2, checkpoints": (MIXED.with_(prepare=CHECKPOINTED), _make_random_text),
    "LoRA": (MIXED.with_(wrap=with_lora), _make_random_text),
    "pictures": (PICTURES, _make_random_pictures),
}


def _check_no_new_graph_after_second_step(name: str, rank: int, world: int) -> None:
    case, make = LENGTHS[name]
    torch.compiler.reset()
    counters.clear()
    model = tiny(**case.model)
    model = case.wrap(model) if case.wrap else model
    if case.prepare:
        case.prepare(model)
    apply_ep_fsdp2(model, ep_size=case.ep, **case.config)
    graphs = []
    for step in range(STEPS):
        model(**make(model, rank, step)).loss.backward()
        model.zero_grad()
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[1:] == [graphs[1]] * (STEPS - 1), (graphs[:5], graphs[-1], name)
    assert graphs[-1] > 0


@pytest.mark.parametrize(
    "claim",
    on_ranks(
        2,
        {name: partial(_check_no_new_graph_after_second_step, name) for name in LENGTHS},
        slow=True,
        **PATIENT,
    ),
)
def test_200_random_lengths(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)


@pytest.mark.parametrize(
    "claim", on_ranks(2, {name: partial(_run, name) for name in CASES}, slow=True, **PATIENT)
)
def test_equal_to_stock(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)


@pytest.mark.slow
def test_router_biases_follow_the_load_of_compiled_layers() -> None:
    torch.compiler.reset()
    options: dict[str, Any] = {"experts_backend": "torch", "bias_update_rate": 0.0625}
    eager, compiled = (models.tiny("deepseek_v3", num_hidden_layers=3) for _ in range(2))
    patch(eager, **options)
    patch(compiled, **options, **CONFIG)
    before = {name: value.clone() for name, value in eager.state_dict().items()}
    for step in range(3):
        for model in (eager, compiled):
            model(**batch(model, 2, 9 + step, seed=step)).loss.backward()
            update_router_bias(model)
        got = compiled.state_dict()
        changed = [
            n for n, value in eager.state_dict().items() if not torch.equal(value, before[n])
        ]
        assert changed and all("bias" in name for name in changed)
        assert all(torch.equal(got[name], eager.state_dict()[name]) for name in changed)
