"""Run another project's training command with expert parallelism: `hf-moe-ep run`.

    options          settings of ParallelConfig as options of a command, and as variables
    environment      the environment of the command: HF_MOE_EP_* variables and PYTHONPATH
    path/            the folder in front of PYTHONPATH; its sitecustomize.py waits for transformers
    hook             in each Python process below: patches models as transformers returns them
    load             what a rank reads when such a model is loaded

The command replaces the process of `hf-moe-ep run`, so its exit code and its signals are those of
the command. Nothing here changes how a patched model is sharded, trained or saved: this folder only
calls `patch`. Settings for a single trainer belong to `upstream/trainers.py`.
"""
