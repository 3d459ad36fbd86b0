"""The state from which a training run resumes: parameters, moments, progress, random generators.

These modules name the state, save it and load it at any layout. The hub's layout belongs to `hub/`.
"""
