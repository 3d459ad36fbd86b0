"""A fake of Liger in plain torch, which runs on CPU ranks and replaces the same code as Liger 0.8.

It supports Qwen3-MoE. `support.fakes.liger` adds its folder to sys.path, because transformers looks
for a package of this name.
"""

__version__ = "0.8.5"
