"""Find the parts of a stock model, as `patch` finds them."""

from torch import nn

from hf_moe_ep.architectures import Parts, find_block, find_parts
from hf_moe_ep.moe.stacked import stack_experts, unstack_experts


def parts_of(model: nn.Module) -> Parts:
    """Return the parts that `patch` would find. The model stays stock.

    The experts of a block outside of the experts interface are `StackedExperts` in the result.
    """
    stack_experts(model, find_block(model))
    try:
        return find_parts(model)
    finally:
        unstack_experts(model)
