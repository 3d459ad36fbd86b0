"""Compute the loss of a causal language model without the logits of a whole batch.

This folder replaces the loss function and the head of a model during a forward. The router's aux
loss is in `moe/aux_loss.py`, because it is not computed from logits.
"""
