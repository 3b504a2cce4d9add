"""Compile a training step for chips that are not here, over a mesh of them, and measure it.

`experiments.train` runs the same step (`varjax.training`): forward, gradients, clipping, AdamW and
the average of the weights. Its arguments are shapes here; nothing is allocated. All bytes and FLOPs
are those of one device.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from experiments.aot import buffers, collectives, modelled_report
from experiments.aot.listing import collective_lines, exchanged, table, temporary_lines
from experiments.aot.program import Program, compile_program
from pallas_kernels import chips
from pallas_kernels.chips import Chip
from varjax.engine.cost import device_bytes
from varjax.engine.memory import show_bytes
from varjax.errors import UserError
from varjax.model import Model
from varjax.nn import parameters
from varjax.parallel.training import TrainingMesh
from varjax.training import session
from varjax.training.settings import TrainingSettings
from varjax.training.var_trainer import TransformerStage

NO_DATA = "none"  # a folder is asked for, and never opened
LEGEND = """\
state        parameters, their average, AdamW's two moments: a device's share.
peak         state, pictures, temporaries, results and code at one time.
in place     the donated state is updated in place.
FLOPs        products and convolutions of a device, those that --remat computes twice included.
exchanged    bytes that a device sends to others in one step, around a ring; below the table the
             arrays by kind of exchange."""


@dataclass(frozen=True)
class AbsentMesh(TrainingMesh):
    """A mesh of chips that are not here. chip: their name."""

    chip: str = ""

    @cached_property
    def devices(self) -> Mesh:
        return self.over(chips.compile_only_devices(self.chip, self.size))


@dataclass(frozen=True, eq=False, kw_only=True)
class TrainingStep:
    """What is compiled, apart from the chip. accumulate, remat: see `TrainingSettings`."""

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
        """The stage of `varjax.training` on a mesh of this chip, without data."""
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


def compile_step(asked: TrainingStep, chip: Chip) -> tuple[Program, dict]:
    """Return the compiled step and the shapes of its state. Raises the errors of
    `compile_program`."""
    stage = asked.stage(chip)
    mesh = stage.mesh
    state = _placed(stage.shapes, mesh.state(stage.shapes))
    whole = partial(_on, mesh.whole())
    tokens = jax.ShapeDtypeStruct((asked.batch_size, asked.model.config.total_tokens), jnp.int32)
    labels = jax.ShapeDtypeStruct((asked.batch_size,), jnp.int32)
    quantizer = stage.quantizer and parameters.shapes(stage.quantizer, "float32")
    arguments = (
        state,
        whole(quantizer),
        *_on(mesh.batch(), (tokens, labels)),
        whole(jax.eval_shape(partial(jax.random.key, 0))),
    )
    trace = partial(type(stage)._train.trace, stage, *arguments)
    with jax.sharding.use_abstract_mesh(mesh.devices.abstract_mesh):
        return compile_program(trace, state, chip, {}), state


def _on(where: jax.sharding.Sharding, tree):
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=where), tree)


def _placed(tree, where):
    return jax.tree.map(
        lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), tree, where
    )


def describe(asked: TrainingStep, chip: Chip, temporaries: int) -> dict:
    """Compile for a chip; the result as content of a JSON file."""
    program, state = compile_step(asked, chip)
    held = sum(map(device_bytes, jax.tree.leaves(state)))
    stats, devices = program.memory, asked.mesh.size
    # the traced program is that of all devices
    flops = program.cost.flops / devices
    return {
        "status": "compiled",
        "batch_size": asked.batch_size,
        "mesh": str(asked.mesh),
        "devices": devices,
        "parameters": sum(int(np.prod(a.shape)) for a in state["params"].values()),
        "state_bytes": held,
        "temporary_bytes": stats.temp_size_in_bytes,
        "peak_bytes": program.resident,
        "memory_bytes": chip.memory,
        "fits": program.resident <= chip.memory,
        "state_aliased": stats.alias_size_in_bytes >= held,
        "flops": flops,
        "roofline_s": flops / chip.bf16_flops,
        "collectives": collectives.describe(program.exchanged),
        "modelled": modelled_report.describe(program.modelled),
        "live_temporary_bytes": buffers.total_bytes(program.live),
        "largest_temporaries": [
            {"bytes": b.size, "shape": b.shape, "instruction": b.name, "source": b.source}
            for b in program.live[:temporaries]
        ],
        "compile_s": program.compile_s,
    }


# --- to read ---


def _bytes(key: str) -> Callable[[Mapping], str]:
    return lambda r: show_bytes(r[key])


_ROWS = (
    ("batch", lambda r: r["batch_size"]),
    ("devices", lambda r: r["devices"]),
    ("state", _bytes("state_bytes")),
    ("temporaries", _bytes("temporary_bytes")),
    ("peak", _bytes("peak_bytes")),
    ("memory", _bytes("memory_bytes")),
    ("fits", lambda r: "yes" if r["fits"] else "NO"),
    ("in place", lambda r: "yes" if r["state_aliased"] else "NO"),
    ("TFLOPs", lambda r: f"{r['flops'] / 1e12:.4g}"),
    ("seconds at the peak rate", lambda r: f"{r['roofline_s']:.3g}"),
    ("exchanged", exchanged),
    ("compile seconds", lambda r: f"{r['compile_s']:.0f}"),
)


def text(results: Sequence[Mapping]) -> str:
    """The results of all targets: a table with a column for each, then exchanges and
    temporaries."""
    lines = table(_ROWS, results)
    for r in results:
        if r["status"] == "compiled":
            lines += collective_lines(r["target"], "a step", r)
            lines += temporary_lines(r["target"], "a step", r)
        else:
            lines += ["", f"{r['target']}: {r['error']}"]
    return "\n".join([*lines, "", LEGEND])
