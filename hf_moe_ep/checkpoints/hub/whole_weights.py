"""Refuse to export the weights of a model whose experts are held quantised."""

from __future__ import annotations

from torch import nn

from hf_moe_ep.state import patched_state, quantised_matrices


def check_whole_weights(model: nn.Module, what: str) -> None:
    """Raise ValueError if experts are held quantised: they are not the model's exact weights."""
    if any(True for _ in quantised_matrices(model)):
        kind = patched_state(model).config.experts_dtype
        raise ValueError(
            f"{what} of a model whose experts are held by experts_dtype={kind!r}: their original "
            f"values are in the checkpoint that they were loaded from. Save the adapter with "
            f"save_pretrained(model, directory), which PEFT and engines load together with that "
            f"checkpoint, or merge both: hf-moe-ep merge-adapter BASE ADAPTER OUT"
        )
