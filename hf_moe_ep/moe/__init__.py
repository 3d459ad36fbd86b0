"""The MoE layer: route -> dispatch -> experts -> combine, its recompute and its aux loss.

Here: what happens to a token between the router's choice and the sum of its experts. Never:
kernels (`ops/`), or where weights come from (`sharding/`).
"""
