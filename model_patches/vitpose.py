"""The backbone of ViTPose has experts."""

from __future__ import annotations

from hf_moe_ep.model_patches.vitpose_backbone import REFUSED as REFUSED
