"""Wrappers around functions of Accelerate, the Trainer, PEFT and TRL.

The first argument of a wrapper is the stock function; the other arguments are those of the stock
function. `install.py` has the table of all wrappers. Code that a hand-written training loop needs
as well does not belong here: it stands in the folders below, and the wrappers call it.
"""
