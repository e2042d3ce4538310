"""Services of the machine for all backends: files of compiled code, threads, forks, and the CUDA driver."""
