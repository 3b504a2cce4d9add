"""Time and check kernels and whole programs on the device that is there.

    python -m experiments.bench --model=var-d30 --op=attend --budget=1,0.1
    python -m experiments.bench --check
    python -m experiments.bench --tune --model=var-d30,infinity-2b
    python -m experiments.bench --draw=var-d30-b8,llamagen-xl-b64 --json=results/chip.jsonl

Shapes are those of published models (pallas_kernels/arg_specs.py); every operation takes the shapes
of models that have it. Each call is timed with the kernel of this device, if it has one, and with
the plain JAX reference. Attention is also timed with JAX's own attention on a full cache of the
same scale (XLA; on a GPU cuDNN, too). Times are medians of repeated loops after warm-up.

On a CPU shapes are cut down and the reference is timed, which says nothing of chips. --check
compares kernel and reference over shapes, types and tables instead. --tune times all tiles of the
attention kernels and writes the best into pallas_kernels/ragged_attention/tuned/, where later
programs for this kind of device find them. Status 1: a kernel differs or cannot run.

--draw times whole programs: codes and pixels of published models with random weights, in bfloat16,
on a CPU small models in float32. Each is compiled, run once, timed --repeats times, and run under
JAX's profiler, which says how long each kernel takes. --json gets a line for each task as soon as
it is done (docs/reference/files.md). Status 1: a task failed, or pixels are not finite.
"""

import contextlib
import json
import sys
import time
from dataclasses import replace

import jax

import varjax
from experiments.bench import draw, measured
from experiments.cli import command_line
from experiments.cli.flags import CommandFlags
from experiments.output import FileFlags
from pallas_kernels import arg_specs, bench, implementations
from pallas_kernels.arg_specs import ArgSpec
from pallas_kernels.ragged_attention import tune
from varjax.core.errors import UserError, choose
from varjax.generation.progress import Progress
from varjax.storage.atomic import write_text

FLAGS = CommandFlags("--model=var-d30 --op=attend --budget=0.1", "check tune draw model op budget")
MODELS = tuple(dict.fromkeys(name.rpartition("-t")[0] for name in arg_specs.SPECS))
DTYPES, KV_DTYPES = ("bfloat16", "float32"), ("same", "bfloat16", "float32", "int8")
MODEL = FLAGS.list("model", list(MODELS), f"Models whose shapes are run: {', '.join(MODELS)}.")
SHAPE = FLAGS.list("shape", None, f"Shapes instead of models: {', '.join(arg_specs.SPECS)}.")
OP = FLAGS.list("op", list(bench.OPERATIONS), f"Operations: {', '.join(bench.OPERATIONS)}.")
DTYPE = FLAGS.list("dtype", None, f"Types: {', '.join(DTYPES)}; default: bfloat16, CPU float32.")
KV_DTYPE = FLAGS.list("kv_dtype", ["same"], f"Types of the pool: {', '.join(KV_DTYPES)}.")
BUDGET = FLAGS.list("budget", ["1", "0.1"], "Shares of the full cache that every head owns.")
ROWS = FLAGS.integer("rows", None, "Rows, two per image; default: 16; --check: 2.", lower_bound=1)
HEADS = FLAGS.integer(
    "heads", None, "Heads at most; default: the model's; --check: 3.", lower_bound=1
)
BLOCK_SIZE = FLAGS.integer("block_size", 16, "Slots per cache block.", lower_bound=1)
SIZE = FLAGS.enum(
    "size", "auto", ["auto", "small", "full"], "Shapes cut down or in full; auto: small on a CPU."
)
IMPLEMENTATION = FLAGS.enum(
    "implementation", "auto", ["auto", *implementations.NAMES], "What is timed or checked."
)
REPEATS = FLAGS.integer("repeats", 7, "Timed loops per way.", lower_bound=1)
CHECK = FLAGS.boolean("check", False, "Compare kernel and reference, time nothing.")
TUNE = FLAGS.boolean("tune", False, "Time all tiles of the attention kernels, keep the best.")
DRAW = FLAGS.list("draw", [], f"Draw these: {draw.ALL}, {', '.join(draw.TASKS)}.")
MINUTES = FLAGS.integer("minutes", 40, "--draw: after them nothing more begins.", lower_bound=1)
JSON = FileFlags(FLAGS, "json", "Also write the results to this file; --draw: JSON lines.")
CALLS = "model shape op dtype kv_dtype rows heads block_size implementation".split()
# flags that only these take, of "timing", "--check", "--tune" and "--draw"
TAKEN_BY = {
    **dict.fromkeys(CALLS, ("timing", "--check", "--tune")),
    "budget": ("timing",),
    "repeats": ("timing", "--tune", "--draw"),
    "minutes": ("--draw",),
    "json": ("timing", "--check", "--draw"),
}


