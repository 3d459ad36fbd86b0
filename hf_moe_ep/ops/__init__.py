"""The expert MLP: its formula, a slow reference in plain torch, and two fast implementations.

Here: functions that take tensors and return tensors, and their gradients. Never: ranks, models or a
training framework.

    expert_mlp    the function; read it first, then operators, formula and interface
    torch_mlp     plain torch, one product per expert
    triton_mlp    the same as a few launches of `kernels/`
    self_check    compares the compiled kernels with torch before they are used
    quantised     the byte formats of frozen matrices, which are dequantised when they are used
    reference     what both implementations must equal, one row at a time
    permute       sums of the rows that dispatch copied from the tokens, checked by sum_check
"""
