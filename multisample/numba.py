"""The stream in kernels that Numba compiles, for ``@njit`` and for ``@cuda.jit``.

Element ``z[i, j]`` of the matrix of standard normals is a function of ``(seed, offset, i, j)``. These functions return
it with the bits that `multisample.sample` has, so that a kernel need not read noise from memory. They are the functions
that the package's own kernels consist of.

A caller's ``fastmath=True`` does not reach into them. Callers may be compiled with ``cache=True``.
"""

import numpy as np
from numba import types
from numba.core.errors import TypingError
from numba.extending import intrinsic

from multisample.backends.kernels.compilation import jit
from multisample.backends.kernels.stream.arithmetic import native_word
from multisample.backends.kernels.stream.normals import FLOAT64_KEY, normals_f32, normals_f64
from multisample.backends.kernels.stream.words import philox4x32_10, stream_key

__all__ = ["normal", "normal_f64", "normals4", "normals4_f64"]

_SHIFT = np.uint64(32)
_FINE = np.uint64(FLOAT64_KEY)


def _word(name):
    """The conversion of argument `name` to uint64. Types other than integers fail to compile."""

    def convert(typingctx, x):
        if not isinstance(x, (types.Integer, types.Boolean)):
            raise TypingError(f"{name}: expected an integer, got a value of type {x}")
        return types.uint64(x), lambda context, builder, signature, args: context.cast(
            builder, args[0], signature.args[0], types.uint64
        )

    convert.__name__ = convert.__qualname__ = name  # Numba's message has it.
    return intrinsic(convert)


_seed, _offset, _i, _j, _g = map(_word, ("seed", "offset", "i", "j", "g"))


@jit
def _words(seed, offset, i, g, fine):
    seed, offset = _seed(seed), _offset(offset)
    k0, k1 = stream_key(seed)
    return philox4x32_10(
        native_word(g), native_word(_i(i)), native_word(offset), native_word(offset >> _SHIFT),
        native_word(k0), native_word(k1 ^ fine),
    )  # fmt: skip


@jit
def _pair(w, j):
    """The words of column `j`, twice, as the four words of a group. The compiler drops the second pair of normals."""
    second = j & np.uint64(2) != 0
    a, b = (w[2] if second else w[0]), (w[3] if second else w[1])
    return a, b, a, b


@jit
def _chosen(z, j):
    return z[1] if j & np.uint64(1) != 0 else z[0]


@jit
def normal(seed, offset, i, j):
    """The float32 normal ``z[i, j]``.

    Parameters
    ----------
    seed, offset : int
        64-bit parts of the `Key` passed to `sample` as ``seed=``. In `sample`, ``seed=7`` means offset 0.
    i : int
        Row, ``dim_offset`` + dimension, less than 2**32; 0 for ``noise="shared"``. Not checked.
    j : int
        Column, ``sample_offset`` + sample, less than 2**34. Not checked.

    Returns
    -------
    float32

    Examples
    --------
    >>> import numpy as np
    >>> from numba import njit
    >>> import multisample.numba
    >>> @njit
    ... def row(i, n):
    ...     return np.array([multisample.numba.normal(7, 0, i, j) for j in range(n)])
    >>> bool((row(2, 10) == multisample.sample([0.0] * 3, 1.0, 10, seed=7)[2]).all())
    True
    """
    j = _j(j)
    w = _words(seed, offset, i, j >> np.uint64(2), np.uint64(0))
    return _chosen(normals_f32(_pair(w, j)), j)


@jit
def normals4(seed, offset, i, g):
    """The float32 normals of row `i` in columns ``4 g`` to ``4 g + 3``, for less than the price of two.

    Parameters
    ----------
    seed, offset, i : int
        As for `normal`.
    g : int
        ``j // 4``, less than 2**32. Not checked.

    Returns
    -------
    tuple of four float32

    Examples
    --------
    >>> import multisample.numba
    >>> z = multisample.numba.normals4(7, 0, 2, 1)
    >>> z == tuple(multisample.sample([0.0] * 3, 1.0, 8, seed=7)[2, 4:].tolist())
    True
    """
    return normals_f32(_words(seed, offset, i, _g(g), np.uint64(0)))


@jit
def normal_f64(seed, offset, i, j):
    """The normal ``z[i, j]`` as drawn for type float64.

    Parameters
    ----------
    seed, offset, i, j : int
        As for `normal`.

    Returns
    -------
    float64

    Examples
    --------
    >>> import multisample.numba
    >>> x = multisample.sample(0.0, [1.0], 4, seed=7, dtype="float64")
    >>> bool(multisample.numba.normal_f64(7, 0, 0, 3) == x[0, 3])
    True
    """
    j = _j(j)
    g = j >> np.uint64(2)
    w, fine = _words(seed, offset, i, g, np.uint64(0)), _words(seed, offset, i, g, _FINE)
    return _chosen(normals_f64(_pair(w, j), _pair(fine, j)), j)


@jit
def normals4_f64(seed, offset, i, g):
    """The float64 normals of row `i` in columns ``4 g`` to ``4 g + 3``, which refine `normals4`.

    Parameters
    ----------
    seed, offset, i, g : int
        As for `normals4`.

    Returns
    -------
    tuple of four float64

    Examples
    --------
    >>> import multisample.numba
    >>> z = multisample.numba.normals4_f64(7, 0, 0, 0)
    >>> z == tuple(multisample.sample(0.0, [1.0], 4, seed=7, dtype="float64")[0].tolist())
    True
    """
    g = _g(g)
    w, fine = _words(seed, offset, i, g, np.uint64(0)), _words(seed, offset, i, g, _FINE)
    return normals_f64(w, fine)
