"""Launches in host memory by the C functions of `calls`."""

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from multisample.backends.contract import HostArray, Launcher
from multisample.backends.element_types import ElementType
from multisample.backends.launch import INPUTS, Launch, Operation, computing_name, matrix_of_batch, pack, packer
from multisample.backends.memory.host import address_of, inputs_at
from multisample.backends.system.threads import thread_count

from .calls import function_address
from .floating_point import with_default_floats
from .kernel import value_kernel
from .thread_windows import THREAD_WORK

_NO_MEMORY = "backend: no memory for the sums of weighted moments"


def packed_function(launch: Launch) -> Callable[[bytes], int]:
    """``run(packed_launch)``: the C function for launches like `launch`, whose inputs have the computing type."""
    run: Callable[[bytes], int] = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_char_p)(function_address(launch))
    return run


def _is_small(launch: Launch) -> bool:
    """Whether one thread is enough."""
    return max(launch.batch, 1) * launch.rows * launch.columns <= THREAD_WORK


def _threads(launch: Launch, most: int) -> int:
    """The number of threads of a call, at most `most`."""
    return min(most, launch.threads or most)


def packed_launcher(launch: Launch, thread_count: Callable[[], int] = thread_count) -> Launcher:
    """The launcher that packs a launch for the C function of its operation, with at most ``thread_count()`` threads."""
    function, kind = packed_function(launch), ElementType[computing_name(launch)]
    has_own_rows = launch.origin_step != 0

    @functools.cache
    def packer_of(*strides: tuple[int, ...] | None) -> tuple[Callable[..., bytes], bytes]:
        fields: dict[str, Any] = {}
        for name, of_input in zip(INPUTS, strides, strict=True):
            if of_input is not None:
                step, stride = (0, *of_input)[-2:]
                fields |= {f"{name}_type": kind, f"{name}_step": step, f"{name}_stride": stride}
        return packer(launch._replace(**fields))

    def run(
        limit: int | None, mu: HostArray | None, sigma: HostArray | None, weights: HostArray | None,
        matrix: HostArray | bytes | None, first: HostArray | None, second: HostArray | None, seed: int, offset: int,
        seed_at: int, offset_at: int, first_row: int, first_column: int, stream: int, scratch: int,
    ) -> None:  # fmt: skip
        pack_head, tail = packer_of(*[None if x is None else x.strides for x in (mu, sigma, weights)])
        results, operands = map(address_of, (weights, first, second)), map(address_of, (mu, sigma, matrix))
        row_at, threads = first_row if has_own_rows else 0, 1 if limit is None else limit
        head = pack_head(
            *results, seed_at, row_at, row_at, 0, 0, threads, offset_at, *operands, seed, offset, first_row,
            first_column,
        )  # fmt: skip
        if function(head + tail):
            raise MemoryError(_NO_MEMORY)

    geometry = None if _is_small(launch) else lambda matrix, first_column: _threads(launch, thread_count())
    if launch.operation == Operation.perturb:
        return Launcher(run, geometry=geometry, takes_arrays=True)
    is_valid_vector = value_kernel(computing_name(launch), launch.operation == Operation.moments)

    def is_valid_batch(*vectors: HostArray | None) -> Any:
        return is_valid_vector(*[x if x is None or x.ndim == 1 else x.reshape(-1) for x in vectors])

    is_valid = is_valid_batch if launch.batch else is_valid_vector
    return Launcher(run, is_valid, geometry, takes_arrays=True)


@with_default_floats
def run_launch(launch: Launch, thread_count: Callable[[], int] = thread_count) -> None:
    """`Backend.launch`."""
    function, kind = packed_function(launch), ElementType[computing_name(launch)]
    of_batch = [inputs_at(matrix_of_batch(launch, b)) for b in range(max(launch.batch, 1))]
    copies = {}  # Kept alive until the call returns.
    for name in of_batch[0]:
        own = of_batch if getattr(launch, f"{name}_step") else of_batch[:1]
        copies[name] = x = np.stack([inputs[name] for inputs in own])
        step = x.strides[0] if len(own) > 1 else 0
        fields = {name: address_of(x), f"{name}_type": kind, f"{name}_step": step, f"{name}_stride": x.strides[1]}
        launch = launch._replace(**fields)
    threads = 1 if _is_small(launch) else _threads(launch, thread_count())
    if function(pack(launch._replace(threads=threads))):
        raise MemoryError(_NO_MEMORY)
