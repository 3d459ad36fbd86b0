"""The choice of experts: count it, balance it, record it, replay it.

This folder reads or changes the choice of experts for all layers and ranks. The exchange of tokens
and the computation of experts are in `moe/`.
"""
