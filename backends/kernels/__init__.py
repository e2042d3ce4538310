"""The kernel in Python, which Numba compiles for the CPU and for CUDA; its twin in C++ is in csrc."""
