"""Towers where ranks differ in what they have to see and hear, and the positions of what is seen.

Here: what a model with pictures or sound needs beyond a model of text. Never: attention over slices
(`sequence/`).
"""
