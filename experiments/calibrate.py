"""Measure a model once, and write everything that policies calibrate with into one file.

    python -m experiments.calibrate --save=CAL.json
    python -m experiments.calibrate --checkpoint=DIR --num_samples=10 --stability=10 --save=CAL.json
    python -m experiments.calibrate --checkpoint=DIR --prompts=FILE.txt --size=0.25M --save=CAL.json
    python -m experiments.run --policy=heatkv --budget=0.1 --calibration=CAL.json

Generates a few images with the full cache and records, per layer and head: attention mass between
scales (beta, S-CAS, CAS, attention density), the distance of keys to those of the scale before, how
much the queries of a head disagree, and attention selectivity. A file belongs to one model,
schedule and guidance; used with another one it is refused.

--stability=N measures N times with different seeds, averages, and prints how much the order of
heads differs between the runs: the standard deviation of a head's rank, averaged over heads, per
source scale.
"""

from experiments.cli import command_line
from experiments.cli.flags import CommandFlags
from experiments.flags.condition import ConditionFlags
from experiments.flags.model import ModelFlags
from experiments.flags.program import batch_size_flag, dtype_flag
from experiments.flags.sampling import SamplingFlags
from experiments.output import FileFlags
from experiments.prompts import condition as text_condition
from varjax.calibration import files as measured
from varjax.calibration.data import Calibration
from varjax.generation import measure_calibration
from varjax.generation.progress import Progress
from varjax.models.loading import load_weights
from varjax.storage.parameters import default_dtype

FLAGS = CommandFlags(
    "--num_samples=2 --save=CAL.json", "save num_samples stability checkpoint", compiles=True
)
MODEL = ModelFlags(FLAGS)
CONDITION = ConditionFlags(FLAGS, samples=10)
STABILITY = FLAGS.integer(
    "stability",
    1,
    "Repeat with so many seeds and report the dispersion of ranks.",
    lower_bound=1,
    upper_bound=10**6,
)
SAMPLING = SamplingFlags(FLAGS)
BATCH_SIZE = batch_size_flag(FLAGS, 5)
DTYPE = dtype_flag(FLAGS, None, "the weights")
SAVE = FileFlags(FLAGS, "save", "The file to write.", required=True)


def summary(found: Calibration) -> str:
    """Return the text that is printed at the end."""
    distances = found.key_discrepancy[:, 1:].mean(1)
    selectivities = found.selectivity[:, 1:].mean(1)
    layers = zip(distances, selectivities, found.query_variance.mean(1), strict=True)
    cfg = found.guidance
    guidance = cfg if isinstance(cfg, str) else f"{cfg:g}"
    lines = [
        f"{found.model}: {found.num_layers} layers, {found.num_heads} heads, schedule "
        f"{found.schedule}, cfg {guidance}, {found.num_samples} images",
        "attention density of the last scale, by source scale: "
        + " ".join(f"{d:.3f}" for d in found.attention_density.mean((0, 1))),
        "layer  key discrepancy  selectivity  query variance (mean over heads)",
    ]
    for i, (distance, selectivity, variance) in enumerate(layers):
        lines.append(f"{i:5d}  {distance:15.4f}  {selectivity:11.4f}  {variance:.4f}")
    if found.rank_dispersion is not None:
        heads = found.num_layers * found.num_heads
        lines.append(
            f"rank dispersion by source scale (of {heads} ranks): "
            + " ".join(f"{d:.2f}" for d in found.rank_dispersion)
        )
    return "\n".join(lines)


def main(argv: list[str]) -> None:
    target = SAVE.check()
    model = MODEL.resolve()
    measure_calibration.check_scales(model)
    condition = CONDITION.resolve(model)
    sampling, seed = SAMPLING.sampling(model), SAMPLING.seed(STABILITY.value)
    dtype = DTYPE.value or default_dtype()
    condition = text_condition.encoded(condition, model, dtype)
    progress = Progress("measured image", STABILITY.value * len(condition))
    progress.note("compiling")
    found = measure_calibration.measure(
        load_weights(model, dtype),
        condition,
        sampling,
        runs=STABILITY.value,
        seed=seed,
        batch_size=min(BATCH_SIZE.value, len(condition)),
        progress=progress.update,
    )
    measured.save(found, target)
    print(f"{summary(found)}\nwritten to {target}")


if __name__ == "__main__":
    command_line.run(main)
