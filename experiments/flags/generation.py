"""Flags that all commands share which generate images, and the settings that follow from them."""

import dataclasses
from dataclasses import dataclass
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from experiments import settings
from experiments.prompts import condition as text_condition
from pallas_kernels import implementations
from varjax import api
from varjax.api import Generator, Model
from varjax.cache.plan import CachePlan
from varjax.cli.command_line import CommandFlags
from varjax.engine import memory
from varjax.engine.segments import plan_segments
from varjax.errors import UserError
from varjax.parallel.mesh import MeshSpec
from varjax.policies import Policy
from varjax.sampling import Sampling

USUAL_BATCH = 8


@dataclass(frozen=True, eq=False, kw_only=True)
class GenerationSettings:
    """What decides the images of a command besides the policy.

    condition: what they are made of (`varjax.conditions`); prompts may still have to be encoded.
    kv_dtype: of the pool; dense_dtype: of a full cache.
    decode_batch: images decoded at once; None: as many as fit.
    """

    model: settings.AbstractModel
    condition: Any
    sampling: Sampling
    seed: int
    batch_size: int
    dtype: str
    kv_dtype: Any
    dense_dtype: Any
    matmul_precision: str
    segments: str
    attention: str | None
    decode_batch: int | None = None
    mesh: MeshSpec = MeshSpec()

    def describe(self) -> dict:
        """JSON-able content: what decides the results."""
        return {
            "model": self.model.name,
            "model_sources": self.model.metadata.get("sources", []),
            "model_files": self.model.metadata.get("files", {}),
            "schedule": [list(pair) for pair in self.model.geometry.schedule.maps],
            "labels": self.condition.numbers.tolist(),
            **self._text(),
            "sampling": dataclasses.asdict(self.sampling),
            "seed": self.seed,
            "batch_size": self.batch_size,
            "dtype": self.dtype,
            "kv_dtype": str(self.kv_dtype),
            "matmul_precision": self.matmul_precision,
            "segments": str(self.segments),
            "attention": self.attention or "auto",
            "mesh": str(self.mesh),
        }

    def _text(self) -> dict:
        """What labels do not say: the texts behind their numbers."""
        said = self.condition.describe()
        return {"text": said} if isinstance(said, dict) else {}

    def encoded(self) -> Self:
        """With prompts encoded; the encoder is freed again before the model is loaded."""
        condition = text_condition.encoded(self.condition, self.model, self.dtype)
        return dataclasses.replace(self, condition=condition)

    def padded(self, index: np.ndarray) -> np.ndarray:
        """int32 [batch_size]: image numbers of a whole batch, the last one repeated."""
        return np.pad(index, (0, self.batch_size - index.size), mode="edge").astype(np.int32)

    def generator(
        self, model: Model, policy: Policy, plan: CachePlan, *, kv_dtype, keep_logits: bool
    ) -> Generator:
        """The program of a policy under these settings."""
        return Generator(
            model,
            policy,
            sampling=self.sampling,
            batch_size=self.batch_size,
            segments=self.segments,
            attention=self.attention,
            kv_dtype=kv_dtype,
            matmul_precision=self.matmul_precision,
            keep_logits=keep_logits,
            cache_plan=plan,
            mesh=self.mesh,
            decode_batch=self.decode_batch,
        )


class SamplingFlags:
    """--cfg, --tau, --cfg_insertion_layer, --top_k, --top_p, --greedy, --more_smooth and --seed of
    a command."""

    def __init__(self, flags: CommandFlags):
        self._cfg = flags.string(
            "cfg",
            None,
            "Guidance strength, a number or one per scale (3,3,2.5); default: the checkpoint's "
            "recommendation, as for all sampling flags.",
        )
        self._tau = flags.string(
            "tau", None, "Temperature that logits are divided by, a number or one per scale."
        )
        self._insertion = flags.string(
            "cfg_insertion_layer",
            None,
            "Where guidance acts, a list: 0 on the logits, -k after layer depth - k (Infinity).",
        )
        self._top_k = flags.integer("top_k", None, "Keep the k largest logits; 0 is off.")
        self._top_p = flags.floating("top_p", None, "Nucleus sampling with this mass; 0 is off.")
        self._greedy = flags.boolean("greedy", False, "Take the largest logit instead of sampling.")
        self._more_smooth = flags.boolean(
            "more_smooth", None, "Feed back mixtures of codes: smoother pictures (VAR)."
        )
        self._seed = flags.integer(
            "seed", 0, "Image i depends on (seed, i, its label or prompt) only."
        )

    def sampling(self, model: settings.AbstractModel) -> Sampling:
        """As asked, else as the checkpoint recommends."""
        chosen = Sampling.recommended(
            dict(model.metadata.get("sampling", {})),
            cfg=_one_or_many(self._cfg),
            tau=_one_or_many(self._tau),
            cfg_insertion_layer=_numbers(self._insertion, int),
            top_k=self._top_k.value,
            top_p=self._top_p.value,
            greedy=self._greedy.value,
            more_smooth=self._more_smooth.value,
        )
        return model.transformer.config.check_sampling(chosen)

    @property
    def seed(self) -> int:
        return settings.check_seed(self._seed.value)


