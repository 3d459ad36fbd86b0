"""Sharding of a model with FSDP2.

Here: FSDP2 units and their meshes, the initial values of parameters, and gradient clipping. Never:
the computation of a layer.
"""
