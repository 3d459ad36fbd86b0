"""One batch on several ranks: slices of a sequence, attention over heads.

Here: how a sequence is split, exchanged and joined. Never: the data loader (`integrations/`).
"""
