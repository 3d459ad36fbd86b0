"""Triton kernels of the experts, each with the function that launches it.

In a kernel's body the comment behind a load is the shape of what it brings, in the kernel's own
blocks: M rows of the output, N columns, K a step along the sum, P one along an adapter's rank.
`p_` is a pointer, `b_` a block of values, `o_` offsets, `m_` a mask.

Matrices are tensors, or bytes with scales that `dequantise.py` reads in their place.

What changes with the routing stands in a kernel's `do_not_specialize`: Triton would build the
kernel anew where a count is 1 or divisible by 16, in the middle of a step and on one rank only.

Never: a choice between kernels and torch (`ops/expert_mlp.py`), or autograd.
"""
