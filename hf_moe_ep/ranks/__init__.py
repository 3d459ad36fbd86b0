"""The only meshes and collectives, and how ranks meet.

Here: process groups, what travels over them in forward and backward, and what ranks agree on
outside of both. Never: a model.
"""
