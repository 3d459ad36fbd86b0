"""The placement of experts on ranks: choose it, move the experts, and restore hub order.

This folder does not exchange tokens (`moe/dispatch/` does, by slots), and writes no files.
"""
