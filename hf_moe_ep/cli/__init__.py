"""The command `hf-moe-ep`: one file per command, each with its options and its printed lines.

Here: parsing arguments and printing. A command imports what it needs when it is named, so that
help and typing errors do not wait for torch. Never: the work itself, which is done elsewhere: plans in
`planner/`, checks of an installation in `doctor.py`, conversions in `checkpoints/` and `lora/`.
"""
