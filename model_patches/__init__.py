"""What no model says of itself: `standard.py`, and a file for each architecture that differs.

A file is named after the `config.model_type`. It may have

    DIFFERS    fields of ModelPlan that take the place of the derived ones
    REFUSED    why models of this architecture cannot be patched, and what would work
"""
