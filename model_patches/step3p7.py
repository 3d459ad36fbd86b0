"""The experts of Step-3.7 have the weights of the interface, but clamp only in some layers."""

from __future__ import annotations

from hf_moe_ep.plan import MoEBlock, WeightSource

DIFFERS = {
    "block": MoEBlock(
        name="layers.*.mlp",
        weights={
            "gate_up_proj": WeightSource(("experts.gate_up_proj",)),
            "down_proj": WeightSource(("experts.down_proj",)),
        },
        gate="experts._apply_gate",
    )
}
