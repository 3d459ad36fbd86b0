"""Run another project's training command with expert parallelism: `hf-moe-ep run`.

    options          reads settings of ParallelConfig from command-line options and variables
    environment      starts the command, with HF_MOE_EP_* variables and a PYTHONPATH
    path/            is the first folder of PYTHONPATH; its sitecustomize.py waits for transformers
    hook             runs in each Python process of the command: patches the models that
                     transformers returns
    load             chooses the tensors that a process reads when such a model is loaded

The command replaces the process of `hf-moe-ep run`, so its exit code and its signals are those of
the command. Nothing here changes how a patched model is sharded, trained or saved: this folder only
calls `patch`. Settings for a single trainer belong to `upstream/frameworks.py`.
"""
