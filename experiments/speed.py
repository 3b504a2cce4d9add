"""The gain in time that a smaller cache may bring, by the cost model
(docs/explanation/cost_model.md): what it saves of a batch's bytes and FLOPs."""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

from experiments.generation import ProgramOptions
from pallas_kernels.chips import Chip
from varjax.core.plan import CachePlan
from varjax.core.sequence import TOKENS
from varjax.fast import arrange
from varjax.fast.schemes import SCHEMES
from varjax.generation import cost
from varjax.models.model import Model
from varjax.storage import parameters

LITTLE = 0.1  # of the time; what saves less is told
SIZES = tuple(2**n for n in range(20))  # batches that are looked at


def savings(
    model: Model, plan: CachePlan, program: ProgramOptions, chip: Chip | None
) -> Callable[[int], tuple[float, float, float]]:
    """Return the function of a batch that gives the shares of (time, bytes, FLOPs) that the plan
    saves beside the full cache. Padding is not counted, nor what a policy does to decide and move.
    chip: without its peaks the time is the larger of the other shares, the most that it can be."""
    g, read = plan.geometry, cost.tokens_read(plan)
    if g.kind == TOKENS:  # a token is stored before it is read
        queries, own = np.ones(len(read)), 0
        full = g.schedule.condition + 1.0 + np.arange(len(read))
    else:
        queries = own = np.array(g.schedule.tokens, float)
        full = np.cumsum(own) - own
    heads = g.num_layers * g.num_heads
    found = np.stack([full * heads, read])  # tokens of the full cache, and of the plan's
    stored = parameters.shapes(model.transformer, program.dtype)
    weights = arrange.product_bytes(stored.blocks, stored.once)
    item = 1 if model.weights_dtype in SCHEMES else jnp.dtype(program.dtype).itemsize
    pairs = (found + own * heads) @ queries
    products = 2 * g.rows_per_image * (weights / item) * queries.sum()
    flops = products + 4 * g.rows_per_image * g.head_dim * g.queries_per_head * pairs
    slot = plan.num_bytes(1, program.kv_dtype) / max(1, plan.pool_tokens)
    cache = slot * (found.sum(1) + [g.dense_tokens, plan.pool_tokens])

    def saved(batch: int) -> tuple[float, float, float]:
        moved, done = weights * len(read) + batch * cache, batch * flops
        shares = [1 - small / large for large, small in (moved, done)]
        if chip is None:
            return max(shares), *shares
        large, small = np.maximum(moved / chip.bandwidth, done / chip.bf16_flops)
        return 1 - small / large, *shares

    return saved


def remark(
    model: Model, plan: CachePlan, program: ProgramOptions, batch: int, chip: Chip | None
) -> list[str]:
    """Return a line if a policy saves next to no time in batches of this size, with the size from
    which on it saves some; else none. batch: images of a device."""
    saved = savings(model, plan, program, chip)
    time, moved, flops = saved(batch)
    if plan.policy.name == "full" or time >= LITTLE:
        return []
    first = next((n for n in SIZES if saved(n)[0] >= LITTLE), None)
    later = f"{LITTLE:.0%} {f'from batches of {first} on' if first else 'in none'}"
    where = f" on {chip.name}" if chip else ""
    return [
        f"speed     {plan.policy.name} saves at most {time:.1%} of the full cache's time in batches"
        f" of {batch}, and may be slower; {later} (cost model{where}: {moved:.1%} of the bytes and "
        f"{flops:.1%} of the FLOPs saved)"
    ]
