"""Count, balance, record and replay the choices of routers: which experts a token is sent to.

This folder reads or changes the choice of experts for all layers and ranks. The exchange of tokens
and the computation of experts belong in `moe/`.
"""
