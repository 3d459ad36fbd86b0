"""The choice of experts: seen, balanced, repeated.

Here: what reads or steers which experts tokens go to, across layers and ranks. Never: how tokens
travel or what experts compute, which is `moe/`.
"""
