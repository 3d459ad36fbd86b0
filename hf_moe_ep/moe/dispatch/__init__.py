"""The exchanges that send tokens to the ranks of their experts, and the results back.

Each dispatcher has a file of its own; the other files are shared. Never here: the computation of
experts (`moe/experts.py`).
"""
