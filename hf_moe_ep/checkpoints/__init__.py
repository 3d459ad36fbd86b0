"""Checkpoints: what is written to disk and read back, at any layout of ranks.

`storage/` holds bytes and knows no model; `hub/` converts between a model and the hub's layout;
`training/` holds the state from which a run resumes. Never: how parameters are sharded
(`sharding/`).

A slice of a tensor has three forms, and no others:

    Box         storage/boxes.py             index ranges, [start, stop) per dim: a rank's shard, a
                                             slab to write, the part of a file to read
    FileTensor  storage/safetensors_file.py  a tensor in a file: dtype, shape, first byte. FP8 and
                                             MXFP4 weights are FileTensors that decode while they
                                             are read (ScaledTensor, PackedTensor)
    Piece       hub/pieces.py                how the two are related: which box of a checkpoint
                                             tensor holds which elements of a parameter. A piece
                                             that is cut to a rank's box is a smaller piece

Their collections have names, but no geometry of their own:

    InFiles      hub/in_files.py      the pieces of a parameter, and the FileTensors that hold them
    TensorGroup  hub/write.py         checkpoint tensors that are written together
    Spread       storage/spread.py    the boxes of all ranks: a grid of ranks and the dims it cuts
    StateTensor  training/tensors.py  a tensor of the model and its form in a training checkpoint
"""
