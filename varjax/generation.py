"""From labels to images: loading, planning, compiling once, running batch after batch."""

import math
import numbers
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from varjax import checkpoint, compilation_cache, engine, programs, sampling
from varjax.cache import cost
from varjax.cache.plan import CachePlan
from varjax.cache.planner import plan_cache
from varjax.cache.state import KVState
from varjax.errors import UserError, choose
from varjax.geometry import Geometry
from varjax.models import registry
from varjax.policies import POLICIES, Policy, get_policy
from varjax.policies import calibration as calibrations
from varjax.policies.calibration import Calibration
from varjax.sampling import Sampling
from varjax.segments import plan_segments

MATMUL_PRECISIONS = ("default", "highest")
AUTO_LAYOUT_PLATFORMS = ("tpu",)  # elsewhere stacked weights are not copied into another layout


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
    def num_classes(self) -> int:
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


def storage_dtype(dtype):
    """Type of an uncompressed KV pool: that of the computation, but float32 on CPU (whose bfloat16
    scatters convert the whole pool)."""
    return jnp.dtype("float32") if jax.default_backend() == "cpu" else jnp.dtype(dtype)


KV_DTYPES = ("bfloat16", "float32", "int8")


def load(path=None, dtype: str | None = None) -> Model:
    """Load a checkpoint folder; without a path the embedded demo (64-pixel fruit, 44 classes).

    Args:
      path: folder written by `python -m ported_weights` or `experiments.train`.
      dtype: "float32" or "bfloat16" for the transformer; None takes float32 on CPU, bfloat16
        elsewhere. The codec is float32.

    Raises:
      UserError: there is no usable checkpoint there.
    """
    directory = path or checkpoint.demo_directory()
    if str(directory) in registry.PRESETS and not checkpoint.Path(directory).exists():
        raise UserError(
            f"{directory} is the name of a published model, whose weights are not part of "
            f"varjax: convert them with "
            f"`python -m ported_weights --model={directory} --source=... --tokenizer_source=... "
            f"--out=DIR` and give DIR"
        )
    found = checkpoint.load(directory)
    transformer = cast(found.transformer, dtype or default_dtype())
    pipeline = registry.family(found.family).pipeline(transformer, cast(found.codec, "float32"))
    name = "demo" if path is None else checkpoint.Path(directory).name
    return Model(pipeline, found.metadata, name, str(directory))


def cast(module, dtype):
    """A module with its floating parameters in `dtype`."""
    dtype = jnp.dtype(choose("dtype", str(dtype), ("float32", "bfloat16")))
    return jax.tree.map(
        lambda a: a.astype(dtype) if jnp.issubdtype(a.dtype, jnp.floating) else a, module
    )


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
    return plan_cache(geometry, chosen, _calibration(calibration, chosen, model))


def _calibration(calibration, policy: Policy, model, cfg=None) -> Calibration | None:
    """A calibration as it is, read from a file, or the one of the checkpoint folder; refused if it
    was made for other weights or, with `cfg`, another guidance."""
    is_model = isinstance(model, Model)
    if calibration is None and policy.uses_calibration and is_model:
        calibration = calibrations.beside(model.directory)
    if calibration is not None and not isinstance(calibration, Calibration):
        calibration = calibrations.load(calibration, model.geometry if is_model else model)
    if calibration is not None and is_model:
        calibration.check_origin(calibrations.model_digest(model.metadata), cfg)
    return calibration


def check_labels(labels: Sequence[int], num_classes: int) -> np.ndarray:
    """int32 [B]; `UserError` naming every label outside the classes."""
    wrong = sorted({int(x) for x in labels if not 0 <= int(x) < num_classes})
    if wrong:
        raise UserError(
            f"labels {', '.join(map(str, wrong))} are outside the model's {num_classes} "
            f"classes: choose 0 to {num_classes - 1}"
        )
    if len(labels) == 0:
        raise UserError("no labels given: name at least one class")
    return np.asarray(labels, np.int32)


@dataclass
class Timing:
    """Seconds. `compile_s` includes tracing; `cache` says whether the programs came from the
    compilation cache ("warm"), were compiled ("cold"), or there is none ("off"). `runs` are those
    of each call of the compiled program, pixels included, the first one apart."""

    compile_s: float = 0.0
    cache: str = "off"
    first_run_s: float = 0.0
    runs: list[float] = field(default_factory=list)


