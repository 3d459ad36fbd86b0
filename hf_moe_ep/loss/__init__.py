"""Compute the loss of a causal language model without the logits of a whole batch.

This folder replaces the loss function and the head of a model for one forward. Losses that are not
computed from logits belong elsewhere: the router's aux loss is in `moe/aux_loss.py`.
"""
