"""Refuse to export the weights of a model that holds its experts quantised."""

from __future__ import annotations

from torch import nn

from hf_moe_ep.state import patched_state, quantised_matrices


def check_whole_weights(model: nn.Module, what: str) -> None:
    """Raise ValueError if the experts are held quantised, because quantisation rounded them.

    Args:
        what: the name of the function that exports the weights, for the error.
    """
    if any(True for _ in quantised_matrices(model)):
        kind = patched_state(model).config.experts_dtype
        raise ValueError(
            f"{what} cannot export experts that are held quantised (experts_dtype={kind!r}); "
            f"their original values are in the checkpoint from which they were loaded. Save the "
            f"adapter with save_pretrained(model, directory), which PEFT and inference engines "
            f"load together with that checkpoint, or merge both: hf-moe-ep merge-adapter BASE "
            f"ADAPTER OUT"
        )
