"""The placement of experts on ranks: choosing it, moving experts, and restoring hub order.

Never here: the exchange of tokens (`moe/dispatch/`, which works with slots) and the files.
"""
