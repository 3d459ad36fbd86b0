"""LoRA adapters on stacked experts: their factors, their computation, their export for servers.

Never here: adapters on other modules, which PEFT computes itself.
"""
