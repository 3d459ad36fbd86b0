"""Plan training jobs from a model's config alone: memory, seconds, layouts.

    config, architecture     read a config, build the model without weights, try each feature
    held                     sum the bytes that a rank holds between two steps
    step                     plan the peak memory and the work of a whole step, with these files:
      count, work            count bytes and operators while code runs
      counted                run and count one step of a sharded model
      choices, fake          run one rank alone, on tensors without memory
      kernels                count the launches of the experts' Triton kernels, which need a GPU
      fused                  count the kernels that a compiler would make of the layers
      extrapolate            extrapolate from models with 4 and 5 layers to all layers
    stages                   plan a step of a model with pipeline stages
    hardware, rates.json     store the rates of GPUs and the source of every number
    seconds, calibrate       compute seconds from work and rates; measure the rates of a machine
    search, shrink           find the layouts that fit; find options that make a step fit
    plot                     draw the memory over a step
    options                  list the values that the options of a plan may have

The code in this folder runs in one process, without a GPU, before a training job starts. A training
step imports none of it.
"""
