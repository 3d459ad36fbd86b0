"""Models with pictures or sound: encoders on ranks with different inputs, positions of pictures.

Splitting a sequence over ranks does not belong here, but to `sequence/`.
"""
