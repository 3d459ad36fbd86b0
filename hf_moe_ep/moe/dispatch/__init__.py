"""Dispatchers: they send tokens to the ranks of their experts, and the results back.

Each dispatcher has a file of its own; the other files are shared. The computation of experts
belongs in `moe/experts.py`.
"""
