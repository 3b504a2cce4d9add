"""Resolution of what a command generates, and its description for reports."""

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Self

import jax
import numpy as np

import varjax
from experiments.judges import Judges
from experiments.prompts import condition as text_condition
from pallas_kernels import implementations
from pallas_kernels.chips import Chip
from varjax import jax_settings
from varjax.conditions import Condition
from varjax.core.plan import CachePlan
from varjax.core.sampling import Sampling
from varjax.generation import memory
from varjax.generation.build import Build
from varjax.generation.generator import Generator
from varjax.generation.mesh import MeshSpec
from varjax.models.loading import load_weights
from varjax.models.model import Model
from varjax.policies import Policy


@dataclass(frozen=True, kw_only=True)
class ProgramOptions:
    """Options of a compiled program, apart from model, plan and batch.

    dtype: type of the computation. weights_dtype: type of stored weights.
    kv_dtype: type of the cache, of which budgets are fractions; a full cache that others are
      compared with has `dtype`.
    build: how both programs are built; in which arithmetic pixels are decoded is decided.
    """

    dtype: str
    weights_dtype: str
    kv_dtype: str
    build: Build
    mesh: MeshSpec

    def predict(
        self,
        model: Model,
        plan: CachePlan,
        batch_size: int,
        text: int | None,
        kernels: bool,
        *,
        platform: str | None = None,
        layers: str | None = None,
    ) -> memory.Prediction:
        """Predict the bytes of one device without compiling (`memory.predict`). batch_size: images
        of that device. text: padded length of texts, None for the most. layers: in place of those
        asked for."""
        return memory.predict(
            model,
            plan.divide(self.mesh.model)[0],
            batch_size,
            self.dtype,
            self.kv_dtype,
            kernels=kernels,
            text_tokens=text,
            decoding=self.build.decoding,
            platform=platform,
            layers=layers or self.build.layers,
        )

    def predict_on(
        self, chip: Chip | None, model: Model, plan: CachePlan, text: int | None, batch_size: int
    ) -> memory.Prediction:
        """Predict the bytes of one device of a chip. chip: None is this machine."""
        platform, name = chip and chip.platform, self.build.attention
        best = implementations.choices(platform, chip.capability)[0] if chip else None
        name = name or best or implementations.preferred()
        kernels = name in implementations.PLATFORMS
        if self.build.attention is None and name == "tpu":
            from pallas_kernels.shared.tpu_operands import BLOCK_SIZES  # JAX may lack this backend

            kernels = plan.block_size >= min(BLOCK_SIZES)
        return self.predict(model, plan, batch_size, text, kernels, platform=platform)

    def predict_here(
        self, model: Model, plan: CachePlan, batch_size: int, condition: Condition
    ) -> memory.Prediction:
        """Predict the bytes of one device of this machine, for images of a condition."""
        text = getattr(condition, "padded_length", None)
        return self.predict_on(None, model, plan, text, batch_size)


@dataclass(frozen=True, eq=False, kw_only=True)
class Generation:
    """Settings that decide the images of `run` and `sweep` besides the policy.

    model: without its weights.
    condition: what the images are made of. Its prompts may not be encoded yet.
    """

    model: Model
    condition: Condition
    sampling: Sampling
    seed: int
    batch_size: int
    program: ProgramOptions

    def describe(self) -> dict:
        """Return what decides the results, as JSON data."""
        said, program = self.condition.describe(), self.program
        return {
            "model": self.model.name,
            "model_sources": self.model.metadata.get("sources", []),
            "model_files": self.model.metadata.get("files", {}),
            "schedule": [list(pair) for pair in self.model.config.token_maps],
            "labels": self.condition.numbers.tolist(),
            # `labels` are numbers of prompts only: say which texts they stand for
            **({"text": said} if isinstance(said, dict) else {}),
            "sampling": dataclasses.asdict(self.sampling),
            "seed": self.seed,
            "batch_size": self.batch_size,
            "dtype": program.dtype,
            "weights_dtype": program.weights_dtype,
            "kv_dtype": program.kv_dtype,
            "matmul_precision": program.build.matmul_precision,
            "decode_dtype": program.build.decode_dtype,
            "segments": program.build.segments,
            "layers": program.build.layers,
            "attention": program.build.attention or "auto",
            "mesh": str(program.mesh),
            **({"compiler": compiler} if (compiler := jax_settings.of_compiler()) else {}),
        }

    def encoded(self) -> Self:
        """Return a copy whose prompts are encoded. The encoder's memory is free again after it."""
        condition = text_condition.encoded(self.condition, self.model, self.program.dtype)
        return dataclasses.replace(self, condition=condition)

    def load_model(self) -> Model:
        """Load the weights; they stay on disk until it is known which devices share them."""
        several = self.program.mesh.num_devices > 1
        return load_weights(self.model, self.program.dtype, on_disk=several)

    def generator(
        self,
        model: Model,
        plan: CachePlan,
        kv_dtype: str,
        *,
        keep_logits: bool = False,
        keep_contents: bool = False,
    ) -> Generator:
        """Return the generator of a plan. model: with weights. kv_dtype: of the stored cache."""
        keep = {"keep_logits": keep_logits, "keep_contents": keep_contents}
        return Generator(
            model,
            plan=plan,
            sampling=self.sampling,
            batch_size=self.batch_size,
            kv_dtype=kv_dtype,
            mesh=self.program.mesh,
            build=dataclasses.replace(self.program.build, **keep),
        )


