"""A model <-> a checkpoint in the layout of the Hugging Face hub.

Here: which tensors of a file make up a parameter, and the two ways between them. Never: optimizer
state, or anything else that only this run understands.
"""
