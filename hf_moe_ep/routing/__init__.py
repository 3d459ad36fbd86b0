"""Count, balance, record and replay the choices that routers make: which experts a token goes to.

This folder reads or changes the choice of experts for all layers and ranks. It does not exchange
tokens and does not compute experts (`moe/`).
"""
