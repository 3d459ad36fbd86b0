"""The exchanges that send tokens to the ranks of their experts, and the results back.

Each dispatcher has a file; the other files are what dispatchers share. The experts are computed
elsewhere (`moe/experts.py`).
"""
