"""Which rank owns which expert, once that is no longer the hub's order; and moving them there.

Belongs here: the choice of an owner, the bytes that move, the way back to hub order for whatever
reads or writes files. Never: how tokens travel (`moe/dispatch/` is told slots), nor what a file is.
"""
