"""With expert tensor parallelism a training step of every model type equals stock's step.

Each of two ranks holds half of every expert. The loss, every gradient, the gradient norm and one
step of AdamW are compared with stock, as in test_every_type.py. tests/test_etp.py tests the shapes
of the halves.
"""

import warnings
from functools import partial

import pytest
from support.architectures import MODEL_TYPES, record_refusal, recording
from support.architectures.steps import (
    CUT_LOGITS,
    adamw,
    assert_same_step,
    build,
    exactly,
)
from support.checks import Check, Found

from hf_moe_ep import apply_ep_fsdp2, patch

# Type -> a regular expression for the error with which patch() refuses etp_size=2.
REFUSED = {"muse_spark": r"norm after each expert.*etp_size \(2\)"}
SUPPORTED = [name for name in MODEL_TYPES if name not in REFUSED]


def _check_on_two_ranks(model_type: str, rank: int, world: int) -> None:
    if model_type in CUT_LOGITS:
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
    with recording(model_type, "etp") as errors, exactly(model_type):
        model, stock = build(model_type, seed=rank), build(model_type)
        apply_ep_fsdp2(model, etp_size=2)
        optimizers = adamw(model), adamw(stock)
        errors += assert_same_step(model_type, (model, stock), optimizers, seed=1)


TWO_RANKS = [
    Check(name, 2, partial(_check_on_two_ranks, name), slow=True).as_parameter()
    for name in SUPPORTED
]


@pytest.mark.parametrize("claim", TWO_RANKS)
def test_on_two_ranks_at_etp_2(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", REFUSED)
def test_types_that_etp_cannot_cut_are_refused_by_name(model_type: str) -> None:
    with pytest.raises(ValueError, match=REFUSED[model_type]) as raised:
        patch(build(model_type), etp_size=2)
    record_refusal(model_type, "etp", str(raised.value))
