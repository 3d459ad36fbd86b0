"""Make the training batch of a tiny model (`batch`), and compute its loss (`loss_of`)."""

from inspect import signature

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from hf_moe_ep.upstream.adapters import without_adapters
from support import tiny_models
from support.architectures.sizes import FIRST_SPECIAL_TOKEN, VOCAB_SIZE


def batch(
    model: PreTrainedModel,
    batch_size: int,
    seq_len: int,
    seed: int = 0,
    *,
    ignore: float = 0.25,
    pad: int = 0,
) -> dict[str, torch.Tensor]:
    """Make a batch like that of `tiny_models.batch`, without placeholders of pictures or sound.

    A token classifier gets labels below its `num_labels`. `pad` must stay below 5, the size of
    windows: in the fp32 softmax of GraniteMoeSWA, a row of fp64 scores that is all masked is NaN.
    """
    inputs = tiny_models.batch(model, batch_size, seq_len, seed, ignore=ignore, pad=pad)
    text_ids = inputs["input_ids"] % FIRST_SPECIAL_TOKEN
    counted = inputs["labels"] != -100
    labels = text_ids
    if "ForTokenClassification" in type(model).__name__:
        labels = text_ids % model.config.num_labels
    inputs |= {"input_ids": text_ids, "labels": labels.masked_fill(~counted, -100)}
    return with_canvas(model, inputs, seed)


def with_canvas(
    model: PreTrainedModel, inputs: dict[str, torch.Tensor], seed: int
) -> dict[str, torch.Tensor]:
    """For a model that denoises a canvas behind a prompt, add a random canvas and its labels.

    The inputs of all other models are returned unchanged.
    """
    if "decoder_input_ids" not in signature(model.forward).parameters:
        return inputs
    generator = torch.Generator().manual_seed(seed + 1)
    shape = (len(inputs["input_ids"]), model.config.canvas_length)
    noisy, clean = torch.randint(FIRST_SPECIAL_TOKEN, (2, *shape), generator=generator)
    logits = torch.randn(*shape, VOCAB_SIZE, generator=generator, dtype=torch.float64)
    mask = inputs["attention_mask"]
    return inputs | {
        "labels": clean.masked_fill(torch.rand(shape, generator=generator) < 0.25, -100),
        "decoder_input_ids": noisy,
        "decoder_attention_mask": torch.cat([mask, mask.new_ones(shape)], dim=1),
        "self_conditioning_logits": logits,
    }


def loss_of(model: PreTrainedModel, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Compute the loss of a stock forward.

    A model without a loss gets the cross-entropy, and a model without a head the embedding as head.
    """
    forward = without_adapters(model).forward
    if hasattr(model, "loss_function") and "labels" in signature(forward).parameters:
        loss = model(**inputs).loss
        assert isinstance(loss, torch.Tensor)
        return loss
    out = model(**{name: value for name, value in inputs.items() if name != "labels"})
    logits = getattr(out, "logits", None)
    if logits is None:
        logits = out.last_hidden_state @ model.get_input_embeddings().weight.T
    return F.cross_entropy(logits.flatten(0, 1), inputs["labels"].flatten())
