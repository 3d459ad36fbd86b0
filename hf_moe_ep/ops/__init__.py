"""Compute the expert MLP with two fast implementations, and with a slow reference in plain torch.

This folder contains functions on tensors, with their gradients. It never imports code that knows
ranks, models or a training framework.

    expert_mlp    the public function. Read it first, then operators, formula and interface
    torch_mlp     the implementation in plain torch, with one matrix product per expert
    triton_mlp    the implementation with the Triton kernels of `kernels/`. moe/experts.py chooses
                  one of the two for a model, and says why not Triton
    self_check    compares the compiled kernels with torch before their first use
    quantised     the formats of quantised, frozen matrices, which are dequantised at every use
    reference     computes one row at a time, for comparison with both implementations in tests
    permute       sums the rows that dispatch copied from a token
    sum_check     compares the kernel that computes these sums with torch
    columns       joins hidden states and routing weights in one matrix, to send them together
    autograd      helpers of autograd functions
    devices       launches kernels on the device of their tensors, and copies between devices
    dtypes        the dtype in which the experts compute
"""
