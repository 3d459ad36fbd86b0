"""torch.compile for the parts of a patched model that surround its experts.

This folder decides what is traced and what is called by compiled code without being traced. How a
module is sharded belongs in `sharding/`, and how tokens are dispatched in `moe/`.
"""
