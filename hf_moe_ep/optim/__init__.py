"""Optimizers that know how a patched model is sharded.

    muon             `Muon`: the optimizer, with AdamW for all parameters that are no matrices
    matrices         which parameters hold matrices, and where each matrix is in its parameter
    deal             which rank orthogonalises which sharded matrices, and in which order
    orthogonal       Newton-Schulz for a batch of matrices

A new rule about which parameter is a matrix belongs into `matrices.py`.
"""
