"""What a training run goes on from: parameters, moments, progress, random numbers.

Here: the state by name, and saving and loading it at any layout. Never: the hub's layout.
"""
