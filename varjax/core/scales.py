"""The program that draws scale by scale: one function of arrays. It scans over the scales of each
segment. Inside a scale it scans over layers; where weights are separate, it runs one layer after
the other.

The carry (latent map, KV cache) has one shape for all scales. Padding never leaks: padded tokens
are computed and thrown away, masked as keys and never stored.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, PyTree

from varjax.core import sampling as sampling_lib
from varjax.core import stacked
from varjax.core.given import Given
from varjax.core.layer_inputs import SegmentInputs, join_heads, layer_inputs, observed_inputs
from varjax.core.sampling import Sampling
from varjax.core.scale_plan import ScalePlan
from varjax.core.segments import Segment, images_at_once, map_in_chunks
from varjax.core.state import KVState
from varjax.core.step import CacheStep
from varjax.core.step_inputs import StepInputs
from varjax.core.transformer import Transformer


@dataclass(frozen=True)
class ScaleSpec:
    """The static side of a program that draws scale by scale, and the program itself.

    plan: of the cache.
    segments: of its schedule.
    cache: how each segment's layers use the cache.
    attention: implementation of the kernels; None takes what the platform has.
    keep_logits, keep_contents: whether these are among the results (`generate`).
    watch: called on the host with a scale's number and the code map [B, P, Q, C] after it.
    groups: of heads, each with a pool of its own on a device of its own.
    """

    plan: ScalePlan
    segments: tuple[Segment, ...]
    cache: tuple[CacheStep, ...]
    sampling: Sampling
    attention: str | None = None
    keep_logits: bool = False
    keep_contents: bool = False
    watch: Callable[[Array, Array], None] | None = None
    groups: int = 1

    def shared_inputs(self, transformer: Transformer) -> tuple[SegmentInputs, ...]:
        """Host arrays that are the same for every batch: all but what a policy knows of images."""
        # Kept apart because they are slow: for VAR-d30 they take 0.3 s on a CPU of 2026, longer
        # than drawing an image on a GPU should. Every device along `model` has a pool of its own,
        # and so tables of its own, which lie side by side.
        groups, resampling = self.plan.divide(self.groups), transformer.resampling
        schedule = self.plan.geometry.schedule
        found = []
        for s in self.segments:
            observed = observed_inputs(groups[0], s.scales, s.length)
            step = StepInputs.of(schedule, s.scales, s.length, resampling, **observed)
            tables = join_heads([layer_inputs(group, s.scales, s.length) for group in groups])
            found.append(SegmentInputs(step, tables))
        return tuple(found)

    def for_images(
        self, shared: tuple[SegmentInputs, ...], image_index: np.ndarray
    ) -> tuple[SegmentInputs, ...]:
        """The program's inputs for a batch of images, from `shared_inputs`."""
        # static contents do not depend on images: nothing has to be copied
        if self.plan.static_content:
            return shared
        inputs, found = self.plan.policy_inputs(image_index), []
        for given, segment in zip(shared, self.segments, strict=True):
            scales = np.asarray(segment.scales)
            mine = jax.tree.map(lambda a, scales=scales: np.asarray(a)[scales], inputs)
            # `replace` keeps the shared arrays, which may be on the device already
            found.append(replace(given, layers=replace(given.layers, policy=mine)))
        return tuple(found)

    def generate(
        self,
        networks: Mapping[str, nnx.Module],
        state: KVState,
        condition: PyTree,
        keys: Array,
        inputs: tuple[SegmentInputs, ...],
        given: Given | None,
    ) -> tuple[dict[str, Array], KVState]:
        """Draws all scales of a batch of images. Returns {"tokens": int32 [B, L] (bitwise models:
        uint8 [B, L, bits]), "code_map": float32 [B, P, Q, C], "logits": float32 [B, L, V] ([B, L,
        bits, 2]) and "contents" if asked for} and the cache as it is after the last scale.
        contents: `KVState.position` and `regions` after every scale, an axis of scales in front.

        networks: "transformer" (`varjax.core.next_scale`) and "codec".
        state: empty cache; donate it.
        condition: what `encode_condition` takes, for B images (VAR: int32 labels [B]; see
          `varjax.conditions`).
        keys: one typed random key per image [B].
        inputs: `for_images`.
        given: tokens that replace the draw, or None.
        """
        transformer = networks["transformer"]
        # once per image, outside both scans: text and modulation are the same for every scale
        with jax.named_scope("encode_condition"):
            guided = self.plan.geometry.rows_per_image == 2
            kernel = self.attention
            context = transformer.encode_condition(condition, guided=guided, implementation=kernel)
            context = context | {"attention": transformer.attention_vectors()}
        code_map = jnp.zeros((keys.shape[0], *transformer.config.code_map), jnp.float32)
        # The cache travels in the carry of both scans, never as scan input or output: those are
        # buffers of their own, and a second pool would exist beside the first. In the carry XLA
        # updates it in place, and the donated argument is the only one.
        carry, parts, contents = (code_map, state), [], []
        # A scan pads all its scales to one length, so each segment is a scan of its own: one
        # compiled layer body per segment instead of one per scale and layer.
        for segment, cache, scanned in zip(self.segments, self.cache, inputs, strict=True):
            scale = partial(_scale, networks, context, keys, given, cache, self)
            carry, outputs = jax.lax.scan(scale, carry, scanned)
            contents.append(outputs.pop("contents", None))
            # the scales of the segment without padding: [S, B, T, ...] -> [B, tokens, ...]
            tokens = self.plan.geometry.schedule.tokens
            lengths = list(enumerate(tokens[s] for s in segment.scales))
            parts.append(
                {
                    name: jnp.concatenate([array[i, :, :n] for i, n in lengths], axis=1)
                    for name, array in outputs.items()
                }
            )
        code_map, state = carry
        results = {name: jnp.concatenate([p[name] for p in parts], axis=1) for name in parts[0]}
        if self.keep_contents:
            results["contents"] = jax.tree.map(lambda *a: jnp.concatenate(a), *contents)
        return results | {"code_map": code_map}, state


