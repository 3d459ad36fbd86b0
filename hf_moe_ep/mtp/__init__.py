"""Train a head for multi-token prediction (MTP) with its model.

This folder builds the head, runs it in every forward that trains, and adds its loss. The modules of
the head are in `mtp_head.py`. `checkpoints/hub/head.py` reads values for the head.
"""
