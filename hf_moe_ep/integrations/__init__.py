"""Wrap functions of Accelerate, the Trainer, PEFT and TRL.

The first argument of a wrapper is the stock function. The other arguments are passed to the stock
function. `install.py` has the table of the wrappers that `patch` installs. Code that a hand-written
training loop needs as well belongs to other folders; the wrappers call this code.
"""
