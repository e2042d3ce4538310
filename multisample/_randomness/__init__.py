"""Sources of a call's seed and offset: keys, generators, PyTorch's generators, counters in device memory."""
