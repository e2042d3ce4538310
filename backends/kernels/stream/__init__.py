"""Words, normals and rounding of STREAM.md, the same on a CPU and a GPU; twins of the headers in csrc/stream."""
