"""Store, compute, merge and export LoRA adapters on stacked experts.

PEFT itself computes adapters on all other modules.
"""
