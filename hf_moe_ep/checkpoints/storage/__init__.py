"""Read and write files and folders: byte ranges, atomic renames, manifests, JSON without pickle.

Another project could use this folder unchanged, because it knows no model, layer or optimizer.
"""
