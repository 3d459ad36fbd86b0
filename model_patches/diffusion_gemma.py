"""DiffusionGemma, whose encoder and decoder consist of the same layers."""

from __future__ import annotations

REFUSED = (
    "its encoder and its decoder share the parameters of every layer; an FSDP2 unit of both layers "
    "stays gathered from the forward of the first to that of the second, and the decoder begins "
    "after the last layer of the encoder, so all layers would be gathered at once; its text model "
    "(diffusion_gemma_text) can be patched"
)
