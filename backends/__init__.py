"""One small module per backend, behind one typed contract (`contract`), found by name (`registry`)."""

from .system import fork_safety as fork_safety  # Registers what a fork has to wait for.
