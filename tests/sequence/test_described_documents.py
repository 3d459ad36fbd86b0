"""Documents of packed rows that `cu_seq_lens_q` or `seq_idx` describes, but not the positions.

Flash attention reads `cu_seq_lens_q`. Convolutions and recurrences in plain PyTorch, indexers, and
other attention functions do not, so a model with such modules refuses these batches.
test_mixers.py has documents that the positions describe.
"""

from typing import Any

import pytest
import torch
from support import parity, split_rows
from support.architectures import MODEL_TYPES, batch
from support.architectures.steps import build
from support.checks import Check, Found, on_ranks
from support.close import FP64_MODEL, assert_close
from support.fakes.flash import use_fake_flash
from support.fp64 import FP64
from support.parity import Batch, Case
from torch import Tensor, nn

from hf_moe_ep import apply_ep_fsdp2, patch

ENDS = torch.tensor([0, 4, 5, 7], dtype=torch.int32)
LENGTHS: dict[str, Any] = dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), ENDS)
LENGTHS |= dict.fromkeys(("max_length_q", "max_length_k"), 4)
NUMBERS = {"seq_idx": torch.tensor([[0, 0, 0, 0, 1, 2, 2]], dtype=torch.int32)}
POSITIONS = {"position_ids": torch.tensor([[0, 1, 2, 3, 0, 0, 1]])}
# The second document goes on in the third one.
COARSE = {"position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2]])}
# A delta net, state spaces, a short convolution, an indexer, lightning attention, and attention
# whose masks stock code builds without positions.
TYPES = ("qwen3_next", "jamba", "nemotron_h", "lfm2_moe", "deepseek_v32", "minimax", "gpt_oss")
REFUSED = r"{} describes packed documents, one of which begins at token {}, but position_ids do not"


def _run_alone(stock: nn.Module, inputs: Tensor) -> Tensor:
    documents = inputs.split(ENDS.diff().tolist(), 1)
    return torch.cat([stock(input_ids=x, use_cache=False).logits for x in documents], 1)


@pytest.mark.parametrize("model_type", [name for name in TYPES if name in MODEL_TYPES])
def test_documents_that_positions_do_not_describe_are_refused(model_type: str) -> None:
    model, stock = patch(build(model_type)).eval(), build(model_type).eval()
    inputs = batch(stock, 1, 7)["input_ids"]
    for described, name in ((LENGTHS, "cu_seq_lens_q"), (NUMBERS, "seq_idx")):
        for positions, token in (({}, 4), (COARSE, 5)):
            with pytest.raises(ValueError, match=REFUSED.format(name, token)):
                model(input_ids=inputs, **described, **positions, use_cache=False)
        with torch.no_grad(), FP64():
            got = model(input_ids=inputs, **described, **POSITIONS, use_cache=False).logits
            want = _run_alone(stock, inputs)
        assert_close(f"{model_type}, {name}", got, want, FP64_MODEL)


def test_rows_of_one_document_are_accepted() -> None:
    """The documents of two rows begin where the rows begin, and lengths may end in empty ones."""
    model, stock = patch(build("jamba")).eval(), build("jamba").eval()
    inputs = batch(stock, 2, 7)["input_ids"]
    given: Any = {"cu_seq_lens_q": torch.tensor([0, 7, 14, 14]), "max_length_q": 7}
    with torch.no_grad(), FP64():
        got, want = (
            m(input_ids=inputs, **extra, use_cache=False).logits
            for m, extra in ((model, given), (stock, {}))
        )
    assert_close("logits", got, want, FP64_MODEL)


def test_flash_attention_separates_documents_by_lengths_alone() -> None:
    """This type has no mixers, so stock flash attention separates the documents everywhere."""
    model, stock = build("gpt_oss").eval(), build("gpt_oss").eval()
    use_fake_flash(model)
    patch(model)
    inputs = batch(stock, 1, 7)["input_ids"]
    with torch.no_grad(), FP64():
        got = model(input_ids=inputs, **LENGTHS, use_cache=False).logits
        want = _run_alone(stock, inputs)
    assert_close("logits", got, want, FP64_MODEL)


def ranks_refuse_lengths_alone(rank: int, world: int) -> None:
    """No rank waits for another one, and the model computes the next batch."""
    for sizes in ({"sp_size": world}, {"cp_size": world}):
        model = apply_ep_fsdp2(build("qwen3_next", seed=rank), **sizes)
        rows = batch(model, 1, 7)
        for trains in (True, False):
            with pytest.raises(ValueError, match=REFUSED.format("cu_seq_lens_q", 4)):
                model.train(trains)(**rows, **LENGTHS)
        assert torch.isfinite(model.train()(**rows).loss)


def _by_lengths_alone(*args: Any) -> list[Batch]:
    (micro,) = split_rows.packed_by_lengths((5, 3, 9, 2), *args)
    return [{name: x for name, x in micro.items() if name != "position_ids"}]


LENGTHS_ALONE = Case("", 2, 2, micro_batches=_by_lengths_alone).with_(
    prepare=use_fake_flash, change_reference=use_fake_flash, exact_loss=True
)


@pytest.mark.parametrize("claim", on_ranks(2, ranks_refuse_lengths_alone))
def test_ranks_refuse_lengths_alone(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)


@pytest.mark.parametrize(
    "claim",
    parity.on_ranks(
        [LENGTHS_ALONE.with_(name="sp 2", sp=2), LENGTHS_ALONE.with_(name="cp 2", cp=2)], slow=True
    ),
)
def test_split_flash_attention_separates_documents_by_lengths_alone(
    found: Found, claim: Check
) -> None:
    """The model has no mixers."""
    found.raise_if_failed(claim)
