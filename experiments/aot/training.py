"""Compile a training step for chips that are not here, over a mesh of them, and measure it.

`experiments.train` runs the same step (`experiments.training`): forward, gradients, clipping, AdamW
and the average of the weights. Its arguments are shapes here; nothing is allocated. All bytes and
FLOPs are those of one device.
"""

from dataclasses import dataclass
from functools import cached_property, partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from experiments.aot import floor
from experiments.aot.program import compile_program, num_bytes, on
from experiments.training import session
from experiments.training.mesh import TrainingMesh
from experiments.training.settings import TrainingSettings
from experiments.training.var_trainer import TransformerStage
from pallas_kernels import chips
from pallas_kernels.chips import Chip
from varjax.core.errors import UserError
from varjax.models.model import Model
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


@dataclass(frozen=True, eq=False, kw_only=True)
class TrainingStep:
    """Training step to be compiled, apart from the chip. accumulate, remat: see
    `TrainingSettings`."""

    model: Model
    mesh: TrainingMesh
    batch_size: int
    dtype: str
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

    def title(self) -> str:
        """A line that says what is compiled."""
        how = f", {self.accumulate} parts" * (self.accumulate > 1) + ", remat" * self.remat
        return (
            f"{self.model.name}, training step of {self.batch_size} images, {self.dtype}{how}, "
            f"mesh {self.mesh}, bytes per device"
        )

    def stage(self, chip: Chip) -> TransformerStage:
        """The stage of `experiments.training` on a mesh of this chip, without data."""
        made = session.TRANSFORMERS[self.model.family.name]
        settings = TrainingSettings.for_family(
            family=self.model.family.name,
            data=NO_DATA,
            dtype=self.dtype,
            accumulate=self.accumulate,
            remat=self.remat,
            var_batch_size=self.batch_size,
        )
        mesh = AbsentMesh(self.mesh.data, self.mesh.fsdp, chip.name)
        quantizer = getattr(self.model.networks["codec"], "quantizer", None)
        return made(settings, self.model.config, None, quantizer, mesh=mesh)


def describe(asked: TrainingStep, chip: Chip) -> dict:
    """Compile for a chip; the result as content of a JSON file. Raises the errors of
    `compile_program`."""
    stage = asked.stage(chip)
    mesh, devices = stage.mesh, asked.mesh.size
    state = jax.tree.map(on, mesh.state(stage.shapes), stage.shapes)
    tokens = jax.ShapeDtypeStruct((asked.batch_size, asked.model.config.total_tokens), jnp.int32)
    labels = jax.ShapeDtypeStruct((asked.batch_size,), jnp.int32)
    quantizer = stage.quantizer and parameters.shapes(stage.quantizer, "float32")
    key = jax.eval_shape(partial(jax.random.key, 0))
    quantizer, key = on(mesh.whole(), (quantizer, key))
    arguments = state, quantizer, *on(mesh.batch(), (tokens, labels)), key
    trace = partial(type(stage)._train.trace, stage, *arguments)
    program = compile_program(trace, state, {}, (), mesh.devices)
    # the traced program is that of all devices
    held, flops = num_bytes(state), program.cost.flops / devices
    return {
        "status": "compiled",
        "batch_size": asked.batch_size,
        "mesh": str(asked.mesh),
        "devices": devices,
        "parameters": sum(int(np.prod(a.shape)) for a in state["params"].values()),
        "state_bytes": held,
        "peak_bytes": program.resident,
        "peak_of": STEP,
        "memory_bytes": chip.memory,
        "fits": program.resident <= chip.memory,
        "aliased": program.memory.alias_size_in_bytes >= held,
        "copies": program.copies,
        "loops_of_unknown_length": program.cost.loops,
        "flops": flops,
        **floor.seconds(chip, flops, 2 * held, asked.batch_size),
        "compile_s": program.compile_s,
        "programs": {STEP: program.said},
    }
