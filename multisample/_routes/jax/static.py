"""`Static`, the part of a call that a program is compiled for.

The operands of a custom call are `Static.reads`, the seed, and the offsets unless all are 0.
"""

import functools
import json
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from multisample.backends.element_types import MATRIX_TYPES
from multisample.backends.launch import OPERANDS, Operation

AXES: dict[str, tuple[str, ...]] = {
    "mu": ("i",), "sigma": ("i",), "weights": ("j",), "matrix": ("i", "j"), "first": ("i",), "second": ("i",),
    "seed": ("k",), "offsets": ("l",), "begins": ("t", "k"), "factors": ("t",),
}  # fmt: skip
"""The axes of operands and results with layout "dn": i counts dimensions, j samples, k and l words of 32 bits.

Model parameters have axes of their own; t counts parameters, and m coefficients, which may have a key each. Operands
and results of a primitive also have a batch axis b in front, of length 1 where all elements share it. In a custom call,
operands have that axis only where elements differ, and results as `Static.batch` says: XLA would copy a parameter to
reshape it.
"""


class Parameter(NamedTuple):
    """A model parameter, or a device's block of it."""

    id: int
    shape: tuple[int, ...]
    steps: tuple[int, ...]
    """How far neighbours along each axis are apart in the parameter."""


class Static(NamedTuple):
    """All of a call that a program is compiled for.

    A custom call has the fields up to `has_factors` as a string, also in programs that were saved: a new field needs a
    default, and a renamed field makes users export their programs again.
    """

    backend: str
    """The caller's argument `backend`, which may be "auto"; in a custom call, the name of the chosen backend."""
    dtype: str
    layout: str = "dn"
    shared_noise: bool = False
    antithetic: bool = False
    fast_math: bool = False
    aligned: bool = False
    """Whether the first column is known to be a multiple of 8, which allows aligned stores on CUDA."""
    batched: tuple[str, ...] = ()
    """The operands with the axis of the batch. Set for custom calls only."""
    parameters: tuple[Parameter, ...] = ()
    """The parameters that perturb adds noise to. In a custom call, all are of type `dtype`."""
    has_factors: bool = False
    """Whether perturb has the operand `factors`, with a factor for each parameter."""
    operation: Operation = Operation.sample
    d: int = 0
    n: int = 0
    order: int = 0
    """How many moments there are."""
    seeds: int | None = None
    """The length of the result's leading axis: how many seeds, or members of perturb, it has; None without the axis."""
    dims: tuple[int, ...] = ()
    """The common shape of `mu` and `sigma`. The product of its lengths is `d`."""
    result: tuple[int, ...] = ()
    """The shape of the sample."""
    size: int = 1
    """The length of the batch. Set for custom calls only."""
    in_place: bool = False
    """Whether results of perturb alias the buffers of the parameters. XLA first copies a buffer that it reads later."""

    @property
    def has_scratch(self) -> bool:
        """Whether the last result on CUDA is scratch memory."""
        return self.operation in (Operation.gradient, Operation.moments)

    @property
    def reads(self) -> tuple[str, ...]:
        """The operands before the seed: fields of `Launch`, and for perturb ``p0`` and on, and factors."""
        factors = ("factors",) if self.has_factors else ()
        return (*self._of_parameters(), *OPERANDS[self.operation].reads, *factors)

    @property
    def writes(self) -> tuple[str, ...]:
        """The results, in the same way."""
        return self._of_parameters() or OPERANDS[self.operation].writes[: self.order or None]

    @property
    def has_row_keys(self) -> bool:
        """Whether perturb has a key for each coefficient."""
        return self.shared_noise and self.operation == Operation.perturb

    def _of_parameters(self) -> tuple[str, ...]:
        return tuple(f"p{k}" for k in range(len(self.parameters)))

    def names(self, count: int) -> tuple[str, ...]:
        return (*self.reads, "seed", "offsets", "begins")[:count]

    def axes(self, name: str) -> tuple[str, ...]:
        """The axes of an operand or a result: see `AXES`."""
        if name not in AXES:
            return tuple(f"{name}_{axis}" for axis in range(len(self.shape(name))))
        if self.operation == Operation.perturb and name == "weights":
            return ("m",)
        if self.has_row_keys and name in ("seed", "offsets"):
            return ("m", *AXES[name])
        return AXES[name][::-1] if self.layout == "nd" else AXES[name]

    @property
    def batch(self) -> tuple[int, ...]:
        """The axis that results of the custom call have in front: its length, or ()."""
        return (self.size,) if self.operation == Operation.sample or self.batched else ()

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in AXES:
            return self.parameters[int(name[1:])].shape
        return tuple(self.d if axis == "i" else self.n for axis in self.axes(name))

    def type_of(self, name: str) -> Any:
        stored = ("first", "second") if self.operation == Operation.moments else ("matrix",)
        return jnp.dtype(self.dtype) if name in stored or name not in AXES else self.computing_type

    @property
    def computing_type(self) -> Any:
        return np.dtype(MATRIX_TYPES[self.dtype].computing)

    def encoded(self) -> str:
        """The string from which `decoded` makes the fields that `_ENCODED` names."""
        return json.dumps({name: getattr(self, name) for name in _ENCODED})


_ENCODED = Static._fields[: Static._fields.index("operation")]


@functools.lru_cache(1024)
def decoded(string: bytes, operation: Operation) -> Static:
    """The static part of a custom call with this string, without lengths."""
    try:
        fields = json.loads(string)
    except ValueError:
        raise ValueError("jax: another version of multisample exported this program: export it again") from None
    parameters = tuple(Parameter(number, *map(tuple, lengths)) for number, *lengths in fields.pop("parameters"))
    return Static(**fields | {"batched": tuple(fields["batched"])}, parameters=parameters, operation=operation)
