"""Arrays as engines return them, written by hand from their documents, replayed in a model.

Four decoder layers, the second without experts, top-2 of 8; two samples of one prompt of 3 tokens,
with completions of 3 and of 1 token. The engine forwarded all tokens but the last of each.
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
from hf_moe_ep.upstream.grpo import routes_of_engine

NOTHING = [0, 0]  # what engines have where a layer has no experts
# [tokens - 1, decoder layers, K]
PROMPT = [
    [[0, 1], NOTHING, [2, 3], [7, 5]],
    [[4, 6], NOTHING, [1, 0], [3, 2]],
    [[5, 7], NOTHING, [6, 4], [1, 7]],
]
FIRST = [
    [[2, 0], NOTHING, [3, 5], [4, 6]],
    [[1, 3], NOTHING, [7, 2], [0, 5]],
]
LENGTHS = [6, 4]
# A prompt padded left in 4 columns, completions padded right in 3; -1 routes live.
FRONT = [1, 1]


def _vllm(dtype: Any) -> list[Any]:
    """`CompletionOutput.routed_experts`: prompt and completion in one array."""
    return [np.array(PROMPT + FIRST, dtype=dtype), np.array(PROMPT, dtype=dtype)]


def _vllms_server() -> list[Any]:
    """`choices[i].routed_experts`: a file of numpy's, in base64."""
    choices = []
    for array in _vllm(np.uint8):
        file = io.BytesIO()
        np.save(file, array)
        choices.append({"routed_experts": base64.b64encode(file.getvalue()).decode()})
    return [np.load(io.BytesIO(base64.b64decode(c["routed_experts"]))) for c in choices]


def _sglang() -> list[Any]:
    """`meta_info.routed_experts`: int32, one behind the other, in base64."""
    found = []
    for rows in (PROMPT + FIRST, PROMPT):
        numbers = [number for row in rows for layer in row for number in layer]
        data = base64.b64encode(struct.pack(f"<{len(numbers)}i", *numbers)).decode()
        found.append(np.frombuffer(base64.b64decode(data), np.int32).reshape(-1, 4, 2))
    return found


def _vllm_in_two_parts() -> list[Any]:
    """vLLM 0.21: the prompt's array once, one of each completion; as TRL's seam reads them."""
    samples = [
        SimpleNamespace(routed_experts=np.array(rows, dtype=np.int16).reshape(-1, 4, 2))
        for rows in (FIRST, [])
    ]
    prompt = np.array(PROMPT, dtype=np.int16)
    outputs = [SimpleNamespace(prompt_routed_experts=prompt, outputs=samples)]
    trainer = SimpleNamespace(vllm_generation=SimpleNamespace(tensor_parallel_size=1))
    arrays = routes_of_engine(trainer, outputs)
    assert arrays is not None
    return arrays


@pytest.mark.parametrize(
    "arrays",
    [_vllm(np.int16), _vllm(np.uint8), _vllms_server(), _sglang(), _vllm_in_two_parts()],
    ids=["vllm", "vllm, uint8", "vllm's server", "sglang", "vllm in two parts"],
)
def test_each_layer_gets_what_the_engine_chose_for_its_tokens(arrays: list[Any]) -> None:
    model = patch(tiny(num_hidden_layers=4, mlp_only_layers=[1]))
    routes = Routes.from_engine(arrays, LENGTHS, padded_to=7, pad_side=FRONT)
    seen: dict[int, Tensor] = {}
    for layer in (0, 2, 3):
        model.model.layers[layer].mlp.experts.register_forward_pre_hook(
            lambda module, args, layer=layer: seen.update({layer: args[1].view(2, 7, 2)})
        )
    tokens = torch.arange(14).view(2, 7)
    replay = RoutingReplay(model)
    with torch.no_grad(), replay.replay(routes):
        model(input_ids=tokens)
    for layer in (0, 2, 3):
        rows = torch.tensor([row[layer] for row in PROMPT + FIRST])
        assert torch.equal(seen[layer][0, 1:6], rows)
        assert torch.equal(seen[layer][1, 1:4], rows[:3])
    assert (replay.last.replayed, replay.last.live) == (3 * 8, 3 * 6)


def test_a_part_behind_a_cached_prefix() -> None:
    """With SGLang's `routed_experts_start_len`, rows before it route live."""
    whole, _ = _sglang()
    routes = Routes.from_engine([whole[2:]], [6], padded_to=6, pad_side="right", starts=[2])
    assert routes.ids[0, :, 2].tolist() == [[-1, -1]] * 2 + [[6, 4], [3, 5], [7, 2], [-1, -1]]


def test_ranks_that_share_an_engine_keep_their_own_samples() -> None:
    """With vllm_tensor_parallel_size=2 each rank's engine returns the samples of both ranks."""
    samples = [SimpleNamespace(routed_experts=np.full((1, 1, 1), n)) for n in range(4)]
    outputs = [SimpleNamespace(outputs=[sample]) for sample in samples]
    generation = SimpleNamespace(tensor_parallel_size=2, tp_group=None)
    with mock.patch.object(dist, "get_rank", lambda group: 1):
        arrays = routes_of_engine(SimpleNamespace(vllm_generation=generation), outputs)
    assert arrays is not None and [array.item() for array in arrays] == [2, 3]
