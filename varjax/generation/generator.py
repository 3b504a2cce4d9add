"""`Generator`: a generation program, compiled once and run batch after batch."""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, PyTree

from varjax import conditions, jax_settings
from varjax.calibration import files as calibration_lib
from varjax.calibration.data import Calibration
from varjax.conditions import Condition
from varjax.core import arguments, stacked
from varjax.core.drawing import Inputs, State
from varjax.core.errors import UserError
from varjax.core.given import Given
from varjax.core.plan import CachePlan
from varjax.core.planner import plan_cache
from varjax.core.policy import Policy
from varjax.core.sampling import Sampling, check_seed, check_seeds, image_keys
from varjax.core.sequence import TOKENS
from varjax.fast import stored
from varjax.generation import compilation_cache, cost, hosts, memory, program, sharding
from varjax.generation import weights as sharded_weights
from varjax.generation.build import SCAN, UNROLL, Build, arrange_layers, pool_dtype, specify
from varjax.generation.compiled import Program, Timing, Weights
from varjax.generation.kept import of_images, telling
from varjax.generation.mesh import MeshSpec, make_mesh
from varjax.generation.progress import reporter
from varjax.generation.started import Started, in_turn
from varjax.models.model import Model, check_model
from varjax.policies.registry import resolve_policy
from varjax.storage import pictures
from varjax.text.features import TextFeatures
from varjax.text.prompt_ids import PromptIds


