"""The expert MLP: its formula, its plain-torch truth, its fast implementations.

Here: tensors in, tensors out, and their gradients. Never: a rank, a model, a framework.
"""
