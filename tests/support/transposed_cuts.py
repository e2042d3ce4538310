"""Other geometries for transposed layouts, for tests of both kernels."""

from collections.abc import Callable

from multisample.backends.kernels.cuda.geometry import TRANSPOSED_THREADS, Geometry, StoreKind


def recut(cut: Callable[[Geometry], dict[str, int]], usual: Geometry, groups: int, own_rows: int) -> Geometry:
    """`usual` with the groups per pass, chunk or band changed by `cut`, and the dependent fields computed again.

    `cut` gets a geometry whose `rows_per_pass` and `band_rows` hold groups per pass and band. A thread of
    kTransposedStaged has `own_rows` dimensions.
    """
    as_rows = usual._replace(rows_per_pass=usual.groups_per_pass, band_rows=usual.band_groups)
    changed = as_rows._replace(**cut(as_rows))
    threads, tiles = usual.threads, 1
    if usual.store_kind == StoreKind.kTransposed:
        turns = min(changed.rows_per_pass, 32)
        warps = -(-turns * usual.pieces // (32 - usual.overlap))
        threads = 32 * min(warps, TRANSPOSED_THREADS // 32)
        tiles = -(-32 * warps // threads)
    else:
        turns = min(changed.rows_per_pass, threads * own_rows // usual.pieces, threads)
    passes, per_chunk = (max(rows // changed.rows_per_pass, 1) for rows in (changed.band_rows, changed.chunk))
    chunk, blocks = min(per_chunk, threads // turns) * turns, -(-groups // (passes * turns)) * tiles
    bands = {"band_groups": passes * turns, "blocks_per_band": tiles}
    return usual._replace(threads=threads, groups_per_pass=turns, chunk=chunk, blocks=blocks, **bands)
