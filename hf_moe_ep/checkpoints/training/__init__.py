"""The state from which a training run resumes: parameters, moments, progress, random generators.

These modules name the state, save it and load it at any layout. Never: the hub's layout (`hub/`).
"""
