"""Plans of `weighted_moments`: the part of a call that does not depend on values, addresses, seed or offset."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from multisample.backends import generic
from multisample.backends.contract import Backend
from multisample.backends.element_types import MATRIX_TYPES
from multisample.backends.launch import HOST, ElementType, Launch, Operation

from ._checks.operands import Inputs, check_alignment, inspect_inputs
from ._checks.values import check_values, number_vector
from ._libraries import Library, is_number
from ._plan import COLUMNS, ROWS, PlanCache, check_rows, checked_window, input_fields
from ._randomness.generator import WORD_64
from ._randomness.source import checked_key
from ._reading import Reader
from ._streams import order_after, order_before

__all__ = ["MOMENT_PLANS", "MomentsCall", "MomentsPlan", "RecordMoments", "make_moments_plan"]


class MomentsCall(NamedTuple):
    """The arguments of a call of `weighted_moments`."""

    weights: Any
    mu: Any
    sigma: Any
    order: Any
    seed: Any
    noise: str
    dtype: Any
    dim_offset: Any
    sample_offset: Any
    antithetic: bool
    fast_math: bool
    backend: str


RecordMoments = Callable[["MomentsPlan", Any, Any, Any, Any, int, int], tuple[Any, ...]]


class MomentsPlan:
    """A call resolved except for values, addresses, seed and window; immutable.

    Attributes
    ----------
    library : Library
        Library of the arrays and of the results.
    dtype : str
        Type of the results.
    order : int
        The number of results.
    operands : tuple of Operand or None
        `mu` and `sigma`; None for a number.
    record : callable or None
        Runs the plan and records gradients; None if there are none to record.
    """

    __slots__ = (
        "_address", "_allocate", "_allocate_scratch", "_device", "_geometry", "_is_valid", "_last_column", "_last_row",
        "_launch", "_mu", "_read_out", "_scratch_size", "_sigma", "_stream", "_takes_arrays", "_unit", "_weights",
        "dtype", "library", "operands", "order", "record", "shape",
    )  # fmt: skip

    def __init__(
        self, call: MomentsCall, backend: Backend, library: Library, inputs: Inputs, weights: Inputs,
        record: RecordMoments | None,
    ) -> None:  # fmt: skip
        d, n = inputs.d, weights.d
        device = self._device = inputs.device
        self.library, self.dtype, self.order = library, inputs.dtype, call.order
        self.record, self.shape = record, (d, n)
        self.operands = inputs.operands.get("mu"), inputs.operands.get("sigma")
        self._last_row, self._last_column = ROWS - d, COLUMNS - n
        launcher = generic.launcher(backend, _template(call, inputs, weights, unit=record is not None))
        self._launch, self._is_valid, self._takes_arrays = launcher.run, launcher.is_valid, launcher.takes_arrays
        self._geometry = launcher.geometry
        on_device = device.kind == "cuda"
        self._scratch_size = launcher.scratch_size if on_device else None
        # Recorded sums have the computing type.
        real = MATRIX_TYPES[inputs.dtype].computing
        self._allocate = library.allocator((d,), inputs.dtype if record is None else real, device)
        self._unit: tuple[Any, Any] = 0.0, 1.0
        if self._takes_arrays:
            self._unit = number_vector(0.0, d, np.dtype(real)), number_vector(1.0, d, np.dtype(real))
        self._allocate_scratch: dict[int, Callable[[Any], Any]] = {0: _nothing}
        self._weights = Reader("weights", call.weights, weights, library, self._takes_arrays)
        self._mu, self._sigma = (
            Reader(name, x, inputs, library, self._takes_arrays) for name, x in (("mu", call.mu), ("sigma", call.sigma))
        )
        self._address: Callable[[Any], int] = library.address
        self._read_out: Callable[[Any], Any] = library.host_array if self._takes_arrays else library.address
        self._stream = library.stream(device) if on_device else None

    def run(self, weights: Any, mu: Any, sigma: Any, seed: Any, dim_offset: int, sample_offset: int) -> tuple[Any, ...]:
        """The moments, with gradients if the plan has `record`."""
        if self.record is not None:
            return self.record(self, weights, mu, sigma, seed, dim_offset, sample_offset)
        return self.sum(weights, mu, sigma, seed, dim_offset, sample_offset)

    def sum(self, weights: Any, mu: Any, sigma: Any, seed: Any, dim_offset: int, sample_offset: int) -> tuple[Any, ...]:
        """The moments without gradients; of a plan with `record`, those of mean 0 and standard deviation 1."""
        if not (0 <= dim_offset <= self._last_row and 0 <= sample_offset <= self._last_column):
            d, n = self.shape
            checked_window(n, dim_offset, sample_offset)
            check_rows(dim_offset, d)
        offset = 0
        if not (type(seed) is int and 0 <= seed < WORD_64):
            seed, offset = checked_key(seed)
        # `_kept` keeps arrays alive until the launch.
        _kept_weights, weights_at = self._weights.read(weights)
        if self.record is None:
            (_kept_mu, mu_at), (_kept_sigma, sigma_at) = self._mu.read(mu), self._sigma.read(sigma)
        else:
            mu_at, sigma_at = self._unit
        stream = 0
        other_streams: set[int] = set()
        if self._stream is None:
            # Compiled checks read at least one row.
            is_valid = self.shape[0] > 0 and (self._is_valid is None or self._is_valid(mu_at, sigma_at, weights_at))
            if not is_valid:
                check_values(self.library, {"weights": weights, "mu": mu, "sigma": sigma}, self.dtype)
        else:
            stream = self._stream(weights)
            if self.library.names_streams:
                arrays = [x for x in (weights, mu, sigma) if not is_number(x)]
                other_streams = order_before(map(self.library.named_stream, arrays), self._device, stream)
            self._weights.check(weights_at)
            if self.record is None:
                self._mu.check(mu_at)
                self._sigma.check(sigma_at)
        results = tuple(self._allocate(weights) for _ in range(self.order))
        if self.shape[0] > 0:
            size = 0 if self._scratch_size is None else self._scratch_size(sample_offset)
            scratch = self._scratch(size, weights)
            first, *others = map(self._read_out, results)
            second = others[0] if others else None if self._takes_arrays else 0
            self._launch(
                None if self._geometry is None else self._geometry(0, sample_offset), mu_at, sigma_at, weights_at, 0,
                first, second, seed, offset, 0, dim_offset, sample_offset, stream,
                0 if scratch is None else self._address(scratch),
            )  # fmt: skip
        if other_streams:
            order_after(other_streams, self._device, stream)
        return results

    def _scratch(self, size: int, like: Any) -> Any:
        """Device memory for `size` float64 numbers. The allocator reuses it only for later work on the same stream."""
        allocate = self._allocate_scratch.get(size)
        if allocate is None:  # At most two sizes, by the place of the first column in its group.
            allocate = self._allocate_scratch[size] = self.library.allocator((size,), "float64", self._device)
        return allocate(like)


def _nothing(like: Any) -> None:
    return None


def _template(call: MomentsCall, inputs: Inputs, weights: Inputs, unit: bool) -> Launch:
    """The launch, without addresses, seed, offset and window. With `unit`, mean and deviation are numbers."""
    operands = {} if unit else inputs.operands
    dtype = MATRIX_TYPES[inputs.dtype].computing if unit else inputs.dtype
    return Launch(
        **input_fields("mu", operands.get("mu")), **input_fields("sigma", operands.get("sigma")),
        **input_fields("weights", weights.operands["weights"]), rows=max(inputs.d, 1), columns=weights.d,
        type=ElementType[dtype], operation=Operation.moments, results=call.order,
        common_noise=call.noise == "shared", antithetic=bool(call.antithetic), fast_math=bool(call.fast_math),
        device=HOST if inputs.device.kind == "cpu" else inputs.device.ordinal,
    )  # fmt: skip


def make_moments_plan(
    call: MomentsCall, backend: Backend, library: Library, record: RecordMoments | None = None
) -> MomentsPlan:
    """Make the plan of a call, with all checks of its arrays except values and addresses.

    Raises
    ------
    TypeError, ValueError
        If the arrays do not match each other, a kernel cannot read them, or the backend has no weighted moments.
    BackendUnavailableError
        If the kernel cannot be compiled.
    """
    generic.check_operation(backend, Operation.moments)
    inputs = inspect_inputs(library, call.mu, call.sigma, call.dtype)
    operand = library.describe("weights", call.weights)
    check_alignment("weights", operand, 0)
    if len(operand.shape) != 1 or operand.shape[0] == 0:
        raise ValueError(f"weights: expected shape (n,), n being at least 1, got {operand.shape}")
    if operand.device != inputs.device:
        raise ValueError(f"weights: expected them on the device of mu, {inputs.device}, got {operand.device}")
    (n,) = operand.shape
    checked_window(n, call.dim_offset, call.sample_offset)
    check_rows(call.dim_offset, inputs.d)
    weights = Inputs({"weights": operand}, n, inputs.dtype, inputs.device)
    return MomentsPlan(call, backend, library, inputs, weights, record)


MOMENT_PLANS: PlanCache[MomentsPlan] = PlanCache(1024)
