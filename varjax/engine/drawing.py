"""What drawing scales and drawing tokens do differently: the cache's shape, the static side of the
program, its inputs. `Generator` and `experiments.aot` know one interface, `Drawing`, and `drawing`
chooses.

    ScaleDrawing    `engine.scales`: segments of scales, inputs by scale
    TokenDrawing    `engine.tokens`: layers always separate, no inputs but the condition
"""

from collections.abc import Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array

from varjax.cache.plan import CachePlan
from varjax.engine import cost, program, scales, tokens
from varjax.engine.segments import AUTO, Segment
from varjax.errors import UserError, show
from varjax.models import stacked
from varjax.models.transformer import Transformer
from varjax.parallel.plans import ShardedPlan, ShardedTokenPlan, layout
from varjax.parallel.split import MeshSpec
from varjax.sampling import Sampling
from varjax.sequence import TOKENS


class Drawing(Protocol):
    """How one kind of model draws a batch.

    spec: the static side, which `program.trace_codes` takes. layout: the plan divided over the
    devices. segments: of scales; none of tokens.
    """

    spec: scales.ProgramSpec | tokens.TokenSpec
    layout: ShardedPlan | ShardedTokenPlan
    segments: tuple[Segment, ...]

    def arrange(self, networks: Mapping[str, nnx.Module], how: str, platform: str) -> None:
        """Arrange the weights as the program takes them; the modules are changed."""
        ...

    def empty_state(self, batch_size: int, dtype, compute_dtype) -> Any:
        """An empty cache, of all devices side by side."""
        ...

    def shared_inputs(self, transformer: Transformer) -> tuple:
        """Host arrays that are the same for every batch."""
        ...

    def for_images(self, shared: tuple, image_index: np.ndarray) -> tuple:
        """`shared_inputs` for a batch of images: the program's inputs."""
        ...

    def given(self, array: np.ndarray, count: int | None) -> Any:
        """Tokens that replace the draw in the first `count` scales, or tokens (None: in all)."""
        ...

    def stored(self, state: Any) -> Any:
        """The arrays that hold K and V among those of a cache."""
        ...

    def attention_flops(self) -> dict[str, float]:
        """`cost.attention_flops`."""
        ...


def drawing(
    networks: Mapping[str, nnx.Module],
    plan: CachePlan,
    sampling: Sampling,
    *,
    batch_size: int,
    segments: int | str,
    layers: str,
    attention: str | None,
    mesh: MeshSpec,
    platform: str,
    **options: bool,
) -> Drawing:
    """The strategy for the model of a plan. options: keep_logits, unroll.

    Raises:
      UserError: segments or sampling that do not fit, or a plan for another number of rows.
    """
    config = networks["transformer"].config
    if plan.geometry.kind == TOKENS:
        check_cut(segments, layers)
        return TokenDrawing(config, layout(plan, mesh), sampling, attention, **options)
    rows = plan.geometry.rows_per_image * batch_size // mesh.data or 1
    cuts = program.plan_segments(networks, plan.geometry.schedule, segments, rows, platform)
    spec = scales.ProgramSpec.of(plan, cuts, sampling, config, attention=attention, **options)
    return ScaleDrawing(spec, layout(plan, mesh))


class ScaleDrawing:
    """Scale by scale."""

    def __init__(self, spec: scales.ProgramSpec, layout: ShardedPlan):
        self.spec, self.layout = spec, layout

    @property
    def segments(self) -> tuple[Segment, ...]:
        return self.spec.segments

    def arrange(self, networks, how, platform):
        program.arrange_layers(networks, how, platform)

    def empty_state(self, batch_size, dtype, compute_dtype):
        return self.layout.empty_state(batch_size, dtype, compute_dtype)

    def shared_inputs(self, transformer):
        return self.layout.shared_inputs(self.segments, transformer.resampling)

    def for_images(self, shared, image_index):
        return self.layout.for_images(shared, self.segments, image_index)

    def given(self, array, count):
        count = self.spec.schedule.num_scales if count is None else count
        return scales.GivenTokens(jnp.asarray(array), jnp.asarray(count, jnp.int32))

    def stored(self, state):
        return state.kv_pool, state.kv_scale

    def attention_flops(self):
        return cost.attention_flops(self.layout.plan, self.segments, self.spec.cache)


class TokenDrawing:
    """Token by token."""

    segments = ()

    def __init__(self, config, layout: ShardedTokenPlan, sampling, attention, **options):
        if options.pop("unroll", False):
            raise UserError("unroll=True: models that draw token by token have no scans of layers")
        self.plan, self.layout = layout.plan, layout
        one_slot = self.plan.sequence.condition < config.condition_tokens
        self.spec = tokens.TokenSpec.of(
            self.plan, sampling, config, attention, one_slot=one_slot, **options
        )

    def arrange(self, networks, how, platform):
        transformer = networks["transformer"]
        # parts of a matrix are multiplied as they lie
        turned = platform == "cpu" and self.layout.spec.model == 1
        stacked.separate(transformer.blocks, transformer.once, turned=turned)

    def empty_state(self, batch_size, dtype, compute_dtype):
        return self.layout.empty_state(batch_size, dtype, compute_dtype)

    def shared_inputs(self, transformer):
        return ()

    def for_images(self, shared, image_index):
        """Of every layer, what its policy wants to know for its decisions."""
        if self.plan.static_content:
            return ()
        found = self.plan.rule.inputs(self.plan.geometry, self.plan.allocation, image_index)
        return () if found is None else tuple(found)

    def given(self, array, count):
        count = self.plan.sequence.image_tokens if count is None else count
        return tokens.GivenImageTokens(jnp.asarray(array), jnp.asarray(count, jnp.int32))

    def stored(self, state) -> list[Array]:
        return jax.tree.leaves([(layer.pool, layer.scale) for layer in state])

    def attention_flops(self):
        return cost.token_attention_flops(self.plan)


def check_cut(segments: int | str, layers: str) -> None:
    """Raise `UserError` for what only models that draw scale by scale let one choose."""
    if segments != AUTO:
        raise UserError(
            f"segments={show(segments)}: models that draw token by token have no scales to cut: "
            f"give {AUTO!r}"
        )
    if layers == program.SCAN:
        raise UserError(
            "layers='scan': models that draw token by token run a body per layer, because a scan "
            "would copy every layer's weights for every token: give 'auto' or 'unroll'"
        )
