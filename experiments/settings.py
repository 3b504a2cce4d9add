"""What a run does, resolved from flags before anything is compiled, and everything that can be
wrong with it."""

import dataclasses
import json
import pathlib
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from pallas_kernels import implementations
from varjax import checkpoint, generation
from varjax.cache.plan import CachePlan
from varjax.cache.planner import plan_cache
from varjax.errors import UserError
from varjax.generation import Model
from varjax.geometry import Geometry
from varjax.models import parameters, registry
from varjax.policies import Policy

ALL_CLASSES_UP_TO = (
    64  # without --labels and --num_images: every class once, or this many images for larger models
)
FEW_IMAGES = 16
MOST_IMAGES = 10**7
SMALLEST_TPU_BLOCK = 8


@dataclass(frozen=True)
class AbstractModel:
    """A model without weights: configurations and shapes. Enough to plan and to check every
    flag."""

    name: str
    transformer: Any
    codec: Any
    metadata: dict
    directory: pathlib.Path | None

    @property
    def geometry(self) -> Geometry:
        pipeline = registry.family(self.metadata["family"]).pipeline
        return pipeline(self.transformer, self.codec).geometry

    @property
    def num_classes(self) -> int:
        return self.transformer.config.num_classes


def abstract_model(name_or_directory: str | None) -> AbstractModel:
    """The embedded demo (None), a checkpoint folder, or a published name (no weights)."""
    if name_or_directory in registry.PRESETS and not pathlib.Path(name_or_directory).exists():
        preset = registry.preset(name_or_directory)
        family = registry.family(preset.family)
        parts = [
            parameters.abstract(lambda p=p, c=c: p.build(c))
            for p, c in ((family.transformer, preset.transformer), (family.codec, preset.codec))
        ]
        metadata = {"family": preset.family, "sampling": dict(preset.sampling)}
        return AbstractModel(name_or_directory, *parts, metadata, None)
    directory = (
        pathlib.Path(name_or_directory) if name_or_directory else checkpoint.demo_directory()
    )
    found = checkpoint.load_abstract(directory)
    name = directory.resolve().name if name_or_directory else "demo"
    return AbstractModel(name, found.transformer, found.codec, found.metadata, directory)


def choose_labels(labels: str | None, num_images: int | None, num_classes: int) -> np.ndarray:
    """int32 [N] from `--labels=3,7,7` or `--num_images=N` (over all classes in turn)."""
    if labels is not None and num_images is not None:
        raise UserError(
            "--labels and --num_images exclude each other: labels already say how many images "
            "there are"
        )
    if labels is not None:
        try:
            wanted = [int(part) for part in labels.split(",")]
        except ValueError:
            raise UserError(
                f"--labels={labels!r}: write class numbers separated by commas, for example 3,7,7"
            ) from None
        return generation.check_labels(wanted, num_classes)
    if num_images is None:
        num_images = num_classes if num_classes <= ALL_CLASSES_UP_TO else FEW_IMAGES
    if num_images < 1:
        raise UserError(f"--num_images={num_images}: at least 1")
    if num_images > MOST_IMAGES:
        raise UserError(f"--num_images={num_images}: at most {MOST_IMAGES}")
    return (np.arange(num_images) % num_classes).astype(np.int32)


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
    return (
        f"blocks    of {plan.block_size} slots are too small for the TPU kernels, so that the "
        f"reference runs there: --policy_args=block_size={SMALLEST_TPU_BLOCK} keeps the kernel"
    )


def read_given_tokens(
    path: str | None, num_images: int, geometry: Geometry, vocab_size: int
) -> np.ndarray | None:
    """int32 [N, L] of `--given_tokens=FILE.npz` (array `tokens`)."""
    if not path:
        return None
    try:
        with np.load(path, allow_pickle=False) as archive:
            tokens = archive["tokens"]
    except Exception as error:  # NumPy raises many kinds over damaged files
        raise UserError(
            f"--given_tokens={path}: cannot read array `tokens` of an .npz file: {error}"
        ) from None
    wanted = (num_images, geometry.schedule.total_tokens)
    if tokens.shape != wanted or not np.issubdtype(tokens.dtype, np.integer):
        raise UserError(
            f"--given_tokens={path}: tokens are {tokens.dtype} {tokens.shape}, needed are "
            f"integers {wanted}"
        )
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        raise UserError(
            f"--given_tokens={path}: tokens reach from {tokens.min()} to {tokens.max()}, "
            f"allowed is 0 to {vocab_size - 1}"
        )
    return tokens.astype(np.int32)


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
    loaded = generation.load(abstract.directory, dtype)
    return dataclasses.replace(loaded, name=abstract.name)


def full_plan(geometry: Geometry) -> tuple[Policy, CachePlan]:
    """The full cache, for comparisons."""
    policy = generation.resolve_policy("full")
    return policy, plan_cache(geometry, policy)


def fingerprint(description: dict) -> str:
    """Text that two runs share exactly if one may continue the other."""
    return json.dumps(description, sort_keys=True)
