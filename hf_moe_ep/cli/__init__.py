"""The command `hf-moe-ep`: one file per command, each with its options and its printed lines.

Here: parsing arguments and printing. A command is imported when it is named, so that help and
typing errors do not wait for torch. Never: the work itself, which is done in `planner/` (plans),
`doctor.py` (checks of an installation), `checkpoints/` and `lora/` (conversions).
"""
