"""DiffusionGemma, whose encoder and decoder consist of the same layers."""

from __future__ import annotations

REFUSED = (
    "its encoder and its decoder share the parameters of every layer, and FSDP2 cannot shard a "
    "parameter that two modules share; its text model (diffusion_gemma_text) can be patched"
)
