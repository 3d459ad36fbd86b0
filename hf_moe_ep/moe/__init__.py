"""The MoE layer: route -> dispatch -> experts -> combine, its recompute and its aux loss.

This folder holds everything that happens to a token between the router's choice and the weighted
sum of its experts. Kernels are in `ops/`, the sharding of the weights in `sharding/`.
"""
