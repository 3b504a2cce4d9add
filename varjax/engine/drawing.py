"""The differences between drawing scales and drawing tokens: the static side of the program, its
inputs, how weights are arranged. `Generator` and `experiments.aot` know one interface, `Drawing`;
`drawing` chooses.

    ScaleDrawing    `engine.scales`: segments of scales, inputs by scale
    TokenDrawing    `engine.tokens`: layers always separate, no inputs but the policy's own

The plan itself answers what concerns the cache alone: an empty one, its division over devices.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import jax
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array

from varjax.cache.plan import CachePlan
from varjax.cache.scale_plan import ScalePlan
from varjax.cache.stages import TokenPlan
from varjax.engine import cost, inputs, program
from varjax.engine.inputs import SegmentInputs
from varjax.engine.scales import ScaleSpec
from varjax.engine.segments import AUTO, Segment, plan_segments
from varjax.engine.tokens import TokenSpec
from varjax.errors import UserError, show
from varjax.logical_axes import HEADS
from varjax.models.transformer import Transformer
from varjax.nn import stacked
from varjax.parallel.split import MeshSpec
from varjax.sampling import Sampling
from varjax.schedule import Schedule
from varjax.sequence import TokenSequence

Inputs = TypeVar("Inputs", bound=tuple)


@dataclass(frozen=True, kw_only=True)
class BuildOptions:
    """A user's choices of how the program is built; results do not depend on them.

    segments: how the scale loop is cut (`segments.plan_segments`).
    layers: how the weights of layers lie (`program.arrange_layers`).
    attention: implementation of the kernels; None takes what the platform has.
    keep_logits: also return guided logits.
    keep_contents: also return what the cache holds after every scale (`Generator`).
    unroll: debug option; unrolls the scans over scales and layers.
    watch: called on the host while images are drawn (`Generator`).
    """

    segments: int | str = AUTO
    layers: str = program.AUTO
    attention: str | None = None
    keep_logits: bool = False
    keep_contents: bool = False
    unroll: bool = False
    watch: Callable[[Array, Array], None] | None = None


class Drawing(Protocol[Inputs]):
    """The way in which one kind of model draws a batch.

    plan: of the cache.
    spec: the static side of the program, which `program.trace_codes` takes.
    segments: how the scale loop is cut; empty where tokens are drawn.
    """

    plan: CachePlan
    spec: ScaleSpec | TokenSpec
    segments: tuple[Segment, ...]

    def arrange(self, networks: Mapping[str, nnx.Module], how: str, platform: str) -> None:
        """Arranges the weights as the program takes them; the modules are changed."""
        ...

    def shared_inputs(self, transformer: Transformer) -> Inputs:
        """Host arrays that are the same for every batch."""
        ...

    def for_images(self, shared: Inputs, image_index: np.ndarray) -> Inputs:
        """The program's inputs for a batch of images, from `shared_inputs`."""
        ...

    def input_names(self, inputs: Inputs) -> tuple:
        """The inputs with names of their axes (`varjax.logical_axes`) in place of every array."""
        ...

    def attention_flops(self) -> dict[str, float]:
        """`cost.attention_flops` of this program."""
        ...


def drawing(
    networks: Mapping[str, nnx.Module],
    plan: CachePlan,
    sampling: Sampling,
    options: BuildOptions,
    *,
    batch_size: int,
    mesh: MeshSpec,
    platform: str,
) -> Drawing:
    """The strategy for the model of a plan. batch_size: images on the whole mesh.

    Raises:
      UserError: segments or sampling that do not fit, or a plan for another number of rows.
    """
    config = networks["transformer"].config
    check_cut(plan.geometry.schedule, options.segments, options.layers, options.unroll)
    if isinstance(plan, TokenPlan):
        # the plan was made for fewer slots than the condition has tokens: one stands for all
        one_slot = plan.sequence.condition < config.condition_tokens
        spec = TokenSpec.of(
            plan,
            sampling,
            config,
            options.attention,
            one_slot=one_slot,
            keep_logits=options.keep_logits,
        )
        spec = replace(spec, watch=options.watch)
        return TokenDrawing(spec, plan, mesh)
    # The cut depends on the rows that one device multiplies: few rows make padding free.
    rows = plan.geometry.rows_per_image * batch_size // mesh.data or 1
    schedule = plan.geometry.schedule
    cuts = program.plan_segments(networks, schedule, options.segments, rows, platform)
    spec = ScaleSpec.of(
        plan,
        cuts,
        sampling,
        config,
        options.attention,
        keep_logits=options.keep_logits,
        unroll=options.unroll,
    )
    spec = replace(spec, watch=options.watch, keep_contents=options.keep_contents)
    return ScaleDrawing(spec, plan, mesh)


