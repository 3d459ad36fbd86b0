"""LoRA adapters on stacked experts: their factors, their computation, their export for servers.

PEFT itself computes adapters on other modules.
"""
