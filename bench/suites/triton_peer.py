"""The kernel that people write in Triton, with Philox and Box-Muller of `tl.randn4x`.

Its four normals go to four parts of a row, so that all stores are coalesced. A program draws a tile: some rows, and
some of their columns.
"""

from typing import Any

import triton
import triton.language as tl

PARTS = 4


@triton.jit(do_not_specialize=["seed"])
def draw(out, mu, sigma, d, n, groups, seed, ROWS: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * WIDTH * 4 + tl.arange(0, WIDTH)[None, :]
    group = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)[None, :]
    means = tl.load(mu + row, mask=row < d)
    deviations = tl.load(sigma + row, mask=row < d)
    place = out + row.to(tl.int64) * n + column
    z0, z1, z2, z3 = tl.randn4x(seed, row * groups + group)
    tl.store(place, means + deviations * z0, mask=(row < d) & (column < n))
    tl.store(place + WIDTH, means + deviations * z1, mask=(row < d) & (column + WIDTH < n))
    tl.store(place + 2 * WIDTH, means + deviations * z2, mask=(row < d) & (column + 2 * WIDTH < n))
    tl.store(place + 3 * WIDTH, means + deviations * z3, mask=(row < d) & (column + 3 * WIDTH < n))


def launch(out: Any, mu: Any, sigma: Any, seed: int, tile: int, warps: int) -> None:
    """Fill `out` of shape (d, n) with tiles of `tile` groups of four normals."""
    d, n = out.shape
    width = min(tile, triton.next_power_of_2(triton.cdiv(n, PARTS)))
    rows, parts = tile // width, triton.cdiv(n, PARTS * width)
    draw[triton.cdiv(d, rows), parts](out, mu, sigma, d, n, parts * width, seed, rows, width, num_warps=warps)
