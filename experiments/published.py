"""Memory that papers print, beside the bytes of our plans; `experiments.plan` shows it.

A printed total of a model that draws token by token is keys and values, weights, and a rest. The
first two are known: the keys and values of the tokens that a cache holds in the end (all that are
read again, or the papers' part of the image tokens), and the parameters. The rest is taken by
decoding and the framework, and has to be about the same in all numbers of a table if the count is
the authors'. The numbers and their sources are in `published.json`.
"""

import functools
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from varjax.cache.allocation import Geometry
from varjax.cache.plan import CachePlan
from varjax.cache.scale_plan import ScalePlan
from varjax.cache.stages import TokenPlan

BYTES_PER_PAIR = 6  # an element of K in float32 and one of V in 16 bits
WEIGHT_BYTES = 2
MIB, GIB = 2**20, 2**30
NEAR = 0.01  # largest difference between a budget and a row that it is compared with


@dataclass(frozen=True, kw_only=True)
class Totals:
    """One model's row of a table. The fields are those of `published.json`."""

    table: str
    model: str
    sizes: tuple[int, int, int]
    tokens: int
    batch: int
    parameters: float
    text: int
    pair: int
    printed: Mapping[float, Mapping[str, float]]

    @property
    def full(self) -> float:
        """GiB in all with the full cache."""
        (total,) = self.printed[1.0].values()
        return total

    @property
    def weights(self) -> float:
        """GiB of the parameters."""
        return self.parameters * WEIGHT_BYTES / GIB

    def keys_and_values(self, part: float) -> float:
        """GiB of keys and values when a picture is done. The last token is never stored."""
        layers, heads, size = self.sizes
        image = self.tokens - 1 if part == 1.0 else part * self.tokens
        return 2 * self.batch * layers * heads * size * (image + self.text) * self.pair / GIB

    def rest(self, part: float, method: str) -> float:
        """GiB of a printed total that are neither weights nor keys and values."""
        return self.printed[part][method] - self.weights - self.keys_and_values(part)


@functools.cache
def numbers() -> dict:
    """Return the content of `published.json`, its totals as `Totals`."""
    content = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
    for row in content["totals"]:
        row["sizes"] = tuple(row["sizes"])
        row["printed"] = {float(Fraction(part)): gib for part, gib in row["printed"].items()}
    return {**content, "totals": [Totals(**row) for row in content["totals"]]}


def rows_near(geometry: Geometry, budget: float) -> Iterator[tuple[Totals, float]]:
    """Yield the tables' rows for a model, each with its part of the cache that is within `NEAR` of
    the budget."""
    sizes = geometry.num_layers, geometry.num_heads, geometry.head_dim
    for totals in numbers()["totals"]:
        nearest = min(totals.printed, key=lambda part: abs(part - budget))
        same = (sizes, geometry.schedule.image_tokens) == (totals.sizes, totals.tokens)
        if same and abs(nearest - budget) <= NEAR:
            yield totals, nearest


def memory_lines(
    plan: CachePlan, batch_size: int, kv_dtype: str, steady_tokens: int | None
) -> list[str]:
    """Return lines with what papers print about the memory of such a plan; none if they print
    nothing.

    steady_tokens: tokens per head, summed over layers, that AMS-KV counts; None for other policies.
    """
    if isinstance(plan, TokenPlan):
        return _token_lines(plan, kv_dtype)
    return _scale_lines(plan, batch_size, kv_dtype, steady_tokens)


def _scale_lines(
    plan: ScalePlan, batch_size: int, kv_dtype: str, steady_tokens: int | None
) -> list[str]:
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
    table = numbers()["heatkv"]
    share = min(map(float, table["rows"]), key=lambda row: abs(row - plan.budget))
    if plan.geometry.schedule.persistent_tokens != table["full"] or abs(share - plan.budget) > NEAR:
        return []
    tokens = table["rows"][str(share)]
    published = full * tokens / table["full"]
    return [
        f"          HeatKV's table, {share:.0%}: {tokens} tokens per head = {_show(published, 0)} "
        f"MB of {_show(full, 0)} MB; ours, {plan.fraction:.2%} in {kv_dtype}: "
        f"{_show(plan.num_bytes(batch_size, kv_dtype) / MIB, 0)} MB"
    ]


def _token_lines(plan: TokenPlan, kv_dtype: str) -> list[str]:
    """Return the rows of HeadKV's and LineAR's tables for this model at the nearest budget: what
    their totals are made of, and what our pool saves at their batch sizes. Other models and budgets
    have none."""
    lines = []
    for totals, budget in rows_near(plan.geometry, plan.budget):
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
        f"{totals.table}'s table, batch {batch}, GiB in all: full cache {full:.2f}{more};"
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
