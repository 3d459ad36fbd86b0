"""What a tiny model is trained on, and its loss."""

from inspect import signature

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from support import tiny_models


def batch(
    model: PreTrainedModel,
    batch_size: int,
    seq_len: int,
    seed: int = 0,
    *,
    ignore: float = 0.25,
    pad: int = 0,
) -> dict[str, torch.Tensor]:
    """Text and labels as of `tiny_models.batch`, without any placeholder of pictures or sound.

    A token classifier gets labels below its `num_labels`. `pad` stays below the windows of 5: a row
    of fp64 scores that is masked as a whole is NaN in the fp32 softmax of GraniteMoeSWA.
    """
    inputs = tiny_models.batch(model, batch_size, seq_len, seed, ignore=ignore, pad=pad)
    # Placeholders and other special tokens are the last seven of the vocabulary.
    low = inputs["input_ids"] % 90
    counted = inputs["labels"] != -100
    labels = low
    if "ForTokenClassification" in type(model).__name__:
        labels = low % model.config.num_labels
    return inputs | {"input_ids": low, "labels": labels.masked_fill(~counted, -100)}


def loss_of(model: PreTrainedModel, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """The loss of a stock forward; cross-entropy with the embedding as head where it has none."""
    if hasattr(model, "loss_function") and "labels" in signature(model.forward).parameters:
        loss = model(**inputs).loss
        assert isinstance(loss, torch.Tensor)
        return loss
    out = model(**{name: value for name, value in inputs.items() if name != "labels"})
    logits = getattr(out, "logits", None)
    if logits is None:
        logits = out.last_hidden_state @ model.get_input_embeddings().weight.T
    return F.cross_entropy(logits.flatten(0, 1), inputs["labels"].flatten())
