"""CUDA C++ and C++ sources, compiled on the user's machine, or into a wheel by `backends.native.wheels`."""
