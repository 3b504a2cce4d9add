"""The token that a TPU kernel of token attention stores before it attends.

HBM holds slots in tiles, and a single slot of a tile cannot be written. So the tile with the
token's slot is a result that lies in the pool itself (`input_output_aliases`). The kernel reads the
other slots of the tile anyway, puts the token among them, and does so before anything is computed:
scores and sums need not know of it.

Grid steps fetch slots while the tiles of the last ones are written. They never touch the same
slots, because every row and head is fetched once, and its tile is written after that.
"""

import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.token_attention.tpu_row import iota
from pallas_kernels.tpu_operands import rounded


def tile_of(pool, fetched: int, interpret) -> int:
    """Slots of the result: the smallest number that the compiler can write at any place.

    fetched: slots of the pool in a grid step.
    """
    slots = pool.shape[2]
    # a whole tile of int8 numbers has 32 lines; of bfloat16, half a tile can be written as well
    tile = min(32 if pool.dtype == jnp.int8 else 8, slots)
    # the interpreter pads operands and results to whole blocks, then takes one for the other
    padded_alike = rounded(slots, tile) == rounded(slots, fetched)
    return tile if padded_alike or interpret is not True else fetched


def put_beside(row, token, rows_ref) -> None:
    """Put keys and values of a row's heads into `rows_ref` [N, 2 H], side by side as the pool holds
    them. float32, because single rows can be addressed in that type only."""
    both = [array[row].astype(jnp.float32) for array in (token.k, token.v)]
    rows_ref[...] = jnp.concatenate(both, axis=-1)


def put(rows_ref, first, slot, pool, tile_ref) -> None:
    """Put the tokens of a row's heads, from head number `first` on, into their slots and into the
    tile that is written.

    Args:
      rows_ref: see `put_beside`.
      slot: number of the slot among those of `pool`.
      pool: reference [heads, C, 2 H] to the slots that the grid step has fetched.
      tile_ref: reference [heads, tile, 2 H] to the result.
    """
    slots, tile = pool.shape[1], tile_ref.shape[1]
    whole = slots // tile * tile

    def in_tile(begin, size: int) -> None:
        here = pl.ds(begin, size)
        # chosen by a mask, because single lines of packed numbers cannot be addressed
        own = iota((size, pool.shape[2]), 0) == slot - begin
        for j in range(pool.shape[0]):
            # float32 holds what the other slots hold exactly (int8: whole numbers)
            new = rows_ref[pl.ds(first + j, 1)]
            new = jnp.where(own, new, pool[j, here].astype(jnp.float32)).astype(pool.dtype)
            tile_ref[j, :size] = new  # goes to memory
            pool[j, here] = new  # is attended to

    # starts of slices are known multiples of the tile, or static
    if whole == slots:
        in_tile(pl.multiple_of(slot // tile * tile, tile), tile)
        return
    pl.when(slot < whole)(lambda: in_tile(pl.multiple_of(slot // tile * tile, tile), tile))
    # the rest of the last tile is no part of the pool
    pl.when(slot >= whole)(lambda: in_tile(whole, slots - whole))
