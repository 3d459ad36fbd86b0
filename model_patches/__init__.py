"""State facts about architectures that cannot be derived from a model.

`standard.py` lists the features that were tested with each architecture. If the derived plan of an
architecture is wrong, a file with the name of its `config.model_type` defines one of these:

    DIFFERS    fields of ModelPlan that replace the derived fields. The field `block` describes MoE
               blocks whose experts do not use transformers' experts interface (`plan.MoEBlock`)
    REFUSED    the reason why models of this architecture cannot be patched, and an alternative

The name of a file has "_" where the model type has "-".
"""
