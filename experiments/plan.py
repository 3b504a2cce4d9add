"""Print a policy's cache plan for a model, without weights.

    python -m experiments.plan --model=var-d30 --policy=streaming --budget=0.1 --batch_size=8
    python -m experiments.plan --policy=headkv --budget=0.3 --save=PLAN.npz \\
        --geometry='layers=32,heads=16,head_dim=128,schedule=1x1;2x2;3x4'

Shows tokens held per scale, the size of the pool, and how full the cache is after every layer. The
lines "papers" count as the published tables of AMS-KV and HeatKV do, which our bytes differ from:
they say how; of models that draw token by token they are the rows of HeadKV's and LineAR's tables
of memory at the nearest budget. A published model needs no --calibration here: layers and heads
then count as alike. --save writes the plan's arrays (docs/reference/files.md).
--target=CHIP says whether a device of it can hold the batch, --mesh=data=2,model=4 what each device
holds; --fit prints the largest batch on each of --targets=rtx4090,tpu-v5e:8, with the full cache
and compressed (--policy, or streaming), and the commands that draw them. Memory is predicted, and
nothing compiled: experiments.aot compiles.
Models that draw token by token are given as --geometry='layers=36,heads=20,head_dim=64,tokens=576,
condition=1,line=24': image tokens, slots of the condition (1), tokens of an image line (by default
the image is a square); queries_per_head=8: so many query heads share each of the heads. Stages take
the place of scales, stage 0 is the condition; one is printed where what heads hold begins to grow,
drops or stays.
"""

import json
import shlex
from collections.abc import Sequence
from fractions import Fraction
from functools import cache, partial, singledispatch
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from experiments import placement, speed
from experiments.budgets import Sizing
from experiments.cli import command_line
from experiments.cli.flags import CommandFlags, about
from experiments.flags.model import ModelFlags
from experiments.flags.policy import PolicyFlags, plan_remarks
from experiments.flags.program import ProgramFlags
from experiments.geometry import read_geometry
from experiments.output import FileFlags
from experiments.recipes import figures
from pallas_kernels import chips
from pallas_kernels.chips import Chip
from varjax.core.errors import UserError
from varjax.core.plan import CachePlan
from varjax.core.scale_plan import ScalePlan
from varjax.core.stages import TokenPlan
from varjax.generation import api, memory
from varjax.generation.memory import Prediction, show_bytes
from varjax.generation.mesh import LARGEST_MESH, MeshSpec
from varjax.models.model import Model
from varjax.policies import Policy
from varjax.storage.atomic import new_file

# A printed total of a model that draws token by token is keys and values, weights, and what
# decoding and the framework take. Numbers and their sources are in this file.
PUBLISHED = Path(__file__).with_name("published.json")
BYTES_PER_PAIR = 6  # an element of K in float32 and one of V in 16 bits
MIB, GIB = 2**20, 2**30
COMPRESSED = "streaming"  # with --fit: serves all models, and can be divided
FOUND = ("kv_bytes", "batch_size", "mesh", "target", "save")  # not with --fit
OF_FIT = ("fit", "targets", "model", "program")  # of which the commands that it prints have nothing
NEAR = 0.01  # largest difference between a budget and a row that it is compared with

FLAGS = CommandFlags(
    "--model=var-d30 --policy=streaming --budget=0.1 --batch_size=8",
    "model policy budget kv_bytes batch_size mesh target fit targets save",
)
MODEL = ModelFlags(FLAGS, published="Published name")
GEOMETRY = FLAGS.string(
    "geometry",
    None,
    "layers=32,heads=16,head_dim=128,schedule=1x1;2x2;3x4 (height x width), or in place of the "
    "schedule tokens=576,condition=1,line=24.",
)
POLICY = PolicyFlags(FLAGS)
PROGRAM = ProgramFlags(FLAGS, mesh=True, elsewhere=True, usual=1)
FLAGS.heading("Where it fits")
TARGET = FLAGS.string(
    "target", None, f"A chip, for what a device has to hold: {', '.join(chips.CHIPS)}."
)
FIT = FLAGS.boolean(
    "fit", False, "Print the mesh and the largest batch on each of --targets, full and compressed."
)
TARGETS = FLAGS.string(
    "targets", "rtx4090,l4,a100,h100,tpu-v5e:8", "With --fit: chips, or several devices of one."
)
FLAGS.heading("Output")
SAVE = FileFlags(FLAGS, "save", "Write the plan's arrays to this npz file.")


