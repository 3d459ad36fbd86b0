"""Refuse to export the weights of a model that holds its experts quantised."""

from __future__ import annotations

from torch import nn

from hf_moe_ep.state import holds_quantised_experts, patched_state


def refuse_quantised_experts(model: nn.Module, function_name: str) -> None:
    """Raise ValueError if the experts are held quantised, because quantisation rounded them."""
    if holds_quantised_experts(model):
        kind = patched_state(model).config.experts_dtype
        raise ValueError(
            f"{function_name} cannot export experts that are held quantised "
            f"(experts_dtype={kind!r}); their original values are in the checkpoint from which "
            f"they were loaded. Save the adapter with save_pretrained(model, directory), which "
            f"PEFT and inference engines load together with that checkpoint, or merge both: "
            f"hf-moe-ep merge-adapter BASE ADAPTER OUT"
        )
