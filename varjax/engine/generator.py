"""A compiled generation program: compiled once, run batch after batch."""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from varjax import sampling
from varjax.cache.plan import CachePlan
from varjax.cache.planner import plan_cache
from varjax.cache.state import KVState
from varjax.calibration import Calibration
from varjax.conditions import Condition
from varjax.engine import attention_cost, compilation_cache, program
from varjax.engine import scales as engine
from varjax.engine.segments import plan_segments
from varjax.errors import UserError, choose
from varjax.parallel import sharding
from varjax.parallel.mesh import MeshSpec
from varjax.parallel.sharding import ShardedPlan, ShardedProgram
from varjax.policies import Policy
from varjax.sampling import Sampling

if TYPE_CHECKING:
    from varjax.api import Model

MATMUL_PRECISIONS = ("default", "highest")


def storage_dtype(dtype):
    """Type of an uncompressed KV pool: that of the computation, but float32 on CPU (whose bfloat16
    scatters convert the whole pool)."""
    return jnp.dtype("float32") if jax.default_backend() == "cpu" else jnp.dtype(dtype)


@dataclass
class Timing:
    """Seconds. `compile_s` includes tracing; `cache` says whether the program that draws codes came
    from the compilation cache ("warm"), was compiled ("cold"), or there is none ("off"). `runs` are
    those of each call of the compiled program, pixels included, the first one apart."""

    compile_s: float = 0.0
    cache: str = "off"
    first_run_s: float = 0.0
    runs: list[float] = field(default_factory=list)


