"""Train matrices whose rows or columns are sharded over ranks.

    muon             the optimizer `Muon`, with AdamW for all parameters that are not matrices
    matrices         finds the parameters that contain matrices, and each matrix in its parameter
    owners           chooses the rank that orthogonalises each sharded matrix, and plans exchanges
    orthogonal       computes Newton-Schulz for a batch of matrices

A new rule about which parameters are matrices belongs into `matrices.py`.
"""