def summary(
    name: str, plan: CachePlan, batch_size: int, kv_dtype: str, remarks: Sequence[str]
) -> str:
    """Return the printed plan. remarks: lines that only some policies have."""
    g = plan.geometry
    excess = plan.fraction - plan.budget
    held, full = plan.num_bytes(batch_size, kv_dtype), plan.dense_bytes(batch_size, kv_dtype)
    lines = [
        f"{name}: {g.num_layers} layers, {g.heads}, "
        f"{g.schedule.summary}, {g.schedule.total_tokens} tokens "
        f"({g.schedule.persistent_tokens} per head in a full cache)",
        f"policy {plan.policy.name}, budget {plan.budget:g}, accounting {plan.accounting}",
        f"pool      {plan.pool_blocks} blocks of {plan.block_size} slots = {plan.pool_tokens} "
        f"tokens, {plan.fraction:.2%} of full",
        f"bytes     {held} ({show_bytes(held)}) of {full} ({show_bytes(full)}), batch "
        f"{batch_size}, {kv_dtype}",
        f"peak      {plan.peak_live_fraction:.2%} of full is live at most",
    ]
    if excess > 1e-9:
        lines.append(
            f"rounding  the pool exceeds the budget by {excess:.2%} of full (accounting=bytes "
            f"would charge this to the budget)"
        )
    return "\n".join([*lines, *remarks, "", *timeline(plan)])


@singledispatch
def timeline(plan: ScalePlan) -> list[str]:
    """Lines of text that say what is held when, with a heading."""
    dense = max(1, plan.geometry.dense_tokens)
    lines = ["scale  map      tokens  held per head (min mean max)  live after first, last layer"]
    for s, (h, w) in enumerate(plan.geometry.schedule.maps):
        held, live = plan.capacity[s], plan.live_tokens[s] / dense
        spread = f"{held.min()} {held.mean():.1f} {held.max()}"
        lines.append(
            f"{s:5d}  {f'{h}x{w}':7s}  {h * w:6d}  {spread:28s}  {live[0]:.2%}, {live[-1]:.2%}"
        )
    return lines


@timeline.register
def _(plan: TokenPlan) -> list[str]:
    """Lines for the stages at which what heads hold begins to grow, drops, or stays from then
    on, and for the last one."""
    held, period = plan.capacity.max((1, 2)).astype(int), plan.allocation.period
    live = plan.live_tokens[:, -1] / max(1, plan.geometry.dense_tokens)
    # second differences: growth begins, ends or turns into a drop there
    turns = 1 + np.flatnonzero(np.diff(np.diff(held))) if len(held) > 2 else []
    lines = [] if plan.reads is None else [f"reads     {plan.reads}", ""]
    lines += ["stage  drawn before  held per head  live at its end"]
    for s in sorted({0, *(int(s) for s in turns), len(held) - 1}):
        drawn = max(0, s - 1) * period
        lines.append(f"{s:5d}  {drawn:12d}  {held[s]:13d}  {live[s]:.2%}")
    return lines


def _chip() -> Chip | None:
    """Return --target; None without it."""
    if not TARGET.value:
        return None
    with about(TARGET):
        chip, devices = placement.read_chips(TARGET.value)
        if devices > 1:
            raise UserError("give a chip alone, --mesh says how many there are")
    return chip


def _fits(model: Model) -> str:
    """Return what --fit prints: a table, and the commands that draw the compressed batches."""
    with about(TARGETS):
        places = [placement.read_chips(name) for name in TARGETS.value.split(",")]
    FLAGS.values.set_default("policy", COMPRESSED)
    policy, text = POLICY.resolve(), MODEL.text_tokens(model)
    model = PROGRAM.stored(model, [chip for chip, _ in places])
    plans = {"full": lambda groups: api.plan(model.geometry, mesh=MeshSpec(model=groups))}
    plans[policy.name] = lambda groups: POLICY.plan(policy, model, None, groups)[0]
    columns = {}
    for name, plan_of in ((name, cache(plan_of)) for name, plan_of in plans.items()):
        # a policy that does not serve the model says so here
        columns[f"{name} {plan_of(1).budget:g}"] = [
            placement.largest(model, plan_of, PROGRAM.resolve(model, where[0]), text, where)
            for where in places
        ]
    commands = []
    lines = [f"{model.name}: images of the largest batch that is predicted to fit", ""]
    lines += [f"{'':12s}" + "".join(f"{name:26s}" for name in columns).rstrip()]
    for (chip, devices), *found in zip(places, *columns.values(), strict=True):
        name = chip.name + f":{devices}" * (devices > 1)
        cells = [f"{f[0]}{f' ({f[1]})' * (devices > 1)}" if f else "-" for f in found]
        lines.append(f"{name:12s}" + "".join(f"{cell:26s}" for cell in cells).rstrip())
        if found[-1]:
            commands.append(f"{name}: {_command(model, policy, chip, devices, *found[-1])}")
    return "\n".join([*lines, "", *commands])


