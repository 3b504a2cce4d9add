"""Compile a whole generation program for chips that are not here, and say whether it fits.

    python -m experiments.aot --model=var-d30 --batch_size=8 --target=tpu-v5e,h200
    python -m experiments.aot --model=var-d30 --policy=streaming --budget=0.1 --target=a100 \\
        --largest_batch
    python -m experiments.aot --model=var-d36 --mesh=data=4,model=2 --batch_size=32 --target=v5p
    python -m experiments.aot --model=var-d30 --learn --batch_size=11 --target=h100

The command compiles exactly what `experiments.run` would run there, with the real compiler of the
chip and without weights. It prints the bytes of parameters, cache and temporaries, the peak,
whether the cache is updated in place, FLOPs and the least time that they and the bytes take (a
floor, no prediction) and how many kernels are started, and ends with the verdict. With --learn it
compiles a step of `experiments.learn` in place of the programs that draw. It needs `libtpu` for
TPUs and JAX's CUDA plugin for GPUs, not the chips (docs/howto/scale.md).

Exit status 1: a target failed, the others are printed. A program that does not fit is no failure.
"""

import importlib.metadata
import itertools
import sys
from collections.abc import Sequence
from functools import partial

import jax

from experiments.aot import listing, worker
from experiments.aot.learning import LearningStep
from experiments.aot.program import Workload
from experiments.budgets import Sizing
from experiments.cli import command_line
from experiments.cli.flags import CommandFlags, about
from experiments.flags.model import ModelFlags
from experiments.flags.policy import PolicyFlags, plan_remarks
from experiments.flags.program import ProgramFlags
from experiments.flags.sampling import SamplingFlags
from experiments.generation import ProgramOptions
from experiments.json_text import json_text
from experiments.output import FileFlags
from experiments.training.mesh import TrainingMesh
from pallas_kernels import chips, implementations
from pallas_kernels.chips import Chip
from varjax.core.errors import UserError
from varjax.models.model import Model
from varjax.storage.atomic import new_file

FLAGS = CommandFlags(
    "--model=var-d30 --policy=streaming --budget=0.1 --target=a100",
    "model policy budget kv_bytes target batch_size largest_batch",
)
MODEL = ModelFlags(FLAGS, published="Published name")
TARGET = FLAGS.string(
    "target", "tpu-v5e,tpu-v6e,a100,h200", f"Chips, separated by commas: {', '.join(chips.CHIPS)}."
)
POLICY = PolicyFlags(FLAGS)
LARGEST_BATCH = FLAGS.boolean(
    "largest_batch", False, "Find the largest batch that fits; --batch_size does not matter."
)
PROGRAM = ProgramFlags(FLAGS, mesh=True, elsewhere=True)
SAMPLING = SamplingFlags(FLAGS)
FLAGS.heading("A step of learning")
LEARN = FLAGS.boolean(
    "learn",
    False,
    "Compile a step of experiments.learn in place of the programs that draw: --mesh=data=2, "
    "--batch_size images.",
)
COMPILERS = ("jax", "jaxlib", "libtpu", "jax-cuda13-plugin", "varjax")  # whose versions are said
# other flags decide how pictures are drawn
OF_LEARNING = set(
    "model plugin checkpoint target mesh batch_size dtype verbose json overwrite learn aspect size "
    "grid prompt_tokens cfg tau sampling cfg_insertion_layer cfg_interval".split()
)
FLAGS.heading("Output")
VERBOSE = FLAGS.boolean(
    "verbose", False, "Also list temporaries, kernels and exchanges of each program."
)
JSON = FileFlags(FLAGS, "json", "Also write the results to this file.")


def targets() -> list[Chip]:
    """The chips of --target, each once."""
    found = {}
    for name in TARGET.value.split(","):
        try:
            chip = chips.get_chip(name.strip())
        except ValueError as error:
            raise UserError(f"--target={name}: {error}") from None
        found[chip.name] = chip
    return list(found.values())


