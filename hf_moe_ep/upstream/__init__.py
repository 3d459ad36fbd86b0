"""Every name of torch, transformers, accelerate, peft and trl that is not public API.

Here: one file per topic, each naming the upstream files that it leans on, and every version check.
When an upgrade breaks, this is the folder to read, and the table in `integrations/install.py` that
names what is wrapped, as strings. Never: a decision of ours.

    attention_interface   transformers' attention and mask functions, and configs that select ours
    experts_interface     the same of its experts
    models                what a model knows of itself: parts, config, forward, buffers
    code                  what the code of a module says: which functions it calls, what it takes
    towers                vision towers, and what a forward takes of them
    graph                 what the graph of a tensor reaches
    module_names          names of modules without what wrappers put in
    modules               what torch.nn.Module keeps: buffers, children, hooks
    norms                 norms of many tensors in one operator call
    replaced_forwards     who computes a module: its class, Liger, another patcher
    sharded_models        marks of FSDP, DDP and transformers on a model over ranks
    process_groups        the default store, a mesh of one axis over several, a group that is fake
    gloo                  groups of gloo with one worker thread
    dispatch_modes        what sees every operator; tensors without memory
    host_copies           what FSDP2 copies between host and device
    operators             what an operator computes, reads, writes and sends
    autograd_modes        the backward and the checkpoint that run now
    checkpoint_files      files of torch.distributed.checkpoint
    hub                   folders of the hub, and the model that a config describes
    conversion            a model's tensors into those of the hub, and their names
    adapters              PEFT: adapters, their factors, what it would save
    adapter_files         PEFT: an adapter's folder over a model without values
    training_frameworks   what Accelerate and the Trainer keep to themselves
    grpo                  functions of a GRPO trainer, and its engine
    requirements          which versions of other packages are allowed, and which are installed
    launch_config         the config file that `accelerate launch` takes by itself
    wrap                  how one of our functions gets in front of one of theirs
"""
