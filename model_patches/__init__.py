"""Facts about architectures that cannot be derived from a model.

`standard.py` lists what was tested for each architecture. An architecture whose derived plan is not
right has a file, named after its `config.model_type`, with one of these names:

    DIFFERS    the fields of ModelPlan that replace the derived ones
    REFUSED    the reason why models of this architecture cannot be patched, and the alternative
"""
