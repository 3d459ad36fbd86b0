"""Count, balance, record and replay the choices that routers make: which experts a token goes to.

This folder reads or changes the choice of experts for all layers and ranks. The exchange of tokens
and the computation of experts belong to `moe/`.
"""
