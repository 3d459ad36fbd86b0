"""FSDP2 units of a model, their meshes, the initial values of parameters, and gradient clipping.

The computation of a layer does not belong here.
"""
