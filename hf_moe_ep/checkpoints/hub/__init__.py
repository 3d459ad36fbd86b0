"""Convert between a model and a checkpoint in the layout of the Hugging Face hub.

These modules find the checkpoint tensors that make up each parameter, read them and write them.
Optimizer state and other data of a training run belong to `training/`.
"""
