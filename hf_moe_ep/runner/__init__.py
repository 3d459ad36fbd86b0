"""Run another project's training command with expert parallelism: `hf-moe-ep run`.

    options          read settings of ParallelConfig from command-line options and variables
    environment      start the command with HF_MOE_EP_* variables and a PYTHONPATH
    path/            the first folder of PYTHONPATH; its sitecustomize.py waits for transformers
    hook             in each Python process of the command, patch the models that transformers
                     returns
    load             choose the tensors that a process reads when it loads such a model

The command replaces the process of `hf-moe-ep run`. Therefore the launcher sees the command's exit
code, and the command receives all signals. This folder only calls `patch`: it does not change how a
patched model is sharded, trained or saved. Settings for a single trainer belong to
`upstream/frameworks.py`.
"""
