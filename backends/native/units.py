"""The units of torch_ext on CUDA: the kernels of one operation, element type and set of options, in two lines.

A program compiles only the units that its calls need. ``csrc/torch/unit.h`` has the table of the loaded units.
"""

import functools
import itertools
from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple, TypeAlias

from ..element_types import MATRIX_TYPES, ElementType
from ..launch import HOST, SIZES, Launch, Operation, computing_name, runs_down

LibraryKind: TypeAlias = Literal["cpu", "cuda"]

_OPTIONS = ("shared_noise", "antithetic", "fast_math")


class Unit(NamedTuple):
    """The source of one unit."""

    name: str
    header: str
    function: str
    """The function of the unit in C++."""
    kinds: tuple[int, ...]
    """The kinds of calls that the function serves: see `kind_of`."""
    seconds: float
    """Usual time of one processor to compile it."""

    @property
    def text(self) -> str:
        kinds = ", ".join(map(str, self.kinds))
        return (
            f'#include "{self.header}"\n#include "torch/unit.h"\n'
            f"static const multisample::Unit unit(multisample::{self.function}, {{{kinds}}});\n"
        )


class _Family(NamedTuple):
    """The units of one operation."""

    header: str
    function: str
    """A function template in C++. Its parameters are the element type and `options`."""
    options: tuple[str, ...]
    seconds: float
    in_computing_type: bool = False
    """Whether the element type is the computing type of the launch."""


_FAMILIES: dict[Operation, _Family] = {
    Operation.sample: _Family("cuda/sample_launch.cuh", "launch_sample", _OPTIONS, 5.3),
    Operation.gradient: _Family("cuda/gradient_launch.cuh", "launch_gradient", _OPTIONS[1:], 2.2),
    Operation.moments: _Family("cuda/moments_launch.cuh", "launch_moments", _OPTIONS[1:], 2.2, True),
    Operation.perturb: _Family("cuda/perturb_launch.cuh", "launch_perturb", _OPTIONS[2:], 3.2),
}


def kind_of(launch: Launch) -> int:
    """The number of a launch's kind, which ``kind_of`` in ``csrc/torch/unit.h`` computes too."""
    if launch.operation == Operation.gradient and launch.results == 1:  # `is_product` in C++.
        name = computing_name(launch)
        launch = launch._replace(operation=Operation.sample, type=ElementType[name], row_stride=SIZES[name])
    is_on_host = launch.operation == Operation.sample and launch.device == HOST
    last = runs_down(launch) if is_on_host else launch.fast_math
    return _kind(launch.operation, launch.type, (launch.shared_noise, launch.antithetic, last))


def _kind(operation: int, element_type: int, options: Iterable[int]) -> int:
    number = operation * len(MATRIX_TYPES) + element_type - ElementType.float16
    for option in options:
        number = 2 * number + bool(option)
    return number


@functools.cache
def all_units() -> tuple[Unit, ...]:
    """The units of all calls."""
    return tuple(itertools.chain.from_iterable(itertools.starmap(_units, _FAMILIES.items())))


def unit_of(kind: int) -> Unit:
    """The unit that serves calls of a kind."""
    return next(unit for unit in all_units() if kind in unit.kinds)


def _units(operation: Operation, family: _Family) -> Iterator[Unit]:
    kinds: dict[tuple[str, tuple[str, ...]], list[int]] = {}
    for name, values in itertools.product(MATRIX_TYPES, itertools.product((False, True), repeat=len(_OPTIONS))):
        used = [option for option, value in zip(_OPTIONS, values, strict=True) if value and option in family.options]
        if name == "float64" and "fast_math" in used:  # It has no effect.
            used.remove("fast_math")
        element = MATRIX_TYPES[name].computing if family.in_computing_type else name
        kinds.setdefault((element, tuple(used)), []).append(_kind(operation, ElementType[name], values))
    for (element, named), numbers in kinds.items():
        parameters = [MATRIX_TYPES[element].cpp, *(str(option in named).lower() for option in family.options)]
        yield Unit(
            "_".join((operation.name, element, *named)), family.header, f"{family.function}<{', '.join(parameters)}>",
            tuple(numbers), family.seconds,
        )  # fmt: skip