def is_small() -> bool:
    return SIZE.value == "small" or SIZE.value == "auto" and jax.default_backend() == "cpu"


def shapes() -> list[ArgSpec]:
    """The calls that the flags select."""
    on_cpu = jax.default_backend() == "cpu"
    dtypes = DTYPE.value or ["float32" if on_cpu else "bfloat16"]
    for what, given, allowed in (
        ("model", MODEL.value, MODELS),
        ("shape", SHAPE.value or (), arg_specs.SPECS),
        ("dtype", dtypes, DTYPES),
        ("kv_dtype", KV_DTYPE.value, KV_DTYPES),
    ):
        for name in given:
            choose(what, name, allowed)
    named = SHAPE.value or [n for n in arg_specs.SPECS if n.rpartition("-t")[0] in MODEL.value]
    small = is_small()
    sizes = small, BLOCK_SIZE.value, ROWS.value
    found = [measured.resized(arg_specs.SPECS[name], *sizes) for name in dict.fromkeys(named)]
    if HEADS.value:
        found = [replace(spec, heads=min(HEADS.value, spec.heads)) for spec in found]
    return [
        replace(spec, dtype=dtype, kv_dtype=None if kv_dtype == "same" else kv_dtype)
        for spec in found
        for dtype in dtypes
        for kv_dtype in KV_DTYPE.value
    ]


def calls() -> list[tuple[ArgSpec, str]]:
    """Every shape with each chosen operation that its model has."""
    named = [choose("operation", name, bench.OPERATIONS) for name in OP.value]
    operations = bench.OPERATIONS
    found = [(s, o) for s in shapes() for o in named if s.name.startswith(operations[o].models)]
    if not found:
        raise UserError(f"no model of the shapes chosen asks for --op={','.join(named)}")
    return found


def budgets() -> list[float]:
    """--budget as numbers in (0, 1]."""
    with contextlib.suppress(ValueError):
        found = [float(text) for text in BUDGET.value]
        if all(0 < share <= 1 for share in found):
            return found
    raise UserError(f"--budget={','.join(BUDGET.value)}: shares above 0, at most 1")


def kernel() -> str:
    """The implementation to time or check, which can run here."""
    if IMPLEMENTATION.value == "auto":
        return implementations.preferred()
    if why := implementations.why_not_here(IMPLEMENTATION.value):
        raise UserError(f"--implementation={IMPLEMENTATION.value}: {why}: choose auto or reference")
    return IMPLEMENTATION.value


def show_timings(name: str) -> int:
    """Time every way and print the table; return 1 if the kernel could not be timed."""
    if name.endswith(implementations.SUFFIX):
        raise UserError(f"{name} runs step by step, its time says nothing: only --check takes it")
    ways = [
        (operation, spec, budget, way)
        for spec, operation in calls()
        for budget in (budgets() if bench.OPERATIONS[operation].of_cache else [1.0])
        for way in bench.ways(operation, spec, name)
    ]
    rows = []
    progress = Progress("ways", len(ways), every=5)
    for operation, spec, budget, way in ways:
        rows.append(measured.timed(operation, spec, budget, way, REPEATS.value))
        progress.update(len(rows), f"{spec.name} {operation} {way}")
    device = jax.devices()[0].device_kind
    print(f"{device}, jax {jax.__version__}, blocks of {BLOCK_SIZE.value}")
    print(measured.table(rows))
    write_results({"device": device, "rows": rows})
    failures = [row for row in rows if row["way"] == name and row["seconds"] is None]
    for row in failures:
        print("error: {way}: {operation} {shape}: {note}".format(**row), file=sys.stderr)
    return 1 if failures else 0


def write_results(contents: dict) -> None:
    if JSON.path:
        told = {"jax": jax.__version__, "command": sys.argv} | contents
        write_text(JSON.path, json.dumps(told, indent=1) + "\n")


