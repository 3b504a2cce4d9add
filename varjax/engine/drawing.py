"""The choice between drawing scales (`engine.scales`) and drawing tokens (`engine.tokens`).

Both static sides of a program have one interface, which `Generator` and `experiments.aot` know: how
weights are arranged, the program's inputs and the names of their axes. The plan itself answers what
concerns the cache alone: an empty one, its division over devices.
"""

from collections.abc import Mapping

from flax import nnx

from varjax.cache.plan import CachePlan
from varjax.cache.stages import TokenPlan
from varjax.cache.step import cache_step
from varjax.engine import program
from varjax.engine.program import BuildOptions
from varjax.engine.scales import ScaleSpec
from varjax.engine.segments import AUTO, plan_segments
from varjax.engine.tokens import TokenSpec, token_step
from varjax.errors import UserError, show
from varjax.parallel.split import MeshSpec
from varjax.sampling import Sampling
from varjax.schedule import Schedule
from varjax.sequence import TokenSequence


def drawing(
    networks: Mapping[str, nnx.Module],
    plan: CachePlan,
    sampling: Sampling,
    options: BuildOptions,
    *,
    batch_size: int,
    mesh: MeshSpec,
    platform: str,
) -> ScaleSpec | TokenSpec:
    """The static side of the program for the model of a plan. `UserError` for segments or sampling
    that do not fit, or a plan for another number of rows. batch_size: images on the whole mesh."""
    config, schedule = networks["transformer"].config, plan.geometry.schedule
    check_cut(schedule, options.segments, options.layers)
    # guidance runs an unconditional row beside the conditional one, with a cache of its own
    rows, planned = 1 + config.is_guided(config.check_sampling(sampling)), plan.geometry
    if planned.rows_per_image != rows:
        raise UserError(
            f"the cache plan is for {planned.rows_per_image} rows per image, guidance "
            f"{sampling.guidance} takes {rows}: plan with the geometry of this sampling "
            f"(`Model.geometry_for`)"
        )
    if isinstance(plan, TokenPlan):
        numbers = range(plan.geometry.num_layers)
        layers = tuple(token_step(plan, i, options.attention) for i in numbers)
        return TokenSpec(plan, layers, sampling, options, mesh)
    # The cut depends on the rows that one device multiplies: few rows make padding free.
    rows = plan.geometry.rows_per_image * batch_size // mesh.data or 1
    cuts = program.plan_segments(networks, schedule, options.segments, rows, platform)
    cache = tuple(cache_step(plan, cut.scales, options.attention) for cut in cuts)
    return ScaleSpec(plan, cuts, cache, sampling, options, mesh)


def check_cut(order: Schedule | TokenSequence, segments: int | str, layers: str) -> None:
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
    # given "auto" or "unroll", layers are separate in any case (`TokenSpec.arrange`)
    if layers == program.SCAN:
        raise UserError(
            "layers='scan': models that draw token by token run a body per layer, because a scan "
            "would copy every layer's weights for every token: give 'auto' or 'unroll'"
        )
