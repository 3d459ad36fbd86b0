"""The expert MLP: its formula, its plain-torch truth, its fast implementations.

Here: tensors in, tensors out, and their gradients. Never: a rank, a model, a framework.

    expert_mlp    the function; read first, then operators, spec, formula, interface
    torch_mlp     plain torch, one product per expert
    triton_mlp    the same as a few launches of `kernels/`, checked by self_check
    quantised     frozen matrices as bytes: dequantised one at a time, by the kernels tile by tile
    reference     the truth of both, one row at a time
    permute       rows copied from tokens and added back, for dispatch; checked by sum_check
"""
