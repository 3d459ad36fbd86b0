"""The MoE layer: route -> dispatch -> experts -> combine, its recompute and its aux loss.

This folder contains everything that happens to a token between the router's choice and the weighted
sum of its experts. Never here: kernels (`ops/`) and the sharding of weights (`sharding/`).
"""
