"""Files and folders: byte ranges, atomic renames, manifests, JSON without pickle.

Nothing here knows a model, a layer or an optimizer, so another project could use it unchanged.
"""
