"""Save and load the state from which a training run resumes, at any layout.

The state is parameters, optimizer state, progress and random generators. Code for the hub's layout
belongs to `hub/`.
"""
