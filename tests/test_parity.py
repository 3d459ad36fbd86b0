"""Gradients, norm and parameters of N ranks against stock in one process, in fp64."""

from functools import partial

import pytest
from parity import Case, run_cases
import parity
from run_ranks import run_ranks

CHECKPOINT = partial(parity.checkpointing, use_reentrant=False)
REENTRANT = partial(parity.checkpointing, use_reentrant=True)

CASES = [
    Case("w1", 1),
    Case("w2 ep1", 2), Case("w2 ep2", 2, 2),
    Case("w4 ep1", 4), Case("w4 ep2", 4, 2), Case("w4 ep4", 4, 4), Case("w4 ep2 hsdp", 4, 2, 2),
    Case("shard dim 0", 4, 2, config={"expert_shard_dim": 0}),
    Case("shard dim 1", 4, 2, config={"expert_shard_dim": 1}),
    Case("ep_outside", 4, 2, config={"ep_outside": True}),
    Case("eager", 4, 1, config={"experts_backend": "eager"}),
    Case("one token", 4, 2, micro_batches=parity.one_token_everywhere),
    Case("no labels", 4, 4, micro_batches=parity.one_rank_without_labels),
    Case("accumulation", 4, 2, micro_batches=parity.three_micro_batches),
    Case("checkpoint", 4, 2, prepare=CHECKPOINT),
    Case("checkpoint reentrant", 4, 2, prepare=REENTRANT),
    Case("two forwards", 4, 2, micro_batches=parity.three_micro_batches, backward=parity.two_forwards_backward),
    Case("two forwards, ckpt", 4, 2, micro_batches=parity.three_micro_batches, backward=parity.two_forwards_backward, prepare=CHECKPOINT),
    Case("two forwards, ckpt re", 4, 2, micro_batches=parity.three_micro_batches, backward=parity.two_forwards_backward, prepare=REENTRANT),
    Case("mlp_only_layers", 4, 2, model={"num_hidden_layers": 3, "mlp_only_layers": [1]}),
    Case("sparse step 2", 4, 4, model={"num_hidden_layers": 4, "decoder_sparse_step": 2}),
    Case("no norm_topk_prob", 4, 4, model={"norm_topk_prob": False}),
    Case("tied", 4, 2, model={"tie_word_embeddings": True}),
    Case("2 experts ep1", 4, 1, model={"num_experts": 2, "num_experts_per_tok": 1}),
    Case("2 experts ep2", 4, 2, model={"num_experts": 2, "num_experts_per_tok": 1}),
    Case("w8 ep2 hsdp2", 8, 2, 2),
    Case("w3", 3, 1, budget=1e-6), Case("w3 ep3", 3, 3, model={"num_experts": 6}, budget=1e-6),
]

@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
def test_parity(world):
    run_ranks(run_cases, world, [c for c in CASES if c.world == world], timeout=300)
