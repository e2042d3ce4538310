"""What the machine offers to all backends: files of compiled code, threads, forks, and the CUDA driver."""
