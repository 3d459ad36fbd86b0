"""Every MoE type with pictures or sound, any mix of them over ranks, equals stock in one process.

Tiny models in fp64 (what stock computes in fp32: `support.architectures.precision`), 2 ranks,
experts split over them. One model goes through all mixes; a gradient that stock has none of is none
here, so that weight decay moves no tower that nobody has used.
"""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from support.architectures import (
    MODEL_TYPES,
    mixed_batch,
    recording,
    takes_sound,
    tiny,
    tiny_config,
)
from support.architectures.inputs import loss_of
from support.architectures.precision import budget
from support.architectures.sizes import PLACEHOLDERS
from support.checks import Check, Found, on_ranks
from support.close import assert_close
from support.parity import full_tensor
from torch import Tensor, nn

from hf_moe_ep import apply_ep_fsdp2, patch
from hf_moe_ep.derive import derive_plan
from hf_moe_ep.ranks.collectives import sum_over_ranks
from hf_moe_ep.upstream.sharded_models import is_gathered

Batch = dict[str, Tensor]
Make = Callable[[nn.Module, int], Batch]


def text(model: Any, seed: int) -> Batch:
    return mixed_batch(model, [0, 0], seed=seed)


def image(model: Any, seed: int) -> Batch:
    return mixed_batch(model, [1], seed=seed)


def images(model: Any, seed: int) -> Batch:
    return mixed_batch(model, [2, 0, 1], seed=seed)


def sound(model: Any, seed: int) -> Batch:
    return mixed_batch(model, [0, 0], sounds=[1, 0], seed=seed)


def sound_and_image(model: Any, seed: int) -> Batch:
    return mixed_batch(model, [0, 1], sounds=[1, 0], seed=seed)


def video(model: Any, seed: int) -> Batch:
    """A picture under the names of a video: as many frames as are one step in time."""
    given = image(model, seed)
    config = model.config
    frames = getattr(config.vision_config, "temporal_merge_size", 1)
    if frames > 1:
        given["pixel_values"] = given["pixel_values"].repeat(frames, 1)
        given["image_grid_thw"][:, 0] = frames
    for name, new in (
        ("pixel_values", "pixel_values_videos"),
        ("image_grid_thw", "video_grid_thw"),
        ("image_position_ids", "video_position_ids"),
    ):
        if name in given:
            given[new] = given.pop(name)
    if "num_frames_per_video" in _names_of_inputs(model):
        given["num_frames_per_video"] = torch.tensor([1])
    kinds = ("mm_token_type_ids", "moe_mm_token_type_ids")
    given |= {name: given[name].masked_fill(given[name] == 1, 2) for name in kinds if name in given}
    ids = given["input_ids"]
    if not config.model_type.startswith("glm"):  # whose frames hold tokens of images
        given["input_ids"] = ids.masked_fill(ids == config.image_token_id, config.video_token_id)
    elif config.model_type == "glm5_next":  # between those of a video's begin and end
        places = (ids[0] == config.image_token_id).nonzero().flatten()
        ids[0, places[0] - 1] = config.video_start_token_id
        ids[0, places[-1] + 1] = config.video_end_token_id
    return given


def both(model: Any, seed: int) -> Batch:
    """An image in the first row, a video in the second."""
    rows = [image(model, seed), video(model, seed + 1)]
    texts = [{n: x for n, x in row.items() if n in _TEXT} for row in rows]
    longest = max(row["input_ids"].shape[1] for row in texts)
    pad = partial(torch.nn.functional.pad, mode="constant")
    fill = {"labels": -100}
    padded = [
        {n: pad(x, (0, longest - x.shape[1]), value=fill.get(n, 0)) for n, x in row.items()}
        for row in texts
    ]
    joined = {n: torch.cat([row[n] for row in padded]) for n in padded[0]}
    media = {n: x for row in rows for n, x in row.items() if n not in _TEXT}
    return joined | media


_TEXT = ("input_ids", "attention_mask", "labels", "mm_token_type_ids", "moe_mm_token_type_ids")


def _names_of_inputs(model: nn.Module) -> set[str]:
    forwards = (inspect.signature(module.forward) for module in model.modules())
    return {name for forward in forwards for name in forward.parameters}


def mixes(model: nn.Module) -> list[tuple[Make, Make]]:
    """What rank 0 and rank 1 have, step by step."""
    found: list[tuple[Make, Make]] = [(text, text), (text, images), (image, text), (image, images)]
    if "pixel_values_videos" in _names_of_inputs(model):
        found += [(video, image), (both, text)]
    if takes_sound(model):
        found += [(sound, image), (text, sound), (sound_and_image, text)]
    return [*found, (text, text)]


def kimi_k25(seed: int) -> nn.Module:
    """A DeepSeek-V3 behind the tower of Kimi-K2.5."""
    tower = {"pos_emb_height": 4, "pos_emb_width": 4, "intermediate_size": 20}
    return _composite("Kimi_K25", "deepseek_v3", seed, tower, projection_hidden_size=16)


