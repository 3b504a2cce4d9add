"""Learn which head may see which token for how long, for `--policy=learned`.

    python -m experiments.learn --checkpoint=DIR --budgets=0.05,0.1,0.2 --out=DIR/learned.npz
    python -m experiments.run --checkpoint=DIR --policy=learned --budget=0.1

Draws images with the full cache, and learns for each budget a table of last uses by gradients
through the model: its logits are to stay those of the full cache. As it goes it prints the
divergence (KL) of images that are held back: a quarter as many, of other seeds. It begins with the
table of `knapsack`, and ends with what was gained over it. A file belongs to one model, schedule
and guidance; used with another one it is refused. In the checkpoint folder, as learned.npz, it is
found by itself.

An interrupted run goes on from its last save, in OUT.partial, when the same command is given again;
the result is the same. What to choose: docs/howto/learn.md.
"""

import dataclasses
import hashlib
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np

from experiments.cli import command_line
from experiments.cli.flags import CommandFlags, about
from experiments.flags.condition import ConditionFlags
from experiments.flags.model import ModelFlags
from experiments.flags.program import batch_size_flag, dtype_flag
from experiments.flags.sampling import SamplingFlags
from experiments.generation import environment
from experiments.output import FileFlags, Stopped, partial_folder, say
from experiments.prompts import condition as text_condition
from experiments.sweep.plan import parse_budgets
from experiments.training import loop
from experiments.training.learner import Learner, LearnerSettings, Samples
from experiments.training.mesh import TrainingMesh
from varjax import jax_settings
from varjax.calibration import files as calibrations
from varjax.calibration.data import Calibration
from varjax.conditions import Condition
from varjax.core.errors import UserError
from varjax.core.sampling import Sampling
from varjax.generation import measure_calibration
from varjax.generation.generator import Generator
from varjax.generation.progress import Progress
from varjax.models import teacher_forcing
from varjax.models.loading import load_weights
from varjax.models.model import Model
from varjax.models.teacher_forcing import Gates
from varjax.policies.knapsack import Knapsack
from varjax.storage import lock
from varjax.storage.parameters import default_dtype

HELD_BACK = 4  # one held-back image for so many that are learned from
OWN_SEEDS = 10**6  # added to seeds, so that no image is learned from that other commands compare
MEASURED = 10  # images of a calibration, where the checkpoint has none

FLAGS = CommandFlags(
    "--budgets=0.1,0.2 --out=learned.npz", "checkpoint budgets num_samples steps out", compiles=True
)
MODEL = ModelFlags(FLAGS)
BUDGETS = FLAGS.string("budgets", "0.05,0.1,0.2", "Fractions of the full cache, a table for each.")
CONDITION = ConditionFlags(FLAGS, samples=176)
STEPS = FLAGS.integer(
    "steps", 300, "Steps for each budget, of --batch_size images.", lower_bound=1, upper_bound=10**6
)
SAMPLING = SamplingFlags(FLAGS)
BATCH_SIZE = batch_size_flag(FLAGS, 11, "Images of a step.")
DTYPE = dtype_flag(FLAGS, None, "the weights")
MESH = FLAGS.string("mesh", None, "Devices that share the images of a step: data=4.")
OUT = FileFlags(FLAGS, "out", "The file to write.", required=True)


def drawn(
    model: Model, dtype: str, condition: Condition, sampling: Sampling, seed: int, batch_size: int
) -> list[Samples]:
    """Return the images to learn from and those that are held back, drawn with the full cache."""
    generator = Generator(
        load_weights(model, dtype), "full", sampling=sampling, batch_size=batch_size
    )
    whole = np.arange(len(condition))
    own = OWN_SEEDS + 2 * seed
    sets = [(whole, own), (whole[::HELD_BACK], own + 1)]
    tokens, total = [], sum(len(index) for index, _ in sets)
    progress, done = Progress("drawn image", total), 0
    for index, seed in sets:
        found = []
        for start in range(0, len(index), batch_size):
            some = index[start : start + batch_size]
            found.append(generator.draw(condition, some, seed=seed)["tokens"])
            done += len(some)
            progress.update(done)
        tokens.append(np.concatenate(found))
    # the generator has arranged the weights for drawing
    return forced(load_weights(model, dtype), condition, sampling, sets, tokens, batch_size)


def forced(model, condition, sampling, sets, tokens, batch_size) -> list[Samples]:
    """Return samples of images whose tokens are drawn."""

    @jax.jit
    def both(networks, given, tokens):
        codes = teacher_forcing.seen_codes(networks, tokens)
        transformer = networks["transformer"]
        args = (transformer, given, codes, sampling, Gates())
        return codes, teacher_forcing.guided_of_scales(*args).astype(jnp.float32)

    samples = []
    for (index, _), drawn in zip(sets, tokens, strict=True):
        found = []
        for start in range(0, len(index), batch_size):
            # a short batch repeats its last image, so that one program serves all
            places = np.minimum(np.arange(start, start + batch_size), len(index) - 1)
            given = jax.tree.map(jnp.asarray, condition.take(index[places]))
            results = both(model.networks, given, jnp.asarray(drawn[places]))
            count = min(batch_size, len(index) - start)
            found.append([np.asarray(a)[:count] for a in results])
        arrays = [np.concatenate(parts) for parts in zip(*found, strict=True)]
        samples.append(Samples(condition.take(index), *arrays))
    return samples


