"""Whether this process is a forked child.

PyTorch's threads are those of GNU OpenMP, which keeps a pool of them for each thread that starts parallel work. A
forked child inherits the pool of the thread that forked, without the threads in the pool. Parallel work in the child
would wait for these threads forever.
"""

from __future__ import annotations

import os
from pathlib import Path

# Linux's flag PF_FORKNOEXEC.
_FORKED_WITHOUT_EXEC = 0x40


def _began_by_fork() -> bool:
    """Whether Linux started this process by a fork, and it has executed no program since."""
    try:
        # The program's name, in parentheses, may have any characters.
        fields = Path("/proc/self/stat").read_text(errors="replace").rpartition(")")[2].split()
        return bool(int(fields[6]) & _FORKED_WITHOUT_EXEC)
    except (OSError, ValueError, IndexError):
        return False


_forked = _began_by_fork()


def is_forked() -> bool:
    """Whether this process began by a fork."""
    return _forked


def _set_forked() -> None:
    global _forked
    _forked = True


os.register_at_fork(after_in_child=_set_forked)
