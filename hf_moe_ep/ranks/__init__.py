"""Process groups, meshes and collectives, and errors that reach every rank.

Here: everything that creates a process group or sends data. Never: knowledge of a model.
"""