def internvl(seed: int) -> nn.Module:
    """A Qwen3-MoE behind the tower of InternVL."""
    tower = {"image_size": 16, "intermediate_size": 20}
    return _composite("InternVL", "qwen3_moe", seed, tower, tie_word_embeddings=False)


def _composite(name: str, text_type: str, seed: int, tower: Any, **fields: Any) -> nn.Module:
    """A model that is in no table of MoE types, around one that is."""
    text_config = tiny_config(text_type).to_dict() | {"output_router_logits": False}
    tower = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, **tower}
    config_class = getattr(transformers, f"{name}Config")
    tokens = {n: t for n, t in PLACEHOLDERS.items() if n in config_class.__dataclass_fields__}
    vision = {**tower, "patch_size": 4, "initializer_range": 0.18}
    config = config_class(text_config=text_config, vision_config=vision, **tokens, **fields)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, f"{name}ForConditionalGeneration")(config).double().train()
    model.set_experts_implementation("eager")
    return model


COMPOSITES = {"kimi_k25": kimi_k25, "internvl": internvl}
# Experts that nobody splits (tests/architectures): refused before any tower is looked at.
REFUSED = {"inkling2"}
# Two models in one that share their layers; not causal, and no forward of theirs takes labels.
APART = {"diffusion_gemma"}
TYPES = [
    name
    for name in MODEL_TYPES
    if getattr(tiny_config(name), "vision_config", None) is not None and name not in REFUSED | APART
]


def build(name: str, seed: int = 0) -> nn.Module:
    """A tiny model without a load-balancing loss, which is one of the whole batch."""
    if name in COMPOSITES:
        return COMPOSITES[name](seed)
    fields = tiny_config(name).get_text_config().__dataclass_fields__
    options = {"output_router_logits": False} if "output_router_logits" in fields else {}
    return tiny(name, seed=seed, **options)


def parts(model: nn.Module) -> tuple[str, ...]:
    """Names of what stands beside the decoder, in a model that is not sharded."""
    plan = derive_plan(model)
    names = plan.encoders or (plan.vision.tower,)
    return tuple(n for n, _ in model.named_modules() if any(n.endswith(name) for name in names))


def assert_equals_stock(
    name: str,
    rank: int,
    world: int,
    *,
    prepare: Callable[[nn.Module], Any] = lambda model: None,
    data: Callable[[nn.Module], list[tuple[Make, Make]]] = mixes,
    **config: Any,
) -> list[float]:
    """Compare losses and gradients of every mix, and weights after one more step, with stock."""
    errors = []
    model, stock = build(name, seed=rank), build(name)
    for one in (model, stock):
        prepare(one)
    apply_ep_fsdp2(model, **({"ep_size": 2} | config))
    ours = dict(model.named_parameters())
    steps = data(stock)
    for step, makes in enumerate(steps):
        where = f"{name}, step {step}, " + " and ".join(make.__name__ for make in makes)
        everyone = [make(stock, 10 * step + i) for i, make in enumerate(makes)]
        loss = loss_of(model, everyone[rank])
        (loss * world).backward()
        want = torch.stack([loss_of(stock, one) for one in everyone]).sum()
        want.backward()
        errors.append(assert_close(f"{where}: loss", sum_over_ranks(loss), want, budget(name)))
        for key, parameter in stock.named_parameters():
            grad = full_tensor(ours[key].grad)
            if grad is None or parameter.grad is None:
                assert grad is None and parameter.grad is None, f"{where}: one gradient of {key}"
                continue
            rounded = budget(name, key)
            errors.append(assert_close(f"{where}: grad of {key}", grad, parameter.grad, rounded))
        for one in (model, stock) if step < len(steps) - 1 else ():
            one.zero_grad()
    for one in (model, stock):
        torch.optim.SGD(one.parameters(), lr=0.01, weight_decay=0.1).step()
    for key, parameter in stock.named_parameters():
        got = full_tensor(ours[key].detach())
        wanted = budget(name, key)
        errors.append(assert_close(f"{name}: {key} after a step", got, parameter, wanted))
    return errors


def one_mix(model: nn.Module) -> list[tuple[Make, Make]]:
    return [(image, text), (text, text)]


def checkpointed(use_reentrant: bool, model: Any) -> None:
    model.gradient_checkpointing_enable(
        gradient_checkpointing_kwargs={"use_reentrant": use_reentrant}
    )


def frozen_towers(model: nn.Module) -> None:
    for name in parts(model):
        model.get_submodule(name).requires_grad_(False)


def frozen_towers_before_a_trained_projector(model: nn.Module) -> None:
    """As in the first stage of many recipes: the language model is frozen, too."""
    model.requires_grad_(False)
    *_, projector = parts(model)
    model.get_submodule(projector).requires_grad_(True)


def frozen_text(model: nn.Module) -> None:
    names = parts(model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(names))


def with_input_gradients(model: Any) -> None:
    """What PEFT asks of a model under reentrant checkpointing."""
    frozen_towers(model)
    model.enable_input_require_grads()


