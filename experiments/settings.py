"""What a run does, resolved from flags before anything is compiled, and everything that can be
wrong with it."""

import dataclasses
import json
import pathlib
from dataclasses import dataclass
from typing import Any

import jax
from varjax.models.pipeline import Pipeline

from pallas_kernels import implementations
from varjax import api
from varjax.api import Model
from varjax.cache.geometry import Geometry
from varjax.cache.plan import CachePlan
from varjax.cache.planner import plan_cache
from varjax.errors import UserError
from varjax.models import registry
from varjax.models.registry import Family
from varjax.policies import Policy
from varjax.storage import checkpoint

SMALLEST_TPU_BLOCK = 8


@dataclass(frozen=True)
class AbstractModel:
    """A model without weights: configurations and shapes. Enough to plan and to check every flag.

    aspect, size: what was asked for; None: as the checkpoint, or the published preset, has it.
    """

    name: str
    transformer: Any
    codec: Any
    metadata: dict
    directory: pathlib.Path | None
    aspect: str | None = None
    size: str | None = None

    @property
    def family(self) -> Family:
        return registry.family(self.metadata["family"])

    @property
    def pipeline(self) -> Pipeline:
        """As the engine sees it; its arrays are shapes."""
        return self.family.pipeline(self.transformer, self.codec)

    @property
    def geometry(self) -> Geometry:
        return self.pipeline.geometry

    @property
    def num_classes(self) -> int:
        return self.transformer.config.num_classes


def abstract_model(
    name_or_directory: str | None, aspect: str | None = None, size: str | None = None
) -> AbstractModel:
    """The embedded demo (None), a checkpoint folder, or a published name (no weights).

    aspect, size: of the pictures, for families that have templates.
    """
    if name_or_directory in registry.PRESETS and not pathlib.Path(name_or_directory).exists():
        preset = registry.preset(name_or_directory)
        family = registry.family(preset.family)
        configs = dict(preset.configs)
        configs["transformer"] = family.with_template(configs["transformer"], aspect, size)
        parts = (part.abstract(configs[name]) for name, part in family.tree.items())
        metadata = {"family": preset.family, "sampling": dict(preset.sampling)}
        return AbstractModel(name_or_directory, *parts, metadata, None, aspect, size)
    directory = (
        pathlib.Path(name_or_directory) if name_or_directory else checkpoint.demo_directory()
    )
    found, metadata = checkpoint.describe(directory)
    name = directory.resolve().name if name_or_directory else "demo"
    family = registry.family(metadata["family"])
    transformer = api.with_template(family, found["transformer"], aspect, size)
    parts = (transformer, found["codec"], metadata, directory)
    return AbstractModel(name, *parts, aspect, size)


def check_seed(seed: int) -> int:
    """What the random numbers may start from."""
    if not 0 <= seed < 2**31:
        raise UserError(f"--seed={seed}: choose 0 to {2**31 - 1}")
    return seed


def check_attention(name: str) -> str | None:
    """The implementation of `--attention`; None for auto."""
    if name == "auto":
        return None
    reason = implementations.why_not_here(name)
    if reason:
        raise UserError(
            f"--attention={reason}: choose auto, reference or {name}-interpret (the kernel step by "
            f"step, slow, for checking)"
        )
    return name


def runs_kernels(attention: str | None, plan: CachePlan) -> bool:
    """Whether attention of this plan runs in a kernel of this machine, which needs less memory."""
    name = attention or implementations.preferred(jax.default_backend())
    if name not in implementations.PLATFORMS:
        return False
    return attention is not None or not block_remark(plan, name)


def block_remark(plan: CachePlan, name: str) -> str:
    """A line about blocks that the TPU kernels do not take; empty if they do, or for others."""
    if name != "tpu" or plan.block_size >= SMALLEST_TPU_BLOCK:
        return ""
    argument = f"block_size={SMALLEST_TPU_BLOCK}"
    if plan.peak_live_fraction == 1:  # nothing may be dropped for larger blocks: they cost memory
        argument = "accounting=tokens"
    return (
        f"blocks    of {plan.block_size} slots are too small for the TPU kernels, so that the "
        f"reference runs there: --policy_args={argument} keeps the kernel"
    )


def policy_arguments(policy: Policy) -> dict:
    """The policy's arguments except the budget."""
    names = (f.name for f in dataclasses.fields(policy) if f.name[0] != "_")
    return {name: getattr(policy, name) for name in names if name != "budget"}


def require_weights(model: AbstractModel, hint: str = "") -> None:
    """Refuse a published name where a checkpoint is needed. hint: another way out."""
    if model.directory is None:
        raise UserError(
            f"{model.name} is a published model without weights here: {hint}convert its weights "
            f"with `python -m ported_weights --model={model.name} ...` and give the folder"
        )


def load_model(abstract: AbstractModel, dtype: str) -> Model:
    """The weights of a checked checkpoint."""
    shape = {"aspect": abstract.aspect, "size": abstract.size}
    loaded = api.load(abstract.directory, dtype, **shape)
    return dataclasses.replace(loaded, name=abstract.name)


def full_plan(geometry: Geometry) -> tuple[Policy, CachePlan]:
    """The full cache, for comparisons."""
    policy = api.resolve_policy("full")
    return policy, plan_cache(geometry, policy)


def fingerprint(description: dict) -> str:
    """Text that two runs share exactly if one may continue the other."""
    return json.dumps(description, sort_keys=True)
