"""The router of LongCat-Flash also chooses experts that return their input.

gate_up_proj has rows for these experts, too, which stock never reads.
"""

from __future__ import annotations

from hf_moe_ep.plan import MoEBlock, WeightSource

DIFFERS = {
    "num_layers": "num_layers",
    "block": MoEBlock(
        name="layers.*.mlp",
        weights={
            "gate_up_proj": WeightSource(("experts.gate_up_proj",)),
            "down_proj": WeightSource(("experts.down_proj",)),
        },
        num_experts="experts.num_routed_experts",
        identity_experts="experts.zero_expert_num",
    ),
}
