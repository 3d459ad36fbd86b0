"""A file for ms-swift's --external_plugins. It patches models as `hf-moe-ep run` does.

    HF_MOE_EP_EP_SIZE=8 NPROC_PER_NODE=8 swift sft examples/trainers/ms_swift.yaml \\
        --external_plugins examples/trainers/ms_swift_plugin.py

ms-swift imports the file in each rank, before it loads a model. The settings are environment
variables: HF_MOE_EP_EP_SIZE=8 is the option --ep-size 8 of `hf-moe-ep run`.
"""

from hf_moe_ep.runner.hook import install

install()
