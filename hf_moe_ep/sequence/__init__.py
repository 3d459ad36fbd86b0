"""Sequence parallelism: the ranks of an sp group split the sequences of one batch.

This folder slices sequences, and splits attention over heads. The data loader that gives these
ranks the same batch belongs in `integrations/`.
"""
