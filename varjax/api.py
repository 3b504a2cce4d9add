"""From labels or text to images: loading, planning, compiling once, running batch after batch."""

import gc
import numbers
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from varjax import calibration as calibrations
from varjax.cache.geometry import Geometry
from varjax.cache.plan import CachePlan
from varjax.cache.planner import plan_cache
from varjax.calibration import Calibration
from varjax.conditions import Labels
from varjax.engine.generator import MATMUL_PRECISIONS, Generator, Timing, storage_dtype
from varjax.errors import UserError, choose
from varjax.models import registry
from varjax.models.registry import Family
from varjax.policies import POLICIES, Policy, get_policy
from varjax.sampling import Sampling
from varjax.storage import checkpoint
from varjax.text.encoder import FOLDER, TextEncoder
from varjax.text.features import TextFeatures


@dataclass(frozen=True)
class Model:
    """A model ready to generate: the pipeline (arrays) and what its checkpoint says about it."""

    pipeline: Any
    metadata: dict
    name: str
    directory: str | None = None

    @property
    def geometry(self) -> Geometry:
        return self.pipeline.geometry

    @property
    def dtype(self):
        return self.pipeline.transformer.dtype

    @property
    def family(self) -> Family:
        return registry.family(self.metadata["family"])

    @property
    def num_classes(self) -> int:
        """Classes of a class-conditional model."""
        return self.pipeline.transformer.config.num_classes

    @property
    def class_names(self) -> list[str] | None:
        return self.metadata.get("class_names")

    @property
    def recommended_sampling(self) -> dict:
        return dict(self.metadata.get("sampling", {}))


def default_dtype() -> str:
    """bfloat16 on accelerators; float32 on CPU, where bfloat16 is not faster."""
    return "float32" if jax.default_backend() == "cpu" else "bfloat16"


DTYPES = ("float32", "bfloat16")
KV_DTYPES = ("bfloat16", "float32", "int8")


def load(
    path=None,
    dtype: str | None = None,
    *,
    aspect: float | str | None = None,
    size: str | None = None,
) -> Model:
    """Load a checkpoint folder; without a path the embedded demo (64-pixel fruit, 44 classes).

    Args:
      path: folder written by `python -m ported_weights` or `experiments.train`.
      dtype: "float32" or "bfloat16" for the transformer; None takes float32 on CPU, bfloat16
        elsewhere. The codec is float32.
      aspect, size: height / width and pixel count of the pictures, as 1.5 and "0.25M", for models
        that have templates (Infinity); None keeps the checkpoint's.

    Raises:
      UserError: there is no usable checkpoint there, or no such template.
    """
    directory = path or checkpoint.demo_directory()
    if str(directory) in registry.PRESETS and not Path(directory).exists():
        raise UserError(
            f"{directory} is the name of a published model, whose weights are not part of "
            f"varjax: convert them with "
            f"`python -m ported_weights --model={directory} --source=... --tokenizer_source=... "
            f"--out=DIR` and give DIR"
        )
    dtype = choose("dtype", str(dtype or default_dtype()), DTYPES)
    found = checkpoint.load(directory, dtype, "float32")
    family = registry.family(found.family)
    transformer = with_template(family, found.transformer, aspect, size)
    pipeline = family.pipeline(transformer, found.codec)
    name = "demo" if path is None else Path(directory).name
    return Model(pipeline, found.metadata, name, str(directory))


def with_template(family: Family, transformer, aspect, size):
    """A transformer for pictures of another shape (`Family.with_template`)."""
    return with_config(transformer, family.with_template(transformer.config, aspect, size))


def with_config(transformer, config):
    """The same weights, shared and not copied, under another configuration."""
    if config == transformer.config:
        return transformer
    other = nnx.merge(*nnx.split(transformer))
    other.config = config
    return other


def resolve_policy(policy: str | Policy, budget: float | None = None, **arguments) -> Policy:
    """A policy object from a name and arguments; objects pass through."""
    if not isinstance(policy, str | Policy):
        raise UserError(f"policy={policy!r:.60}: give a name, one of {', '.join(POLICIES)}")
    if budget is not None and (isinstance(budget, bool) or not isinstance(budget, numbers.Real)):
        raise UserError(f"budget={budget!r:.60} is not a number")
    if isinstance(policy, Policy):
        if budget is not None or arguments:
            raise UserError(
                "give budget and arguments to the policy object itself, or name the policy as text"
            )
        return policy
    return get_policy(policy, budget, {k: str(v) for k, v in arguments.items()})


def plan(
    model, policy: str | Policy = "full", budget: float | None = None, calibration=None, **arguments
) -> CachePlan:
    """The cache plan of a policy on a model (`Model`, or a `Geometry`). calibration: as in
    `generate`."""
    geometry = model if isinstance(model, Geometry) else model.geometry
    chosen = resolve_policy(policy, budget, **arguments)
    return plan_cache(geometry, chosen, calibrations.find(chosen, model, calibration))


