"""Towers that run on every rank or on none, and the positions of what they see.

Here: what a model with pictures needs beyond a model of text. Never: attention over slices
(`sequence/`).
"""