class Generator:
    """A generation program for one model, policy, sampling and batch size: compiled at its first
    call, then run as often as you like.

        generator = varjax.Generator(model, "headkv", 0.25, batch_size=8)
        images = generator(labels=[22, 11], seed=0)
        more = generator(labels=range(44), seed=1)  # nothing is traced or compiled again

    Args:
      model: from `varjax.load`. Over several devices load it with `on_disk=True`: every device's
        share is then read when its place is known, and no device, nor the host, holds all of them.
      policy, budget, sampling, calibration, kv_dtype: as in `varjax.generate`.
      batch_size: images per call of the program.
      plan: the cache plan, if it is made already; policy, budget and calibration then do not count.
      mesh: devices to split over.
      build: how the programs are built, and what they return besides (`varjax.Build`).

    Attributes:
      model: its weights are arranged as the programs take them; once they are divided over several
        devices, it is of shapes alone.
      spec: the static side of the program that draws. program: both, compiled; None before.
      timing: seconds of compiling, and of every batch.

    Raises:
      UserError: for anything that cannot work; nothing is compiled then.
    """

    @jax_settings.pinned()
    def __init__(
        self,
        model: Model,
        policy: str | Policy = "full",
        budget: float | None = None,
        *,
        sampling: Sampling | None = None,
        batch_size: int = 8,
        kv_dtype=None,
        calibration: str | os.PathLike | Calibration | None = None,
        plan: CachePlan | None = None,
        mesh: MeshSpec | None = None,
        build: Build | None = None,
    ):
        check_model(model)
        self.batch_size = arguments.integer("batch_size", batch_size, 1, arguments.LARGEST_BATCH)
        words = "a varjax.Build, as varjax.Build(layers='scan')"
        build = arguments.instance("build", Build() if build is None else build, Build, words)
        self.build = build.here()
        sampling = model.resolve_sampling(sampling)
        words = "a MeshSpec of varjax.generation.mesh"
        mesh = arguments.instance("mesh", MeshSpec() if mesh is None else mesh, MeshSpec, words)
        if plan is None:
            chosen = resolve_policy(policy, budget)
            found = calibration_lib.find(chosen, model, calibration, sampling.guidance)
            plan = plan_cache(model.geometry_for(sampling), chosen, found, groups=mesh.model)
        arguments.instance("plan", plan, CachePlan, "a plan, as varjax.plan makes it")
        model.check_geometry(plan.geometry, sampling)
        self.model, self.plan, self.policy, self.mesh = model, plan, plan.policy, mesh
        told = {"batch_size": self.batch_size, "mesh": mesh, "platform": jax.default_backend()}
        self.spec = specify(model.networks, plan, sampling, self.build, **told)
        sharding.check_plan(plan, mesh)
        devices = {"available": len(jax.devices()), "where": hosts.where()}
        mesh.check(batch_size=self.batch_size, num_heads=plan.geometry.num_heads, **devices)
        self.kv_dtype = pool_dtype(kv_dtype, model.dtype)
        share = plan.divide(mesh.model)[0], self.batch_size // mesh.data  # of a device
        kernels = build.attention and build.attention != "reference"
        how = {"kernels": kernels, "decoding": self.build.decoding}
        predict = partial(memory.predict, model, *share, model.dtype, self.kv_dtype, **how)
        self._layers = memory.layers_that_fit(build.layers, predict, memory.device_bytes())
        self.networks, self.timing, self.program = model.networks, Timing(), None
        doing = f"drawing a batch of {batch_size}"
        self._explained = partial(program.explained, doing, build.attention)
        self._weights, self._seen = Weights(self.networks), ()
        self._arrange()
        # only now: another generator may have left matrices turned, which are never divided
        sharded_weights.check_weights(self.networks, mesh)
        if mesh.num_devices == 1 and isinstance(self._weights.arrays()[0], stored.Stored):
            raise UserError("the weights are on disk, for several devices: give a mesh of these")

    def __repr__(self) -> str:
        state = "not compiled yet" if self.program is None else "compiled"
        return (
            f"Generator of {self.model.name}: batches of {self.batch_size}, cache in "
            f"{self.kv_dtype}, mesh {self.mesh}, {state}\n{self.plan!r}"
        )

    # --- what is known ----------------------------------------------------------------------------

    @property
    def layers(self) -> str:
        """Whether the program scans over layers ("scan") or has a body for each ("unroll")."""
        return UNROLL if stacked.is_separate(self.networks["transformer"]) else SCAN

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the arrays that hold K and V among the compiled program's arguments."""
        return cost.tree_bytes(self.plan.kv_arrays(self.program.codes.in_avals[0][1]))

    # --- running ----------------------------------------------------------------------------------

    def __call__(
        self,
        labels: Sequence[int | str] | None = None,
        *,
        prompts: Sequence[str] | None = None,
        text_features: TextFeatures | None = None,
        prompt_ids: PromptIds | Sequence[Sequence[int]] | None = None,
        seed: int = 0,
        progress: bool | Callable[[int, int], None] = False,
        as_pil: bool = False,
    ) -> np.ndarray | list:
        """One image per label or prompt, as in `varjax.generate`: float32 [N, H, W, 3], RGB in
        [0, 1], or pictures. Image i depends on (seed, i, its label or prompt) only."""
        check_seed(seed)
        if arguments.flag("as_pil", as_pil):
            pictures.pillow()  # missing, it is said before anything is compiled
        report = reporter(progress, "image")
        given = {"labels": labels, "prompts": prompts, "text_features": text_features}
        condition = conditions.resolve(self.model, **given, prompt_ids=prompt_ids)
        self.policy.check_images(len(condition))
        report(0, len(condition))
        if self.program is None:
            with hosts.answering():
                first = np.arange(min(len(condition), self.batch_size))
                self.compile(condition.take(self._padded(first)))
        images = []
        for index, results in self.batches(condition, seed=seed):
            images += pictures.to_pil(results["images"]) if as_pil else [results["images"]]
            report(int(index[-1]) + 1, len(condition))
        return images if as_pil else np.concatenate(images)

    def kept(
        self,
        labels: Sequence[int | str] | None = None,
        *,
        prompts: Sequence[str] | None = None,
        text_features: TextFeatures | None = None,
        prompt_ids: PromptIds | Sequence[Sequence[int]] | None = None,
        seed: int = 0,
    ) -> Bool[np.ndarray, "B K L N T"]:
        """The tokens of a call's images that heads hold when each scale or stage starts."""
        given = {"labels": labels, "prompts": prompts, "text_features": text_features}
        return of_images(self, given | {"prompt_ids": prompt_ids}, seed)

    telling = cached_property(telling)

    def batches(
        self, condition: Condition, numbers: Iterable[np.ndarray] | None = None, **options
    ) -> Iterator[tuple[np.ndarray, dict[str, np.ndarray]]]:
        """All images, batch by batch: (their numbers, results on the host). The next batch is
        started before one is handed out (`started.in_turn`).

        numbers: of images of each batch, asked for when the one before is done; None: all in order.
        options: seed, given and given_scales, as of `run_images`. Many processes that share the
          mesh call it alike, and all of them have all results.
        """
        if numbers is None:
            sizes = range(self.batch_size, len(condition), self.batch_size)
            numbers = np.split(np.arange(len(condition)), sizes)
        start = partial(self._start_images, condition, keep_cache=False, **options)
        # gathering from other processes waits for all that was started before
        turn = in_turn(numbers, start, self._wait) if hosts.count() == 1 else map(start, numbers)
        for batch in turn:
            self._wait(batch)
            found, batch.results = batch.results, None  # on the device only until they are fetched
            with hosts.answering():
                results = jax.tree.map(np.asarray, hosts.gathered(found))
            del found
            yield batch.index, results  # pyright: ignore[reportReturnType]

    def draw(self, condition: Condition, index: np.ndarray, **options) -> dict[str, np.ndarray]:
        """Results of at most a batch of images, by numbers, on the host. options: of `batches`."""
        ((_, results),) = self.batches(condition, [index], **options)
        return results

    def run_images(
        self, condition: Condition, index: np.ndarray, *, given=None, **options
    ) -> tuple[dict[str, Array], PyTree]:
        """The results of at most a batch of images, by their numbers, and the cache of the
        whole batch. given: tokens of all images. options: as of `run_batch`."""
        batch = self._wait(self._start_images(condition, index, given=given, **options))
        return batch.results, batch.cache

    def _start_images(
        self, condition: Condition, index: np.ndarray, *, given=None, **options
    ) -> Started:
        """Starts what `run_images` does."""
        padded = self._padded(index)
        if given is not None:
            given = given.take(padded) if isinstance(given, Given) else np.asarray(given)[padded]
        batch = self._start(condition.take(padded), padded, given, **options)
        # contents are of rows, not of images
        batch.results |= {n: a[: len(index)] for n, a in batch.results.items() if n != "contents"}
        batch.index = index
        return batch

    def _padded(self, index: np.ndarray) -> np.ndarray:
        # one program for every number of images: copies of a short batch's last are cut off again
        return np.pad(index, (0, self.batch_size - len(index)), mode="edge").astype(np.int32)

    @jax_settings.pinned()
    def run_batch(
        self,
        condition: PyTree,
        image_index: np.ndarray,
        *,
        seed: int | np.ndarray = 0,
        given: np.ndarray | Given | None = None,
        given_scales: int | None = None,
        keep_cache: bool = True,
    ) -> tuple[dict[str, Array], PyTree]:
        """One full batch: {"images" float32 [B, H, W, 3] in [0, 1], "tokens", "code_map",
        "logits"?} and the final cache.

        condition: arrays with a leading image axis (`Condition.take`); for VAR labels [B].
        image_index: the image's number in its run [B]; seed: of the run, or of each image's.
        given: tokens that replace the draw. An array is taken for the first `given_scales` scales,
          or for so many tokens where they are drawn one by one (None: all); a `Given` says where.
        keep_cache: without it None is returned, and the cache is gone before pixels are decoded.
          Over several devices its rows are those of the first device, then of the next.

        Raises:
          UserError: wrong input, or (`generation.program.OutOfMemory`) too little memory.
        """
        told = condition, image_index, given, seed, given_scales, keep_cache
        batch = self._wait(self._start(*told))
        return batch.results, batch.cache

    @jax_settings.pinned()
    def _start(
        self, condition, image_index, given, seed=0, given_scales=None, keep_cache=True
    ) -> Started:
        """Starts what `run_batch` does."""
        seed = check_seeds(seed, self.batch_size)
        if self.program is None:
            self.compile(condition, given)
        with hosts.answering(), self._explained():
            told = self.arguments(condition, image_index, seed, given, given_scales)
            if self.program.sharded is not None:
                told = sharding.place(told, self.program.sharded.shardings[2:])
            self._arrange()
            # a new pool for every batch: the last one was donated, and zeroing is not what is timed
            state = jax.block_until_ready(self.empty_state())
            begun = time.perf_counter()
            found = self.program.draw(self._weights, state, told, keep_cache=keep_cache)
            return Started(*found, begun)

    def _wait(self, batch: Started) -> Started:
        """Waits until a batch is done, and keeps its time."""
        with hosts.answering(), self._explained():
            seconds = batch.wait()
        if seconds is not None:
            self.timing.runs.append(seconds)
        return batch

    @jax_settings.pinned()
    def decode_arguments(self, condition: Condition, seed: int = 0) -> tuple:
        """What `varjax.core.decode` takes to draw the first batch as this generator does, on one
        device: networks, empty cache, condition, keys, inputs.

        condition: of a run (`conditions.resolve`). A short batch repeats its last image.
        """
        if self.mesh.num_devices > 1:
            raise UserError("decode_arguments are those of one device: leave out mesh")
        if not hasattr(condition, "take"):
            words = "what varjax.conditions.resolve(model, labels=[3, 7]) gives"
            raise arguments.wrong("condition", condition, f"give {words}")
        index = self._padded(np.arange(min(len(condition), self.batch_size)))
        told = self.arguments(condition.take(index), index, check_seed(seed))
        self._arrange()
        return self.networks, self.empty_state(), *told

    # --- compiling --------------------------------------------------------------------------------

    @jax_settings.pinned()
    def compile(self, condition: PyTree = None, given: np.ndarray | Given | None = None) -> None:
        """Compiles both programs (codes, pixels) ahead of time. `UserError` for a kernel that
        cannot take these shapes, or a device without enough memory.

        condition: of a batch, in the shapes to come; None: labels, or texts of the largest length.
        given: tokens of a batch if some will be given.
        """
        if any(isinstance(a, jax.ShapeDtypeStruct) for a in self._weights.arrays()):
            raise UserError(f"{self.model.name} was only described: load it with varjax.load")
        start, images = time.perf_counter(), self.batch_size
        if condition is None:
            shapes = self.networks["transformer"].condition_shapes(images)
            condition = jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), shapes)
        few, dtype = self.plan.geometry.kind == TOKENS, self.model.weights_dtype
        doing, platform = f"compiling a batch of {images}", jax.default_backend()
        code_map = jax.ShapeDtypeStruct((images, *self.model.code_map), jnp.float32)
        try:
            with program.explained(doing, self.build.attention), compilation_cache.kept():
                self.program = None
                self._arrange()
                told = self.arguments(condition, np.zeros(images, np.int32), 0, given)
                divided = self._divided(told[-1]) if self.mesh.num_devices > 1 else None
                options = program.compiler_options(platform, few_rows=few, weights_dtype=dtype)
                taken = self._weights, self._empty, told, code_map, self.build
                self.program = Program.compile(*taken, sharded=divided, options=options)
        except NotImplementedError as error:  # a kernel that cannot take these shapes
            raise UserError(str(error)) from error
        self.timing.cache = self.program.came
        self.timing.compile_s = time.perf_counter() - start

    def _divided(self, inputs: Inputs) -> sharding.ShardedProgram:
        """The program over several devices, which are given their weights on the way. Then only
        shapes are kept of the model, so that its arrays go once nobody else holds them."""
        every = jax.devices()  # a smaller mesh takes those of this process
        devices = every if self.mesh.num_devices == len(every) else jax.local_devices()
        mesh = make_mesh(vars(self.mesh), devices)
        found = sharding.ShardedProgram.of(mesh, self.networks, inputs, self.kv_dtype)
        self.networks = sharded_weights.place(self.networks, found.shardings[0])
        self.model, self._weights = self.model.abstract(), Weights(self.networks)
        return found

    def _arrange(self) -> None:
        """Arranges the weights as the programs take them, unless they are as this generator left
        them: another one of the same model may have arranged them differently."""
        # by identity, which costs nothing; holding the arrays would keep weights twice
        if self._seen == (seen := tuple(map(id, self._weights.arrays()))) and seen:
            return
        arrange_layers(self.networks, self._layers, jax.default_backend(), self.mesh.model)
        if self.program is not None and self.program.formats is not None:
            self._weights.place(self.program.formats)
        self._seen = tuple(map(id, self._weights.arrays()))

    # --- what programs take -----------------------------------------------------------------------

    @cached_property
    def _shared_tables(self) -> tuple:
        """Tables that no batch changes: put on the device once, for all batches."""
        shared = self.spec.shared_inputs(self.networks["transformer"])
        return jax.device_put(shared)  # `jnp.asarray` would compile a program for each shape

    def arguments(
        self,
        condition: PyTree,
        image_index: np.ndarray,
        seed: int | np.ndarray = 0,
        given: np.ndarray | Given | None = None,
        given_scales: int | None = None,
    ) -> tuple[PyTree, Array, Inputs]:
        """Condition, keys and inputs of a batch (`varjax.core.decode`), told as `run_batch` is."""
        tables = self.spec.for_images(self._shared_tables, image_index)
        if given is not None:
            given = Given.of(given, self.plan.geometry.schedule, given_scales)
        keys = image_keys(seed, jnp.asarray(image_index))
        if isinstance(condition, (list, tuple)):  # labels as Python numbers
            condition = np.asarray(condition, np.int32)
        condition, tables = jax.device_put((condition, tables))
        return condition, keys, Inputs(self.spec, tables, given)

    def _empty(self) -> State:
        types = self.kv_dtype, self.model.dtype
        return self.plan.empty_state(self.batch_size, *types, groups=self.mesh.model)

    @jax_settings.pinned()
    def empty_state(self) -> State:
        """An empty cache, as the program takes it; of several devices each makes its own share."""
        return (jax.jit(self._empty) if self.program is None else self.program.empty_state)()
