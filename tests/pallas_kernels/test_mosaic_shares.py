"""Which tiles the programs of the Mosaic attention kernel serve."""

from dataclasses import replace

import numpy as np
import pytest

from pallas_kernels.arg_specs import SPECS
from pallas_kernels.ragged_attention import config
from pallas_kernels.ragged_attention.mosaic_gpu import Shares
from pallas_kernels.shared import mosaic_products

D30 = SPECS["var-d30-t256"]
CORES = 132  # multiprocessors of an H100


def shares_of(spec):
    args = spec.abstract()
    call = config.Call.of("attend", args.projection, args.kv_pool, args.table)
    tiles = config.heuristic(call, "mosaic")
    return Shares.of(args.projection, tiles, mosaic_products.Wgmma(), spec.kv_dtype == "int8")


@pytest.mark.parametrize(("tiles", "heads", "rows", "programs"), [(2, 3, 5, 7), (1, 30, 2, 60)])
def test_every_tile_is_served_once(tiles, heads, rows, programs):
    shares = Shares(tiles, heads, tiles * heads * rows, programs)
    served, counts = [], []
    for program in range(programs):
        first, count = shares.of_program(program)
        counts.append(int(count))
        served += [tuple(map(int, shares.place(first + i))) for i in range(int(count))]
    # tiles of a head follow one another, heads of a row as well
    assert served == list(np.ndindex(rows, heads, tiles))
    assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize(
    ("spec", "programs"),
    [
        # 3 programs of one warpgroup on a multiprocessor (rotated: 2), or one of two
        (replace(D30, tokens=64, length=64, rows=16), 3 * CORES),
        (replace(SPECS["llamagen-xl-t1"], rows=64), 2 * CORES),
        (replace(D30, rows=16), CORES),
        # as many as there are tiles
        (replace(D30, tokens=64, length=64, rows=2), 60),
        (replace(D30, rows=2), 120),
        # heads of 128 leave no room for results of their own
        (replace(SPECS["infinity-2b-t64"], rows=32), 32 * 16),
        (replace(SPECS["infinity-2b-t4096"], rows=2), 2 * 16 * 32),
    ],
)
def test_shares(spec, programs):
    assert shares_of(spec).programs == programs
