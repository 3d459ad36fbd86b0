"""Shard a model with FSDP2.

This folder decides which modules become FSDP2 units and on which meshes, gives parameters their
initial values, and clips gradients. It never computes a layer (`moe/`).
"""
