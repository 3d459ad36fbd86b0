"""Accelerate, the Trainer and TRL: what of them is wrapped, and what runs in its place.

Here: functions with the signature of the one they stand for, and the table of them. Never: what
an own training loop needs as well; that is one folder further down and called from here.
"""
