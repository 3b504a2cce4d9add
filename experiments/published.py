"""Memory that papers print, beside the bytes of our plans; `experiments.plan` shows it.

A printed total of a model that draws token by token is keys and values, weights, and what decoding
and the framework take. The numbers and their sources are in `published.json`.
"""

import json
from fractions import Fraction
from pathlib import Path

from varjax.cache.plan import CachePlan
from varjax.cache.scale_plan import ScalePlan
from varjax.cache.stages import TokenPlan

BYTES_PER_PAIR = 6  # an element of K in float32 and one of V in 16 bits
MIB, GIB = 2**20, 2**30
NEAR = 0.01  # largest difference between a budget and a row that it is compared with


def memory_lines(
    plan: CachePlan, batch_size: int, kv_dtype: str, steady_tokens: int | None
) -> list[str]:
    """Return lines with what papers print about the memory of such a plan; none if they print
    nothing.

    steady_tokens: tokens per head, summed over layers, that AMS-KV counts; None for other policies.
    """
    content = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
    if isinstance(plan, TokenPlan):
        return _token_lines(plan, kv_dtype, content["totals"])
    return _scale_lines(plan, batch_size, kv_dtype, steady_tokens, content["heatkv"])


def _scale_lines(
    plan: ScalePlan, batch_size: int, kv_dtype: str, steady_tokens: int | None, table: dict
) -> list[str]:
    """Return the bytes as AMS-KV and HeatKV count them, and the row of HeatKV's table that is
    nearest to the plan, if it has the same schedule."""
    g = plan.geometry
    per_token = g.head_dim * BYTES_PER_PAIR * g.rows_per_image * batch_size / MIB
    kept = plan.capacity[-1].sum() if steady_tokens is None else steady_tokens * g.num_heads
    with_last = g.schedule.total_tokens * g.num_layers * g.num_heads
    full = g.dense_tokens * per_token
    live = plan.live_tokens.max() * per_token
    lines = [
        f"papers    AMS-KV's count {_show(kept * per_token / 1000, 3)} GB of "
        f"{_show(with_last * per_token / 1000, 3)} GB, {1 - kept / with_last:.2%} saved (float32 "
        f"keys, 16-bit values, last scale in the full cache; GB = 1000 MiB)",
        f"          HeatKV's count {_show(plan.budget * full, 0)} MB of {_show(full, 0)} MB by "
        f"budget, {_show(live, 0)} MB live at most (last scale left out; MB = MiB)",
    ]
    share = min(map(float, table["rows"]), key=lambda row: abs(row - plan.budget))
    if g.schedule.persistent_tokens == table["full"] and abs(share - plan.budget) <= NEAR:
        tokens = table["rows"][str(share)]
        lines.append(
            f"          HeatKV's table, {share:.0%}: {tokens} tokens per head = "
            f"{_show(full * tokens / table['full'], 0)} MB of {_show(full, 0)} MB; ours, "
            f"{plan.fraction:.2%} in {kv_dtype}: "
            f"{_show(plan.num_bytes(batch_size, kv_dtype) / MIB, 0)} MB"
        )
    return lines


def _token_lines(plan: TokenPlan, kv_dtype: str, totals: list[dict]) -> list[str]:
    """Return the rows of HeadKV's and LineAR's tables for this model at the nearest budget, and
    what our pool saves at their batch sizes. Other models and budgets have none."""
    g, lines = plan.geometry, []
    mine = [g.num_layers, g.num_heads, g.head_dim], g.schedule.image_tokens
    for row in totals:
        printed = {float(Fraction(part)): gib for part, gib in row["printed"].items()}
        near = min(printed, key=lambda part: abs(part - plan.budget))
        if (row["sizes"], row["tokens"]) != mine or abs(near - plan.budget) > NEAR:
            continue
        full, batch = printed[1.0]["full cache"], row["batch"]
        said = ", ".join(
            f"{m} {gib:.2f} ({full - gib:.2f} less)" for m, gib in printed[near].items()
        )
        more = "" if near == 1 else f"; at 1/{round(1 / near)} {said}"
        ours, dense = (f(batch, kv_dtype) / GIB for f in (plan.num_bytes, plan.dense_bytes))
        lines.append(
            f"{'' if lines else 'papers':10s}{row['table']}'s table, batch {batch}, GiB in all:"
            f" full cache {full:.2f}{more}; ours, keys and values: {ours:.2f} of {dense:.2f}"
            f" ({dense - ours:.2f} less)"
        )
    return lines


def _show(value: float, decimals: int) -> str:
    return f"{value:.{decimals}f}" if value >= 1 else f"{value:.3g}"
