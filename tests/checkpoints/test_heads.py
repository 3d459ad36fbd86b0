"""A model without a head reads the checkpoint of a model with a head, but not the reverse.

Modules that stock keeps in fp32 stay in fp32.
"""

from pathlib import Path

import pytest
import torch
from support.ranks import run_ranks
from support.tiny_models import tiny
from torch import Tensor
from transformers import AutoModel, Qwen3MoeForCausalLM, Qwen3MoeModel

from hf_moe_ep import from_pretrained, save_pretrained
from hf_moe_ep.architectures import find_plan
from hf_moe_ep.checkpoints.hub.read import match_checkpoint
from hf_moe_ep.upstream.hub import build_empty_model

IDS = torch.arange(5)[None]


def _load_with_and_without_head(rank: int, world: int, folder: str) -> Tensor:
    model = from_pretrained(
        f"{folder}/lm", model_class=AutoModel, ep_size=2, experts_implementation="eager"
    )
    assert type(model.base_model) is type(model)
    save_pretrained(model, f"{folder}/base")
    with pytest.raises(ValueError, match=r"missing 1 tensors: lm_head.weight; it holds a base mo"):
        from_pretrained(f"{folder}/base", model_class=Qwen3MoeForCausalLM, ep_size=2)
    tied = from_pretrained(
        f"{folder}/base",
        model_class=Qwen3MoeForCausalLM,
        tie_word_embeddings=True,
        ep_size=2,
        experts_implementation="eager",
    )
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    with torch.no_grad():
        hidden = model(input_ids=IDS).last_hidden_state
        last = tied(input_ids=IDS, output_hidden_states=True).hidden_states[-1]
    torch.testing.assert_close(last, hidden, rtol=0, atol=0)
    return hidden


def test_a_head_is_ignored_and_a_missing_head_is_an_error(tmp_path: Path) -> None:
    tiny(dtype=torch.float32).save_pretrained(tmp_path / "lm")
    by_rank = run_ranks(_load_with_and_without_head, 2, str(tmp_path))
    for name in ("lm", "base"):
        stock = Qwen3MoeModel.from_pretrained(tmp_path / name, experts_implementation="eager")
        with torch.no_grad():
            stock_hidden = stock(input_ids=IDS).last_hidden_state
        for hidden in by_rank:
            # The order of fp32 sums differs.
            torch.testing.assert_close(hidden, stock_hidden, rtol=1e-5, atol=1e-5)


def test_the_error_of_a_missing_tensor_does_not_mention_the_head(tmp_path: Path) -> None:
    """The keys have a prefix that the base model lacks, and the checkpoint has a head."""
    model = tiny(num_hidden_layers=1, dtype=torch.float32)
    tensors = model.state_dict()
    del tensors["model.norm.weight"]
    model.save_pretrained(tmp_path, state_dict=tensors)
    base = build_empty_model(tmp_path, AutoModel, torch.get_default_dtype, {})
    names = [name for name, _ in base.named_parameters()]
    with pytest.raises(ValueError, match=r"this Qwen3MoeModel: missing 1 tensors: norm.weight$"):
        match_checkpoint(base, tmp_path, find_plan(base), names)


class ModelWithFp32Modules(Qwen3MoeForCausalLM):
    """Keeps modules in fp32, as architectures with a sensitive router do."""

    _keep_in_fp32_modules = ("q_norm",)
    _keep_in_fp32_modules_strict = ("mlp.gate.weight",)


def _list_dtypes(model: torch.nn.Module) -> dict[str, torch.dtype]:
    return {name: p.dtype for name, p in model.named_parameters()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_modules_stay_in_fp32_as_in_stock(tmp_path: Path, dtype: torch.dtype) -> None:
    tiny(dtype=torch.float32).save_pretrained(tmp_path)
    stock = ModelWithFp32Modules.from_pretrained(tmp_path, dtype=dtype)
    ours = build_empty_model(
        tmp_path, ModelWithFp32Modules, torch.get_default_dtype, {"dtype": dtype}
    )
    assert _list_dtypes(ours) == _list_dtypes(stock)
    fp32_names = {name for name, kind in _list_dtypes(ours).items() if kind == torch.float32}
    assert any("gate" in name for name in fp32_names)
    assert any("q_norm" in name for name in fp32_names) == (dtype != torch.bfloat16)
