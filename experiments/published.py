"""What papers print about memory, beside the bytes of our plans; `experiments.plan` shows it."""

from collections.abc import Iterable
from functools import singledispatch

from experiments import published_totals
from experiments.published_totals import FULL, GIB, Totals
from varjax.cache.plan import CachePlan
from varjax.cache.scale_plan import ScalePlan
from varjax.cache.stages import TokenPlan

BYTES_PER_PAIR = 6  # an element of K in float32 and one of V in 16 bits
MIB = 2**20
# HeatKV's table: how many of 6425 tokens (Infinity, 1M, square) each row keeps per head, which is
# not exactly the share that the row is named after.
HEATKV_FULL = 6425
HEATKV_ROWS = {0.2: 1300, 0.1: 650, 0.04: 265}
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
    """Return the rows of HeadKV's and LineAR's tables for this model at the nearest budget: what
    their totals are made of, and what our pool saves at their batch sizes. Other models and budgets
    have none."""
    lines = []
    for totals, budget in published_totals.rows_near(plan.geometry, plan.budget, NEAR):
        lines += [_printed(totals, budget, plan, kv_dtype), *_parts(totals, budget)]
    return [f"{'' if at else 'papers':10s}{line}" for at, line in enumerate(lines)]


def _printed(totals: Totals, budget: float, plan: TokenPlan, kv_dtype: str) -> str:
    """The printed totals, and our keys and values."""
    full, batch = totals.full, totals.batch
    compressed = ", ".join(
        f"{method} {total:.2f} ({full - total:.2f} less)"
        for method, total in totals.printed[budget].items()
    )
    more = "" if budget == 1 else f"; at 1/{round(1 / budget)} {compressed}"
    ours, dense = plan.num_bytes(batch, kv_dtype) / GIB, plan.dense_bytes(batch, kv_dtype) / GIB
    return (
        f"{totals.table}'s table, batch {batch}, GiB in all: {FULL} {full:.2f}{more};"
        f" ours, keys and values: {ours:.2f} of {dense:.2f} ({dense - ours:.2f} less)"
    )


def _parts(totals: Totals, budget: float) -> Iterable[str]:
    """What the printed totals are made of."""
    for part in (1.0, budget) if budget < 1 else (1.0,):
        held, printed = totals.keys_and_values(part), totals.printed[part]
        rests = ", ".join(f"{method} {totals.rest(part, method):.2f}" for method in printed)
        yield (
            f"  of these: keys and values {held:.2f} ({totals.pair} bytes for K and V, text of"
            f" {totals.text}), weights {totals.weights:.2f}, the rest: {rests}"
        )


def _show(value: float, decimals: int) -> str:
    return f"{value:.{decimals}f}" if value >= 1 else f"{value:.3g}"
