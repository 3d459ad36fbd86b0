"""Models with pictures or sound.

Here: encoders on ranks with different inputs, slices of patches, and position ids of pictures.
Never: attention over slices of a sequence (`sequence/`).
"""
