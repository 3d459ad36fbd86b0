"""Files and folders: byte ranges, renames that commit, manifests, JSON without pickle.

Never: a model, a layer, an optimizer. Whatever is here could serve another project as it is.
"""
