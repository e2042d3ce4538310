"""One small module per backend. `contract` has their typed protocol, `registry` finds them by name."""

from .system import fork_safety as fork_safety  # Registers the locks that a fork acquires.
