"""CUDA C++ and C++ sources, compiled on the user's machine; no Python."""
