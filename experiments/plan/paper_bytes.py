"""The bytes of a plan as the papers count them, which differ from ours.

Their keys are float32 after normalisation and their values 16 bits wide: 6 bytes for an element of
K and one of V together, for both guidance rows. MB means MiB, and GB 1000 of those.
"""

from varjax.cache.plan import CachePlan

BYTES_PER_PAIR = 6  # an element of K in float32 and one of V in 16 bits
MIB = 2**20
# HeatKV's table: tokens per head that its rows keep of 6425 (Infinity, 1M, square), which is not
# exactly the share the rows are named after.
HEATKV_FULL = 6425
HEATKV_ROWS = {0.2: 1300, 0.1: 650, 0.04: 265}


def paper_lines(
    plan: CachePlan, batch_size: int, kv_dtype: str, steady_tokens: int | None = None
) -> list[str]:
    """The bytes as AMS-KV and HeatKV count them.

    steady_tokens: tokens per head, summed over layers, that AMS-KV counts; None for other policies.
    """
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
    """The row of HeatKV's table that is nearest to this plan, if it has this schedule."""
    share = min(HEATKV_ROWS, key=lambda row: abs(row - plan.budget))
    if plan.geometry.schedule.persistent_tokens != HEATKV_FULL or abs(share - plan.budget) > 0.01:
        return []
    tokens = HEATKV_ROWS[share]
    published = full * tokens / HEATKV_FULL
    return [
        f"          HeatKV's table, {share:.0%}: {tokens} tokens per head = {_show(published, 0)} "
        f"MB of {_show(full, 0)} MB; ours, {plan.fraction:.2%} in {kv_dtype}: "
        f"{_show(plan.num_bytes(batch_size, kv_dtype) / MIB, 0)} MB"
    ]


def _show(value: float, decimals: int) -> str:
    return f"{value:.{decimals}f}" if value >= 1 else f"{value:.3g}"
