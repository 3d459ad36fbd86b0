"""Triton kernels of the experts, each with the function that launches it.

Never: a choice between kernels and torch (`ops/expert_mlp.py`), or autograd.
"""
