"""Process groups, meshes and collectives, and errors that reach every rank.

No other folder creates process groups. Nothing here knows a model.
"""
