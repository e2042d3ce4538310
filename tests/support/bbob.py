"""Functions of COCO's suite BBOB, for many points at once: S. Finck, N. Hansen, R. Ros, A. Auger, "Real-parameter
black-box optimization benchmarking 2009: noiseless functions definitions", INRIA RR-6829.

Instances are our own: the optimum and the rotations of each are drawn here, and the lowest value is 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Function = Callable[[Array], Array]


def oscillated(x: Array) -> Array:
    """T_osz: small bumps that keep a function from being exactly quadratic."""
    logarithm = np.log(np.abs(x), where=x != 0, out=np.zeros_like(x))
    c1, c2 = np.where(x > 0, 10, 5.5), np.where(x > 0, 7.9, 3.1)
    return np.asarray(np.sign(x) * np.exp(logarithm + 0.049 * (np.sin(c1 * logarithm) + np.sin(c2 * logarithm))))


def exponents(d: int) -> Array:
    """A column of numbers from 0 to 1, one for each dimension."""
    return np.linspace(0, 1, d)[:, None]


def asymmetric(x: Array, beta: float) -> Array:
    """T_asy: positive sides grow faster."""
    positive = np.maximum(x, 0)
    return np.where(x > 0, positive ** (1 + beta * exponents(len(x)) * np.sqrt(positive)), x)


def rotation(d: int, generator: np.random.Generator) -> Array:
    """A random orthogonal matrix."""
    q, _ = np.linalg.qr(generator.standard_normal((d, d)))
    return np.asarray(q)


def rastrigin_of(z: Array) -> Array:
    return np.asarray(10 * (len(z) - np.cos(2 * np.pi * z).sum(axis=0)) + (z * z).sum(axis=0))


def sphere(d: int, seed: int) -> tuple[Function, Array]:
    """f1, and the position of its minimum."""
    optimum = np.random.default_rng(seed).uniform(-4, 4, (d, 1))
    return lambda x: np.asarray(np.square(x - optimum).sum(axis=0)), optimum[:, 0]


def rastrigin(d: int, seed: int) -> tuple[Function, Array]:
    """f3, the separable Rastrigin function."""
    optimum = np.random.default_rng(seed).uniform(-4, 4, (d, 1))
    scale = 10 ** (exponents(d) / 2)
    return lambda x: rastrigin_of(scale * asymmetric(oscillated(x - optimum), 0.2)), optimum[:, 0]


def rosenbrock(d: int, seed: int) -> tuple[Function, Array]:
    """f8, without rotation."""
    optimum = np.random.default_rng(seed).uniform(-3, 3, (d, 1))

    def f(x: Array) -> Array:
        z = max(1, np.sqrt(d) / 8) * (x - optimum) + 1
        return np.asarray((100 * np.square(z[:-1] ** 2 - z[1:]) + np.square(z[:-1] - 1)).sum(axis=0))

    return f, optimum[:, 0]


def rotated_ellipsoid(d: int, seed: int) -> tuple[Function, Array]:
    """f10, with condition number 10**6."""
    generator = np.random.default_rng(seed)
    optimum, axes = generator.uniform(-4, 4, (d, 1)), rotation(d, generator)
    scale = 10 ** (6 * exponents(d))
    return lambda x: np.asarray((scale * np.square(oscillated(axes @ (x - optimum)))).sum(axis=0)), optimum[:, 0]


def ellipsoid(d: int, seed: int) -> tuple[Function, Array]:
    """f2: f10 with axes along the coordinates."""
    optimum = np.random.default_rng(seed).uniform(-4, 4, (d, 1))
    scale = 10 ** (6 * exponents(d))
    return lambda x: np.asarray((scale * np.square(oscillated(x - optimum))).sum(axis=0)), optimum[:, 0]


def rotated_rastrigin(d: int, seed: int) -> tuple[Function, Array]:
    """f15."""
    generator = np.random.default_rng(seed)
    optimum = generator.uniform(-4, 4, (d, 1))
    r, q = rotation(d, generator), rotation(d, generator)
    scale = 10 ** (exponents(d) / 2)
    return lambda x: rastrigin_of(r @ (scale * (q @ asymmetric(oscillated(r @ (x - optimum)), 0.2)))), optimum[:, 0]
