"""The generation program: one function of arrays, `lax.scan` over scales inside segments,
`lax.scan` over layers inside scales.

The state (latent map, KV cache) has one shape for all scales. Padding never leaks: padded tokens
are computed and thrown away, masked as keys and never stored. The cache travels in the carry of
both scans and is donated, so it is updated in place.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from varjax.cache.plan import CachePlan
from varjax.cache.state import KVState
from varjax.cache.step import attend_and_store
from varjax.cache.tables import (
    CacheSegment,
    LayerTables,
    ScaleTables,
    layer_tables,
    scale_tables,
)
from varjax.engine.inputs import POOLED, Resampling, ScaleMaps
from varjax.engine.segments import Segment
from varjax.sampling import Sampling
from varjax.schedule import Schedule


@dataclass(frozen=True)
class ProgramSpec:
    """The static side of a generation program.

    unroll: debug option; unrolls both scans. keep_logits: also return guided logits.
    """

    schedule: Schedule
    segments: tuple[Segment, ...]
    cache: tuple[CacheSegment, ...]
    sampling: Sampling
    keep_logits: bool = False
    unroll: bool = False

    @classmethod
    def of(
        cls,
        plan: CachePlan,
        segments: tuple[Segment, ...],
        sampling: Sampling,
        *,
        attention: str | None = None,
        keep_logits: bool = False,
        unroll: bool = False,
    ) -> "ProgramSpec":
        cache = tuple(CacheSegment.of(plan, s, attention) for s in segments)
        return cls(plan.geometry.schedule, segments, cache, sampling, keep_logits, unroll)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SegmentTables:
    """Scan inputs of one segment: what a scale needs (leading axis scales) and what its layers need
    (scales, layers)."""

    maps: ScaleMaps
    cache: ScaleTables
    layers: LayerTables


def program_tables(
    plan: CachePlan,
    segments: tuple[Segment, ...],
    image_index: np.ndarray,
    resampling: Resampling = POOLED,
) -> tuple[SegmentTables, ...]:
    """Host arrays of all segments for a batch of images. resampling: the model's."""
    inputs = plan.policy.inputs(plan.geometry, plan.allocation, image_index)
    schedule = plan.geometry.schedule
    return tuple(
        SegmentTables(
            ScaleMaps.of(schedule, s, resampling),
            scale_tables(plan, s),
            layer_tables(plan, s, inputs),
        )
        for s in segments
    )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Given:
    """Tokens (or the bits of tokens) that replace the draw in the first `scales` scales."""

    tokens: Int[Array, "B L ..."]
    scales: Int[Array, ""]


def generate_codes(
    model: Any,
    state: KVState,
    condition: Any,
    keys: Array,
    tables: tuple[SegmentTables, ...],
    given: Given | None,
    *,
    spec: ProgramSpec,
) -> tuple[dict[str, Array], KVState]:
    """Draw all scales of a batch of images.

    Args:
      model: a pipeline (`varjax.models.pipeline`).
      state: empty cache; donate it.
      condition: what `model.prepare` takes, for B images (VAR: int32 labels [B]; see
        `varjax.conditions`).
      keys: one typed random key per image [B].
      tables: `program_tables`.
      given: tokens to force, or None.
      spec: static.

    Returns:
      {"tokens": int32 [B, L] (uint8 [B, L, bits] of bitwise models), "code_map": float32
      [B, P, Q, C], "logits": float32 [B, L, V] ([B, L, bits, 2]) if asked for} and the cache as it
      is after the last scale.
    """
    with jax.named_scope("prepare"):
        context = model.prepare(condition)
    code_map = model.empty_code_map(keys.shape[0])
    carry, parts = (code_map, state), []
    for segment, cache, table in zip(spec.segments, spec.cache, tables, strict=True):

        def step(carry, table, cache=cache):
            return _scale_step(model, context, keys, given, cache, spec, carry, table)

        carry, outputs = jax.lax.scan(step, carry, table, unroll=spec.unroll)
        parts.append(_without_padding(outputs, spec.schedule, segment))
    code_map, state = carry
    results = {name: jnp.concatenate([p[name] for p in parts], axis=1) for name in parts[0]}
    return {**results, "code_map": code_map}, state


def _scale_step(
    model, context, keys, given, cache: CacheSegment, spec: ProgramSpec, carry, table: SegmentTables
):
    """One scale: inputs, layers, head, tokens, accumulation."""
    code_map, state = carry
    maps = table.maps
    with jax.named_scope("embed"):
        x = model.embed(context, code_map, maps)
        shared = model.scale_context(context, maps, spec.sampling)

    def layer(carry, inputs):
        x, state = carry
        block, layer_context, tables, index = inputs
        with jax.named_scope("project"):
            q, k, v = model.project(block, layer_context, shared, x)
            raw = model.raw_queries(block, layer_context, x) if cache.raw_queries else None
        with jax.named_scope("attend"):
            attended, state = attend_and_store(
                q,
                k,
                v,
                raw_queries=raw,
                now=table.cache,
                layer=index,
                state=state,
                tables=tables,
                segment=cache,
            )
        with jax.named_scope("finish"):
            x = model.finish(block, layer_context, shared, x, attended)
        return (x, state), None

    layers = jnp.arange(model.num_layers)
    inputs = (model.blocks, context["layers"], table.layers, layers)
    (x, state), _ = jax.lax.scan(layer, (x, state), inputs, unroll=spec.unroll)
    scale_keys = jax.vmap(lambda key: jax.random.fold_in(key, maps.scale))(keys)
    forced = None if given is None else (given.tokens[:, maps.token_index], given.scales)
    drawn = model.draw(context, x, scale_keys, maps, spec.sampling, forced)
    with jax.named_scope("accumulate"):
        code_map = model.accumulate(code_map, drawn["codes"], maps)
    wanted = ("tokens", "logits") if spec.keep_logits else ("tokens",)
    return (code_map, state), {name: drawn[name] for name in wanted}


def _without_padding(
    outputs: dict[str, Array], schedule: Schedule, segment: Segment
) -> dict[str, Array]:
    """[S, B, T, ...] of one segment -> [B, tokens of its scales, ...]."""
    lengths = [schedule.tokens[s] for s in range(segment.start, segment.stop)]
    return {
        name: jnp.concatenate([array[i, :, :n] for i, n in enumerate(lengths)], axis=1)
        for name, array in outputs.items()
    }
