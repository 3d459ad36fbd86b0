"""Dispatchers send tokens to the ranks of their experts, and send the results back.

Each dispatcher has its own file (`all_to_all.py`, `hierarchical.py`, `deepep.py`); they share the
other files. The computation of experts belongs in `moe/experts.py`.
"""
