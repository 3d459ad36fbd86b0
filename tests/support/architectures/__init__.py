"""Stock models of every Mixture-of-Experts type of Transformers, small enough for fp64 on one core.

`MODEL_TYPES` are all that tests know, `NEW_TYPES` those of a newer Transformers, and `FAMILIES` the
eight that stand for them in the fast suite (`few_fast` marks all others slow),
`tiny_config` and `tiny` make one, `batch` and `mixed_batch` (with pictures and sound) what it is
trained on, `loss_of` its loss. What a test found of a type goes to ARCHITECTURES.md through
`recording`, `record` or `record_refusal`.
"""

from support.architectures.inputs import batch, loss_of
from support.architectures.models import model_class, tiny
from support.architectures.pictures import mixed_batch, takes_pictures, takes_sound
from support.architectures.results import record, record_refusal, recording
from support.architectures.sizes import tiny_config
from support.architectures.types import (
    FAMILIES,
    MODEL_TYPES,
    NEW_TYPES,
    NOT_BUILT_UPSTREAM,
    few_fast,
)

__all__ = [
    "FAMILIES",
    "MODEL_TYPES",
    "NEW_TYPES",
    "NOT_BUILT_UPSTREAM",
    "batch",
    "few_fast",
    "loss_of",
    "mixed_batch",
    "model_class",
    "record",
    "record_refusal",
    "recording",
    "takes_pictures",
    "takes_sound",
    "tiny",
    "tiny_config",
]
