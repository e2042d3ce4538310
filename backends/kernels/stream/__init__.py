"""Words, normals and rounding of STREAM.md, for the CPU and the GPU: twins of the headers in csrc/stream."""
