"""The command `hf-moe-ep`. Each subcommand has a module that parses its options and prints.

`main.py` imports a module only when its subcommand is used. `planner/` (plans), `doctor.py` (checks
of an installation), `runner/` (commands of other projects), `checkpoints/` and `lora/`
(conversions) do the work itself.
"""
