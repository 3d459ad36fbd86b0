"""Adapters on stacked experts: how PEFT packs them, how they lie sharded, how servers want them.

Here: factors, their computation beside the weights, their export. Never: adapters on anything that
is no stacked expert; those are PEFT's own.
"""
