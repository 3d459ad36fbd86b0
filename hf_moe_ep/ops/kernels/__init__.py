"""Triton kernels of the experts. A file has kernels, and the functions that launch these kernels:

    sort_pairs    sorts the (row, expert) pairs by expert and lists the tiles to compute
    gate_up       `up` gathers rows, multiplies by the gate and up matrices, computes f(gate) * up
    grouped_mm    the down product, the gradient of the rows; `thin_mm`: first products of adapters
    reduce        `combine`: sums the rows of each token; `weight_grads`: gradients of the routing
                  weights; `segment_sum`: gradients of the biases
    dgated        backward through down and the gate
    outer         the gradients of the matrices

Three files hold functions that these kernels call: `epilogue` (adapters and the formula of the
gate), `product` (the loop of a product) and `dequantise`. `choose_blocks` in `blocks` selects the
block sizes of all matrix products from a table; `triton_mlp.py` calls it. `sort_pairs` and `reduce`
have block sizes of their own.

A tile is up to BLOCK_M consecutive pairs of one expert. One program of a kernel computes a block of
BLOCK_N columns for one tile.

In a kernel's body the comment after a load gives the shape of the loaded block: M rows of the
output, N columns, K elements of a step along the sum, P elements of a step along an adapter's rank.
[] is a scalar, and a whole word in capitals is a constant of the kernel. The prefix `p_` stands for
a computed pointer, `b_` for a block of values, `o_` for offsets and `m_` for a mask. Arguments,
sums and numbers of rows have no prefix.

A matrix is a tensor, or quantised bytes with scales that `dequantise.py` reads.

Arguments that depend on the routing are listed in a kernel's `do_not_specialize`. Otherwise Triton
would build another kernel for a count that is 1 or divisible by 16, in the middle of a step and on
one rank only.

This folder contains no autograd, and does not choose between kernels and torch
(`ops/operators.py`).
"""