class Generator:
    """A compiled generation program for one model, policy, sampling and batch size."""

    def __init__(
        self,
        model: "Model",
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
        mesh: MeshSpec | None = None,
        decode_batch: int | None = None,
    ):
        self.model, self.batch_size, self.decode_batch = model, batch_size, decode_batch
        self.plan = cache_plan or plan_cache(model.geometry, policy, calibration)
        self.policy = self.plan.policy
        self.kv_dtype = jnp.dtype(kv_dtype or storage_dtype(model.dtype))
        self.precision = choose("matmul_precision", matmul_precision, MATMUL_PRECISIONS)
        self.segments = plan_segments(model.geometry.schedule, segments)
        self.spec = engine.ProgramSpec.of(
            self.plan,
            self.segments,
            model.pipeline.transformer.config.check_sampling(sampling),
            attention=attention,
            keep_logits=keep_logits,
            unroll=unroll,
        )
        self.timing = Timing()
        self.layout = ShardedPlan(self.plan, self._check_mesh(mesh or MeshSpec()))
        self._pipeline = model.pipeline
        self._program = self._decoder = self._formats = self._sharded = None

    def _check_mesh(self, mesh: MeshSpec) -> MeshSpec:
        if mesh.num_devices > 1:
            sharding.check_plan(self.plan, mesh)
        return mesh.check(
            batch_size=self.batch_size,
            num_heads=self.model.geometry.num_heads,
            available=len(jax.devices()),
            where="this machine",
        )

    # --- compiling --------------------------------------------------------------------------------

    def empty_state(self) -> KVState:
        """An empty cache; over several devices each makes its own share."""
        make = partial(self.layout.empty_state, self.batch_size, self.kv_dtype, self.model.dtype)
        if self._sharded is None:
            return make()
        return jax.jit(make, out_shardings=self._sharded.shardings[1])()

    def compile(self, condition: Any = None, given: np.ndarray | None = None) -> None:
        """Compile both programs (codes, pixels) ahead of time.

        condition: arrays of a batch, of the shapes that `run_batch` will get; None: labels, or
          texts as long as the model takes.
        given: tokens of a batch if some will be forced.
        """
        start = time.perf_counter()
        try:
            self._compile(condition, given)
        except NotImplementedError as error:  # a kernel that cannot take these shapes
            raise UserError(str(error)) from error
        self.timing.compile_s = time.perf_counter() - start

    def _compile(self, condition: Any, given: np.ndarray | None) -> None:
        images = self.batch_size
        zeros = np.zeros(images, np.int32)
        if condition is None:
            shapes = self._pipeline.condition_shapes(images)
            condition = jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), shapes)
        arguments = self._arguments(condition, zeros, 0, given, 0)
        state = jax.eval_shape(self.empty_state)
        if self.layout.spec.num_devices > 1:
            self._split(state, arguments)
            place = self._sharded.place_shapes
            state, arguments = place(1, state), place(slice(2, None), arguments)
        automatic = jax.default_backend() in program.AUTO_LAYOUT_PLATFORMS
        options = dict(precision=self.precision, sharded=self._sharded)
        codes = program.lower_codes(
            self._pipeline, state, arguments, self.spec, auto_layout=automatic, **options
        )
        with compilation_cache.Watch() as watch:  # not the helpers, which are too quick to be kept
            self._program = codes.compile()
        self.timing.cache = watch.verdict
        self._formats = self._program.input_formats[0][0] if automatic else None
        code_map = jax.eval_shape(lambda: self._pipeline.empty_code_map(images))
        pixels = program.lower_pixels(
            *(self._pipeline, code_map),
            formats=self._formats,
            at_once=self.decode_batch,
            **options,
        )
        self._decoder = pixels.compile()

    def _split(self, state, arguments) -> None:
        """Divide the program and the weights over the mesh."""
        spec, pipeline = self.layout.spec, self.model.pipeline
        _, _, tables, given = arguments
        self._sharded = ShardedProgram.of(
            sharding.make_mesh(spec, jax.devices()),
            *(self.spec, self.layout, pipeline, state, tables, given),
        )
        self._pipeline = sharding.place_weights(pipeline, spec, self._sharded.shardings[0])

    def _arguments(self, condition, image_index, seed, given, given_scales):
        tables = self.layout.tables(self.segments, image_index, self._pipeline.resampling)
        forced = None
        if given is not None:
            forced = engine.Given(jnp.asarray(given), jnp.asarray(given_scales, jnp.int32))
        keys = sampling.image_keys(seed, jnp.asarray(image_index))
        if isinstance(condition, (list, tuple)):  # labels as Python numbers
            condition = np.asarray(condition, np.int32)
        condition, tables = (jax.tree.map(jnp.asarray, tree) for tree in (condition, tables))
        return condition, keys, tables, forced

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
        return attention_cost.attention_flops(self.plan, self.segments, self.spec.cache)

    @property
    def compiled(self):
        """The compiled program that draws the codes (for memory analysis)."""
        return self._program

    @property
    def compiled_decoder(self):
        """The compiled program that decodes pixels."""
        return self._decoder

    # --- running ----------------------------------------------------------------------------------

    def run_batch(
        self, condition, image_index, *, seed=0, given=None, given_scales=None, keep_cache=True
    ) -> tuple[dict, KVState | None]:
        """One full batch: {"images" float32 [B, H, W, 3] in [0, 1], "tokens", "code_map",
        "logits"?} and the final cache.

        condition: arrays with a leading image axis (`Condition.take`); for VAR labels [B].
        given: tokens of the images that replace the draw in the first `given_scales` scales.
        keep_cache: without it None is returned, and the cache is gone before pixels are decoded.
          Over several devices its rows are those of the first device, then of the next.
        """
        if self._program is None:
            self.compile(condition, given)
        scales = self.model.geometry.schedule.num_scales if given_scales is None else given_scales
        arguments = self._arguments(condition, image_index, seed, given, scales)
        if self._formats is not None:
            program.place(self._pipeline, self._formats)
        if self._sharded is not None:
            arguments = jax.device_put(arguments, self._sharded.shardings[2:])
        state = jax.block_until_ready(self.empty_state())
        start = time.perf_counter()
        results, state = self._program(self._pipeline, state, *arguments)
        if not keep_cache:
            state = None
        results["images"] = self._decoder(self._pipeline, results["code_map"])
        jax.block_until_ready(results)
        elapsed = time.perf_counter() - start
        if self.timing.first_run_s == 0:
            self.timing.first_run_s = elapsed
        else:
            self.timing.runs.append(elapsed)
        return results, state

    def batches(
        self, condition: Condition, *, seed=0, first=0, given=None, given_scales=None
    ) -> Iterator[tuple[np.ndarray, dict[str, np.ndarray]]]:
        """All images from number `first` on, batch by batch: (their numbers, results on the host).

        The last batch is padded by repeating its last image; the padding is dropped. Image i
        depends on (seed, i, its condition) only.
        """
        for start in range(first, len(condition), self.batch_size):
            index = np.arange(start, min(start + self.batch_size, len(condition)))
            padded = np.pad(index, (0, self.batch_size - index.size), mode="edge").astype(np.int32)
            forced = None if given is None else np.asarray(given)[padded]
            results, _ = self.run_batch(
                *(condition.take(padded), padded),
                seed=seed,
                given=forced,
                given_scales=given_scales,
                keep_cache=False,
            )
            on_host = {k: np.asarray(v)[: index.size] for k, v in results.items()}
            del results  # or they would stay on the device during the next batch
            yield index, on_host

    def steady_seconds_per_image(self) -> float:
        """Median over the runs after the first one."""
        return float(np.median(self.timing.runs)) / self.batch_size
