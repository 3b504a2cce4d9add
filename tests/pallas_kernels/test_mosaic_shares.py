"""Which tiles the programs of the Mosaic attention kernel serve."""

from dataclasses import replace

import numpy as np
import pytest

from pallas_kernels import mosaic_products
from pallas_kernels.arg_specs import SPECS
from pallas_kernels.ragged_attention import config
from pallas_kernels.ragged_attention.mosaic_shares import Shares, programs_at_once, shared_memory

D30 = SPECS["var-d30-t256"]
CORES = 132  # multiprocessors of an H100


def shares_of(spec):
    args = spec.abstract()
    call = config.Call.of("attend", args.projection, args.kv_pool, args.table)
    tiles = config.heuristic(call, "mosaic")
    return Shares.of(args.projection, tiles, mosaic_products.Wgmma(), spec.kv_dtype == "int8")


@pytest.mark.parametrize(("tiles", "heads", "rows", "programs"), [(2, 3, 5, 7), (1, 30, 2, 60)])
def test_every_tile_is_served_once(tiles, heads, rows, programs):
    shares = Shares(tiles, heads, tiles * heads * rows, programs, apart=False)
    served, counts = [], []
    for program in range(programs):
        first, count = shares.of_program(program)
        counts.append(int(count))
        served += [tuple(map(int, shares.place(first + i))) for i in range(int(count))]
    # tiles of a head follow one another, heads of a row as well
    assert served == list(np.ndindex(rows, heads, tiles))
    assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize(
    ("spec", "programs", "apart"),
    [
        # 3 programs of one warpgroup on a multiprocessor, or one of two
        (replace(D30, tokens=64, length=64, rows=16), 3 * CORES, True),
        (replace(D30, rows=16), CORES, True),
        # as many as there are tiles
        (replace(D30, tokens=64, length=64, rows=2), 60, False),
        (replace(D30, rows=2), 120, False),
        # no place for a result of its own, beside the matrix of a rotation or heads of 128
        (replace(SPECS["infinity-2b-t64"], rows=32), 2 * CORES, False),
        (replace(SPECS["llamagen-xl-t1"], rows=64), 3 * CORES, False),
        (replace(SPECS["infinity-2b-t4096"], rows=2), CORES, False),
    ],
)
def test_shares(spec, programs, apart):
    shares = shares_of(spec)
    assert (shares.programs, shares.apart) == (programs, apart)


def test_shared_memory_of_three_programs():
    """With room for what CUDA takes and for barriers: 228 KiB in all."""
    tiles = config.MosaicConfig(warpgroups=1, block_k=64, buffers=3)
    needed = shared_memory(tiles, 64, False, turned=False, apart=True)
    assert needed == 72 * 1024 + 256
    assert programs_at_once(tiles, needed) == 3 * CORES
    assert programs_at_once(tiles, needed + 4096) == 2 * CORES
