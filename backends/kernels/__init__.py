"""Kernels in Python, which Numba compiles: all for the CPU, and the plain ones for CUDA. The others are in csrc."""
