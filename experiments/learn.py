"""Learn which head may see which token for how long, for `--policy=learned`.

    python -m experiments.learn --checkpoint=DIR --budgets=0.05,0.1,0.2 --out=DIR/learned.npz
    python -m experiments.run --checkpoint=DIR --policy=learned --budget=0.1

Draws images with the full cache, and learns for each budget a table of last uses: step by step,
tokens that matter more to the model's logits take the place of others. As it goes it prints the
divergence (KL) of images that are held back: a quarter as many, of other seeds. It begins with the
table of `knapsack`, or where tokens are drawn one by one with a window behind four sinks, and ends
with what was gained over it. A file belongs to one model, schedule and guidance; used with another
one it is refused. In the checkpoint folder, as learned.npz, it is found by itself.

An interrupted run goes on from its last save, in OUT.partial, when the same command is given again;
the result is the same. What to choose: docs/howto/learn.md.
"""

import dataclasses
import hashlib
import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

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
from experiments.training.learner import Learner, LearnerSettings, Samples, even_period
from experiments.training.mesh import TrainingMesh
from varjax import jax_settings
from varjax.calibration import files as calibrations
from varjax.calibration.data import Calibration, order_of
from varjax.conditions import Condition
from varjax.core.allocation import Geometry
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
from varjax.policies.learned import gain_of
from varjax.storage import lock
from varjax.storage.parameters import default_dtype

HELD_BACK = 4  # one held-back image for so many that are learned from
SINKS = 4  # image tokens at the beginning that the first table keeps, token by token
OWN_SEEDS = 10**6  # added to seeds, so that no image is learned from that other commands compare

FLAGS = CommandFlags(
    "--budgets=0.1,0.2 --out=learned.npz", "checkpoint budgets num_samples steps out", compiles=True
)
MODEL = ModelFlags(FLAGS)
BUDGETS = FLAGS.string("budgets", "0.05,0.1,0.2", "Fractions of the full cache, a table for each.")
CONDITION = ConditionFlags(FLAGS, samples=176)
STEPS = FLAGS.integer(
    "steps",
    16,
    "Steps for each budget, of about a third of the images, in whole batches.",
    lower_bound=1,
    upper_bound=10**4,
)
SAMPLING = SamplingFlags(FLAGS)
BATCH_SIZE = batch_size_flag(FLAGS, 11, "Images that are in memory together.")
DTYPE = dtype_flag(FLAGS, None, "the weights")
PERIOD = FLAGS.integer(
    "period",
    None,
    "Tokens of a stage, or fewer in stages as even as can be; of models that draw token by token; "
    "default: 8.",
    lower_bound=1,
)
MESH = FLAGS.string("mesh", None, "Devices that share the images of a step: data=4.")
OUT = FileFlags(FLAGS, "out", "The file to write.", required=True)


def samples(
    model: Model, dtype: str, condition: Condition, sampling: Sampling, seed: int, batch_size: int
) -> tuple[nnx.Module, list[Samples]]:
    """Return the transformer, and two sets of images that the full cache has drawn: those to learn
    from, and those that are held back."""
    # the generator arranges weights for drawing, the layers run one after the other on others
    loaded, networks = load_weights(model, dtype), load_weights(model, dtype).networks
    generator = Generator(loaded, "full", sampling=sampling, batch_size=batch_size)

    @jax.jit
    def seen(networks, given, tokens):
        codes, transformer = tokens, networks["transformer"]
        if not model.draws_tokens:
            codes = teacher_forcing.seen_codes(networks, tokens)
        logits = teacher_forcing.guided(transformer, given, codes, sampling, Gates())
        return codes, logits.astype(jnp.float32)

    whole, own = np.arange(len(condition)), OWN_SEEDS + 2 * seed
    sets, found = [(whole, own), (whole[::HELD_BACK], own + 1)], []
    progress, done = Progress("drawn image", sum(len(index) for index, _ in sets)), 0
    for index, seed in sets:
        parts = []
        for start in range(0, len(index), batch_size):
            # a short batch repeats its last image, so that one program serves all
            some = index[np.minimum(np.arange(start, start + batch_size), len(index) - 1)]
            tokens = generator.draw(condition, some, seed=seed)["tokens"]
            given = jax.tree.map(jnp.asarray, condition.take(some))
            parts.append(jax.device_get(seen(networks, given, jnp.asarray(tokens))))
            done += min(batch_size, len(index) - start)
            progress.update(done)
        arrays = [np.concatenate(part)[: len(index)] for part in zip(*parts, strict=True)]
        found.append(Samples(condition.take(index), *arrays))
    return networks["transformer"], found


def beginning(
    model: Model, dtype: str, condition: Condition, sampling: Sampling, batch_size: int
) -> Calibration:
    """Return the calibration of the checkpoint; if it has none for this run, a new one."""
    try:
        found = calibrations.find(Knapsack(), model, None, sampling.guidance)
    except UserError as error:
        say(f"{error}: measured anew")
        found = None
    if found is not None and found.beta is not None:
        return found
    loaded = load_weights(model, dtype)
    return measure_calibration.measure(loaded, condition, sampling, batch_size=batch_size)


