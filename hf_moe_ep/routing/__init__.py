"""The choice of experts: count it, balance it, record it, replay it.

This folder reads or changes the choice of experts for all layers and ranks. It does not exchange
tokens and does not compute experts (`moe/`).
"""