@dataclass(frozen=True, eq=False, kw_only=True)
class Run(Generation):
    """A resolved run.

    policy: as the user asked for it. `plan.policy` also has what a calibration decides.
    given_tokens: tokens of all images that replace the draw; None: everything is drawn.
    given_scales: how many of the first scales take the given tokens; None: all.
    calibration: SHA-256 of the file.
    remarks: lines to print about the plan and the recipe.
    judges: networks that compare the pictures with the full cache's.
    resize: side of the pictures that are kept, in pixels; None: as they are drawn.
    recipe: what the report says about the recipe.
    """

    policy: Policy
    plan: CachePlan
    compare: bool
    save_arrays: bool
    given_tokens: np.ndarray | None
    given_scales: int | None
    calibration: str | None
    remarks: tuple[str, ...]
    save_kept: bool = False
    judges: Judges = Judges()
    resize: int | None = None
    recipe: Mapping | None = None

    def describe(self) -> dict:
        """Return what decides the results, as JSON data."""
        given = None
        if self.given_tokens is not None:
            digest = hashlib.sha256(self.given_tokens.tobytes()).hexdigest()[:16]
            given = f"{digest}:{self.given_scales}"
        return {
            **super().describe(),
            "policy": self.policy.name,
            "policy_args": policy_arguments(self.policy),
            "budget": self.policy.budget,
            "plan": self.plan.digest,
            "policy_content": self.policy.content(),
            "calibration": self.calibration,
            "compare": self.compare,
            "save_arrays": self.save_arrays,
            "given": given,
            **({"resize": self.resize} if self.resize else {}),
            **({"save_kept": True} if self.save_kept else {}),
        }


# --- for reports ----------------------------------------------------------------------------------


def policy_arguments(policy: Policy) -> dict:
    """Return the policy's arguments except the budget."""
    names = (f.name for f in dataclasses.fields(policy) if f.name[0] != "_")
    return {name: getattr(policy, name) for name in names if name != "budget"}


def cache_report(generator: Generator) -> dict:
    """Return the size of a generator's cache. Byte counts are for one batch. `allocated_bytes` is
    read from the compiled program; the full cache is counted in the same type."""
    plan, batch, dtype = generator.plan, generator.batch_size, generator.kv_dtype
    dense, allocated = plan.dense_bytes(batch, dtype), generator.allocated_bytes
    read, geometry = plan.read_tokens, plan.geometry
    full = geometry.dense_tokens / (geometry.num_layers * geometry.num_heads)
    return {
        "dtype": str(generator.kv_dtype),
        "dense_bytes": dense,
        "planned_bytes": plan.allocated_bytes(batch, dtype, generator.mesh.model),
        "allocated_bytes": allocated,
        "fraction": allocated / max(1, dense),
        "peak_live_fraction": plan.peak_live_fraction,
        # of a head's full cache, where queries read less than what is stored
        "read_fraction": None if read is None else read / full,
        "block_size": plan.block_size,
        "pool_blocks": plan.pool_blocks,
        "accounting": plan.accounting,
    }


def time_report(generator: Generator) -> dict:
    """Return times in seconds. `steady_s_per_image` is the median of all runs after the first one,
    the time of the first if it is the only one, and None if nothing was run."""
    timing, runs = generator.timing, generator.timing.runs
    # the first run also loads kernels and fills caches; the median leaves out what others disturb
    steady = float(np.median(runs[1:] or runs)) / generator.batch_size if runs else None
    return {
        "compile_s": timing.compile_s,
        "first_run_s": runs[0] if runs else None,
        "steady_s_per_image": steady,
    }


def environment(*more: ModuleType) -> dict[str, str | dict[str, str]]:
    """Return the device, and the versions of varjax, JAX, NumPy and `more` packages."""
    device = jax.local_devices()[0]
    packages = {package.__name__: package for package in (varjax, jax, np, *more)}
    versions = {name: package.__version__ for name, package in packages.items()}
    return {"device": f"{device.platform}: {device.device_kind}", "versions": versions}


def aligned(rows: Sequence[tuple[str, str]]) -> str:
    """Return a line for each (name, text), with all texts in one column."""
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name.ljust(width)}  {text}" for name, text in rows)
