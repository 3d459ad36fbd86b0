"""The counted work of a step equals a count by hand: FLOPs, bytes, launches and traffic."""

import pytest
import torch
from support.tiny_models import tiny
from torch.nn import functional as F

from hf_moe_ep import ParallelConfig
from hf_moe_ep.planner.extrapolate import extrapolate_work
from hf_moe_ep.planner.step import Batch, plan_step
from hf_moe_ep.planner.work import (
    Collective,
    Operator,
    Phase,
    StepWork,
    WorkCounter,
)
from hf_moe_ep.upstream.dispatch_modes import make_fake_mode


def _count_small_step() -> list[Operator]:
    """Count a product, a view, copies of rows and attention. Returns the operators."""
    with WorkCounter() as work:
        work.begin("all")
        a, b = torch.ones(4, 3), torch.ones(3, 5)
        product = a @ b
        picked = product.view(2, 2, 5).flatten(0, 1).index_select(0, torch.tensor([1, 3]))
        product[:2].copy_(picked)
        picked.add_(1.0)
        table = torch.zeros(100, 5)
        table.index_add_(0, torch.tensor([7, 9]), picked)
        torch.zeros_like(table), table.new_zeros(2)
        F.scaled_dot_product_attention(*(torch.ones(1, 2, 6, 8),) * 3, is_causal=True)
    phases = work.counted().phases
    return [op for op, number in phases["all"].operators for _ in range(number)]


@pytest.mark.parametrize("fake", [False, True])
def test_operators_of_a_small_step_equal_a_count_by_hand(fake: bool) -> None:
    """For index_select and index_add_, only the selected rows count as read and written."""
    if fake:
        with make_fake_mode():
            operators = _count_small_step()
    else:
        operators = _count_small_step()
    assert Operator("matmul", "float32", 2 * 4 * 3 * 5, 4 * (12 + 15 + 20)) in operators
    moved = [op.nbytes for op in operators if op.kind == "memory"]
    two_rows, ids = 4 * 2 * 5, 2 * 8
    constants = [4 * 12, 4 * 15, 4 * 500, 4 * 96]
    assert sorted(moved) == sorted(
        [
            *constants,
            2 * two_rows + ids,  # index_select
            2 * two_rows,  # copy_ does not read its destination
            2 * two_rows,  # add_
            2 * two_rows + two_rows + ids,  # index_add_
            4 * 500,  # zeros_like does not read the table
            4 * 2,  # and neither does new_zeros
        ]
    )
    # Queries times keys, and weights times values. Causal attention halves both products.
    (attention,) = (op for op in operators if op.kind == "attention")
    assert attention.flops == 2 * (2 * 2 * 6 * 6 * 8) // 2


def test_attention_in_bf16_equals_a_count_by_hand() -> None:
    """Forward has 2 products of 6 x 6 x 8 per head, backward has 5. Causal attention halves them.

    Backward is counted as bf16, although it also reads an fp32 tensor (the log-sum-exp).
    """
    with make_fake_mode(), WorkCounter() as work:
        work.begin("all")
        q, k, v = (torch.ones(1, 2, 6, 8, dtype=torch.bfloat16).requires_grad_() for _ in "qkv")
        F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()
        torch.addmm(torch.ones(4, 5), torch.ones(4, 3), torch.ones(3, 5))
    product = 2 * (2 * 6 * 6 * 8) // 2
    operators = [op for op, _ in work.counted().phases["all"].operators]
    attention = [(op.dtype, op.flops) for op in operators if op.kind == "attention"]
    assert attention == [("bfloat16", 2 * product), ("bfloat16", 5 * product)]
    matmul = [(op.dtype, op.flops) for op in operators if op.kind == "matmul"]
    assert matmul == [("float32", 2 * 4 * 3 * 5)]


def test_flops_of_experts_equal_a_count_by_hand() -> None:
    """Each (token, expert) pair has three H x F products in forward, and twice as many in backward.

    `checkpointing` adds one forward. `recompute_activations` repeats the products with gate and up.
    """
    tokens, layers = 2 * 24, 2
    config = tiny(num_hidden_layers=layers).config
    pairs = tokens * config.num_experts_per_tok
    matrix = 2 * pairs * config.hidden_size * config.moe_intermediate_size

    def count_flops(recompute: bool = False, checkpointing: bool = False) -> int:
        batch = Batch(24, 2, checkpointing=checkpointing)
        parallel = ParallelConfig(recompute_activations=recompute)
        return plan_step(config, parallel, world_size=1, batch=batch).work.flops("grouped")

    assert count_flops() == layers * 9 * matrix
    assert count_flops(recompute=True) == layers * 11 * matrix
    assert count_flops(checkpointing=True) == layers * 12 * matrix


