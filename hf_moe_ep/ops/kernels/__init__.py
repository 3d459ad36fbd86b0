"""Triton kernels of the experts. Each file has kernels and the functions that launch them:

    sort_pairs    sorts the (row, expert) pairs by expert and lists the tiles to compute
    gate_up       `up` gathers rows, multiplies by the gate and up matrices, computes f(gate) * up
    grouped_mm    computes the down product and the gradient of the rows. `thin_mm` computes the
                  first products of adapters
    reduce        `combine` sums the rows of each token, `weight_grads` computes the gradients of
                  the routing weights, and `segment_sum` computes the gradients of the biases
    dgated        computes the backward through down and the gate
    outer         computes the gradients of the matrices

Three files hold functions that these kernels call: `epilogue` (adapters and the formula of the
gate), `product` (the loop of a product) and `dequantise`. `launch` in `launch` launches every
kernel, in about half of the host's time that Triton's own way takes. `choose_blocks` in `blocks`
selects the block sizes of all matrix products from a table, and `triton_mlp.py` calls it.
`sort_pairs` and `reduce` have block sizes of their own.

A tile is up to BLOCK_M consecutive pairs of one expert. One program of a kernel computes a block of
BLOCK_N columns for one tile.

In a kernel's body the comment after a load gives the shape of the loaded block: M rows of the
output, N columns, K elements of a step along the sum, P elements of a step along an adapter's rank.
[] is a scalar, and a word in capitals is a constant of the kernel. The prefix `p_` stands for a
computed pointer, `b_` for a block of values, `o_` for offsets and `m_` for a mask. Arguments, sums
and numbers of rows have no prefix.

A matrix is a tensor, or quantised bytes with scales that `dequantise.py` reads.

A kernel's `do_not_specialize` lists the arguments that depend on the routing. Otherwise Triton
would build another kernel for a count that is 1 or divisible by 16, in the middle of a step and on
one rank only.

This folder contains no autograd. `ops/operators.py` chooses between the kernels and torch.
"""
