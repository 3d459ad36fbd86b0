"""Plans of training jobs from a model's config alone: memory, seconds, layouts.

    config, architecture     which model: its config, the model without weights, what it supports
    held                     the bytes that a rank holds between two steps
    step                     the peak memory and the work of a whole step, from these parts:
      count, work            count the bytes and the operators of whatever runs
      counted                run and count one step of a model that is sharded already
      choices, fake          run one rank alone, on tensors without memory
      kernels                the experts' kernels, which run on a GPU only
      extrapolate            from 4 and 5 layers to all layers
    hardware, rates.json     the rates of GPUs and where each number is from
    seconds, calibrate       seconds from work and rates; rates measured on a machine
    search, shrink           which layouts fit; which options make a step fit
    plot                     a picture of the memory over a step

Here: whatever tells about a training job before it starts, in one process and without a GPU. Never:
anything that a training step imports.
"""
