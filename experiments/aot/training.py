"""Compile a training step for chips that are not here, over a mesh of them, and measure it.

`experiments.train` runs the same step (`experiments.training`): forward, gradients, clipping, AdamW
and the average of the weights; `experiments.learn` runs that of `LearningStep`. Its arguments are
shapes here; nothing is allocated. All bytes and FLOPs are those of one device.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import PyTree

from experiments.aot import floor
from experiments.aot.program import compile_program, num_bytes, on
from experiments.training import session
from experiments.training.learner import Programs, even_period
from experiments.training.mesh import TrainingMesh
from experiments.training.settings import TrainingSettings
from experiments.training.var_trainer import TransformerStage
from pallas_kernels import chips
from pallas_kernels.chips import Chip
from varjax.core.errors import UserError
from varjax.core.sampling import Sampling
from varjax.models import teacher_forcing
from varjax.models.model import Model
from varjax.models.teacher_forcing import Gates
from varjax.storage import parameters

NO_DATA = "none"  # a folder is asked for, and never opened
STEP = "a step"  # the program's name in the report


@dataclass(frozen=True)
class AbsentMesh(TrainingMesh):
    """A mesh of chips that are not here. chip: their name."""

    chip: str = ""

    @cached_property
    def devices(self) -> Mesh:
        return self.over(chips.compile_only_devices(self.chip, self.size))


class Program(NamedTuple):
    """Program of a step. first: its first argument, shapes as in state, which it changes, and in
    weights."""

    trace: Callable[[], jax.stages.Traced]
    first: PyTree
    state: dict
    weights: PyTree


@dataclass(frozen=True, eq=False, kw_only=True)
class Step(ABC):
    """Step to be compiled, apart from the chip."""

    kind: ClassVar[str]
    model: Model
    mesh: TrainingMesh
    batch_size: int
    dtype: str

    def check(self) -> None:
        """Raise `UserError` unless there is such a step of such a model, with such a batch."""
        self.mesh.check_batch("--batch_size", self.batch_size)

    def title(self) -> str:
        """A line that says what is compiled."""
        return (
            f"{self.model.name}, {self.kind} step of {self.batch_size} images, "
            f"{self.dtype}{self.how()}, mesh {self.mesh}, bytes per device"
        )

    def how(self) -> str:
        return ""

    @abstractmethod
    def program(self, mesh: TrainingMesh) -> Program:
        """Return the program and the shapes that it takes on a mesh of absent chips."""


@dataclass(frozen=True, eq=False, kw_only=True)
class TrainingStep(Step):
    """Step of `experiments.train`. accumulate, remat: see `TrainingSettings`."""

    kind = "training"
    accumulate: int
    remat: bool

    def check(self) -> None:
        """Raise `UserError` unless `experiments.train` trains such a model, with such a batch."""
        family = self.model.family.name
        if family not in session.TRANSFORMERS:
            raise UserError(
                f"{self.model.name}: there is no training of {family} models, so there is no step "
                f"to compile: choose a model of {' or '.join(session.TRANSFORMERS)}"
            )
        if not self.model.num_classes:
            raise UserError(
                f"{self.model.name} draws from texts; training is for models of classes"
            )
        self.mesh.check_batch("--batch_size", self.batch_size, self.accumulate)

    def how(self) -> str:
        return f", {self.accumulate} parts" * (self.accumulate > 1) + ", remat" * self.remat

    def stage(self, mesh: TrainingMesh) -> TransformerStage:
        """The stage of `experiments.training`, without data."""
        made = session.TRANSFORMERS[self.model.family.name]
        settings = TrainingSettings.for_family(
            family=self.model.family.name,
            data=NO_DATA,
            dtype=self.dtype,
            accumulate=self.accumulate,
            remat=self.remat,
            var_batch_size=self.batch_size,
        )
        quantizer = getattr(self.model.networks["codec"], "quantizer", None)
        return made(settings, self.model.config, None, quantizer, mesh=mesh)

    def program(self, mesh: TrainingMesh) -> Program:
        stage = self.stage(mesh)
        state = jax.tree.map(on, mesh.state(stage.shapes), stage.shapes)
        tokens = shape(self.batch_size, self.model.config.total_tokens, dtype=jnp.int32)
        labels = shape(self.batch_size, dtype=jnp.int32)
        quantizer = stage.quantizer and parameters.shapes(stage.quantizer, "float32")
        key = jax.eval_shape(partial(jax.random.key, 0))
        quantizer, key = on(mesh.whole(), (quantizer, key))
        arguments = state, quantizer, *on(mesh.batch(), (tokens, labels)), key
        trace = partial(type(stage)._train.trace, stage, *arguments)
        return Program(trace, state, state, state["params"])


@dataclass(frozen=True, eq=False, kw_only=True)
class LearningStep(Step):
    """Effects of all gates in a step of `experiments.learn`, of the images that are in memory
    together; the budget does not change their size.

    text_tokens: padded length of texts; None: the most that the model takes.
    """

    kind = "learning"
    sampling: Sampling
    text_tokens: int | None = None

    def arguments(self) -> tuple[Programs, tuple]:
        """`Programs` and what `Programs.effects` takes, as shapes."""
        model, geometry = self.model, self.model.geometry_for(self.sampling)
        period, size = even_period(geometry), self.batch_size
        programs = Programs(self.sampling, geometry, period)
        transformer = parameters.shapes(model.transformer, self.dtype)
        heads = geometry.num_layers, geometry.num_heads
        table = shape(programs.scales, *heads, programs.source.size)
        condition = model.transformer.condition_shapes(size, self.text_tokens)
        if model.draws_tokens:
            given = shape(size, geometry.schedule.num_drawn, dtype=jnp.int32)
        else:
            given = shape(size, geometry.schedule.total_tokens, model.config.code_map[-1])
        full = partial(teacher_forcing.guided, sampling=self.sampling, gates=Gates())
        logits = shape(*jax.eval_shape(full, transformer, condition, given).shape)
        key = jax.eval_shape(partial(jax.random.key, 0))
        return programs, (transformer, table, (condition, given, logits), key)

    def program(self, mesh: TrainingMesh) -> Program:
        programs, (transformer, table, batch, key) = self.arguments()
        transformer, table, key = on(mesh.whole(), (transformer, table, key))
        batch = on(mesh.batch(), batch)
        trace = partial(Programs.effects.trace, programs, transformer, table, batch, key)
        return Program(trace, transformer, {}, transformer)


def shape(*sizes: int, dtype: jnp.dtype = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def describe(asked: Step, chip: Chip) -> dict:
    """Compile for a chip; the result as content of a JSON file. Raises as `compile_program`."""
    mesh, devices = AbsentMesh(asked.mesh.data, asked.mesh.fsdp, chip.name), asked.mesh.size
    trace, first, state, weights = asked.program(mesh)
    program = compile_program(trace, first, {}, (), mesh.devices)
    # the traced program is that of all devices
    held, flops = num_bytes(state), program.cost.flops / devices
    apart = {} if first is state else {"parameter_bytes": num_bytes(weights)}
    moved = 2 * held + sum(apart.values())
    return {
        "status": "compiled",
        "batch_size": asked.batch_size,
        "mesh": str(asked.mesh),
        "devices": devices,
        "parameters": sum(int(np.prod(a.shape)) for a in jax.tree.leaves(weights)),
        **apart,
        "state_bytes": held,
        "peak_bytes": program.resident,
        "peak_of": STEP,
        "memory_bytes": chip.memory,
        "fits": program.resident <= chip.memory,
        "aliased": program.memory.alias_size_in_bytes >= held,
        "copies": program.copies,
        "loops_of_unknown_length": program.cost.loops,
        "flops": flops,
        **floor.seconds(chip, flops, moved, asked.batch_size),
        "compile_s": program.compile_s,
        "programs": {STEP: program.said},
    }