class ScaleDrawing:
    """`Drawing` of models that draw scale by scale."""

    def __init__(self, spec: ScaleSpec, plan: ScalePlan, mesh: MeshSpec):
        self.spec, self.plan, self.mesh = spec, plan, mesh

    @property
    def segments(self) -> tuple[Segment, ...]:
        return self.spec.segments

    def arrange(self, networks, how, platform):
        program.arrange_layers(networks, how, platform)

    def shared_inputs(self, transformer):
        # every device along `model` has a pool of its own, and so tables of its own
        groups = self.plan.divide(self.mesh.model)
        return inputs.shared_inputs(groups, self.segments, transformer.resampling)

    def for_images(self, shared, image_index):
        # only what the policy wants to know about images is new for a batch
        return inputs.for_images(shared, self.plan, self.segments, image_index)

    def input_names(self, inputs):
        # tables of groups of heads lie side by side along the third axis; all devices need all of
        # what describes the scale itself
        heads = PartitionSpec(None, None, HEADS) if self.mesh.model > 1 else PartitionSpec()
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
    """`Drawing` of models that draw token by token."""

    segments = ()

    def __init__(self, spec: TokenSpec, plan: TokenPlan, mesh: MeshSpec):
        self.spec, self.plan, self.mesh = spec, plan, mesh

    def arrange(self, networks, how, platform):
        transformer = networks["transformer"]
        # On a CPU the right operand of a product is rearranged in every call. Turned matrices are
        # the left one, which pays for the few rows of a token (docs/lab/cpu.md). Weights that
        # are divided over devices are multiplied as they lie.
        turned = platform == "cpu" and self.mesh.model == 1
        stacked.separate(transformer.blocks, transformer.once, turned=turned)

    def shared_inputs(self, transformer):
        # no tables: every layer has a cache of its own, and its slots follow from a token's number
        return ()

    def for_images(self, shared, image_index):
        """Return, for each layer, what its policy knows beforehand."""
        found = self.plan.policy_inputs(image_index)
        return () if found is None else tuple(found)

    def input_names(self, inputs):
        # the same for all images: `parallel.plans.check_plan` refuses inputs that depend on them
        # heads are divided along `model`: inputs that differ by head have to be, too
        axis = self.plan.rule.inputs_heads if inputs and self.mesh.model > 1 else None
        # in front of what `select` sees lies an axis of stages
        spec = PartitionSpec() if axis is None else PartitionSpec(*(None,) * (1 + axis), HEADS)
        return jax.tree.map(lambda _: spec, inputs)

    def attention_flops(self):
        return cost.token_attention_flops(self.plan)


def check_cut(
    order: Schedule | TokenSequence, segments: int | str, layers: str, unroll: bool = False
) -> None:
    """Raises `UserError` for options that make no sense for a model that draws in this order."""
    if isinstance(order, Schedule):
        # raises for what does not fit; the cut that is used comes later, when the rows are known
        plan_segments(order, segments)
        return
    if segments != AUTO:
        raise UserError(
            f"segments={show(segments)}: models that draw token by token have no scales to cut: "
            f"give {AUTO!r}"
        )
    # given "auto" or "unroll", layers are separate in any case (`TokenDrawing.arrange`)
    if layers == program.SCAN:
        raise UserError(
            "layers='scan': models that draw token by token run a body per layer, because a scan "
            "would copy every layer's weights for every token: give 'auto' or 'unroll'"
        )
    if unroll:
        raise UserError("unroll=True: models that draw token by token have no scans of layers")
