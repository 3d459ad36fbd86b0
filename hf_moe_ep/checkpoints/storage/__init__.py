"""Read and write files and folders: byte ranges, atomic renames, manifests, JSON without pickle.

The functions of this folder get tensors, boxes and names. They know no model, layer or optimizer.
"""
