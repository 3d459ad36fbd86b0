"""Optimizers that know how a patched model is sharded.

    muon             `Muon`: the optimizer, with AdamW for all parameters that are not matrices
    matrices         which parameters hold matrices, and where each matrix is in its parameter
    owners           the rank that orthogonalises each sharded matrix, and the order of exchanges
    orthogonal       Newton-Schulz for a batch of matrices

A new rule about which parameter is a matrix belongs into `matrices.py`.
"""