def calibrated(model: Model, dtype: str, condition: Condition, sampling: Sampling) -> Calibration:
    """Return the calibration of the checkpoint, or a new one of a few images."""
    try:
        found = calibrations.find(Knapsack(), model, None, sampling.guidance)
    except UserError as error:
        say(f"{error}: a new one is measured")
        found = None
    if found is not None and found.beta is not None:
        return found
    loaded = load_weights(model, dtype)
    step = -(-len(condition) // MEASURED)
    some = Part(condition, np.arange(len(condition))[::step])
    return measure_calibration.measure(loaded, some, sampling, batch_size=len(some))


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """Some images of a condition."""

    condition: Condition
    index: np.ndarray

    def __len__(self) -> int:
        return len(self.index)

    def take(self, index: np.ndarray):
        return self.condition.take(self.index[index])


def main(argv: list[str]) -> None:
    target = OUT.check()
    budgets = sorted(parse_budgets(BUDGETS.value))
    model = MODEL.resolve()
    measure_calibration.check_scales(model)
    condition, sampling = CONDITION.resolve(model), SAMPLING.sampling(model)
    seed, dtype = SAMPLING.seed(10**9), DTYPE.value or default_dtype()
    with about(MESH):
        mesh = TrainingMesh.parse(MESH.value, len(jax.devices()) if MESH.value else 1)
    size = min(BATCH_SIZE.value, len(condition))
    mesh.check_batch("--batch_size", size)
    condition = text_condition.encoded(condition, model, dtype)
    geometry = model.geometry_for(sampling)
    origin = {
        "model": calibrations.model_digest(model.metadata),
        "schedule": str(geometry.schedule),
        "sampling": dataclasses.asdict(sampling),
        "condition": condition.describe(),
        "images": len(condition),
        "dtype": dtype,
    }
    digest = hashlib.sha256(json.dumps(origin, sort_keys=True).encode()).hexdigest()
    settings = [LearnerSettings(b, STEPS.value, size, seed, digest) for b in budgets]
    for one in settings:
        Learner.check_budget(one, geometry)
    work = partial_folder(target)
    try:
        with lock.held(work, f"another process learns in {work}: wait, or choose another --out"):
            loop.check_folder(work, {one.name: one.deciding(one.name) for one in settings})
            with jax_settings.pinned():
                found = learned(model, dtype, condition, sampling, settings, mesh, work)
            tables, gains = found
            result = Calibration(
                model=model.name,
                model_digest=origin["model"],
                schedule=geometry.schedule,
                num_layers=geometry.num_layers,
                num_heads=geometry.num_heads,
                guidance=sampling.guidance,
                num_samples=len(condition),
                learned=dict(zip(budgets, tables, strict=True)),
            )
            notes = {"steps": STEPS.value, "seed": seed, "held_back": gains, **environment()}
            calibrations.save_learned(result, target, notes)
        shutil.rmtree(work, ignore_errors=True)
    except Stopped as stopped:
        say(f"ended by SIGTERM: {stopped}")
        return
    print(summary(budgets, gains))
    print(f"written to {target}")


def learned(model, dtype, condition, sampling, settings, mesh, work):
    """Return the tables, uint8 [K - 1, L, N, F] for each budget, and the divergences of held-back
    images, in nats: {"knapsack": [...], "learned": [...]}."""
    geometry, size = model.geometry_for(sampling), settings[0].batch_size
    calibration = calibrated(model, dtype, condition, sampling)
    train, held = drawn(model, dtype, condition, sampling, settings[0].seed, size)
    transformer = load_weights(model, dtype).transformer
    tables, gains = [], {"knapsack": [], "learned": []}
    for one in settings:
        rule = Knapsack(budget=one.budget, _calibration=calibration).rule(geometry.kind)
        last_use = rule.allocate(geometry, one.budget).last_use
        stage = Learner(
            transformer=transformer,
            sampling=sampling,
            geometry=geometry,
            train=train,
            held=held,
            start=last_use[..., : geometry.schedule.persistent_tokens].astype(np.int32),
            settings=one,
            mesh=mesh,
        )
        state = loop.run(stage, work)
        keep = stage.keep(state)
        tables.append(np.round(255 * np.sqrt(keep[1:])).astype(np.uint8))
        gains["knapsack"].append(float(state["first"]))
        gains["learned"].append(stage.validate(state)["KL"])
    return tables, gains


def summary(budgets: list[float], gains: dict[str, list[float]]) -> str:
    """Return the table that is printed at the end."""
    lines = ["KL to the full cache of held-back images (nats)", "| budget | knapsack | learned |"]
    rows = zip(budgets, gains["knapsack"], gains["learned"], strict=True)
    return "\n".join(
        [*lines, "| --- | --- | --- |", *(f"| {b:g} | {k:.4f} | {one:.4f} |" for b, k, one in rows)]
    )


if __name__ == "__main__":
    command_line.run(main)
