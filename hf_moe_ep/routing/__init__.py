"""The choice of experts: count it, balance it, record it, replay it.

This folder reads or changes the choice of experts for all layers and ranks. Never here: the
exchange of tokens and the computation of experts (`moe/`).
"""