def _scale(
    networks: Mapping[str, nnx.Module],
    context: dict[str, PyTree],
    keys: Array,
    given: Given | None,
    cache: CacheStep,
    spec: ScaleSpec,
    carry: tuple[Array, KVState],
    inputs: SegmentInputs,
) -> tuple[tuple[Array, KVState], dict[str, Array]]:
    """Draws one scale: inputs, layers, head, tokens, accumulation. carry: latent map [B, P, Q, C]
    and cache."""
    code_map, state = carry
    transformer, codec, step = networks["transformer"], networks["codec"], inputs.step
    with jax.named_scope("embed"):
        x = transformer.embed(context, step.shrink(code_map), step)
        shared = transformer.scale_context(context, step, spec.sampling)

    # Kernels read tables packed into one array. Packing is done here and not in `layer`, so that
    # it runs once per scale.
    tables = inputs.layers.packed(state.kv_pool.shape[2])

    def layer(carry, scanned, index):
        x, state = carry
        block, layer_context = scanned
        with jax.named_scope("project"):
            layer_context = x.vectors(layer_context, context["layers"], index)
            projection, x = transformer.project(block, layer_context, shared, x)
            # kernels read what they need of these small arrays where it lies
            projection = replace(projection, layer=index, **context["attention"])
        with jax.named_scope("attend"):
            attended, state = cache.attend_and_store(
                projection, step=step, layer=index, state=state, inputs=tables.of_layer(index)
            )
        with jax.named_scope("post_attention"):
            x = transformer.post_attention(block, layer_context, shared, x, attended)
        return x, state

    # The layer's number is data: pool and tables hold all layers, so one body serves them all, and
    # kernels find their part of the tables themselves.
    scanned = (transformer.blocks, context["layers"])
    carry = (transformer.stream(x, spec.attention), state)
    x, state = stacked.scan_numbered(layer, carry, scanned)
    drawn = _sample(networks, context["head"], x.settled(), keys, step, given, spec)
    with jax.named_scope("accumulate"):
        code_map = codec.accumulate(code_map, step.enlarge(drawn.pop("codes")), step.scale)
    if spec.watch is not None:
        jax.debug.callback(spec.watch, step.scale, code_map)
    if spec.keep_contents:
        drawn["contents"] = {"position": state.position, "regions": state.regions}
    return (code_map, state), drawn


def _sample(
    networks: Mapping[str, nnx.Module],
    head: Float[Array, "R 2 D"],
    x: Float[Array, "R T D"],
    keys: Array,
    step: StepInputs,
    given: Given | None,
    spec: ScaleSpec,
) -> dict[str, Array]:
    """The tokens of a scale, their codes, and guided logits if they are kept. Images are sampled in
    chunks of at most `images_at_once`, which bounds the memory that logits take."""
    transformer, codec, sampling = networks["transformer"], networks["codec"], spec.sampling
    images = keys.shape[0]
    # folding the scale, not the position in a segment: results do not depend on the cut
    keys = jax.vmap(lambda key: jax.random.fold_in(key, step.scale))(keys)
    # both rows of an image go through together: guidance needs them side by side
    rows = spec.plan.geometry.rows_per_image
    head, x = (a.reshape(rows, images, *a.shape[1:]) for a in (head, x))

    def some(index):
        some_head, some_x = (a[:, index].reshape(-1, *a.shape[2:]) for a in (head, x))
        scores = transformer.logits(some_head, some_x, step, sampling)
        with jax.named_scope("sample"):
            tokens, filtered = transformer.sample(scores, keys[index], sampling, spec.attention)
        if given is not None:
            tokens = given.replace(tokens, step.token_index, index)
        codes = codec.codes(tokens)
        if sampling.more_smooth:
            # what later scales see is a mixture of codes; the tokens stay those that were drawn
            book = codec.quantizer.codebook()
            mixed = sampling_lib.smooth_codes(filtered, keys[index], step.ratio, book)
            # a given token stands for its own code
            codes = mixed if given is None else given.choose(codes, mixed, step.token_index, index)
        kept = {"logits": scores.guided()} if spec.keep_logits else {}
        if given is not None:
            kept |= given.noted(scores)
        return {"tokens": tokens, "codes": codes, **kept}

    at_once = images_at_once(x.shape[2], transformer.config.logits_per_token)
    drawn = map_in_chunks(some, images, at_once)
    if given is None:
        return drawn
    # after the chunks: images that belong together may lie in two
    return given.settled(drawn, codec.codes, keys, step.token_index, sampling.greedy)
