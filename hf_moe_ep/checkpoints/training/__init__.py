"""Save and load the state from which a training run resumes, at any layout.

The state is parameters, optimizer state, progress and random generators. Never: the hub's layout
(`hub/`).
"""
