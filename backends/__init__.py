"""One small module per backend. `contract` has their typed protocol, `registry` finds them by name."""

from .system import forks as forks  # Registers the locks that a fork acquires.
from .system import sources as sources  # Remembers the files of kernels as they are now.
from .system import threads as threads  # Registers with threadpoolctl.
