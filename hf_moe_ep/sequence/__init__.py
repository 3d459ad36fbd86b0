"""Sequence parallelism: the ranks of an sp group split the sequences of one batch.

This folder slices sequences, splits attention and recurrences over heads, and gathers sequences for
modules that need all tokens. The data loader that gives these ranks the same batch belongs in
`integrations/`.
"""