class Generator:
    """A compiled generation program for one model, policy, sampling and batch size."""

    def __init__(
        self,
        model: Model,
        policy: Policy,
        *,
        sampling: Sampling,
        batch_size: int,
        segments: int | str = "auto",
        attention: str | None = None,
        kv_dtype=None,
        matmul_precision: str = "default",
        keep_logits: bool = False,
        unroll: bool = False,
        cache_plan: CachePlan | None = None,
        calibration: Calibration | None = None,
    ):
        self.model, self.batch_size = model, batch_size
        self.plan = cache_plan or plan_cache(model.geometry, policy, calibration)
        self.policy = self.plan.policy
        self.kv_dtype = jnp.dtype(kv_dtype or storage_dtype(model.dtype))
        self.precision = choose("matmul_precision", matmul_precision, MATMUL_PRECISIONS)
        self.segments = plan_segments(model.geometry.schedule, segments)
        self.spec = engine.ProgramSpec.of(
            self.plan,
            self.segments,
            sampling.check(model.pipeline.vocab_size),
            attention=attention,
            keep_logits=keep_logits,
            unroll=unroll,
        )
        self.timing = Timing()
        self._program = self._decoder = self._formats = None

    # --- compiling --------------------------------------------------------------------------------

    def empty_state(self) -> KVState:
        return KVState.empty(self.plan, self.batch_size, self.kv_dtype, self.model.dtype)

    def compile(self, given: bool = False) -> None:
        """Compile both programs (codes, pixels) ahead of time. `given`: some tokens will be
        forced."""
        start = time.perf_counter()
        with compilation_cache.Watch() as watch:
            try:
                self._compile(given)
            except NotImplementedError as error:  # a kernel that cannot take these shapes
                raise UserError(str(error)) from error
        self.timing.compile_s = time.perf_counter() - start
        self.timing.cache = watch.verdict

    def _compile(self, given: bool) -> None:
        images, tokens = self.batch_size, self.model.geometry.schedule.total_tokens
        forced = np.zeros((images, tokens), np.int32) if given else None
        zeros = np.zeros(images, np.int32)
        arguments = self._arguments(zeros, zeros, 0, forced, 0)
        state, pipeline = jax.eval_shape(self.empty_state), self.model.pipeline
        automatic = jax.default_backend() in AUTO_LAYOUT_PLATFORMS
        codes = programs.lower_codes(
            *(pipeline, state, arguments, self.spec),
            precision=self.precision,
            auto_layout=automatic,
        )
        self._program = codes.compile()
        self._formats = self._program.input_formats[0][0] if automatic else None
        code_map = jax.eval_shape(lambda: pipeline.empty_code_map(images))
        pixels = programs.lower_pixels(
            pipeline, code_map, precision=self.precision, formats=self._formats
        )
        self._decoder = pixels.compile()

    def _arguments(self, labels, image_index, seed, given, given_scales):
        tables = engine.program_tables(self.plan, self.segments, image_index)
        forced = None
        if given is not None:
            forced = engine.Given(
                jnp.asarray(given, jnp.int32), jnp.asarray(given_scales, jnp.int32)
            )
        keys = sampling.image_keys(seed, jnp.asarray(image_index))
        return jnp.asarray(labels), keys, jax.tree.map(jnp.asarray, tables), forced

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the arrays that hold K and V among the compiled program's arguments."""
        (_, state, *_), _ = self._program.in_avals
        held = (a for a in (state.kv_pool, state.kv_scale) if a is not None)
        return sum(math.prod(a.shape) * a.dtype.itemsize for a in held)

    @property
    def bookkeeping_bytes(self) -> int:
        """Bytes of everything else that the cache carries: positions, observations, memory."""
        (_, state, *_), _ = self._program.in_avals
        total = sum(math.prod(a.shape) * a.dtype.itemsize for a in jax.tree.leaves(state))
        return total - self.allocated_bytes

    def attention_flops(self) -> dict[str, float]:
        """FLOPs per image of the attention, and of looking at it for the policy."""
        return cost.attention_flops(self.plan, self.segments, self.spec.cache)

    @property
    def compiled(self):
        """The compiled program that draws the codes (for memory analysis)."""
        return self._program

    # --- running ----------------------------------------------------------------------------------

    def run_batch(
        self, labels, image_index, *, seed=0, given=None, given_scales=None
    ) -> tuple[dict, KVState]:
        """One full batch: {"images" float32 [B, H, W, 3] in [0, 1], "tokens", "code_map",
        "logits"?} and the final cache."""
        if self._program is None:
            self.compile(given=given is not None)
        scales = self.model.geometry.schedule.num_scales if given_scales is None else given_scales
        arguments = self._arguments(labels, image_index, seed, given, scales)
        if self._formats is not None:
            programs.place(self.model.pipeline, self._formats)
        state = jax.block_until_ready(self.empty_state())
        start = time.perf_counter()
        results, state = self._program(self.model.pipeline, state, *arguments)
        results["images"] = self._decoder(self.model.pipeline, results["code_map"])
        jax.block_until_ready(results)
        elapsed = time.perf_counter() - start
        if self.timing.first_run_s == 0:
            self.timing.first_run_s = elapsed
        else:
            self.timing.runs.append(elapsed)
        return results, state

    def batches(
        self, labels, *, seed=0, first=0, given=None, given_scales=None
    ) -> Iterator[tuple[np.ndarray, dict[str, np.ndarray]]]:
        """All images from number `first` on, batch by batch: (their numbers, results on the host).

        The last batch is padded by repeating its last image; the padding is dropped. Image i
        depends on (seed, i, label) only.
        """
        labels = np.asarray(labels, np.int32)
        for start in range(first, len(labels), self.batch_size):
            index = np.arange(start, min(start + self.batch_size, len(labels)))
            padded = np.pad(index, (0, self.batch_size - index.size), mode="edge").astype(np.int32)
            forced = None if given is None else np.asarray(given)[padded]
            results, _ = self.run_batch(
                labels[padded], padded, seed=seed, given=forced, given_scales=given_scales
            )
            yield index, {k: np.asarray(v)[: index.size] for k, v in results.items()}

    def steady_seconds_per_image(self) -> float:
        """Median over the runs after the first one."""
        return float(np.median(self.timing.runs)) / self.batch_size


