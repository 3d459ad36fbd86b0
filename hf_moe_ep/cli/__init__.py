"""The command `hf-moe-ep`. Each subcommand has a module that parses its options and prints.

A module is imported only when its subcommand is used, and what needs torch is imported where the
subcommand runs, so that help and mistyped commands do not wait for torch. The work itself is done
elsewhere: in `planner/` (plans), `doctor.py` (checks of an installation), `checkpoints/` and
`lora/` (conversions).
"""
