"""Sequence parallelism: the ranks of an sp group split the sequences of one batch.

Sharing batches between these ranks does not belong here, but to `integrations/`.
"""
