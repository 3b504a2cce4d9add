"""Sums of attention weights over queries on Hopper and Blackwell GPUs with Pallas' Mosaic GPU
backend. See `api.attention_moments` for what it computes.

Tiling. A program serves 64 columns (keys) of one head of one row. It fetches the keys once and the
queries in steps of 64, computes weights again from scores and log-sum-exp, and sums them per key in
float32. Queries meet every tile of keys, so they are finished beforehand, as keys are.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import estimates
from pallas_kernels.projection import K, Q, V
from pallas_kernels.ragged_attention import config as tiles
from pallas_kernels.ragged_attention.mosaic_keys import Fetcher, Keys, PoolHalf, StoredBlocks
from pallas_kernels.shared import mosaic_operands as mosaic
from pallas_kernels.shared.mosaic_products import (
    LAYOUT,
    PER_COLUMN,
    PER_ROW,
    ROWS,
    Multiply,
    Wgmma,
    across,
    down,
    products,
)
from pallas_kernels.shared.mosaic_projection import finished

LOG2_E = math.log2(math.e)


def attention_moments(
    projection, new_length, kv_pool, table, sums, kv_scale, *, interpret, config=None
):
    """See `api.attention_moments`. config: tiles; None takes those of `config.choose`."""
    mosaic.check(projection.qkv, kv_pool, kv_scale, interpret)
    call = tiles.Call.of("attention_moments", projection, kv_pool, table)
    buffers, chip = (config or tiles.choose(call, "mosaic")).buffers, products()
    rows, heads, queries, _ = projection.shape
    # 64 keys are the rows of a product. Each program sums its columns over all queries by itself,
    # so no two programs add to one number.
    stored = StoredBlocks.of(kv_pool, kv_scale, table, ROWS)
    weights = sums.weights.astype(jnp.float32)
    # queries behind the last weight (padding) are not fetched
    last = jnp.where(weights != 0, jnp.arange(queries, dtype=jnp.int32) + 1, 0).max(initial=0)
    old = pl.cdiv(call.slots, ROWS)
    count = old + pl.cdiv(queries, ROWS)
    found = mosaic.launch(
        partial(_sum_columns, heads, chip, old),
        [
            jnp.stack([jnp.asarray(new_length, jnp.int32), last]),
            # keys and values, of which only keys are used: XLA computes attention's equal call once
            finished(projection, (K, V), interpret),
            stored,
            finished(projection, (Q,), interpret),
            mosaic.padded(weights, 0, ROWS),
            mosaic.padded(sums.lse, 2, ROWS),
        ],
        [[jax.ShapeDtypeStruct((rows, heads, count * ROWS), jnp.float32)] * (1 + sums.squares)],
        _scratch(projection, chip, stored, buffers, 1 + sums.squares),
        computing=1,
        grid={"tile": count, "head": heads, "row": rows},
        cost=estimates.attention_moments(projection, kv_pool, table, squares=sums.squares),
        interpret=interpret,
        name="attention_moments",
    )
    columns = [  # of whole tiles: those of slots of the table, then those of own tokens
        jnp.concatenate(
            [a[:, :, : call.slots], a[:, :, old * ROWS : old * ROWS + queries]], axis=-1
        )
        for a in found[0]
    ]
    return columns[0], columns[1] if sums.squares else None


def _scratch(projection, chip: Wgmma, stored: StoredBlocks, buffers: int, powers: int) -> list:
    """Shared and tensor memory of a program, in the order of `_sum_columns`."""
    head_dim = projection.shape[-1]
    tile = partial(mosaic.tile, dtype=projection.dtype, swizzle=chip.swizzle)
    return [
        plgpu.SMEM((powers, ROWS), jnp.float32),  # sums
        tile((1, ROWS, head_dim)),  # keys
        plgpu.Barrier(num_arrivals=stored.copies, num_barriers=1),
        stored.scratch(1, head_dim),
        chip.scratch(1, ROWS),
        [
            tile((buffers, ROWS, head_dim)),  # queries
            plgpu.SMEM((buffers, 2, ROWS), jnp.float32),  # their weights and log-sum-exp
            plgpu.Barrier(num_arrivals=3, num_barriers=buffers),
            plgpu.Barrier(num_barriers=buffers),
        ],
    ]


def _sum_columns(heads: int, chip: Wgmma, old: int, numbers, own, stored, *refs):
    """The kernel: one step of keys. Steps of own keys come after the `old` steps of the table."""
    # No number of registers is asked for: what the compiler takes leaves room for three programs on
    # a multiprocessor.
    *given, results, sums, k_tile, arrived, raw, product_sums, queries = refs
    part = PoolHalf(0, k_tile, arrived, None, *raw)
    row, head, tile = (jax.lax.axis_index(name) for name in ("row", "head", "tile"))
    keys = Keys.of(stored, own, (numbers[0], stored.layer[0]), row, head, heads)
    step = jnp.where(tile < old, keys.own_steps + tile, tile - old)
    # a step behind the last key of its kind fetches nothing, and its sums are 0
    there = jnp.where(tile < old, step < keys.steps, step < keys.own_steps)
    count = jnp.where(there, pl.cdiv(numbers[1], ROWS), 0)

    @pl.when((jax.lax.axis_index("warpgroup") == 1) & (count > 0))
    def _():
        plgpu.warp_map(lambda warp: Fetcher(warp, stored, [part], 1).start_any(keys, step, 0))
        _fetch_queries(given, queries, count, row, head)

    @pl.when(jax.lax.axis_index("warpgroup") == 0)
    def _():
        # a program without queries fetches no keys, and must not wait for them
        pl.when(count > 0)(lambda: plgpu.barrier_wait(arrived.at[0]))
        factor = None
        if stored.scaled:
            factor = keys.scales(part, step, 0, PER_ROW)

            @pl.when((count > 0) & (step >= keys.own_steps))
            def _():
                part.places[0] = mosaic.load(part.raw.at[0], LAYOUT).astype(part.places.dtype)
                plgpu.commit_smem()

        inside = keys.valid(step, (ROWS, ROWS), 0)
        multiply = chip.multiply(product_sums, 0)
        totals = _sums(queries, count, multiply, k_tile.at[0], factor, inside, len(results))
        for i, total in enumerate(totals):
            sums[i] = total
        plgpu.commit_smem()
        for i, result in enumerate(results):
            columns = pl.ds(tile * ROWS, ROWS)
            plgpu.copy_smem_to_gmem(sums.at[i], result.at[row, head, columns])
        plgpu.wait_smem_to_gmem(0)


def _fetch_queries(given, queries, count, row, head) -> None:
    """Fetch `count` steps of 64 queries of a head, as soon as there are places.

    given: queries of all heads [R, Q, N H], their weights [Q] and log-sum-exp [R, N, Q].
    queries: room for queries, and for weights and log-sum-exp, and barriers that say which places
      are full and which are free.
    """
    (q_ref, weight_ref, lse_ref), (tile, lines, full, free) = given, queries
    buffers, _, head_dim = tile.shape
    columns = pl.ds(head * head_dim, head_dim)

    def step(i, _):
        place, here = jax.lax.rem(i, buffers), pl.ds(i * ROWS, ROWS)
        pl.when(i >= buffers)(lambda: plgpu.barrier_wait(free.at[place]))
        for source, target in (
            (q_ref.at[row, here, columns], tile.at[place]),
            (weight_ref.at[here], lines.at[place, 0]),
            (lse_ref.at[row, head, here], lines.at[place, 1]),
        ):
            plgpu.copy_gmem_to_smem(source, target, full.at[place])
        return 0

    def last(i, _):
        plgpu.barrier_wait(free.at[jax.lax.rem(i, buffers)])
        return 0

    jax.lax.fori_loop(0, count, step, 0)
    jax.lax.fori_loop(jnp.maximum(count - buffers, 0), count, last, 0)


def _sums(queries, count, multiply: Multiply, keys, factor, inside, powers: int) -> tuple:
    """Weights of the keys [64, H] summed over all queries, and their squares if powers is 2. Sums
    are zero where a key is not `inside`. factor: factors of the scores [64], or None."""
    tile, lines, full, free = queries
    buffers = tile.shape[0]

    def step(i, carry):
        place = jax.lax.rem(i, buffers)
        plgpu.barrier_wait(full.at[place])
        scores = multiply(keys, tile.at[place].transpose((1, 0)), (ROWS, ROWS))
        if factor is not None:
            scores *= across(factor, scores.shape)
        both = (mosaic.load(lines.at[place, i], PER_COLUMN) for i in range(2))
        weight, lse = (down(line, scores.shape) for line in both)
        plgpu.commit_smem()  # ordinary loads and the copies that follow take different ways
        plgpu.barrier_arrive(free.at[place])
        p = jnp.exp2((scores - lse) * LOG2_E)
        # queries without a weight (padding) and keys without a place may be NaN
        p = jnp.where(inside & (weight != 0), p, 0.0)
        terms = (p * weight, p * p * weight)[:powers]
        return tuple(a + b.sum(axis=1) for a, b in zip(carry, terms, strict=True))

    zeros = plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), PER_ROW)
    return jax.lax.fori_loop(0, count, step, (zeros,) * powers)
