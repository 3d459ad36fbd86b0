"""Cut a model into pipeline stages, and run micro-batches through them.

This folder decides which layers belong to which stage and in which order a stage computes its
micro-batches. It never decides how a stage is sharded over its own ranks (`sharding/`).
"""
