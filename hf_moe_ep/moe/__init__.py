"""The MoE layer: route -> dispatch -> experts -> combine, its recompute and its aux loss.

This folder contains everything that happens to a token between the router's choice and the weighted
sum of its experts. Kernels belong in `ops/`, and the sharding of weights in `sharding/`.
"""
