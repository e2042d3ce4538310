"""Functions that run in forked children of a test."""

import json
import os
import select
import signal
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import pytest

# Seconds after which a process counts as hanging: many times the duration on a busy machine.
DEADLINE = 300


def forked(test: Any) -> Any:
    """Decorator of a test that forks."""
    # Python 3.12 and later warn of forks with threads, and so does JAX if another test has imported it.
    warned = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning", "ignore:.*fork.*:RuntimeWarning")
    return pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")(warned(test))


def fork(work: Callable[[], Any]) -> tuple[int, int]:
    """Run ``work()`` in a forked child; returns the child's id, and a file descriptor for its answer."""
    reading, writing = os.pipe()
    child = os.fork()
    if child:
        os.close(writing)
        return child, reading
    # In the child no exception may escape, since pytest would handle it.
    try:
        answer = json.dumps({"answer": work()})
    except BaseException:
        answer = json.dumps({"error": traceback.format_exc()})
    try:
        os.write(writing, answer.encode())
    finally:
        os._exit(0)


def answers(children: Sequence[tuple[int, int]]) -> list[Any]:
    """The answers of the children; a child without an answer counts as hanging after the timeout."""
    collected = []
    for child, reading in children:
        text = b""
        while select.select([reading], [], [], DEADLINE)[0]:
            part = os.read(reading, 1 << 16)
            text += part
            if not part:
                break
        else:
            os.kill(child, signal.SIGKILL)
        os.close(reading)
        os.waitpid(child, 0)
        collected.append(json.loads(text) if text else {"error": "hangs, or died"})
    assert not [answer["error"] for answer in collected if "error" in answer]
    return [answer["answer"] for answer in collected]


def in_forks(*works: Callable[[], Any]) -> list[Any]:
    return answers([fork(work) for work in works])
