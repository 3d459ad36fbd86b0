"""Where parameters lie, where their first values come from, and norms over all of them.

Here: FSDP2 units, their meshes, their order. Never: what a layer computes.
"""