def show_check(name: str) -> int:
    """Compare kernel and reference; return 1 if a result differs, or if the kernel refuses all."""
    if name == "reference":
        raise UserError(
            f"--check compares a kernel with the reference, and {jax.default_backend()} has none: "
            f"choose --implementation=triton-interpret, tpu-interpret or mosaic-interpret"
        )
    rows, verdicts = [], []
    most = HEADS.value or measured.HEADS
    for spec, operation in calls():
        few = replace(spec, heads=min(most, spec.heads), rows=ROWS.value or measured.ROWS)
        known = bench.OPERATIONS[operation]
        # tables in every way that results may depend on
        for filling in known.fillings if known.has(name) else ():
            spec = replace(few, filling=filling)
            verdict, found, said = measured.compare(operation, spec, name)
            verdicts.append(verdict)
            types = f"{spec.dtype}, pool {spec.pool_dtype}"
            print(f"{verdict:5}", operation, spec.name, types, filling, said, sep="  ", flush=True)
            rows.append({"shape": spec.name, "table": filling, "operation": operation} | found)
    if not rows:
        raise UserError(f"there is no kernel {name} of --op={','.join(OP.value)}")
    right, refused = verdicts.count(measured.OK), verdicts.count(measured.REFUSED)
    told = f"{right} of {len(rows)} right" + f", {refused} refused" * bool(refused)
    print(f"{name} on {jax.devices()[0].device_kind}: {told}")
    write_results({"implementation": name, "errors": rows})
    return 0 if right and measured.WRONG not in verdicts else 1


def show_tuning(name: str) -> int:
    """Time tiles and keep the best of every call; return 1 if no tiles of a call work."""
    if jax.default_backend() == "cpu" or name not in tune.CHOICES:
        raise UserError(
            f"--tune times the tiles of a kernel on its own device; this is {name} on "
            f"{jax.default_backend()}: run it on the GPU or TPU that programs are to run on"
        )
    chosen = [op for op in OP.value if op in tune.OPERATIONS]
    if not chosen:
        raise UserError(
            f"--tune: {', '.join(OP.value)} has no tiles: choose --op from "
            f"{', '.join(tune.OPERATIONS)}"
        )
    kind, calls, wanted = jax.devices()[0].device_kind, 0, 0
    for operation in chosen:
        best = measured.tuned(operation, shapes(), name, REPEATS.value)
        calls, wanted = calls + len(best), wanted + len(shapes())
        if not best:  # a file without entries would say that there is something to use
            print(f"{operation}: no tiles work, nothing is written", file=sys.stderr)
            continue
        path = tune.keep(kind, operation, name, {tune.call_of(operation, s): t for s, t in best})
        print(f"{operation}: {len(best)} calls kept in {path}")
    print(f"{name} on {kind}: tiles of {calls} of {wanted} calls tuned")
    return 0 if calls == wanted else 1


def show_drawing() -> int:
    """Draw the tasks, print and write what is measured; return 1 if one failed."""
    tasks, until = draw.chosen(DRAW.value, is_small()), time.monotonic() + 60 * MINUTES.value
    device = jax.devices()[0].device_kind
    versions = {"jax": jax.__version__, "varjax": varjax.__version__}
    rows = [{"device": device, **versions, "command": sys.argv}]
    print(f"{device}, jax {jax.__version__}")
    for row in draw.rows(tasks, small=is_small(), repeats=REPEATS.value, until=until):
        rows.append(row)
        if JSON.path:
            write_text(JSON.path, "".join(f"{json.dumps(line)}\n" for line in rows))
        print(draw.text(row), flush=True)
    failures = [row for row in rows[1:] if "error" in row or not row.get("finite", True)]
    for row in failures:
        print(f"error: {row['task']}: {row.get('error', 'pixels are not finite')}", file=sys.stderr)
    return 1 if failures else 0


def mode() -> str:
    """Mode that the flags ask for; `UserError` for two at once, or a flag that it does not take."""
    asked = {"--check": CHECK.value, "--tune": TUNE.value, "--draw": bool(DRAW.value)}
    found = [name for name, given in asked.items() if given] or ["timing"]
    if len(found) > 1:
        raise UserError(f"{' and '.join(found)} exclude each other: call one after the other")
    for name, modes in TAKEN_BY.items():
        if FLAGS.values[name].present and found[0] not in modes:
            raise UserError(f"--{name} belongs to {' and '.join(modes)}: leave it out")
    return found[0]


def main(argv) -> int:
    asked = mode()
    JSON.check()
    if asked == "--draw":
        return show_drawing()
    name = kernel()
    calls(), budgets()  # wrong flags are reported before anything runs
    if asked == "--check":
        return show_check(name)
    return show_tuning(name) if asked == "--tune" else show_timings(name)


if __name__ == "__main__":
    command_line.run(main)
