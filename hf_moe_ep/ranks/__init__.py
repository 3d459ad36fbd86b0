"""Process groups, meshes, collectives, and errors that are raised on every rank.

This folder has all code that creates a process group or sends data, and `boxes.py`, which computes
the shard of a tensor that each rank holds. It never looks into a model.
"""
