"""The tables of element types in C++ and in Python have the same rows, in the same order."""

import re
import typing

from multisample.backends.element_types import MATRIX_TYPES, SIZES, DTypeName, ElementType
from multisample.backends.native import csrc_files

ROWS = re.findall(
    r'(?:ROW|LAST)\((\w+), (\w+), (\d), "(\w+)", (\w+)\)', (csrc_files.folder() / "element_types.h").read_text()
)


def test_both_tables_have_equal_types() -> None:
    assert [numpy for *_, numpy, _ in ROWS] == [element.name for element in ElementType][1:]
    assert [*range(len(ROWS) + 1)] == [*ElementType]


def test_both_tables_have_equal_matrix_types() -> None:
    matrix_rows = ROWS[: len(MATRIX_TYPES)]
    assert {numpy: int(size) for _, _, size, numpy, _ in matrix_rows} == SIZES
    assert [cpp for _, cpp, *_ in matrix_rows] == [row.cpp.rpartition(":")[2] for row in MATRIX_TYPES.values()]


def test_type_checkers_accept_every_matrix_type() -> None:
    assert list(typing.get_args(DTypeName)) == list(MATRIX_TYPES)
