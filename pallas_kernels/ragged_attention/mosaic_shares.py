"""How the tiles of `attend` are shared out among the programs of the Mosaic GPU kernel, and how
many programs a multiprocessor holds.

Where there are more tiles than the chip can serve at once, a program stays on its multiprocessor
and goes through several, one after another: the next tile's queries and keys are fetched while the
last one's are in use. Tiles of a head follow one another, so its keys are in the L2 cache when they
are read again.
"""

from dataclasses import dataclass

import jax

from pallas_kernels import mosaic_operands as mosaic
from pallas_kernels.mosaic_products import ROWS, Products
from pallas_kernels.mosaic_projection import TURNED
from pallas_kernels.projection import Projection
from pallas_kernels.ragged_attention.config import MosaicConfig

# Programs of one warpgroup that a multiprocessor holds, without and with a rotation: so many have
# 168 and 255 registers per thread.
ALONE = (3, 2)


@dataclass(frozen=True)
class Shares:
    """The tiles of all heads of all rows, in the order in which programs serve them.

    tiles, heads: of a head, of a row.
    total: tiles in all.
    programs: how many there are. Each has equally many tiles, or one more.
    """

    tiles: int
    heads: int
    total: int
    programs: int

    @classmethod
    def of(cls, projection: Projection, config: MosaicConfig, chip: Products, scaled: bool):
        """scaled: whether the pool is int8."""
        rows, heads, tokens, head_dim = projection.shape
        tiles = -(-tokens // (config.warpgroups * ROWS))
        total = rows * heads * tiles
        turned = projection.rotation is not None
        given = dict(weights=bool(chip.weights((1, 1), projection.dtype)), turned=turned)
        one, more = (
            shared_memory(config, head_dim, scaled, several=several, **given)
            for several in (False, True)
        )
        at_once = programs_at_once(config, one, turned)
        fits = more <= mosaic.MOST and programs_at_once(config, more, turned) == at_once
        return cls(tiles, heads, total, min(total, at_once) if fits else total)

    @property
    def several(self) -> bool:
        """Whether programs serve more than one tile. A tile's result then has a place of its own in
        shared memory, so that the next one's queries may come while it is copied out."""
        return self.total > self.programs

    def of_program(self, program) -> tuple:
        """(first tile, number of tiles) of a program."""
        if not self.several:
            return program, 1
        first, last = ((program + i) * self.total // self.programs for i in (0, 1))
        return first, last - first

    def place(self, number) -> tuple:
        """(row, head, tile of the head) of a tile."""
        head = jax.lax.div(number, self.tiles)
        place = jax.lax.div(head, self.heads), jax.lax.rem(head, self.heads)
        return *place, jax.lax.rem(number, self.tiles)


def programs_at_once(config: MosaicConfig, memory: int, turned: bool) -> int:
    """How many programs the chip runs at the same time. memory: bytes of shared memory of each.
    turned: whether queries are rotated."""
    # two warpgroups that compute take all registers of a multiprocessor
    return mosaic.programs_at_once(memory, ALONE[turned] if config.warpgroups == 1 else 1)


def shared_memory(
    config: MosaicConfig,
    head_dim: int,
    scaled: bool,
    *,
    several: bool = False,
    weights: bool = False,
    turned: bool = True,
) -> int:
    """Bytes of shared memory that a program of `attend` takes for 16-bit numbers, without barriers.

    scaled: whether the pool is int8.
    several: see `Shares`.
    weights: whether weights go through it.
    turned: whether queries are rotated.
    """
    groups, size = config.warpgroups, config.block_k
    steps = 2 * config.buffers * size
    queries = (2 + several) * groups * ROWS * head_dim  # as they come, finished, and the result
    numbers = queries + weights * groups * ROWS * size + turned * TURNED**2 + steps * head_dim
    return 2 * numbers + groups * ROWS * 4 + scaled * steps * (head_dim + 4)
