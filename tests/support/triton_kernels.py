"""Triton kernels for the tests of `multisample.triton`. Importing this module imports Triton."""

import triton
import triton.language as tl

import multisample


@triton.jit
def points(seed, offset, i, j, z, block: tl.constexpr):
    """Fill z[k] with the normal at the k-th place."""
    k = tl.program_id(0) * block + tl.arange(0, block)
    found = multisample.triton.normal(tl.load(seed + k), tl.load(offset + k), tl.load(i + k), tl.load(j + k))
    tl.store(z + k, found)


@triton.jit
def shifted_row(seed, offset, i, shift, z, block: tl.constexpr):
    """Fill z with a row by `normal`."""
    j = tl.program_id(0) * block + tl.arange(0, block)
    tl.store(z + j, multisample.triton.normal(seed, offset, i, j) + shift)


@triton.jit
def shifted_groups(seed, offset, i, shift, z, block: tl.constexpr):
    """Fill z with a row by `normals4`."""
    g = tl.program_id(0) * block + tl.arange(0, block)
    z0, z1, z2, z3 = multisample.triton.normals4(seed, offset, i, g)
    tl.store(z + 4 * g, z0 + shift)
    tl.store(z + 4 * g + 1, z1 + shift)
    tl.store(z + 4 * g + 2, z2 + shift)
    tl.store(z + 4 * g + 3, z3 + shift)


@triton.jit
def literals(z, block: tl.constexpr):
    """Fill z with column 6, from a block of two dimensions and numbers that are known when compiling."""
    i = tl.arange(0, block)[:, None]
    j = tl.arange(0, 1)[None, :] + 6
    tl.store(z + i + (j - 6), multisample.triton.normal(2**63 + 1, 3, i, j))


@triton.jit
def elements(seed, offset, row, column, columns, z, block: tl.constexpr, shift: tl.constexpr = 0.0):
    """Fill a matrix z by `normal`; a program has a block of a row."""
    r = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * block + tl.arange(0, block)
    found = multisample.triton.normal(seed, offset, row + r, column + c)
    tl.store(z + r * columns + c, found + shift if shift != 0 else found, c < columns)


@triton.jit
def groups(seed, offset, row, column, columns, z, block: tl.constexpr, shift: tl.constexpr = 0.0):
    """Fill a matrix z, whose rows are whole groups of columns, by `normals4`."""
    r = tl.program_id(0).to(tl.int64)
    g = tl.program_id(1) * block + tl.arange(0, block)
    z0, z1, z2, z3 = multisample.triton.normals4(seed, offset, row + r, column // 4 + g)
    at, inside = z + r * columns + 4 * g, 4 * g < columns
    tl.store(at, z0 + shift if shift != 0 else z0, inside)
    tl.store(at + 1, z1 + shift if shift != 0 else z1, inside)
    tl.store(at + 2, z2 + shift if shift != 0 else z2, inside)
    tl.store(at + 3, z3 + shift if shift != 0 else z3, inside)
