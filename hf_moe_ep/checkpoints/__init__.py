"""Write checkpoints to disk and read them back at any layout of ranks.

`storage/` reads and writes bytes and knows no model; `hub/` converts between a model and the hub's
layout; `training/` saves and loads the state from which a run resumes. `sharding/` decides how
parameters are sharded.

Three types describe a slice of a tensor:

    Box         ranks/boxes.py               index ranges, [start, stop) per dim: a rank's shard, a
                                             slab to write, the part of a file to read
    FileTensor  storage/safetensors_file.py  a tensor in a file: dtype, shape, first byte. FP8 and
                                             MXFP4 weights are FileTensors that are decoded while
                                             they are read (Fp8Tensor, Mxfp4Tensor)
    Piece       hub/pieces.py                a box of a checkpoint tensor, and the elements of a
                                             parameter that the box holds. A piece that is cut to
                                             a rank's box is a smaller piece

These classes contain slices:

    StoredParameter  hub/stored_parameter.py  the pieces of a parameter, and the FileTensors that
                                              hold them
    TensorGroup      hub/write.py             checkpoint tensors that are written together
    Spread           storage/spread.py        the boxes of all ranks: a grid of ranks, and the dim
                                              that each axis of the grid cuts
    StateTensor      training/tensors.py      a tensor of the model and its form in a training
                                              checkpoint

After a save was killed, the new checkpoint is either complete or does not count:

    saved by                          the last step             after a kill before this step
    save_checkpoint, Accelerate and   storage/manifest.py       the folder has no manifest, and
    Trainer                           writes the manifest       loads skip it
    save_pretrained                   storage/switch.py         the folder still has the old files,
                                      renames a link            and hidden new ones
    convert, merge-adapter            storage/atomic.py         a hidden folder next to the target
                                      renames the folder
    export-adapter                    lora/export.py renames    the same
                                      the folder
"""
