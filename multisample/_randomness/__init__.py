"""One call's seed and offset: keys, generators, PyTorch's generators, offsets in the memory of a device."""
