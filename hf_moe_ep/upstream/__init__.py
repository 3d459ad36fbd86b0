"""Import the private names of torch, transformers, accelerate, peft and trl.

Only this folder imports private names and compares versions. It has one file per topic, and each
file lists the upstream files that it depends on. If an upgrade of another project breaks something,
read this folder, and the table of `integrations/install.py`, which names the wrapped functions as
strings. A few other files name an attribute of a stock module as a string, such as
`_gradient_checkpointing_func`. This folder never decides how a model is trained.

    attention_interface     our functions in transformers' attention and mask interfaces
    experts_interface       our forward of all experts in transformers' experts interface
    models                  the parts, the config, the forward and the buffers of a model
    code                    names that the code of a module uses, arguments of the forward
    causal_loss             how a model's forward uses its logits, and transformers' causal loss
    towers                  vision towers, and the arguments of a forward for pictures and sound
    graph                   parameters that the autograd graph of a tensor reaches; nested tensors
    module_names            module names without the components that wrappers add
    modules                 buffers, children and hooks of a torch.nn.Module
    norms                   norms of many tensors in one operator call
    replaced                attributes of modules and classes, replaced inside a block
    replaced_forwards       the function that runs as a module's forward, such as Liger's
    recurrences             the convolutions and recurrences that mixers call
    sharded_models          private state of FSDP2, DDP and transformers on a sharded model
    process_groups          the default store, timeouts, flattened meshes, fake groups, new names
    gloo                    process groups of gloo with one worker thread
    dispatch_modes          modes that see every operator, and tensors without memory
    host_copies             copies between host and device that FSDP2 makes
    operators               FLOPs, bytes and collectives of an operator
    autograd_modes          the state of autograd: backward, dispatch modes, views
    compiler                torch.compile: its arguments, backends and errors
    captured_outputs        transformers' collector of router logits and other outputs
    checkpoint_files        files and planner of torch.distributed.checkpoint
    hub                     folders of the hub, and the model that a config describes
    named_weights           the weight file that config.json names
    loading                 a hook of from_pretrained that runs before the weights are loaded
    conversion              conversion of a model's tensors to the tensors of a hub checkpoint
    adapters                PEFT: adapters, their factors, and the tensors that PEFT saves
    adapter_files           PEFT: the config in an adapter's folder, an adapter for a model on meta
    accelerate_and_trainer  private names of Accelerate, the Trainer and TRL
    frameworks              options of axolotl, ms-swift, LLaMA-Factory and TRL's commands
    grpo                    methods of TRL's GRPO trainer, and its rollout engine
    requirements            allowed and installed versions of other packages
    launch_config           the default config file of `accelerate launch`
    wrap                    replacement of another project's function by our wrapper
"""
