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
from pallas_kernels.mosaic_products import ROWS, Wgmma
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
    def of(cls, projection: Projection, config: MosaicConfig, chip: Wgmma, scaled: bool):
        """scaled: whether the pool is int8."""
        rows, heads, tokens, head_dim = projection.shape
        groups, size, turned = config.warpgroups, config.block_k, projection.rotation is not None
        tiles = -(-tokens // (groups * ROWS))
        total = rows * heads * tiles
        # bytes of shared memory of a program, without barriers: queries as they come and finished,
        # weights, the matrix of the rotation, steps; two for each number
        queries, steps = groups * ROWS * head_dim, 2 * config.buffers * size
        weights = 0 if chip.registers else groups * ROWS * size
        numbers = 2 * queries + weights + turned * TURNED**2 + steps * head_dim
        memory = 2 * numbers + groups * ROWS * 4 + scaled * steps * (head_dim + 4)
        # two warpgroups that compute take all registers of a multiprocessor
        most = ALONE[turned] if groups == 1 else 1
        at_once = mosaic.programs_at_once(memory, most)
        memory += 2 * queries  # with a place for the result
        fits = memory <= mosaic.MOST and mosaic.programs_at_once(memory, most) == at_once
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
