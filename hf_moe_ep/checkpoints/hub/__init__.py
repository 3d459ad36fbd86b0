"""Convert between a model and a checkpoint in the layout of the Hugging Face hub.

These modules find the checkpoint tensors that make up each parameter, read them and write them.
Never: optimizer state, or other data that only the run itself understands (`training/`).
"""