def generate(
    model: Model,
    labels: Sequence[int],
    policy: str | Policy = "full",
    budget: float | None = None,
    *,
    seed: int = 0,
    batch_size: int | None = None,
    policy_args: dict | None = None,
    cfg: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    greedy: bool | None = None,
    more_smooth: bool | None = None,
    segments: int | str = "auto",
    calibration: str | os.PathLike | Calibration | None = None,
    kv_dtype: str | None = None,
) -> np.ndarray:
    """Generate one image per label: float32 [N, H, W, 3], RGB in [0, 1].

    Args:
      model: from `load`.
      labels: class numbers.
      policy, budget, policy_args: how the KV cache is compressed; see `varjax.policies.POLICIES`.
      seed: image i depends on (seed, i, label) only, never on the batch size.
      batch_size: images per program call; None takes all, at most 8.
      cfg, top_k, top_p, greedy, more_smooth: see `Sampling`; None takes the checkpoint's
        recommendation.
      segments: how the scale loop is cut (`varjax.segments`); results do not depend on it.
      calibration: measurements of this model, or the file that `experiments.calibrate` wrote; None
        takes `calibration.json` of the checkpoint folder, if it is there.
      kv_dtype: type of the cache; None takes that of the weights, "int8" has a scale per token.

    Raises:
      UserError: for anything that cannot work, before compiling.
    """
    labels = check_labels(labels, model.num_classes)
    if batch_size is not None and batch_size < 1:
        raise UserError(f"batch_size={batch_size}: at least 1")
    overrides = dict(cfg=cfg, top_k=top_k, top_p=top_p, greedy=greedy, more_smooth=more_smooth)
    chosen = resolve_policy(policy, budget, **(policy_args or {}))
    chosen.check_images(len(labels))
    sampling = Sampling.recommended(model.recommended_sampling, **overrides)
    generator = Generator(
        model,
        chosen,
        sampling=sampling,
        batch_size=min(len(labels), batch_size or 8),
        segments=segments,
        calibration=_calibration(calibration, chosen, model, sampling.cfg),
        kv_dtype=None if kv_dtype is None else choose("kv_dtype", kv_dtype, KV_DTYPES),
    )
    return np.concatenate(
        [results["images"] for _, results in generator.batches(labels, seed=seed)]
    )


__all__ = ["POLICIES", "Generator", "Model", "generate", "load", "plan"]
