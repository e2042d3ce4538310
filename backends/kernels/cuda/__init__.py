"""The plain kernels for CUDA in Python, and the launch geometry of all CUDA kernels: twins of files in csrc/cuda."""