def _command(
    model: Model, policy: Policy, chip: Chip, devices: int, batch: int, mesh: MeshSpec
) -> str:
    """Return the command that draws a batch; of several hosts, that of every host."""
    flags = [flag for values in FLAGS.all_values() for flag in values]
    group = FLAGS.groups["program"]
    given = {n: FLAGS.flag(n).value for n in flags if FLAGS.flag(n).present and n not in OF_FIT}
    if name := FLAGS.flag("model").value:
        given["checkpoint"] = name
    given |= {"policy": policy.name, "batch_size": batch}
    given |= {"num_images": batch} if model.num_classes else {"prompts": "FILE.txt"}
    given |= {"mesh": mesh} if devices > 1 else {}
    given |= {"distributed": "auto"} if devices > chips.GPUS_PER_HOST else {}
    written = {name: group.written(name) if name in group.values else f"--{name}" for name in given}
    flags = shlex.join(f"{written[name]}={value}" for name, value in given.items())
    return f"{chip.environment}python -m experiments.run {flags}"


# --- memory that papers print, beside the bytes of our plans ---


@singledispatch
def _printed_lines(plan: ScalePlan, batch_size: int, kv_dtype: str, content: dict) -> list[str]:
    """Return the bytes as AMS-KV and HeatKV count them, and the row of HeatKV's table that is
    nearest to the plan, if it has the same schedule. content: of the file of printed numbers."""
    g, table = plan.geometry, content["heatkv"]
    steady_tokens = plan.rule.steady_tokens(g)  # as AMS-KV counts; None for other policies
    per_token = g.head_dim * BYTES_PER_PAIR * g.rows_per_image * batch_size / MIB
    kept = plan.capacity[-1].sum() if steady_tokens is None else steady_tokens * g.num_heads
    with_last = g.schedule.total_tokens * g.num_layers * g.num_heads
    full = g.dense_tokens * per_token
    live = plan.live_tokens.max() * per_token
    lines = [
        f"papers    AMS-KV's count {_show(kept * per_token / 1000, 3)} GB of "
        f"{_show(with_last * per_token / 1000, 3)} GB, {1 - kept / with_last:.2%} saved (float32 "
        f"keys, 16-bit values, last scale in the full cache; GB = 1000 MiB)",
        f"          HeatKV's count {_show(plan.budget * full, 0)} MB of {_show(full, 0)} MB by "
        f"budget, {_show(live, 0)} MB live at most (last scale left out; MB = MiB)",
    ]
    share = min(map(float, table["rows"]), key=lambda row: abs(row - plan.budget))
    if g.schedule.persistent_tokens == table["full"] and abs(share - plan.budget) <= NEAR:
        tokens = table["rows"][str(share)]
        lines.append(
            f"          HeatKV's table, {share:.0%}: {tokens} tokens per head = "
            f"{_show(full * tokens / table['full'], 0)} MB of {_show(full, 0)} MB; ours, "
            f"{plan.fraction:.2%} in {kv_dtype}: "
            f"{_show(plan.num_bytes(batch_size, kv_dtype) / MIB, 0)} MB"
        )
    return lines


@_printed_lines.register
def _(plan: TokenPlan, batch_size: int, kv_dtype: str, content: dict) -> list[str]:
    """Return the rows of HeadKV's and LineAR's tables for this model at the nearest budget, and
    what our pool saves at their batch sizes. Other models and budgets have none."""
    g, lines = plan.geometry, []
    mine = [g.num_layers, g.num_heads, g.head_dim], g.schedule.image_tokens
    for row in content["totals"]:
        printed = {float(Fraction(part)): gib for part, gib in row["printed"].items()}
        near = min(printed, key=lambda part: abs(part - plan.budget))
        if (row["sizes"], row["tokens"]) != mine or abs(near - plan.budget) > NEAR:
            continue
        full, batch = printed[1.0]["full cache"], row["batch"]
        said = ", ".join(
            f"{m} {gib:.2f} ({full - gib:.2f} less)" for m, gib in printed[near].items()
        )
        more = "" if near == 1 else f"; at 1/{round(1 / near)} {said}"
        ours, dense = (f(batch, kv_dtype) / GIB for f in (plan.num_bytes, plan.dense_bytes))
        lines.append(
            f"{'' if lines else 'papers':10s}{row['table']}'s table, batch {batch}, GiB in all:"
            f" full cache {full:.2f}{more}; ours, keys and values: {ours:.2f} of {dense:.2f}"
            f" ({dense - ours:.2f} less)"
        )
    return lines


