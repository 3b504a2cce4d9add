"""`Generator`: a generation program, compiled once and run batch after batch."""

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import jax
import numpy as np
from jaxtyping import Array, PyTree

from varjax import arguments, conditions, jax_settings
from varjax import sampling as sampling_lib
from varjax.cache.plan import CachePlan, pool_dtype
from varjax.cache.planner import plan_cache
from varjax.cache.stages import TokenPlan
from varjax.calibration import files as calibration_lib
from varjax.calibration.data import Calibration
from varjax.codecs import arithmetic
from varjax.conditions import Condition
from varjax.engine import cost, memory, program
from varjax.engine.drawing import drawing
from varjax.engine.given import Given
from varjax.engine.pixels import Decoding
from varjax.engine.program import BuildOptions
from varjax.errors import UserError, choose
from varjax.model import Model, check_model
from varjax.nn import stacked
from varjax.parallel import hosts, sharding
from varjax.parallel.split import MeshSpec
from varjax.policies import Policy
from varjax.policies.registry import resolve_policy
from varjax.progress import reporter
from varjax.runner import Runner
from varjax.sampling import Sampling
from varjax.text.features import TextFeatures
from varjax.text.prompt_ids import PromptIds

MATMUL_PRECISIONS = ("default", "highest")


class Generator(Runner):
    """A generation program for one model, policy, sampling and batch size: compiled at its first
    call, then run as often as you like.

        generator = varjax.Generator(model, "headkv", 0.25, batch_size=8)
        images = generator(labels=[22, 11], seed=0)
        more = generator(labels=range(44), seed=1)  # nothing is traced or compiled again

    Args:
      model: from `varjax.load`. Over several devices load it with `on_disk=True`: every device's
        share is then read when its place is known, and no device, nor the host, holds all of them.
      policy, budget: how the KV cache is compressed: a policy (`varjax.policies`) or the name of
        one and the fraction of the full cache's bytes that it may keep.
      sampling: how tokens are drawn; None: as the checkpoint recommends (`model.sampling()`).
      batch_size: images per call of the program.
      segments: how the scale loop is cut (`varjax.engine.segments`); results do not depend on it.
      attention: implementation of the kernels; None takes what the platform has.
      kv_dtype: type of the cache; None takes that of the weights, "int8" has a scale per token.
      calibration: measurements of this model, or a file of them, for policies that use one; None
        takes `calibration.json` of the checkpoint folder, if it is there.
      plan: the cache plan, if it is made already; policy, budget and calibration then do not count.
      mesh: devices to split over.
      matmul_precision: "default" or "highest", of float32 products.
      keep_logits: also return guided logits.
      keep_contents: also return which tokens the cache holds after every scale, "contents", which
        `CachePlan.at_the_end` reads; one device. Token by token the final cache says it.
      layers: "scan" or "unroll"; "auto" takes what is faster here (`program.arrange_layers`) and
        fits (`memory.layers_that_fit`). The weights of `model` are arranged accordingly: it can go
        on to be used.
      decode_batch: images decoded at once; None: as many as 2 GiB of activations allow.
      decode_dtype: what the decoder of pixels computes in: "bfloat16", "tf32" or "float32"
        (`varjax.codecs.arithmetic`); "auto" is "float32" on a CPU, else "bfloat16".
      watch: called on the host while images are drawn: with the number of a scale and the code map
        [B, P, Q, C] after it, or the number of an image token and the tokens [B, 1]. JAX does not
        keep such programs in its cache.

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
        segments: int | str = "auto",
        attention: str | None = None,
        kv_dtype=None,
        calibration: str | os.PathLike | Calibration | None = None,
        plan: CachePlan | None = None,
        mesh: MeshSpec | None = None,
        matmul_precision: str = "default",
        keep_logits: bool = False,
        keep_contents: bool = False,
        layers: str = "auto",
        decode_batch: int | None = None,
        decode_dtype: str = "auto",
        watch: Callable[[Array, Array], None] | None = None,
    ):
        check_model(model)
        most = arguments.LARGEST_BATCH
        batch_size = arguments.integer("batch_size", batch_size, 1, most)
        if decode_batch is not None:
            decode_batch = arguments.integer("decode_batch", decode_batch, 1, most)
        decoding = Decoding(arithmetic.resolve(decode_dtype), decode_batch)
        sampling = model.resolve_sampling(sampling)
        program.check_attention(attention)
        choose("matmul_precision", matmul_precision, MATMUL_PRECISIONS)
        words = "a MeshSpec of varjax.parallel.split"
        mesh = arguments.instance("mesh", MeshSpec() if mesh is None else mesh, MeshSpec, words)
        if keep_contents and mesh.num_devices > 1:
            raise UserError("keep_contents works on one device: leave out mesh")
        if plan is None:
            chosen = resolve_policy(policy, budget)
            found = calibration_lib.find(chosen, model, calibration, sampling.guidance)
            plan = plan_cache(model.geometry_for(sampling), chosen, found, groups=mesh.model)
        arguments.instance("plan", plan, CachePlan, "a plan, as varjax.plan makes it")
        model.check_geometry(plan.geometry, sampling)
        self.policy, self.keep_contents = plan.policy, keep_contents
        options = BuildOptions(
            segments=segments,
            layers=choose("layers", layers, program.LAYERS),
            attention=attention,
            keep_logits=arguments.flag("keep_logits", keep_logits),
            keep_contents=arguments.flag("keep_contents", keep_contents),
            watch=watch,
        )
        spec = drawing(
            model.networks,
            plan,
            sampling,
            options,
            batch_size=batch_size,
            mesh=mesh,
            platform=jax.default_backend(),
        )
        _check_mesh(mesh, plan, batch_size)
        kv_type = pool_dtype(kv_dtype, model.dtype)
        predict_for = partial(
            memory.predict,
            model,
            plan.divide(mesh.model)[0],
            batch_size // mesh.data,
            model.dtype,
            kv_type,
            kernels=attention and attention != "reference",
            decoding=decoding,
        )
        super().__init__(
            model,
            spec,
            batch_size=batch_size,
            layers=memory.layers_that_fit(layers, predict_for, memory.device_bytes()),
            kv_dtype=kv_type,
            precision=matmul_precision,
            decoding=decoding,
        )

    def __repr__(self) -> str:
        state = "not compiled yet" if self.compiled is None else "compiled"
        return (
            f"Generator of {self.model.name}: batches of {self.batch_size}, cache in "
            f"{self.kv_dtype}, mesh {self.mesh}, {state}\n{self.plan!r}"
        )

    # --- what is known ----------------------------------------------------------------------------

    @property
    def layers(self) -> str:
        """Whether the program scans over layers ("scan") or has a body for each ("unroll")."""
        apart = stacked.is_separate(self.networks["transformer"])
        return program.UNROLL if apart else program.SCAN

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the arrays that hold K and V among the compiled program's arguments."""
        return cost.tree_bytes(self.plan.kv_arrays(self.compiled.in_avals[0][1]))

    @property
    def bookkeeping_bytes(self) -> int:
        """Bytes of everything else that the cache carries: positions, observations, states."""
        return cost.tree_bytes(self.compiled.in_avals[0][1]) - self.allocated_bytes

    def attention_flops(self) -> dict[str, float]:
        """FLOPs per image of the attention, and of observing it for the policy."""
        if isinstance(self.plan, TokenPlan):
            return cost.token_attention_flops(self.plan)
        return cost.attention_flops(self.plan, self.spec.segments, self.spec.cache)

    # --- running ----------------------------------------------------------------------------------

    def __call__(
        self,
        labels: Sequence[int] | None = None,
        *,
        prompts: Sequence[str] | None = None,
        text_features: TextFeatures | None = None,
        prompt_ids: PromptIds | Sequence[Sequence[int]] | None = None,
        seed: int = 0,
        progress: bool | Callable[[int, int], None] = False,
    ) -> np.ndarray:
        """One image per label or prompt: float32 [N, H, W, 3], RGB in [0, 1]. Image i depends on
        (seed, i, its label or prompt) only. See `varjax.generate` for what the model takes, and for
        `progress`."""
        sampling_lib.check_seed(seed)
        report = reporter(progress, "image")
        given = {"labels": labels, "prompts": prompts, "text_features": text_features}
        condition = conditions.resolve(self.model, **given, prompt_ids=prompt_ids)
        self.policy.check_images(len(condition))
        report(0, len(condition))
        images = []
        for index, results in self.batches(condition, seed=seed):
            images.append(results["images"])
            report(int(index[-1]) + 1, len(condition))
        return np.concatenate(images)

    def batches(
        self, condition: Condition, *, first: int = 0, **options
    ) -> Iterator[tuple[np.ndarray, dict[str, np.ndarray]]]:
        """All images from number `first` on, batch by batch: (their numbers, results on the
        host). options: seed, given and given_scales, as of `run_images`."""
        for start in range(first, len(condition), self.batch_size):
            index = np.arange(start, min(start + self.batch_size, len(condition)))
            yield index, self.draw(condition, index, **options)

    def draw(self, condition: Condition, index: np.ndarray, **options) -> dict[str, np.ndarray]:
        """The results of at most a batch of images, by their numbers, on the host. options:
        seed, given and given_scales, as of `run_images`. Many processes that share the mesh call it
        alike, and all of them have all results."""
        with hosts.answering():
            results, _ = self.run_images(condition, index, keep_cache=False, **options)
            return jax.tree.map(np.asarray, hosts.gathered(results))

    def run_images(
        self, condition: Condition, index: np.ndarray, *, given=None, **options
    ) -> tuple[dict[str, Array], PyTree]:
        """The results of at most a batch of images, by their numbers, and the cache of the
        whole batch. given: tokens of all images. options: as of `run_batch`."""
        # One program serves every number of images: a short batch repeats its last image, and the
        # copies are cut off again.
        padded = np.pad(index, (0, self.batch_size - len(index)), mode="edge").astype(np.int32)
        if given is not None:
            given = given.take(padded) if isinstance(given, Given) else np.asarray(given)[padded]
        results, state = self.run_batch(condition.take(padded), padded, given=given, **options)
        contents = results.pop("contents", None)  # has rows, not images
        results = {name: a[: len(index)] for name, a in results.items()}
        return results | ({"contents": contents} if self.keep_contents else {}), state


def _check_mesh(mesh: MeshSpec, plan: CachePlan, batch_size: int) -> None:
    """Raises `UserError` unless the plan and batches of this size can be divided over the mesh."""
    if mesh.num_devices > 1:
        sharding.check_plan(plan, mesh)
    mesh.check(
        batch_size=batch_size,
        num_heads=plan.geometry.num_heads,
        available=len(jax.devices()),
        where=hosts.where(),
    )
