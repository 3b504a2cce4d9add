"""What drawing scales and drawing tokens do differently: the static side of the program, its
inputs, how weights are arranged. `Generator` and `experiments.aot` know one interface, `Drawing`;
`drawing` chooses.

    ScaleDrawing    `engine.scales`: segments of scales, inputs by scale
    TokenDrawing    `engine.tokens`: layers always separate, no inputs but the policy's own

What a plan can answer (an empty cache, its division over devices) is asked of the plan.
"""

from collections.abc import Mapping
from functools import singledispatch
from typing import Protocol, TypeVar

import jax
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec

from varjax.cache.plan import CachePlan
from varjax.cache.scale_plan import ScalePlan
from varjax.cache.stages import TokenPlan
from varjax.engine import cost, inputs, program
from varjax.engine.inputs import SegmentInputs
from varjax.engine.scales import ScaleSpec
from varjax.engine.segments import AUTO, Segment, plan_segments
from varjax.engine.tokens import TokenSpec
from varjax.errors import UserError, show
from varjax.models.transformer import Transformer
from varjax.nn import stacked
from varjax.parallel.split import AXES, MeshSpec
from varjax.sampling import Sampling
from varjax.schedule import Schedule
from varjax.sequence import TokenSequence

MODEL = AXES[1]
Inputs = TypeVar("Inputs", bound=tuple)


class Drawing(Protocol[Inputs]):
    """How one kind of model draws a batch.

    spec: the static side, which `program.trace_codes` takes.
    segments: how the scale loop is cut; nothing where tokens are drawn.
    """

    spec: ScaleSpec | TokenSpec
    segments: tuple[Segment, ...]

    def arrange(self, networks: Mapping[str, nnx.Module], how: str, platform: str) -> None:
        """Arrange the weights as the program takes them; the modules are changed."""
        ...

    def shared_inputs(self, transformer: Transformer) -> Inputs:
        """Host arrays that are the same for every batch."""
        ...

    def for_images(self, shared: Inputs, image_index: np.ndarray) -> Inputs:
        """Complete `shared_inputs` for a batch of images: the program's inputs."""
        ...

    def input_specs(self, inputs: Inputs) -> tuple:
        """Inputs with a `PartitionSpec` in place of every array."""
        ...

    def attention_flops(self) -> dict[str, float]:
        """`cost.attention_flops` of this program."""
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
    keep_logits: bool = False,
    unroll: bool = False,
) -> Drawing:
    """Return the strategy for the model of a plan.

    Raises:
      UserError: segments or sampling that do not fit, or a plan for another number of rows.
    """
    config = networks["transformer"].config
    check_cut(plan.geometry.schedule, segments, layers, unroll)
    if isinstance(plan, TokenPlan):
        one_slot = plan.sequence.condition < config.condition_tokens
        spec = TokenSpec.of(
            plan, sampling, config, attention, one_slot=one_slot, keep_logits=keep_logits
        )
        return TokenDrawing(spec, plan, mesh)
    rows = plan.geometry.rows_per_image * batch_size // mesh.data or 1
    cuts = program.plan_segments(networks, plan.geometry.schedule, segments, rows, platform)
    spec = ScaleSpec.of(
        plan, cuts, sampling, config, attention, keep_logits=keep_logits, unroll=unroll
    )
    return ScaleDrawing(spec, plan, mesh)


class ScaleDrawing:
    """Scale by scale."""

    def __init__(self, spec: ScaleSpec, plan: ScalePlan, mesh: MeshSpec):
        self.spec, self.plan, self.mesh = spec, plan, mesh

    @property
    def segments(self) -> tuple[Segment, ...]:
        return self.spec.segments

    def arrange(self, networks, how, platform):
        program.arrange_layers(networks, how, platform)

    def shared_inputs(self, transformer):
        groups = self.plan.divide(self.mesh.model)
        return inputs.shared_inputs(groups, self.segments, transformer.resampling)

    def for_images(self, shared, image_index):
        return inputs.for_images(shared, self.plan, self.segments, image_index)

    def input_specs(self, inputs):
        # tables of groups of heads lie side by side along the third axis
        heads = PartitionSpec(None, None, MODEL) if self.mesh.model > 1 else PartitionSpec()
        return tuple(
            SegmentInputs(
                step=jax.tree.map(lambda _: PartitionSpec(), segment.step),
                layers=jax.tree.map(lambda _: heads, segment.layers),
            )
            for segment in inputs
        )

    def attention_flops(self):
        return cost.attention_flops(self.plan, self.segments, self.spec.cache)


class TokenDrawing:
    """Token by token."""

    segments = ()

    def __init__(self, spec: TokenSpec, plan: TokenPlan, mesh: MeshSpec):
        self.spec, self.plan, self.mesh = spec, plan, mesh

    def arrange(self, networks, how, platform):
        transformer = networks["transformer"]
        # weights that are divided over devices are multiplied as they lie
        turned = platform == "cpu" and self.mesh.model == 1
        stacked.separate(transformer.blocks, transformer.once, turned=turned)

    def shared_inputs(self, transformer):
        return ()

    def for_images(self, shared, image_index):
        """For each layer, what its policy knows beforehand."""
        found = self.plan.policy_inputs(image_index)
        return () if found is None else tuple(found)

    def input_specs(self, inputs):
        return jax.tree.map(lambda _: PartitionSpec(), inputs)

    def attention_flops(self):
        return cost.token_attention_flops(self.plan)


@singledispatch
def check_cut(
    order: Schedule | TokenSequence, segments: int | str, layers: str, unroll: bool = False
) -> None:
    """Raise `UserError` for what a model that draws in this order lets nobody choose."""
    raise NotImplementedError(type(order))


@check_cut.register
def _(order: Schedule, segments: int | str, layers: str, unroll: bool = False) -> None:
    plan_segments(order, segments)


@check_cut.register
def _(order: TokenSequence, segments: int | str, layers: str, unroll: bool = False) -> None:
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
    if unroll:
        raise UserError("unroll=True: models that draw token by token have no scans of layers")
