"""The imports of ranks. The server that forks the ranks (`support.ranks`) does them once.

It imports what tests, their helpers and a patched model import. The server starts no thread, and a
rank's garbage collections leave these objects out.
"""

import gc
from importlib import import_module
from importlib.util import find_spec

import hf_moe_ep

for _module in (
    "accelerate",
    *(["peft"] if find_spec("peft") else []),  # a GPU machine may have no PEFT
    "pytest",
    "torch.distributed.fsdp",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe",
    "transformers.trainer",
    "hf_moe_ep.integrations.install",
    "support.architectures.steps",
    "support.checks",
    "support.parity",
):
    import_module(_module)
for _name in hf_moe_ep.__all__:
    getattr(hf_moe_ep, _name)  # imports the module that defines it
gc.freeze()
