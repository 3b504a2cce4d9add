"""What is generated, resolved before anything is compiled, and what reports say of it."""

import dataclasses
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import jax
import numpy as np

import varjax
from experiments.flags.program import ProgramOptions
from experiments.judges import Judges
from experiments.prompts import condition as text_condition
from varjax.cache.plan import CachePlan
from varjax.conditions import Condition
from varjax.generator import Generator
from varjax.model import Model
from varjax.policies import Policy
from varjax.sampling import Sampling


@dataclass(frozen=True, eq=False, kw_only=True)
class Generation:
    """What decides the images of `run` and `sweep` besides the policy.

    model: without its weights.
    condition: what images are made of; prompts may still have to be encoded.
    """

    model: Model
    condition: Condition
    sampling: Sampling
    seed: int
    batch_size: int
    program: ProgramOptions

    def describe(self) -> dict:
        """JSON-able content: what decides the results."""
        said, program = self.condition.describe(), self.program
        return {
            "model": self.model.name,
            "model_sources": self.model.metadata.get("sources", []),
            "model_files": self.model.metadata.get("files", {}),
            "schedule": [list(pair) for pair in self.model.config.token_maps],
            "labels": self.condition.numbers.tolist(),
            # what labels do not say: the texts behind their numbers
            **({"text": said} if isinstance(said, dict) else {}),
            "sampling": dataclasses.asdict(self.sampling),
            "seed": self.seed,
            "batch_size": self.batch_size,
            "dtype": program.dtype,
            "kv_dtype": program.kv_dtype,
            "matmul_precision": program.matmul_precision,
            "decode_dtype": program.decode_dtype,
            "segments": program.segments,
            "layers": program.layers,
            "attention": program.attention or "auto",
            "mesh": str(program.mesh),
        }

    def encoded(self) -> Self:
        """With prompts encoded; the encoder is freed again before the model is loaded."""
        condition = text_condition.encoded(self.condition, self.model, self.program.dtype)
        return dataclasses.replace(self, condition=condition)

    def load_model(self) -> Model:
        """The model with its weights; in host memory if they go to several devices."""
        several = self.program.mesh.num_devices > 1
        return self.model.load_weights(self.program.dtype, on_host=several)

    def generator(
        self, model: Model, plan: CachePlan, kv_dtype: str, *, keep_logits: bool
    ) -> Generator:
        """The program of a plan. model: with weights."""
        program = self.program
        return Generator(
            model,
            plan=plan,
            sampling=self.sampling,
            batch_size=self.batch_size,
            segments=program.segments,
            layers=program.layers,
            attention=program.attention,
            kv_dtype=kv_dtype,
            matmul_precision=program.matmul_precision,
            keep_logits=keep_logits,
            mesh=program.mesh,
            decode_batch=program.decode_batch,
            decode_dtype=program.decode_dtype,
        )


@dataclass(frozen=True, eq=False, kw_only=True)
class Run(Generation):
    """A resolved run.

    policy: as it was asked for; that of the plan has what a calibration decides filled in.
    given_tokens: replace the draw in the first `given_scales` scales (None: all).
    calibration: SHA-256 of the file. remarks: of the policy, on its plan. judges: networks whose
      numbers are reported too. resize: side of the pictures that are kept; None: as drawn. recipe:
      what the report says of it.
    """

    policy: Policy
    plan: CachePlan
    compare: bool
    save_arrays: bool
    given_tokens: np.ndarray | None
    given_scales: int | None
    calibration: str | None
    remarks: tuple[str, ...]
    judges: Judges = Judges()
    resize: int | None = None
    recipe: Mapping | None = None

    def describe(self) -> dict:
        """JSON-able content: what decides the results."""
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
        }


# --- for reports ----------------------------------------------------------------------------------


def policy_arguments(policy: Policy) -> dict:
    """The policy's arguments except the budget."""
    names = (f.name for f in dataclasses.fields(policy) if f.name[0] != "_")
    return {name: getattr(policy, name) for name in names if name != "budget"}


def cache_report(generator: Generator, dense_dtype: str) -> dict:
    """What a generator's cache takes. Byte counts are for one batch; `allocated` is read off the
    compiled program. dense_dtype: of a full cache."""
    plan, batch = generator.plan, generator.batch_size
    dense, allocated = plan.dense_bytes(batch, dense_dtype), generator.allocated_bytes
    return {
        "dtype": str(generator.kv_dtype),
        "dense_bytes": dense,
        "planned_bytes": plan.num_bytes(batch, generator.kv_dtype),
        "allocated_bytes": allocated,
        "fraction": allocated / max(1, dense),
        "peak_live_fraction": plan.peak_live_fraction,
        "block_size": plan.block_size,
        "pool_blocks": plan.pool_blocks,
        "accounting": plan.accounting,
    }


def time_report(generator: Generator) -> dict:
    """Seconds. `steady_s_per_image`: median of the runs after the first one, or of a single run
    that one; None where nothing was run."""
    timing = generator.timing
    steady = None if timing.steady_s is None else timing.steady_s / generator.batch_size
    return {
        "compile_s": timing.compile_s,
        "first_run_s": timing.first_run_s,
        "steady_s_per_image": steady,
    }


def environment() -> Mapping[str, Any]:
    """The device, and versions of what computed."""
    device = jax.devices()[0]
    versions = {"varjax": varjax.__version__, "jax": jax.__version__, "numpy": np.__version__}
    return {"device": f"{device.platform}: {device.device_kind}", "versions": versions}
