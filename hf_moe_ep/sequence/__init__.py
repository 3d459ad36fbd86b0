"""Sequence and context parallelism: cp x sp ranks split the sequences of one batch.

This folder slices sequences, splits attention and recurrences over heads, exchanges keys and values
between ranks, and gathers sequences for modules that need all tokens. The data loader that gives
these ranks the same batch belongs in `integrations/`.
"""
