"""Sequence parallelism: the ranks of an sp group split the sequences of one batch.

Here: slices of a sequence, and attention over heads. Never: the data loader that gives these ranks
the same batch (`integrations/`).
"""