def _image_alone(model: nn.Module) -> list[tuple[Make, Make]]:
    return [(image, text), (text, images)]


def two_forwards_before_backward(rank: int, world: int) -> None:
    """The backward of the second takes the towers away, and that of the first gathers them."""
    model, stock = build("kimi_k25", seed=rank), build("kimi_k25")
    apply_ep_fsdp2(model, ep_size=2)
    everyone = [[image(stock, 1), text(stock, 2)], [text(stock, 3), images(stock, 4)]]
    losses = [loss_of(model, batches[rank]) for batches in everyone]
    for loss in reversed(losses):
        (loss * world).backward()
    for batches in everyone:
        for one in batches:
            loss_of(stock, one).backward()
    ours = dict(model.named_parameters())
    for key, parameter in stock.named_parameters():
        want = parameter.grad
        grad = full_tensor(ours[key].grad)
        assert_close(key, grad, want, budget("deepseek_v3", key))


def towers_are_whole_only_while_they_are_needed(rank: int, world: int) -> None:
    model = build("kimi_k25", seed=rank)
    apply_ep_fsdp2(model, ep_size=2)
    units = [model.get_submodule(name) for name in ("model.vision_tower", "model.mm_projector")]
    whole: list[list[bool]] = []

    def look(module: nn.Module, args: Any) -> None:
        whole.append([is_gathered(unit) for unit in units])

    model.model.language_model.layers[0].register_forward_pre_hook(look)
    everyone = [[text, text], [image, text]]
    for makes in everyone:
        loss_of(model, makes[rank](model, 3)).backward()
        with torch.no_grad():
            loss_of(model, makes[rank](model, 3))
        whole.append([is_gathered(unit) for unit in units])
    assert whole == [[False] * 2] * 3 + [[True] * 2] + [[False] * 2] * 2


def a_tower_called_on_its_own_is_refused(rank: int, world: int) -> None:
    model = build("kimi_k25", seed=rank)
    given = image(model, 1)
    apply_ep_fsdp2(model, ep_size=2)
    with pytest.raises(ValueError, match="Kimi_K25VisionModel of a sharded model was called on"):
        model.model.get_image_features(given["pixel_values"], given["image_grid_thw"])


def generate_where_one_rank_has_a_picture(rank: int, world: int) -> None:
    """Before any forward, and with two samples each: the same tokens as stock."""
    model, stock = build("kimi_k25", seed=rank), build("kimi_k25")
    apply_ep_fsdp2(model, ep_size=2)
    given = (image if rank == 1 else text)(stock, 5)
    del given["labels"]
    options = {"max_new_tokens": 4 + rank, "do_sample": False, "num_beams": 2}
    options |= {"num_return_sequences": 2}
    got = model.generate(**given, **options)
    assert torch.equal(got, stock.generate(**given, **options))


ON_TWO_RANKS = [
    two_forwards_before_backward,
    towers_are_whole_only_while_they_are_needed,
    a_tower_called_on_its_own_is_refused,
    generate_where_one_rank_has_a_picture,
]
WAYS = {
    "checkpoint": partial(checkpointed, False),
    "reentrant": partial(checkpointed, True),
    "frozen towers": frozen_towers,
    "input gradients": with_input_gradients,
}
WITHOUT_TEXT = {
    "frozen text": frozen_text,
    "projector alone": frozen_towers_before_a_trained_projector,
}


def _checks() -> list[Any]:
    found = {name: partial(_any_mix, name) for name in (*TYPES, *COMPOSITES)}
    every_way = ("kimi_k25", "qwen3_omni_moe_thinker", "ernie4_5_vl_moe", "gemma4")
    for name in every_way:
        for way, prepare in WAYS.items():
            found[f"{name}: {way}"] = partial(_any_mix, name, prepare=prepare, data=mixes)
        for way, prepare in WITHOUT_TEXT.items():
            found[f"{name}: {way}"] = partial(_any_mix, name, prepare=prepare, data=_image_alone)
    found["kimi_k25: FSDP2 alone"] = partial(_any_mix, "kimi_k25", ep_size=1)
    return [
        Check(name, 2, run, slow=name != "kimi_k25", timeout=120.0).as_parameter()
        for name, run in found.items()
    ]


def _any_mix(name: str, rank: int, world: int, **options: Any) -> None:
    if options or name not in MODEL_TYPES:
        assert_equals_stock(name, rank, world, **options)
        return
    with recording(name, "vision") as errors:
        errors += assert_equals_stock(name, rank, world)


@pytest.mark.parametrize("claim", _checks())
def test_any_mix_over_ranks_equals_stock(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)


@pytest.mark.slow
@pytest.mark.parametrize("claim", on_ranks(2, *ON_TWO_RANKS, slow=True))
def test_on_two_ranks(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)


def test_sequence_parallelism_is_refused_with_such_towers() -> None:
    with pytest.raises(ValueError, match=r"sp_size \(2\) > 1"):
        patch(build("kimi_k25"), sp_size=2)
