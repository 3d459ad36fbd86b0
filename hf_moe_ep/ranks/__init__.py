"""Process groups, meshes, collectives, and errors that are raised on every rank.

This folder has all code that creates a process group or sends data. It never looks into a model.
"""
