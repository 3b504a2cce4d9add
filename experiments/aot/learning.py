"""Compile a step of learning for chips that are not here, over a mesh of them, and measure it.

`experiments.learn` runs the same step. Its arguments are shapes here; nothing is allocated. All
bytes and FLOPs are those of one device.
"""

from dataclasses import dataclass
from functools import cached_property, partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from experiments.aot import floor
from experiments.aot.program import compile_program, num_bytes, on
from experiments.training.learner import Programs, even_period
from experiments.training.mesh import TrainingMesh
from pallas_kernels import chips
from pallas_kernels.chips import Chip
from varjax.core.sampling import Sampling
from varjax.models import teacher_forcing
from varjax.models.model import Model
from varjax.models.teacher_forcing import Gates
from varjax.storage import parameters

STEP = "a step"  # the program's name in the report


@dataclass(frozen=True)
class AbsentMesh(TrainingMesh):
    """A mesh of chips that are not here. chip: their name."""

    chip: str = ""

    @cached_property
    def devices(self) -> Mesh:
        return self.over(chips.compile_only_devices(self.chip, self.size))


@dataclass(frozen=True, eq=False, kw_only=True)
class LearningStep:
    """Effects of all gates in a step of `experiments.learn`, of the images that are in memory
    together; the budget does not change their size.

    text_tokens: padded length of texts; None: the most that the model takes.
    """

    model: Model
    mesh: TrainingMesh
    batch_size: int
    dtype: str
    sampling: Sampling
    text_tokens: int | None = None

    def title(self) -> str:
        """A line that says what is compiled."""
        return (
            f"{self.model.name}, learning step of {self.batch_size} images, {self.dtype}, mesh "
            f"{self.mesh}, bytes per device"
        )

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


def shape(*sizes: int, dtype: jnp.dtype = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def describe(asked: LearningStep, chip: Chip) -> dict:
    """Compile for a chip; the result as content of a JSON file. Raises as `compile_program`."""
    mesh, devices = AbsentMesh(asked.mesh.data, asked.mesh.fsdp, chip.name), asked.mesh.size
    programs, (transformer, table, batch, key) = asked.arguments()
    transformer, table, key = on(mesh.whole(), (transformer, table, key))
    given = transformer, table, on(mesh.batch(), batch), key
    trace = partial(Programs.effects.trace, programs, *given)
    program = compile_program(trace, transformer, {}, (), mesh.devices)
    weights, flops = num_bytes(transformer), program.cost.flops / devices  # traced: of all devices
    return {
        "status": "compiled",
        "batch_size": asked.batch_size,
        "mesh": str(asked.mesh),
        "devices": devices,
        "parameters": sum(int(np.prod(a.shape)) for a in jax.tree.leaves(transformer)),
        "parameter_bytes": weights,
        "peak_bytes": program.resident,
        "peak_of": STEP,
        "memory_bytes": chip.memory,
        "fits": program.resident <= chip.memory,
        "aliased": True,  # nothing is carried
        "copies": program.copies,
        "loops_of_unknown_length": program.cost.loops,
        "flops": flops,
        **floor.seconds(chip, flops, weights, asked.batch_size),
        "compile_s": program.compile_s,
        "programs": {STEP: program.said},
    }