def _check_condition(model: Model, **given) -> None:
    """Raise `UserError` unless exactly what the model's images are made of is given."""
    named = [name for name, value in given.items() if value is not None]
    wanted = {"labels": ("labels",), "text": ("prompts", "text_features")}[model.family.condition]
    if len(named) != 1 or named[0] not in wanted:
        raise UserError(
            f"{', '.join(named) or 'nothing'} given: {model.name} ({model.family.name}) draws from "
            f"{' or '.join(wanted)}: give exactly that"
        )
    labels, prompts, features = (given[n] for n in ("labels", "prompts", "text_features"))
    if labels is not None and not hasattr(labels, "__len__"):
        raise UserError(f"labels={labels!r:.60}: give a list of class numbers, one for each image")
    if prompts is not None:
        texts = isinstance(prompts, (list, tuple)) and all(isinstance(p, str) for p in prompts)
        if not texts or not prompts:
            raise UserError(f"prompts={prompts!r:.60}: give a list of texts, one for each image")
    if features is not None and not isinstance(features, TextFeatures):
        raise UserError(
            f"text_features={features!r:.60}: give TextFeatures, as varjax.text.features.load reads"
        )


def read_prompts(model: Model, prompts: Sequence[str]) -> TextFeatures:
    """Features of prompts by the text encoder of the model's checkpoint, which is on the device
    only while this runs. `UserError` if there is none, or it is another model's."""
    config = model.pipeline.transformer.config
    reader = TextEncoder.load(Path(model.directory or "") / FOLDER, default_dtype())
    features = reader.encode(prompts, max_length=config.text_maxlen)
    del reader
    gc.collect()  # modules refer to themselves, and their arrays should go now
    return features.fitted(config.text_channels, config.text_maxlen)


def generate(
    model: Model,
    labels: Sequence[int] | None = None,
    policy: str | Policy = "full",
    budget: float | None = None,
    *,
    prompts: Sequence[str] | None = None,
    text_features: TextFeatures | None = None,
    seed: int = 0,
    batch_size: int | None = None,
    policy_args: dict | None = None,
    cfg: float | Sequence[float] | None = None,
    tau: float | Sequence[float] | None = None,
    cfg_insertion_layer: Sequence[int] | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    greedy: bool | None = None,
    more_smooth: bool | None = None,
    segments: int | str = "auto",
    calibration: str | os.PathLike | Calibration | None = None,
    kv_dtype: str | None = None,
) -> np.ndarray:
    """Generate one image per label or prompt: float32 [N, H, W, 3], RGB in [0, 1].

    Args:
      model: from `load`.
      labels: class numbers, for class-conditional models.
      prompts: texts, for text-conditional models whose checkpoint holds the text encoder; it is
        loaded, used and freed before anything is compiled for the model.
      text_features: the same computed beforehand (`varjax.text`).
      policy, budget, policy_args: how the KV cache is compressed; see `varjax.policies.POLICIES`.
      seed: image i depends on (seed, i, label or prompt) only, never on the batch size.
      batch_size: images per program call; None takes all, at most 8.
      cfg, tau, cfg_insertion_layer, top_k, top_p, greedy, more_smooth: see `Sampling`; None takes
        the checkpoint's recommendation.
      segments: how the scale loop is cut (`varjax.segments`); results do not depend on it.
      calibration: measurements of this model, or the file that `experiments.calibrate` wrote; None
        takes `calibration.json` of the checkpoint folder, if it is there.
      kv_dtype: type of the cache; None takes that of the weights, "int8" has a scale per token.

    Raises:
      UserError: for anything that cannot work, before compiling.
    """
    _check_condition(model, labels=labels, prompts=prompts, text_features=text_features)
    count = next(len(c) for c in (labels, prompts, text_features) if c is not None)
    if batch_size is not None and batch_size < 1:
        raise UserError(f"batch_size={batch_size}: at least 1")
    chosen = resolve_policy(policy, budget, **(policy_args or {}))
    chosen.check_images(count)
    sampling = Sampling.recommended(
        *(model.recommended_sampling,),
        cfg=cfg,
        tau=tau,
        cfg_insertion_layer=cfg_insertion_layer,
        top_k=top_k,
        top_p=top_p,
        greedy=greedy,
        more_smooth=more_smooth,
    )
    model.pipeline.transformer.config.check_sampling(sampling)
    if labels is not None:
        condition = Labels.of(labels, model.num_classes, model.class_names)
    generator = Generator(
        model,
        chosen,
        sampling=sampling,
        batch_size=min(count, batch_size or 8),
        segments=segments,
        calibration=calibrations.find(chosen, model, calibration, sampling.guidance),
        kv_dtype=None if kv_dtype is None else choose("kv_dtype", kv_dtype, KV_DTYPES),
    )
    if prompts is not None:
        condition = read_prompts(model, prompts)
    elif text_features is not None:
        config = model.pipeline.transformer.config
        condition = text_features.fitted(config.text_channels, config.text_maxlen)
    batches = generator.batches(condition, seed=seed)
    return np.concatenate([results["images"] for _, results in batches])


__all__ = [
    "KV_DTYPES",
    "MATMUL_PRECISIONS",
    "POLICIES",
    "Generator",
    "Model",
    "Timing",
    "default_dtype",
    "generate",
    "load",
    "plan",
    "storage_dtype",
]
