"""Arguments of a decoder layer are sliced by their names in its signature, not by their sizes."""

from typing import Any, cast

import pytest
import torch
from support.tiny_models import tiny
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from hf_moe_ep import patch
from hf_moe_ep.sequence.slice_arguments import read_layer_arguments
from hf_moe_ep.sequence.slices import Slice

LENGTH, LOCAL = 6, 3


class _Layer(nn.Module):
    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        per_layer_input: Tensor | None = None,
        store: dict[str, int] | None = None,
        **kwargs: Any,
    ) -> Tensor:
        return hidden_states


class _Encoded(nn.Module):
    def forward(self, hidden_states: Tensor, encoder_states: Tensor | None = None) -> Tensor:
        return hidden_states


def _make_second_slice() -> Slice:
    """Make the second of two slices of six tokens."""
    return Slice(cast(Any, None), 1, 2, length=LENGTH)


def test_positional_arguments_are_sliced() -> None:
    """The hidden states are already sliced, and a mask with two dimensions must stay whole."""
    hidden, mask = torch.randn(2, LENGTH, 4), torch.ones(2, LENGTH)
    ids, per_layer_input = torch.arange(LENGTH).unsqueeze(0), torch.randn(2, LENGTH, 5)
    layer = read_layer_arguments(_Layer(), "sp_size (2)")
    got = layer.slice_positional((hidden, mask, ids, per_layer_input), _make_second_slice())
    assert got[0] is hidden and got[1] is mask
    assert got[2].tolist() == [[3, 4, 5]]
    assert torch.equal(got[3], per_layer_input[:, LOCAL:])


def test_wrappers_do_not_hide_the_signature_of_a_layer() -> None:
    """Recorders of transformers replace an instance's `forward`; CheckpointWrapper is a module."""
    want = read_layer_arguments(_Layer(), "sp_size (2)").positional
    layer = _Layer()
    layer.forward = lambda *args, cache=None, **kwargs: _Layer.forward(layer, *args, **kwargs)
    for wrapped in (layer, checkpoint_wrapper(layer)):
        assert read_layer_arguments(wrapped, "sp_size (2)").positional == want


def test_keyword_arguments_are_sliced() -> None:
    cos, scale = torch.randn(1, LENGTH, 4), torch.randn(1, 1, LENGTH, 1)
    auxiliary, shared = torch.randn(2, LENGTH, 7), torch.randn(1, 1, 4)
    arguments = {
        "position_embeddings": (cos, shared),
        "attention_scaling": scale,
        "images": auxiliary,
        "use_cache": False,
    }
    got = read_layer_arguments(_Layer(), "sp_size (2)").slice_named(arguments, _make_second_slice())
    assert torch.equal(got["position_embeddings"][0], cos[:, LOCAL:])
    assert got["position_embeddings"][1] is shared, "it has no dimension of tokens"
    assert torch.equal(got["attention_scaling"], scale[:, :, LOCAL:])
    assert got["images"] is auxiliary, "it has the length of the sequence only by chance"


def test_arguments_of_another_length_or_without_a_name_are_refused() -> None:
    layer, ids = read_layer_arguments(_Layer(), "sp_size (2)"), torch.arange(LENGTH + 1)
    with pytest.raises(ValueError, match=r"position_ids of _Layer has 7 entries .* of 6 tokens"):
        layer.slice_named({"position_ids": ids.unsqueeze(0)}, _make_second_slice())
    with pytest.raises(ValueError, match=r"_Layer names 5 positional arguments and was .* with 6"):
        layer.slice_positional((ids.unsqueeze(0),) * 6, _make_second_slice())


def test_an_unknown_argument_is_refused_by_patch(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="encoder_states of _Encoded is"):
        read_layer_arguments(_Encoded(), "sp_size (2)")
    model = tiny()
    monkeypatch.setattr(type(model.model.layers[0]), "forward", _Encoded.forward)
    with pytest.raises(ValueError, match=r"sp_size \(2\) > 1 slices .* if encoder_states of"):
        patch(model, sp_size=2)
