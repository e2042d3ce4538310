"""Slow, exact reference of the stream, which shares no code with the package."""
