"""Without a training job: the command line, memory plans, published shapes.

Here: whatever a person runs before or after training, in one process. Never: anything that a
training step imports.
"""
