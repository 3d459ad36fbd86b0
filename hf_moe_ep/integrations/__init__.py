"""Accelerate, the Trainer, PEFT and TRL: the functions that are wrapped, and our wrappers.

A wrapper has the signature of the function that it wraps, behind the stock function as its first
argument. `install.py` has the table of all wrappers. Never: code that a training loop of one's own
needs as well; it stands in the folders below, and is called from here.
"""
