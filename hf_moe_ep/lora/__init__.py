"""LoRA adapters on stacked experts: store their factors, compute them, merge and export them.

Adapters on all other modules are computed by PEFT itself.
"""
