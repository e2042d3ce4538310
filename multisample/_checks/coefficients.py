"""Checks of the coefficients of `perturb`."""

import math
import sys
from typing import Any, NamedTuple

import numpy as np

from multisample.backends.memory.host import quiet

from .._arguments import describe
from .._libraries import CPU, HOST, Operand, as_base_class, described, is_number, library_of

TRANSFORMED = (
    "parameters: expected plain arrays outside PyTorch's transformations (torch.func, torch.autograd.forward_ad, a"
    " dispatch mode, torch.export without strict=True), in which perturb cannot be"
)


class TransformedError(ValueError):
    """PyTorch transforms a tensor of the call (torch.func, forward-mode AD), so that a plan cannot read the tensor."""


WITH_GRADIENT = (
    "coefficients: require grad, but gradients flow to the parameters only, since those of the coefficients need the"
    " noise; detach them, or draw the noise with multisample.sample"
)


class Coefficients(NamedTuple):
    length: int
    on_host: Any
    """A float, or an array of float64; None if the coefficients are not in host memory."""
    on_device: Operand | None
    given: Any
    """The argument in its base class."""


def read_coefficients(given: Any, is_batch: bool = False) -> Coefficients:
    """The argument `coefficients`; TypeError or ValueError if it is neither a number nor a vector of numbers.

    `check_coefficients` checks the values. For a batch, a number may be a vector, and a vector a matrix.
    """
    if type(given) in (list, tuple) and set(map(type, given)) == {float}:  # Faster than the general way.
        return Coefficients(len(given), np.array(given, np.float64), None, given)
    given = as_base_class("coefficients", given)
    if type(given) in HOST.types and given.ndim == 1 and given.dtype.char in "fd":
        return Coefficients(len(given), np.ascontiguousarray(given, np.float64), None, given)
    if is_number(given):
        try:
            return Coefficients(1, float(given), None, given)
        except OverflowError:
            return Coefficients(1, math.inf, None, given)
    library = library_of("coefficients", given)
    if library.foreign or (library.is_opaque(given) and not library.lacks_values(given)):
        raise TypeError(
            "coefficients: expected a number, a list, a NumPy array, or an array of the parameters' library, got"
            f" {described(given)}"
        )
    if library.name == "torch" and given.requires_grad and sys.modules["torch"].is_grad_enabled():
        raise ValueError(WITH_GRADIENT)
    if library.is_transformed((given,)):
        raise TransformedError(TRANSFORMED)
    operand = library.describe("coefficients", given)
    if len(operand.shape) > 1 + is_batch:
        raise ValueError(f"coefficients: expected a number or shape (K,), got {operand.shape}")
    count = math.prod(operand.shape)
    if operand.device != CPU or library.lacks_values(given):
        return Coefficients(count, None, operand, given)
    values = np.ascontiguousarray(np.atleast_1d(library.to_host(given)), np.float64)
    return Coefficients(count, values if operand.shape else float(values[0]), None, given)


def check_coefficients(values: Any, given: Any, limit: float = math.inf) -> None:
    """ValueError if values of coefficients on the host, a float or an array of float64, are not below `limit`."""
    if isinstance(values, float):
        are_below = abs(values) < limit
    else:
        with quiet():  # A small sum of squares proves all coefficients small, and is faster than a maximum.
            flat = values if values.ndim == 1 else values.reshape(-1)
            are_below = flat.dot(flat) < limit * limit or bool((np.abs(flat) < limit).all())
    if not are_below:
        what, of = ("", "") if not np.isfinite(values).all() else (" of the computing type", " for float32")
        raise ValueError(f"coefficients: expected finite numbers{what}, got {describe(given)}{of}")