def _show(value: float, decimals: int) -> str:
    return f"{value:.{decimals}f}" if value >= 1 else f"{value:.3g}"


def check_flags() -> None:
    """Raise `UserError` if flags are given that others make meaningless."""
    MODEL.check_alone(GEOMETRY)
    of_models = "mesh", "target", "fit", "weights_dtype", *FLAGS.groups["program"].values
    for name in of_models if GEOMETRY.value else ():
        if FLAGS.flag(name).present:
            raise UserError(f"--{name} is of models: a geometry has no weights, leave it out")
    if TARGETS.present and not FIT.value:
        raise UserError("--targets belongs to --fit: add it, or take --target=CHIP")
    names = ["budget=fit"] * POLICY.is_fitted + [n for n in FOUND if FLAGS.flag(n).present]
    if FIT.value and names:
        raise UserError(
            f"--{names[0]} does not go with --fit, which looks for the batch: leave it out; "
            "--budget=0.1 is how much is kept"
        )


def main(argv: list[str]) -> None:
    target = SAVE.check()
    check_flags()
    chip, batch_size, dtype = _chip(), PROGRAM.asked.value, FLAGS.flag("dtype").value
    kv_dtype, mesh = FLAGS.flag("kv_dtype").value or dtype, MeshSpec()
    if GEOMETRY.value:
        name, model = "geometry", read_geometry(GEOMETRY.value)
        geometry, sizing = model, partial(Sizing, batch_size=batch_size, kv_dtype=kv_dtype)
    else:
        model = MODEL.resolve(weights=False)
        if FIT.value:
            print(_fits(model))
            return
        model = PROGRAM.stored(model, [chip] if chip else [])
        program = PROGRAM.resolve(model, chip)
        name, geometry, mesh = model.name, model.geometry, program.mesh
        dtype, kv_dtype = program.dtype, program.kv_dtype
        batch_size = batch_size if PROGRAM.asked.present else mesh.data
        most, where = (chip.most_devices, chip.name) if chip else (LARGEST_MESH, "a mesh")
        PROGRAM.check_mesh(mesh, model, batch_size, most, where)
        text, each = MODEL.text_tokens(model), batch_size // mesh.data

        def need(plan: CachePlan) -> Prediction:
            return program.predict_on(chip, model, plan, text, each)

        sizing = partial(
            Sizing,
            batch_size=batch_size,
            kv_dtype=kv_dtype,
            predict=lambda plan: need(plan).total,
            available=chip.usable if chip else memory.available_bytes(),
            device=chip.name if chip else "this device",
        )
    row = geometry.dense_tokens * 2 * geometry.head_dim * jnp.dtype(dtype).itemsize
    needed = batch_size * geometry.rows_per_image * row
    if needed > np.iinfo(np.int64).max // 2:  # blocks may be padded
        raise UserError(
            f"a batch of {batch_size} needs {show_bytes(needed)}, more than can be counted in 64 "
            f"bits: lower --batch_size or the sizes in --geometry"
        )
    policy, of_budget = POLICY.sized(POLICY.resolve(), model, None, sizing, mesh.model)
    plan, calibration = POLICY.plan(policy, model, None, mesh.model)
    remarks = of_budget + plan_remarks(plan, calibration)
    if chip or mesh.num_devices > 1:
        PROGRAM.check_plan(plan, mesh)
        remarks.insert(0, placement.verdict(need(plan), mesh, chip))
    content = json.loads(PUBLISHED.read_text(encoding="utf-8"))
    remarks += _printed_lines(plan, batch_size, kv_dtype, content)
    if isinstance(model, Model):
        if kv_dtype != "int8":  # of which no recipe's row is
            remarks += figures.lines(model, policy.name, *POLICY.given, plan.budget)
        remarks += speed.remark(model, plan, program, each, chip)
    print(summary(name, plan, batch_size, kv_dtype, remarks))
    if target:
        found = {"capacity": plan.capacity, "live_tokens": plan.live_tokens}
        numbers = {
            "pool_tokens": plan.pool_tokens,
            "num_bytes": plan.num_bytes(batch_size, kv_dtype),
            "dense_bytes": plan.dense_bytes(batch_size, kv_dtype),
            "block_size": plan.block_size,
        }
        found |= {name: np.int64(number) for name, number in numbers.items()}
        with new_file(target) as file:
            np.savez(file, **found | plan.arrays())


if __name__ == "__main__":
    command_line.run(main)
