"""The placement of experts on ranks: choose it, move the experts, and restore hub order.

In hub order, row e of a stacked tensor is expert e. This folder does not exchange tokens
(`moe/dispatch/` does), and writes no files.
"""
