"""From labels or text to images in one call, and the cache plan of a policy."""

import os
from collections.abc import Callable, Sequence

import numpy as np

from varjax import conditions
from varjax.calibration import files as calibration_lib
from varjax.calibration.data import Calibration
from varjax.core import arguments
from varjax.core.allocation import Geometry
from varjax.core.plan import CachePlan
from varjax.core.planner import plan_cache
from varjax.core.sampling import Sampling, check_seed
from varjax.generation.build import Build
from varjax.generation.generator import Generator
from varjax.generation.mesh import MeshSpec
from varjax.models.model import Model, check_model
from varjax.policies import Policy
from varjax.policies.registry import resolve_policy
from varjax.text.features import TextFeatures
from varjax.text.prompt_ids import PromptIds

USUAL_BATCH = 8  # images per call of the program, unless told otherwise


def plan(
    model: Model | Geometry,
    policy: str | Policy = "full",
    budget: float | None = None,
    *,
    calibration: str | os.PathLike | Calibration | None = None,
    sampling: Sampling | None = None,
    mesh: MeshSpec | None = None,
) -> CachePlan:
    """Plans the cache of a policy on a model: everything that is decided before compiling.

    Args:
      model: from `load` or `describe`, or the geometry of one.
      policy, budget, calibration: as in `generate`.
      sampling: how tokens will be drawn, because guidance decides the rows per image; None: as the
        checkpoint recommends.
      mesh: devices that will share the cache: where they divide heads, each keeps the budget.

    Raises:
      UserError: the policy, its budget or its calibration cannot work on this model.
    """
    words = "a model, from varjax.load or varjax.describe, or the geometry of one"
    arguments.instance("model", model, (Model, Geometry), words)
    chosen = resolve_policy(policy, budget)
    geometry, guidance = model, None
    if isinstance(model, Model):
        geometry = model.geometry_for(model.resolve_sampling(sampling))
        guidance = None if sampling is None else sampling.guidance
    found = calibration_lib.find(chosen, model, calibration, guidance)
    words = "a MeshSpec of varjax.generation.mesh"
    groups = 1 if mesh is None else arguments.instance("mesh", mesh, MeshSpec, words).model
    return plan_cache(geometry, chosen, found, groups=groups)


def generate(
    model: Model,
    labels: Sequence[int | str] | None = None,
    policy: str | Policy = "full",
    budget: float | None = None,
    *,
    prompts: Sequence[str] | None = None,
    text_features: TextFeatures | None = None,
    prompt_ids: PromptIds | Sequence[Sequence[int]] | None = None,
    seed: int = 0,
    batch_size: int | None = None,
    sampling: Sampling | None = None,
    calibration: str | os.PathLike | Calibration | None = None,
    kv_dtype: str | None = None,
    decode_dtype: str = "auto",
    progress: bool | Callable[[int, int], None] = False,
    as_pil: bool = False,
) -> np.ndarray | list:
    """Generates one image per label or prompt: float32 [N, H, W, 3], RGB in [0, 1].

    Every call traces a program, and compiles it unless it was compiled before on this machine
    (`varjax.generation.compilation_cache`); to call often, make a `Generator` once.

    Args:
      model: from `load`.
      labels: class numbers or names, for class-conditional models.
      prompts: texts, for text-conditional models whose checkpoint holds the text encoder, which is
        loaded, used and freed before anything is compiled for the model, or the tokenizer.
      text_features: what the text encoder makes of prompts, computed beforehand (`varjax.text`).
      prompt_ids: token ids of prompts, one list per image, for models that read these: as a
        published processor makes them, or read by `varjax.text.prompt_ids.load`.
      policy, budget: how the KV cache is compressed: a policy with its arguments, as
        `varjax.policies.HeadKV(budget=0.1, window=8)`, or the name of one and the fraction of the
        full cache's bytes that it may keep.
      seed: image i depends on (seed, i, label or prompt) only, never on the batch size.
      batch_size: images per program call; None takes all, at most 8.
      sampling: how tokens are drawn; None takes the checkpoint's recommendation, which
        `model.sampling(cfg=2.0, greedy=True)` gives with changes.
      calibration: measurements of this model, or the file that `experiments.calibrate` wrote; None
        takes `calibration.json` of the checkpoint folder, if it is there.
      kv_dtype: type of the cache; None takes that of the weights, "int8" has a scale per token.
      decode_dtype: what the decoder of pixels computes in: "bfloat16", "tf32" (NVIDIA GPUs) or
        "float32"; "auto" is "float32" on a CPU, else "bfloat16".
      progress: True prints lines with the time that is left to standard error; a function is called
        with the number of images that are done, 0 before compiling, and the number of all.
      as_pil: return a list of pictures of pillow, in 8 bits.

    Raises:
      UserError: for anything that cannot work, before compiling.
    """
    check_model(model)
    if batch_size is not None:
        arguments.integer("batch_size", batch_size, 1, arguments.LARGEST_BATCH)
    check_seed(seed)
    given = {"labels": labels, "prompts": prompts, "text_features": text_features}
    given["prompt_ids"] = prompt_ids
    count = conditions.check(model, **given)
    model = conditions.fitted(model, **given)
    generator = Generator(
        model,
        policy,
        budget,
        sampling=sampling,
        batch_size=min(count, batch_size or USUAL_BATCH),
        calibration=calibration,
        kv_dtype=kv_dtype,
        build=Build(decode_dtype=decode_dtype),
    )
    return generator(**given, seed=seed, progress=progress, as_pil=as_pil)