def _numbers(holder, kind: type) -> tuple | None:
    """The numbers of a flag `1,2,3`; None if it was not set."""
    if holder.value is None:
        return None
    try:
        return tuple(kind(part) for part in holder.value.split(","))
    except ValueError:
        what = {int: "whole numbers", float: "numbers"}[kind]
        raise UserError(
            f"--{holder.name}={holder.value}: write {what} separated by commas, or a single one"
        ) from None


def _one_or_many(holder) -> float | tuple[float, ...] | None:
    found = _numbers(holder, float)
    return found[0] if found is not None and len(found) == 1 else found


class ProgramFlags:
    """--dtype, --kv_dtype, --matmul_precision, --segments, --attention, --batch_size,
    --decode_batch and, on request, --mesh."""

    def __init__(self, flags: CommandFlags, *, mesh: bool = False):
        self._mesh = None
        if mesh:
            self._mesh = flags.string(
                "mesh",
                None,
                "Devices to split over: data=4 (images), data=4,model=2 (also heads and weights).",
            )
        self._batch_size = flags.integer(
            "batch_size", None, f"Images per program call; default: {USUAL_BATCH}, or what fits."
        )
        self._decode_batch = flags.integer(
            "decode_batch",
            None,
            "Images decoded to pixels at a time, which lowers the peak; default: what takes 2 GiB.",
            lower_bound=1,
        )
        self._dtype = flags.enum(
            "dtype",
            None,
            ["bfloat16", "float32"],
            "Type of weights and cache; default: float32 on CPU, else bfloat16.",
        )
        self._kv_dtype = flags.enum(
            "kv_dtype",
            None,
            list(api.KV_DTYPES),
            "Type of stored keys and values; default: that of the weights, as the full cache "
            "always has. int8 has a scale per token.",
        )
        self._precision = flags.enum(
            "matmul_precision",
            "default",
            list(api.MATMUL_PRECISIONS),
            "Precision of float32 products.",
        )
        self._segments = flags.string(
            "segments",
            "auto",
            "How many segments the scale loop is cut into: auto or a number. Results do not "
            "change.",
        )
        self._attention = flags.enum(
            "attention",
            "auto",
            ["auto", *implementations.NAMES],
            "Attention and cache writing: auto takes triton on GPU, tpu on TPU, else reference; "
            "-interpret runs a kernel step by step anywhere, slowly.",
        )

    def resolve(self, model: settings.AbstractModel) -> dict[str, Any]:
        """Checked fields of `GenerationSettings`, all but the batch size."""
        plan_segments(model.geometry.schedule, self._segments.value)
        dtype = self._dtype.value or api.default_dtype()
        dense_dtype = api.storage_dtype(dtype)
        return {
            "dtype": dtype,
            "kv_dtype": jnp.dtype(self._kv_dtype.value or dense_dtype),
            "dense_dtype": dense_dtype,
            "matmul_precision": self._precision.value,
            "segments": self._segments.value,
            "attention": settings.check_attention(self._attention.value),
            "mesh": self.mesh(model),
            "decode_batch": self._decode_batch.value,
        }

    def mesh(self, model: settings.AbstractModel) -> MeshSpec:
        """Checked, but for the batch."""
        found = MeshSpec.parse(None if self._mesh is None else self._mesh.value)
        return found.check(
            batch_size=found.data,
            num_heads=model.geometry.num_heads,
            available=len(jax.devices()),
            where="this machine",
        )

    def batch_size(
        self,
        model: settings.AbstractModel,
        plan: CachePlan,
        condition: Any,
        dtype,
        kv_dtype,
        dry_run: bool = False,
    ) -> int:
        """As asked, or the usual one for the images of a condition, cut down to what fits, a
        multiple of the devices along `data`."""
        asked, shards = self._batch_size.value, self.mesh(model).data
        if asked is not None and asked < 1:
            raise UserError(f"--batch_size={asked}: at least 1")
        if asked and asked % shards:
            raise UserError(
                f"--batch_size={asked} cannot be split evenly over data={shards} devices: choose a "
                f"multiple of {shards}"
            )

        kernels = settings.runs_kernels(settings.check_attention(self._attention.value), plan)

        def predict(size):
            sizes = (size, dtype, kv_dtype)
            return memory.predict(
                *(plan, model.transformer, model.codec, *sizes),
                kernels=kernels,
                text_tokens=text_condition.text_tokens(condition),
                decode_batch=self._decode_batch.value,
            )

        asked, images = asked and asked // shards, -(-len(condition) // shards)
        usual = -(-USUAL_BATCH // shards)
        if dry_run:
            return shards * (asked or min(images, usual))
        try:
            if asked and memory.largest_batch(predict, asked, memory.available_bytes()) < asked:
                memory.choose_batch_size(predict, asked, asked, usual)
            return shards * memory.choose_batch_size(predict, asked, images, usual)
        except UserError as error:
            if shards == 1:
                raise
            raise UserError(f"on each of the {shards} devices along data: {error}") from None
