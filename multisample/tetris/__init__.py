"""The first user of the sampler: a Tetris player whose weights the cross-entropy method finds."""
