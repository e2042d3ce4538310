"""The block-per-dimension kernel for CUDA devices; twins of the files in csrc/cuda."""