@pytest.mark.parametrize("like_gpu", [False, True])
def test_flops_of_adapters_on_experts_equal_a_count_by_hand(like_gpu: bool) -> None:
    """Frozen experts compute outputs and gradients of inputs. Factors also compute their gradients.

    The GPU kernels reuse one product of backward for the gradients of both factors.
    """
    tokens, layers, rank = 24, 2, 4
    config = tiny(num_hidden_layers=layers).config
    pairs = tokens * config.num_experts_per_tok
    hidden, inner = config.hidden_size, config.moe_intermediate_size
    batch = Batch(tokens)
    work = plan_step(config, world_size=1, batch=batch, lora_rank=rank, like_gpu=like_gpu).work
    factors = rank * (4 * (2 * hidden + 3 * inner) - like_gpu * (hidden + 2 * inner))
    assert work.flops("grouped") == layers * 2 * pairs * (6 * hidden * inner + factors)


def test_keys_and_values_of_other_ranks_are_not_counted_as_rows() -> None:
    """With windows of 8 tokens, each of two ranks sends one of its two pieces of 24 tokens.

    Forward, its recompute and backward send the piece once each. The loss sends 8 bytes in total.
    """
    config = tiny(num_hidden_layers=1, use_sliding_window=True, sliding_window=8).config
    parallel = ParallelConfig(cp_size=2, dispatch_chunks=2)
    work = plan_step(config, parallel, world_size=2, batch=Batch(4 * 24)).work
    piece = 4 * 24 * 2 * config.num_key_value_heads * config.head_dim
    assert work.sent("sequence", 2) == (3 * piece + 8, 0)
    assert work.sent("rows", 2) == (0, 0)
    sent = [c for phase in work.phases.values() for c, _ in phase.collectives]
    assert all(c.hideable == 0 for c in sent if c.purpose == "sequence")


def test_all_but_the_first_share_of_keys_is_sent_during_attention() -> None:
    """Each rank sends keys and values of 64 tokens, of two heads, one after the other."""
    config = tiny(num_hidden_layers=1).config
    parallel = ParallelConfig(cp_size=2)
    work = plan_step(config, parallel, world_size=2, batch=Batch(4 * 32)).work
    sent = [c for phase in work.phases.values() for c, _ in phase.collectives]
    of_keys = [c for c in sent if c.purpose == "sequence" and c.nbytes > 8]
    # Forward, its recompute, and gradients.
    assert [c.hideable for c in of_keys] == [0.0, 1.0, 0.0, 1.0, 1.0, 0.0]
    assert len({c.nbytes for c in of_keys}) == 1


def test_attention_with_context_parallelism_leaves_out_later_keys() -> None:
    """In zigzag order, each of two ranks computes half of the query-key pairs.

    Forward has two products and backward five. With cp_size 2, backward also recomputes forward.
    """
    config = tiny().config
    whole, half = (
        plan_step(config, ParallelConfig(cp_size=cp), world_size=cp, batch=Batch(64)).work
        for cp in (1, 2)
    )
    assert half.flops("attention") * 14 == whole.flops("attention") * (2 + 2 + 5) > 0


def test_bytes_on_the_links_equal_a_count_by_hand() -> None:
    """Eight ranks are on two nodes. `links` returns a rank's bytes inside and between nodes."""
    world, node = tuple(range(8)), 4

    def links(kind: str, ranks: tuple[int, ...], *by_rank: int) -> tuple[float, float]:
        return Collective(kind, "rows", ranks, ranks[1], 800, by_rank).links(node)

    # A rank receives 7/8 inside its node. The other node's half, 400 bytes, uses four links.
    assert links("all_gather", world) == (700, 100)
    assert links("reduce_scatter", world) == (700, 100)
    assert links("all_reduce", world) == (1400, 200)
    assert links("all_gather", (0, 1, 2, 3)) == (600, 0)
    assert links("all_gather", (1, 5)) == (0, 400)
    # The 20 bytes of rank 1 for itself are not sent.
    assert links("all_to_all", (0, 1, 4, 5), 1, 20, 300, 4000) == (1, 4300)
    assert links("all_gather", (2, 3)[:2]) == (400, 0)


def test_middle_layers_are_counted_several_times() -> None:
    """For 9 layers, 4 layers count once and one layer counts 5 times. The FLOPs are exact."""

    def make_work(layers: int) -> StepWork:
        def make_phase(flops: int) -> Phase:
            return Phase(((Operator("matmul", "float32", flops, 1), 1),), ())

        phases = {f"forward, layer {i}": make_phase(10 + (i == 0)) for i in range(layers)}
        return StepWork({**phases, "optimizer": make_phase(100 * layers)})

    extrapolated = extrapolate_work([make_work(4), make_work(5)], 9)
    assert extrapolated.flops() == make_work(9).flops() == 9 * 10 + 1 + 900
    assert extrapolated.phases["forward, layer 2"].times == 5
    names = extrapolated.phases.keys()
    assert "forward, layer 8" in names and "forward, layer 4" not in names
