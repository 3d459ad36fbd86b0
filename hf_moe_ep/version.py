"""The version of the package: setup.cfg reads it, and so does `hf-moe-ep --version`."""

__version__ = "0.1.0"
