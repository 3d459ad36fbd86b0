"""Routes are made from the arrays of inference engines, in the formats that the engines document.

The model has four decoder layers and top-2 of 8 experts; the second layer has no experts. One
prompt of 3 tokens has two samples, with completions of 3 tokens and 1 token. The engine has run all
tokens except the last token of each sample.
"""

import base64
import io
import struct
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.tiny_models import tiny
from torch import Tensor

from hf_moe_ep import Routes, RoutingReplay, patch
from hf_moe_ep.upstream.grpo import get_routes_of_engine

NO_EXPERTS = [0, 0]  # the ids that engines return for a layer without experts
# [tokens - 1, decoder layers, K]
PROMPT = [
    [[0, 1], NO_EXPERTS, [2, 3], [7, 5]],
    [[4, 6], NO_EXPERTS, [1, 0], [3, 2]],
    [[5, 7], NO_EXPERTS, [6, 4], [1, 7]],
]
FIRST = [
    [[2, 0], NO_EXPERTS, [3, 5], [4, 6]],
    [[1, 3], NO_EXPERTS, [7, 2], [0, 5]],
]
LENGTHS = [6, 4]
# Rows have 7 columns: 4 for the prompt, with 1 token of padding on the left, and 3 for the
# completion, with padding on the right. Padding gets ids of -1, and routes live.
LEFT_PADDING = [1, 1]


def _make_vllm_arrays(dtype: Any) -> list[Any]:
    """Make `CompletionOutput.routed_experts`, one array for prompt and completion."""
    return [np.array(PROMPT + FIRST, dtype=dtype), np.array(PROMPT, dtype=dtype)]


def _make_vllm_server_arrays() -> list[Any]:
    """Make `choices[i].routed_experts`, a numpy file in base64, and decode it."""
    choices = []
    for array in _make_vllm_arrays(np.uint8):
        file = io.BytesIO()
        np.save(file, array)
        choices.append({"routed_experts": base64.b64encode(file.getvalue()).decode()})
    return [np.load(io.BytesIO(base64.b64decode(c["routed_experts"]))) for c in choices]


def _make_sglang_arrays() -> list[Any]:
    """Make `meta_info.routed_experts`, flat int32 numbers in base64, and decode it."""
    arrays = []
    for rows in (PROMPT + FIRST, PROMPT):
        numbers = [number for row in rows for layer in row for number in layer]
        data = base64.b64encode(struct.pack(f"<{len(numbers)}i", *numbers)).decode()
        arrays.append(np.frombuffer(base64.b64decode(data), np.int32).reshape(-1, 4, 2))
    return arrays


def _make_vllm_arrays_in_two_parts() -> list[Any]:
    """Join the arrays of vLLM 0.21 by get_routes_of_engine().

    vLLM 0.21 returns one array for the prompt, and one for each completion.
    """
    samples = [
        SimpleNamespace(routed_experts=np.array(rows, dtype=np.int16).reshape(-1, 4, 2))
        for rows in (FIRST, [])
    ]
    prompt = np.array(PROMPT, dtype=np.int16)
    outputs = [SimpleNamespace(prompt_routed_experts=prompt, outputs=samples)]
    trainer = SimpleNamespace(vllm_generation=SimpleNamespace(tensor_parallel_size=1))
    arrays = get_routes_of_engine(trainer, outputs)
    assert arrays is not None
    return arrays


@pytest.mark.parametrize(
    "arrays",
    [
        _make_vllm_arrays(np.int16),
        _make_vllm_arrays(np.uint8),
        _make_vllm_server_arrays(),
        _make_sglang_arrays(),
        _make_vllm_arrays_in_two_parts(),
    ],
    ids=["vllm", "vllm, uint8", "vllm's server", "sglang", "vllm in two parts"],
)
def test_each_layer_replays_the_ids_of_the_engine(arrays: list[Any]) -> None:
    model = patch(tiny(num_hidden_layers=4, mlp_only_layers=[1]))
    routes = Routes.from_engine(arrays, LENGTHS, padded_to=7, pad_side=LEFT_PADDING)
    ids_of_layers: dict[int, Tensor] = {}
    for layer in (0, 2, 3):
        model.model.layers[layer].mlp.experts.register_forward_pre_hook(
            lambda module, args, layer=layer: ids_of_layers.update({layer: args[1].view(2, 7, 2)})
        )
    tokens = torch.arange(14).view(2, 7)
    replay = RoutingReplay(model)
    with torch.no_grad(), replay.replay(routes):
        model(input_ids=tokens)
    for layer in (0, 2, 3):
        want = torch.tensor([row[layer] for row in PROMPT + FIRST])
        assert torch.equal(ids_of_layers[layer][0, 1:6], want)
        assert torch.equal(ids_of_layers[layer][1, 1:4], want[:3])
    assert (replay.last.replayed, replay.last.live) == (3 * 8, 3 * 6)


def test_tokens_of_a_cached_prefix_route_live() -> None:
    """SGLang omits the tokens before `routed_experts_start_len`."""
    array, _ = _make_sglang_arrays()
    routes = Routes.from_engine([array[2:]], [6], padded_to=6, pad_side="right", starts=[2])
    assert routes.ids[0, :, 2].tolist() == [[-1, -1]] * 2 + [[6, 4], [3, 5], [7, 2], [-1, -1]]


def test_ranks_that_share_an_engine_take_their_own_samples() -> None:
    """With vllm_tensor_parallel_size=2 each rank's engine returns the samples of both ranks."""
    samples = [SimpleNamespace(routed_experts=np.full((1, 1, 1), n)) for n in range(4)]
    outputs = [SimpleNamespace(outputs=[sample]) for sample in samples]
    generation = SimpleNamespace(tensor_parallel_size=2, tp_group=None)
    with mock.patch.object(dist, "get_rank", lambda group: 1):
        arrays = get_routes_of_engine(SimpleNamespace(vllm_generation=generation), outputs)
    assert arrays is not None and [array.item() for array in arrays] == [2, 3]
