"""DiffusionGemma, whole: the same layers twice, as an encoder and as a decoder."""

from __future__ import annotations

REFUSED = (
    "its encoder and its decoder share the parameters of every layer, and FSDP2 splits a parameter "
    "for one of the two alone; its text model (diffusion_gemma_text) can be patched"
)
