"""Compiled libraries of torch_ext: how they are built, kept on disk, checked before loading, and put into wheels."""
