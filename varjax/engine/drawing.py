"""The differences between drawing scales and drawing tokens: the static side of the program, its
inputs, how weights are arranged. `Generator` and `experiments.aot` know one interface, `Drawing`;
`drawing` chooses.

    ScaleDrawing    `engine.scales`: segments of scales, inputs by scale
    TokenDrawing    `engine.tokens`: layers always separate, no inputs but the policy's own

The plan itself answers what concerns the cache alone: an empty one, its division over devices.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec

from varjax.cache.plan import CachePlan
from varjax.cache.stages import TokenPlan
from varjax.engine import cost, inputs, program
from varjax.engine.inputs import SegmentInputs
from varjax.engine.program import BuildOptions
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


@dataclass(frozen=True, eq=False)
class Drawing:
    """The way in which one kind of model draws a batch.

    spec: the static side of the program, which `program.trace_codes` takes.
    plan: of the cache.
    """

    spec: ScaleSpec | TokenSpec
    plan: CachePlan
    mesh: MeshSpec

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The cut of the scale loop; empty where tokens are drawn."""
        return ()

    def arrange(self, networks: Mapping[str, nnx.Module], how: str, platform: str) -> None:
        """Arranges the weights as the program takes them; the modules are changed."""
        raise NotImplementedError

    def shared_inputs(self, transformer: Transformer) -> tuple:
        """Host arrays that are the same for every batch."""
        return ()

    def for_images(self, shared: tuple, image_index: np.ndarray) -> tuple:
        """The program's inputs for a batch of images, from `shared_inputs`."""
        raise NotImplementedError

    def input_names(self, inputs: tuple) -> tuple:
        """The inputs with names of their axes (`varjax.logical_axes`) in place of every array."""
        raise NotImplementedError

    def attention_flops(self) -> dict[str, float]:
        """`cost.attention_flops` of this program."""
        raise NotImplementedError


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
        spec = TokenSpec.of(plan, sampling, config, options, one_slot=one_slot)
        return TokenDrawing(spec, plan, mesh)
    # The cut depends on the rows that one device multiplies: few rows make padding free.
    rows = plan.geometry.rows_per_image * batch_size // mesh.data or 1
    schedule = plan.geometry.schedule
    cuts = program.plan_segments(networks, schedule, options.segments, rows, platform)
    spec = ScaleSpec.of(plan, cuts, sampling, config, options)
    return ScaleDrawing(spec, plan, mesh)


class ScaleDrawing(Drawing):
    """`Drawing` of models that draw scale by scale."""

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


class TokenDrawing(Drawing):
    """`Drawing` of models that draw token by token: no tables are shared, because every layer has a
    cache of its own, whose slots follow from a token's number."""

    def arrange(self, networks, how, platform):
        transformer = networks["transformer"]
        # On a CPU the right operand of a product is rearranged in every call. Turned matrices are
        # the left one, which pays for the few rows of a token (docs/lab/cpu.md). Weights that
        # are divided over devices are multiplied as they lie.
        turned = platform == "cpu" and self.mesh.model == 1
        stacked.separate(transformer.blocks, transformer.once, turned=turned)

    def for_images(self, shared, image_index):
        # for each layer what its policy knows beforehand
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
