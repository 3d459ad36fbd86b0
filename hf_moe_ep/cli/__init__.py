"""The command `hf-moe-ep`. Each subcommand has a module that parses its options and prints.

A module is imported only when its subcommand is used. Its function `run` imports the modules that
need torch, so that help and mistyped commands do not wait for torch. The work itself is done by
`planner/` (plans), `doctor.py` (checks of an installation), `runner/` (commands of other projects),
`checkpoints/` and `lora/` (conversions).
"""