def first_table(
    one: LearnerSettings, geometry: Geometry, calibration: Calibration | None
) -> np.ndarray:
    """Return the last uses [L, N, F] that learning begins with: those of `knapsack`; token by
    token the newest tokens and the first `SINKS`."""
    if calibration is None:
        rule, number = one.rule(geometry), np.arange(geometry.schedule.steps)
        shape = 1 + rule.source(geometry)[-1], geometry.num_layers, geometry.num_heads, number.size
        gain = np.broadcast_to(number / number.size + np.where(number < SINKS, 2, 0), shape)
        return rule.last_uses(gain, geometry, rule.room(geometry, one.budget))
    rule = Knapsack(budget=one.budget, _calibration=calibration).rule(geometry.kind)
    last_use = rule.allocate(geometry, one.budget).last_use
    return last_use[..., : geometry.schedule.persistent_tokens].astype(np.int32)


def learned(
    model: Model,
    dtype: str,
    condition: Condition,
    sampling: Sampling,
    settings: list[LearnerSettings],
    mesh: TrainingMesh,
    work: pathlib.Path,
) -> tuple[Calibration, dict[str, list[float]]]:
    """Return the tables, and the divergences of held-back images in nats, a list for those that it
    began with and one for those that were learned."""
    geometry, size, seed = model.geometry_for(sampling), settings[0].batch_size, settings[0].seed
    calibration, name = None, f"window, {SINKS} sinks"
    if not model.draws_tokens:
        calibration, name = beginning(model, dtype, condition, sampling, size), "knapsack"
    transformer, (train, held) = samples(model, dtype, condition, sampling, seed, size)
    tables, gains = {}, {name: [], "learned": []}
    for one in settings:
        stage = Learner(
            transformer=transformer,
            sampling=sampling,
            geometry=geometry,
            train=train,
            held=held,
            start=first_table(one, geometry, calibration),
            settings=one,
            mesh=mesh,
        )
        table = stage.stored(loop.run(stage, work))
        tables[one.budget] = table
        gains[name].append(stage.first_divergence)
        gains["learned"].append(stage.divergence(stage.best(gain_of(table))))
    result = Calibration(
        model=model.name,
        model_digest=calibrations.model_digest(model.metadata),
        schedule=order_of(geometry),
        num_layers=geometry.num_layers,
        num_heads=geometry.num_heads,
        guidance=sampling.guidance,
        num_samples=len(condition),
        learned=tables,
    )
    return result, gains


def main(argv: list[str]) -> None:
    target, budgets = OUT.check(), sorted(parse_budgets(BUDGETS.value))
    model = MODEL.resolve()
    model, condition = MODEL.fitted(model, CONDITION.resolve(model))
    sampling = SAMPLING.sampling(model)
    seed, dtype = SAMPLING.seed(10**9), DTYPE.value or default_dtype()
    with about(MESH):
        mesh = TrainingMesh.parse(MESH.value, len(jax.devices()) if MESH.value else 1)
    size = min(BATCH_SIZE.value, len(condition))
    mesh.check_batch("--batch_size", size)
    geometry, work = model.geometry_for(sampling), partial_folder(target)
    origin = {
        "model": calibrations.model_digest(model.metadata),
        "schedule": str(geometry.schedule),
        "sampling": dataclasses.asdict(sampling),
        "condition": condition.describe(),
        "images": len(condition),
        "dtype": dtype,
    }
    digest = hashlib.sha256(json.dumps(origin, sort_keys=True).encode()).hexdigest()
    period = even_period(geometry, PERIOD.value)
    images = size * max(1, round(len(condition) / (3 * size)))
    settings = [
        LearnerSettings(b, STEPS.value, images, size, seed, digest, period) for b in budgets
    ]
    for one in settings:
        one.rule(geometry)
    try:
        with lock.held(work, f"another process learns in {work}: wait, or choose another --out"):
            loop.check_folder(work, {one.name: one.deciding(one.name) for one in settings})
            condition = text_condition.encoded(condition, model, dtype)
            with jax_settings.pinned():
                found, gains = learned(model, dtype, condition, sampling, settings, mesh, work)
            notes = {"steps": STEPS.value, "seed": seed, "held_back": gains, **environment()}
            calibrations.save_learned(found, target, notes)
        shutil.rmtree(work, ignore_errors=True)
    except Stopped as stopped:
        say(f"ended by SIGTERM: {stopped}")
        return
    print(f"{summary(budgets, gains)}\nwritten to {target}")


def summary(budgets: list[float], gains: dict[str, list[float]]) -> str:
    """Return the table that is printed at the end."""
    rows = zip(budgets, *gains.values(), strict=True)
    cells = [(f"{budget:g}", f"{first:.4f}", f"{last:.4f}") for budget, first, last in rows]
    head = ("budget", *gains), ("---",) * 3
    lines = [f"| {' | '.join(row)} |" for row in (*head, *cells)]
    return "\n".join(["KL to the full cache of held-back images, in nats per token:", *lines])


if __name__ == "__main__":
    command_line.run(main)
