"""The ways of a token to the ranks of its experts, and home.

Here: one file per dispatcher, and what they share. Never: what the experts compute.
"""
