"""The kernel for the CPU: draws one window of the sample matrix on one thread."""
