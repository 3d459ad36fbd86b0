"""A stand-in for Liger that runs on CPU ranks: what it replaces, and how, in plain torch.

Its folder is put on sys.path (`support.fakes.liger`), since transformers looks for a package of
this name. Written from the behaviour of Liger 0.8 with Qwen3-MoE.
"""

__version__ = "0.8.5"
