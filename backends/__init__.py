"""One small module per backend, behind one typed contract (`contract`), found by name (`registry`)."""
