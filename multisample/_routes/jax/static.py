"""`Static`, the part of a call that a program is compiled for, and `CUSTOM_CALLS`, a table of how operations differ."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from multisample.backends.element_types import MATRIX_TYPES
from multisample.backends.launch import OPERANDS, Operation

AXES: dict[str, tuple[str, ...]] = {
    "mu": ("i",), "sigma": ("i",), "weights": ("j",), "matrix": ("i", "j"), "first": ("i",), "second": ("i",),
    "seed": ("k",), "offsets": ("l",), "begins": ("t", "k"),
    "factors": ("t",),
}  # fmt: skip
"""The axes of operands and results with layout "dn": i counts dimensions, j samples, k and l words of 32 bits.

Model parameters have axes of their own; t counts parameters, and m coefficients. Operands and results of a primitive
also have a batch axis b in front, of length 1 where all elements share it. Those of perturb have that axis only in a
population, and only where elements differ, since XLA would copy a parameter to reshape it.
"""


class CustomCall(NamedTuple):
    """The custom call of an operation. Its operands are `Static.reads`, the seed, and the offsets unless all are 0."""

    reads: tuple[str, ...]
    """The fields of `Launch` that the call reads. Perturb reads and writes the parameters besides."""
    transposed: Operation | None
    """The operation that computes the transpose; None if there is none."""
    is_split: bool
    """Whether one call runs a batch, and each device of a mesh draws a window.

    If not, operands and results of the call have no axis for a batch.
    """
    has_scratch: bool
    """Whether the last result on CUDA is scratch memory."""


CUSTOM_CALLS = {
    Operation.sample: CustomCall(("mu", "sigma"), Operation.gradient, True, False),
    Operation.gradient: CustomCall(("matrix",), Operation.sample, True, True),
    Operation.moments: CustomCall(("mu", "sigma", "weights"), None, False, True),
    Operation.perturb: CustomCall(("weights",), None, True, False),
}


class Parameter(NamedTuple):
    """A model parameter, or a device's block of it."""

    id: int
    shape: tuple[int, ...]
    steps: tuple[int, ...]
    """How far neighbours along each axis are apart in the parameter."""


class Static(NamedTuple):
    """All of a call that a program is compiled for.

    A custom call has the fields up to `parameters` as a string. Saved programs have such strings, so a new field goes
    behind `parameters` and has a default.
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
    has_offsets: bool = False
    """Whether an operand has offset, first row and first column; otherwise all are 0. Set for custom calls only."""
    mu_batched: bool = False
    sigma_batched: bool = False
    seed_batched: bool = False
    offsets_batched: bool = False
    """These four: whether each element of the batch has its own operand. Set for custom calls only."""
    parameters: tuple[Parameter, ...] = ()
    """The parameters that perturb adds noise to. Their type is `dtype`."""
    has_factors: bool = False
    """Whether perturb has the operand `factors`, with a factor for each parameter."""
    population: bool = False
    """Whether results of perturb have the axis of a population in front."""
    weights_batched: bool = False
    parameters_batched: bool = False
    """These two: whether weights, or all parameters, have that axis too."""
    operation: Operation = Operation.sample
    d: int = 0
    n: int = 0
    order: int = 0
    """How many moments there are."""
    seeds: int | None = None
    """The number of seeds of a vector; None for one seed."""
    size: int = 0
    """The length of a population."""
    in_place: bool = False
    """Whether results of perturb alias the buffers of the parameters. XLA first copies a buffer that it reads later."""

    @property
    def call(self) -> CustomCall:
        return CUSTOM_CALLS[self.operation]

    @property
    def reads(self) -> tuple[str, ...]:
        """The operands before the seed: fields of `Launch`, and for perturb ``p0`` and on, and factors."""
        factors = ("factors",) if self.has_factors else ()
        return (*self._of_parameters(), *self.call.reads, *factors)

    @property
    def writes(self) -> tuple[str, ...]:
        """The results, in the same way."""
        return self._of_parameters() or OPERANDS[self.operation].writes[: self.order or None]

    def _of_parameters(self) -> tuple[str, ...]:
        return tuple(f"p{k}" for k in range(len(self.parameters)))

    def names(self, count: int) -> tuple[str, ...]:
        return (*self.reads, "seed", "offsets", "begins")[:count]

    def axes(self, name: str) -> tuple[str, ...]:
        """The axes of an operand or a result: see `AXES`."""
        if name not in AXES:
            return tuple(f"{name}_{axis}" for axis in range(len(self.shape(name))))
        if name == "weights" and self.operation == Operation.perturb:
            return ("m",)
        return AXES[name][::-1] if self.layout == "nd" else AXES[name]

    @property
    def front(self) -> tuple[str, ...]:
        """The axis of the batch, if there is one."""
        return () if self.operation == Operation.perturb else ("b",)

    def all_axes(self, names: Sequence[str]) -> list[tuple[str, ...]]:
        """The axes of operands, or of results of other operations than perturb, with the batch in front."""
        if self.operation == Operation.perturb:
            own = {"weights": self.weights_batched, "seed": self.seed_batched, "offsets": self.offsets_batched}
            are_batched = [own.get(name, self.parameters_batched and name not in AXES) for name in names]
            return [("b",) * batched + self.axes(name) for batched, name in zip(are_batched, names, strict=True)]
        return [self.front + self.axes(name) for name in names]

    def result_axes(self) -> list[tuple[str, ...]]:
        if self.operation == Operation.perturb:
            return [("b",) * self.population + self.axes(name) for name in self.writes]
        return self.all_axes(self.writes)

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

    def of_operands(self, *operands: Any) -> Static:
        """The same static part, with the flags of a custom call with these operands."""
        names = self.names(len(operands))
        is_batched = bool(self.front) and self.call.is_split
        own = [name for name, x in zip(names, operands, strict=True) if is_batched and x.shape[0] != 1]
        flags: dict[str, Any] = {f"{name}_batched": True for name in own if name != "matrix"}
        return self._replace(has_offsets="offsets" in names, **flags)

    def encoded(self) -> str:
        """The string from which `decoded` makes the fields that `_ENCODED` names."""
        names = _ENCODED if self.parameters else _ENCODED[: _ENCODED.index("parameters")]
        parameters = ";".join(":".join((str(x.id), *map(_joined, x[1:]))) for x in self.parameters)
        fields = [parameters if name == "parameters" else getattr(self, name) for name in names]
        return ",".join(x if isinstance(x, str) else str(int(x)) for x in fields)


_ENCODED = Static._fields[: Static._fields.index("operation")]


def _joined(numbers: tuple[int, ...]) -> str:
    return "x".join(map(str, numbers))


def _parameter(text: str) -> Parameter:
    number, *lengths = text.split(":")
    shape, steps = (tuple(map(int, filter(None, x.split("x")))) for x in lengths)
    return Parameter(int(number), shape, steps)


@functools.lru_cache(1024)
def decoded(string: bytes, operation: Operation) -> Static:
    """The static part of a custom call with this string, without lengths."""
    words = string.decode().split(",")
    # The name of a backend may have commas. No word behind the type is the name of a type.
    first = max(k for k, word in enumerate(words) if word in MATRIX_TYPES)
    values = [",".join(words[:first]), *words[first:]]
    fields: dict[str, Any] = dict(zip(_ENCODED, values, strict=False))
    parameters = tuple(map(_parameter, filter(None, fields.pop("parameters", "").split(";"))))
    flags = {name: fields[name] == "1" for name in fields.keys() - {"backend", "dtype", "layout"}}
    return Static(**fields | flags, parameters=parameters, operation=operation)
