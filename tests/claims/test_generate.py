"""Ranks that need different numbers of forwards generate what stock generates, without a hang."""

from functools import partial
from typing import Any

import peft
import pytest
import torch
from support.checks import Check, Found, on_ranks
from support.generation import assert_same, continuations
from support.tiny_models import batch, tiny
from transformers import DynamicCache

from hf_moe_ep import apply_ep_fsdp2

GREEDY: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}


def compare_continuations(ep_size: int, options: dict[str, Any], rank: int, world: int) -> None:
    want = continuations(tiny(seed=0, **options), rank)
    model = apply_ep_fsdp2(tiny(seed=rank, **options), ep_size=ep_size)
    assert_same(f"ep {ep_size}, rank {rank}", continuations(model, rank), want)
    model.train()
    loss = model(input_ids=want["free"], labels=want["free"]).loss
    loss.backward()  # the model can be trained after generate()
    assert torch.isfinite(loss), f"ep {ep_size}: loss {loss}"


def compare_few_tokens(options: dict[str, Any], rank: int, world: int) -> None:
    """Rank 0 generates two tokens, the other ranks generate eight."""
    stock, model, prompt = _make_models(rank)
    options = GREEDY | {"max_new_tokens": 8 if rank else 2} | options
    want, got = (each.generate(prompt, **options) for each in (stock, model))
    assert torch.equal(got, want), f"rank {rank}: {got}, want {want}"


def compare_end_inside_of_a_draft(rank: int, world: int) -> None:
    """The second token of rank 0 is an end token. Drafts of several tokens are verified at once."""
    stock, model, prompt = _make_models(rank)
    free = stock.generate(prompt, max_new_tokens=8, **GREEDY)
    options = GREEDY | {"max_new_tokens": 8, "prompt_lookup_num_tokens": 3}
    options["eos_token_id"] = None if rank else free[0, 6].item()
    want, got = (each.generate(prompt, **options) for each in (stock, model))
    assert torch.equal(got, want), f"rank {rank}: {got}, want {want}"


def compare_two_turns(rank: int, world: int) -> None:
    """The second turn of a chat continues with the cache of the first, which the caller keeps."""
    stock, model, prompt = _make_models(rank)
    found = []
    for each in (stock, model):
        cache = DynamicCache(config=each.config)
        options = GREEDY | {"past_key_values": cache}
        first = each.generate(prompt, max_new_tokens=8 if rank else 2, **options)
        length = cache.get_seq_length()
        second = each.generate(torch.cat([first, prompt], 1), max_new_tokens=3, **options)
        found.append((length, second.tolist()))
    assert found[1] == found[0], f"rank {rank}: {found[1]}, want {found[0]}"


def compare_prompts_in_chunks(rank: int, world: int) -> None:
    """The prompt of a rank is computed in one to four chunks."""
    stock, model, _ = _make_models(rank)
    prompt = batch(stock, 1, 3 + 4 * rank, seed=7)["input_ids"]
    options = GREEDY | {"max_new_tokens": 3, "prefill_chunk_size": 4}
    want, got = (each.generate(prompt, **options) for each in (stock, model))
    assert torch.equal(got, want), f"rank {rank}: {got}, want {want}"


def compare_rows_of_adapters(rank: int, world: int) -> None:
    """The two rows of a batch use different adapters, which PEFT chooses by the number of rows."""
    stock, model = (_add_adapters(tiny(seed=0)) for _ in range(2))
    apply_ep_fsdp2(model, ep_size=2)
    options = GREEDY | {"max_new_tokens": 8 if rank else 2, "adapter_names": ["first", "second"]}
    prompts = batch(stock, 2, 5, seed=3)["input_ids"]
    want, got = (each.eval().generate(input_ids=prompts, **options) for each in (stock, model))
    assert torch.equal(got, want), f"rank {rank}: {got}, want {want}"


def _add_adapters(model: Any) -> Any:
    """Add two adapters of attention with equal values in every call."""
    config = peft.LoraConfig(
        task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"], init_lora_weights=False
    )
    torch.manual_seed(5)
    model = peft.get_peft_model(model, config, adapter_name="first")
    model.add_adapter("second", config)
    return model


def compare_with_checkpoints(rank: int, world: int) -> None:
    """A callback generates between the steps of a training with gradient checkpointing."""
    stock, model, prompt = _make_models(rank)
    model.gradient_checkpointing_enable()
    options = GREEDY | {"max_new_tokens": 8 if rank else 2, "use_cache": False}
    want, got = (each.generate(prompt, **options) for each in (stock, model))
    assert torch.equal(got, want), f"rank {rank}: {got}, want {want}"


def refuse_sharded_assistants(rank: int, world: int) -> None:
    stock, model, prompt = _make_models(rank)
    options = GREEDY | {"max_new_tokens": 8 if rank else 2}
    want = stock.generate(prompt, **options)
    got = model.generate(prompt, assistant_model=tiny(seed=1).eval(), **options)
    assert torch.equal(got, want), f"rank {rank}: {got}, want {want}"
    assistant = apply_ep_fsdp2(tiny(seed=1), ep_size=2)
    with pytest.raises(ValueError, match=r"an assistant that is sharded over 4 ranks"):
        model.generate(prompt, assistant_model=assistant, **options)


def _make_models(rank: int) -> tuple[Any, Any, torch.Tensor]:
    """Make a stock model, a sharded model in training mode, and a prompt."""
    stock, model = tiny(seed=0), apply_ep_fsdp2(tiny(seed=rank), ep_size=2)
    return stock.eval(), model.train(), batch(stock, 1, 5, seed=3)["input_ids"]


# The prompt and the new tokens of rank 0 have 8 positions. On other ranks they have more.
SHORT = {"max_position_embeddings": 8}
DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}}
ON_FOUR_RANKS = {
    "ep 2": partial(compare_continuations, 2, {}),
    "with a second forward per token": partial(compare_few_tokens, {"guidance_scale": 1.5}),
    "end inside of a draft": compare_end_inside_of_a_draft,
    "two turns with one cache": compare_two_turns,
    "rows with different adapters": compare_rows_of_adapters,
}
IN_OTHER_WAYS = {
    **{f"ep {ep_size}": partial(compare_continuations, ep_size, {}) for ep_size in (1, 4)},
    "past the last position on some ranks": partial(compare_continuations, 2, SHORT),
    "the same with dynamic rope": partial(compare_continuations, 2, SHORT | DYNAMIC),
    "prompts in chunks": compare_prompts_in_chunks,
    "gradient checkpointing": compare_with_checkpoints,
    "with an assistant": refuse_sharded_assistants,
    "a static cache": partial(compare_few_tokens, {"cache_implementation": "static"}),
}


@pytest.mark.parametrize(
    "claim", [*on_ranks(4, ON_FOUR_RANKS), *on_ranks(4, IN_OTHER_WAYS, slow=True)]
)
def test_every_rank_generates_its_own_text(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)
