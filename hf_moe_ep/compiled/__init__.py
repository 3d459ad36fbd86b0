"""torch.compile for the parts of a patched model that surround its experts.

This folder decides which modules are traced, and which modules compiled code only calls. It never
shards a module (`sharding/`) or dispatches tokens (`moe/`).
"""
