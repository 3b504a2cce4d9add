"""What papers print about memory, beside the bytes of our plans; `experiments.plan` shows it."""

from functools import singledispatch

from varjax.cache.plan import CachePlan
from varjax.cache.scale_plan import ScalePlan
from varjax.cache.stages import TokenPlan
from varjax.sequence import TokenSequence

BYTES_PER_PAIR = 6  # an element of K in float32 and one of V in 16 bits
MIB = 2**20
# HeatKV's table: how many of 6425 tokens (Infinity, 1M, square) each row keeps per head, which is
# not exactly the share that the row is named after.
HEATKV_FULL = 6425
HEATKV_ROWS = {0.2: 1300, 0.1: 650, 0.04: 265}

GIB = 2**30
XL, XXL = (36, 20, 64), (48, 24, 64)  # LlamaGen for 384 pixels: layers, heads, size of a head
# All memory on a GPU, {(table, model, batch): {part of the cache: {method: GiB}}}. Part 1.0 is the
# full cache. HeadKV: arXiv 2605.20600, tables 4 and 6; LineAR: its repository's efficiency table.
TOTALS = {
    ("HeadKV", XL, 128): {
        1.0: {"full cache": 33.91},
        1 / 4: {"HeadKV": 14.63, "LineAR": 14.88},
        1 / 6: {"HeadKV": 12.34, "LineAR": 12.62},
    },
    ("LineAR", XL, 256): {
        1.0: {"full cache": 64.75},
        1 / 4: {"LineAR": 25.51},
        1 / 6: {"LineAR": 20.97},
    },
    ("LineAR", XXL, 128): {
        1.0: {"full cache": 51.37},
        1 / 4: {"LineAR": 19.54},
        1 / 6: {"LineAR": 15.87},
    },
}
NEAR = 0.01  # largest difference between a budget and a row that it is compared with


@singledispatch
def memory_lines(
    plan: CachePlan, batch_size: int, kv_dtype: str, steady_tokens: int | None
) -> list[str]:
    """Return lines with what papers print about the memory of such a plan; none if they print
    nothing.

    steady_tokens: tokens per head, summed over layers, that AMS-KV counts; None for other policies.
    """
    raise NotImplementedError(type(plan))


@memory_lines.register
def _(plan: ScalePlan, batch_size: int, kv_dtype: str, steady_tokens: int | None) -> list[str]:
    """Return the bytes as AMS-KV and HeatKV count them."""
    g = plan.geometry
    per_token = g.head_dim * BYTES_PER_PAIR * g.rows_per_image * batch_size / MIB
    kept = plan.capacity[-1].sum() if steady_tokens is None else steady_tokens * g.num_heads
    with_last = g.schedule.total_tokens * g.num_layers * g.num_heads
    full = g.dense_tokens * per_token
    live = plan.live_tokens.max() * per_token
    return [
        f"papers    AMS-KV's count {_show(kept * per_token / 1000, 3)} GB of "
        f"{_show(with_last * per_token / 1000, 3)} GB, {1 - kept / with_last:.2%} saved (float32 "
        f"keys, 16-bit values, last scale in the full cache; GB = 1000 MiB)",
        f"          HeatKV's count {_show(plan.budget * full, 0)} MB of {_show(full, 0)} MB by "
        f"budget, {_show(live, 0)} MB live at most (last scale left out; MB = MiB)",
        *_heatkv_row(plan, batch_size, kv_dtype, full),
    ]


def _heatkv_row(plan: CachePlan, batch_size: int, kv_dtype: str, full: float) -> list[str]:
    """Return the row of HeatKV's table that is nearest to a plan, if it has the same schedule."""
    share = min(HEATKV_ROWS, key=lambda row: abs(row - plan.budget))
    if plan.geometry.schedule.persistent_tokens != HEATKV_FULL or abs(share - plan.budget) > NEAR:
        return []
    tokens = HEATKV_ROWS[share]
    published = full * tokens / HEATKV_FULL
    return [
        f"          HeatKV's table, {share:.0%}: {tokens} tokens per head = {_show(published, 0)} "
        f"MB of {_show(full, 0)} MB; ours, {plan.fraction:.2%} in {kv_dtype}: "
        f"{_show(plan.num_bytes(batch_size, kv_dtype) / MIB, 0)} MB"
    ]


@memory_lines.register
def _(plan: TokenPlan, batch_size: int, kv_dtype: str, steady_tokens: int | None) -> list[str]:
    """Return the rows of HeadKV's and LineAR's tables for this model at the nearest budget, with
    what our pool saves at their batch sizes. Other models and budgets have none."""
    g = plan.geometry
    if g.schedule != TokenSequence(576, g.schedule.condition):
        return []
    lines = []
    for (table, model, batch), rows in TOTALS.items():
        budget = min(rows, key=lambda row: abs(row - plan.budget))
        if model != (g.num_layers, g.num_heads, g.head_dim) or abs(budget - plan.budget) > NEAR:
            continue
        (full,) = rows[1.0].values()
        printed = ", ".join(
            f"{method} {total:.2f} ({full - total:.2f} less)" if budget < 1 else f"{total:.2f}"
            for method, total in rows[budget].items()
        )
        ours, dense = plan.num_bytes(batch, kv_dtype) / GIB, plan.dense_bytes(batch, kv_dtype) / GIB
        lines.append(
            f"{'' if lines else 'papers':10s}{table}'s table, batch {batch}, GiB in all: full cache"
            f" {printed if budget == 1 else f'{full:.2f}; at 1/{round(1 / budget)} {printed}'};"
            f" ours, keys and values: {ours:.2f} of {dense:.2f} ({dense - ours:.2f} less)"
        )
    return lines


def _show(value: float, decimals: int) -> str:
    return f"{value:.{decimals}f}" if value >= 1 else f"{value:.3g}"
