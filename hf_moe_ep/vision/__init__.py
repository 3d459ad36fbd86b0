"""Models with pictures or sound.

This folder runs encoders on ranks with different inputs, slices the patches of pictures, and
computes position ids of pictures. Attention over slices of a sequence belongs in `sequence/`.
"""