def resolve(wanted: Sequence[Chip]) -> tuple[dict[str, Workload], list[str]]:
    """The workload of each target, and remarks on the plan. All flags are checked."""
    model, policy = MODEL.resolve(weights=False), POLICY.resolve()
    model = PROGRAM.stored(model, wanted)
    programs = {chip.name: PROGRAM.resolve(model, chip) for chip in wanted}
    program = programs[wanted[0].name]  # they differ in what pixels are decoded in
    batch = program.mesh.data if LARGEST_BATCH.value else PROGRAM.asked.value
    for chip in wanted:
        PROGRAM.check_mesh(program.mesh, model, batch, chip.most_devices, chip.name)
    sampling = SAMPLING.sampling(model)
    sizing = partial(_sizing, wanted, model, program)
    groups = program.mesh.model
    policy, of_budget = POLICY.sized(policy, model, sampling, sizing, groups)
    attention, asked = {}, program.build.attention
    for chip in wanted:
        attention[chip.name] = asked or implementations.choices(chip.platform, chip.capability)[0]
        why = asked and implementations.why_not(asked, chip.platform, chip.capability, chip.name)
        if why:
            raise UserError(f"--attention={why}: choose auto or reference, or other targets")
    plan, calibration = POLICY.plan(policy, model, sampling, groups)
    PROGRAM.check_plan(plan, program.mesh)
    workload = partial(
        Workload, model=model, plan=plan, sampling=sampling, text_tokens=MODEL.text_tokens(model)
    )
    workloads = {n: workload(attention=attention[n], program=p) for n, p in programs.items()}
    # compiling says which kernels cannot take the plan's blocks
    return workloads, of_budget + plan_remarks(plan, calibration)


def _sizing(wanted: Sequence[Chip], model: Model, program: ProgramOptions) -> Sizing:
    """Return what bytes of a cache mean on the one chip of --target."""
    if LARGEST_BATCH.value or len(wanted) > 1:
        raise UserError("--budget=fit and --kv_bytes are for one --target and one --batch_size")
    batch, each = PROGRAM.asked.value, PROGRAM.asked.value // program.mesh.data
    text = MODEL.text_tokens(model)
    predict = partial(program.predict, model, platform=wanted[0].platform)
    return Sizing(
        batch_size=batch,
        kv_dtype=program.kv_dtype,
        predict=lambda plan: predict(plan, each, text, True).total,
        available=wanted[0].usable,
        device=wanted[0].name,
    )


def resolve_step(wanted: Sequence[Chip]) -> LearningStep:
    """The step that is asked for. All flags are checked, nothing is compiled."""
    for other in itertools.chain(*FLAGS.all_values()):
        if FLAGS.flag(other).present and other not in OF_LEARNING:
            raise UserError(
                f"--{other} decides how pictures are drawn, and --learn compiles a learning step: "
                "leave out one of them"
            )
    least = min(wanted, key=lambda chip: chip.most_devices)
    with about(FLAGS.values["mesh"]):
        mesh = TrainingMesh.parse(FLAGS.values["mesh"].value, least.most_devices)
    model, batch, dtype = MODEL.resolve(weights=False), PROGRAM.asked.value, FLAGS.values["dtype"]
    mesh.check_batch("--batch_size", batch)
    return LearningStep(
        model=model,
        mesh=mesh,
        batch_size=batch,
        dtype=dtype.value,
        sampling=SAMPLING.sampling(model),
        text_tokens=MODEL.text_tokens(model),
    )


def title(workload: Workload) -> str:
    """A line that says what is compiled."""
    plan, program = workload.plan, workload.program
    cache = f", cache {program.kv_dtype}" if program.kv_dtype != program.dtype else ""
    if program.weights_dtype != program.dtype:
        cache = f", weights {program.weights_dtype}{cache}"
    mesh = f", mesh {program.mesh}, bytes per device" if program.mesh.num_devices > 1 else ""
    return (
        f"{workload.model.name}, policy {plan.policy.name}, budget {plan.budget:g} (pool "
        f"{plan.fraction:.2%} of full), {program.dtype}{cache}"
        f"{mesh}"
    )


def main(argv) -> int:
    jax.config.update("jax_platforms", "cpu")  # planning needs no accelerator, and takes none
    target, wanted = JSON.check(), targets()
    if LEARN.value:
        step = resolve_step(wanted)
        said, work = [step.title()], partial(worker.learn, step)
    else:
        workloads, remarks = resolve(wanted)
        said = [title(workloads[wanted[0].name]), *remarks]
        batch = None if LARGEST_BATCH.value else PROGRAM.asked.value
        work = partial(worker.draw, workloads, batch)
    # asked last: nobody should install a compiler for a program that a chip cannot run
    if why := chips.why_unavailable(*(chip.name for chip in wanted)):
        raise UserError(f"cannot compile for {why}")
    if len(wanted) > 1:
        results = [worker.apart(chip.name, sys.argv[1:]) for chip in wanted]
    else:
        results = [worker.here(wanted[0], work)]
    print(*said, sep="\n", end="\n\n")
    print(listing.text(results, VERBOSE.value))
    if target:
        found = {d.name: d.version for d in importlib.metadata.distributions()}
        content = {
            "title": said[0],
            "flags": FLAGS.values.flag_values_dict(),
            "versions": {name: found[name] for name in COMPILERS if name in found},
            "results": results,
        }
        with new_file(target) as file:
            file.write(json_text(content).encode())
    return int(any(r["status"] == "failed" for r in results))


if __name__ == "__main__":
    command_line.run(main)
