"""Stock models of every Mixture-of-Experts type of Transformers, small enough for fp64 on one core.

`MODEL_TYPES` lists all types that tests know, and `NEW_TYPES` those that a newer Transformers adds.
`FAMILIES` are eight types that represent the others in the fast suite: `few_fast` marks the others
slow. `tiny_config` and `tiny` build a config and a model. `batch` and `mixed_batch` (with pictures
and sound) make its training data, and `loss_of` computes its loss. Tests record their results for
ARCHITECTURES.md with `recording`, `record` or `record_refusal`.
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
