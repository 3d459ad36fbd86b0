"""Mixers that are divided in training equal stock when they get whole sequences, too.

Whole sequences (mixers.py) are right for every mixer. They are the fallback in forwards in which a
mixer cannot be divided. `test_granted.py` compares the divided mixers with stock.
"""

from functools import partial
from unittest import mock

import pytest
from support.architectures import MODEL_TYPES
from support.architectures.split_steps import equals_stock_backward
from support.checks import Check, Found

from hf_moe_ep.sequence import mixers, recurrences

# A type with each kind of mixer that is divided. The attention of Inkling gets whole sequences in
# any case, and its convolutions behind the attention and the experts are divided.
KINDS = {
    "delta net": "qwen3_next",
    "KDA": "kimi_linear",
    "Mamba-2": "nemotron_h",
    "Mamba-1": "jamba",
    "short convolution": "lfm2_moe",
    "convolutions in several places": "inkling_mm_model",
    "indexer": "deepseek_v32",
    "indexer of blocks": "minimax_m3_vl_text",
    "compressors": "deepseek_v4",
}


def _equals_stock_undivided(model_type: str, rank: int, world: int) -> None:
    with (
        mock.patch.object(recurrences, "copy_forward_with", side_effect=AssertionError),
        mock.patch.object(mixers, "GatheringCache", side_effect=AssertionError),
    ):
        equals_stock_backward(model_type, rank, world, divides_mixers=False)


@pytest.mark.parametrize(
    "claim",
    [
        Check(
            name, 2, partial(_equals_stock_undivided, model_type), slow=name != "delta net"
        ).as_parameter()
        for name, model_type in KINDS.items()
        if model_type in MODEL_TYPES
    ],
)
def test_whole_sequences_equal_stock(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)
