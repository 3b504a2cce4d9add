"""`experiments.bench` on a CPU: it measures, checks and refuses; what it says of a chip is not
tested."""

import json
import re
from dataclasses import replace

import jax
import pytest

from pallas_kernels import arg_specs, bench, implementations
from pallas_kernels.bench.scales import SCALES
from pallas_kernels.ragged_attention import config, tune
from tests.often import often

TOKENS = ("attend_token", "store_token", "token_scores", "move_slots", "rank", "sample")
WORK = re.compile(r" (dot|reduce|sort|call|gather|scatter)\(")
OTHERS = ("attention_moments", "attend_token", "store_token", "move_slots")
SMALL = ("--shape=var-d30-t1", "--rows=1", "--budget=1", "--repeats=1")


def test_timings(call, tmp_path):
    path = tmp_path / "bench.json"
    status, out, err = call("bench", *SMALL, f"--json={path}")
    assert status == 0, err
    lines = out.splitlines()
    assert lines[1].split()[:2] == ["shape", "operation"]
    rows = json.loads(path.read_text())["rows"]
    ways = [(row["operation"], row["way"]) for row in rows]  # of models by scales, no text
    assert ways == [
        ("attend", "reference"),
        ("attend", "dense xla"),
        ("attention_moments", "reference"),
        ("write", "reference"),
        ("store_and_attend", "reference"),
        ("finish", "reference"),
        ("sample", "reference"),
    ]
    for row in rows:
        assert 0 < row["seconds"] < 1 and not row["note"]
    status, _, err = call("bench", *SMALL, f"--json={path}")
    assert status == 2 and "exists already" in err


def test_check(call):
    flags = ("--check", "--shape=var-d30-t1", "--op=attend,write,store_and_attend")
    status, out, err = call("bench", *flags, "--implementation=triton-interpret")
    assert status == 0, err
    assert out.splitlines()[-1] == "triton-interpret on cpu: 9 of 9 right"


@pytest.mark.slow
def test_check_of_models_that_draw_token_by_token(call):
    """Shapes of other models have no operations on single tokens; they choose tokens, too."""
    flags = ("--check", "--shape=var-d30-t1,llamagen-xl-t1", f"--op={','.join(TOKENS)}")
    status, out, err = call("bench", *flags, "--implementation=tpu-interpret")
    assert status == 0, err
    *cases, last = out.splitlines()
    found = [line.split()[1:3] for line in cases]
    assert found == [["sample", "var-d30-t1"], *([name, "llamagen-xl-t1"] for name in TOKENS)]
    assert last == "tpu-interpret on cpu: 7 of 7 right"


@pytest.mark.parametrize("kv_dtype", [None, pytest.param("int8", marks=pytest.mark.slow)])
@pytest.mark.parametrize("operation", [name for name in TOKENS if name != "sample"])
def test_a_token_kernel_that_is_wrong_is_found(operation, kv_dtype, monkeypatch):
    """The last head's results are those of the first."""
    run = implementations.run

    def faulty(name, modules, function, *arguments, **options):
        found = run(name, modules, function, *arguments, **options)
        if name == "reference":
            return found
        return jax.tree.map(lambda a: a.at[:, -1].set(a[:, 0]), found)

    spec = arg_specs.SPECS["llamagen-xl-t1"].reduced(entries=3)
    spec = replace(spec, kv_dtype=kv_dtype)
    # no kernels: other names of the reference
    assert max(bench.errors(operation, spec, "triton").values()) < 0.01
    monkeypatch.setattr(implementations, "run", faulty)
    assert min(bench.errors(operation, spec, "triton-interpret").values()) > 0.01


def test_a_kernel_that_cannot_be_timed_fails(call, monkeypatch):
    def full(*_):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(bench, "measure", full)
    status, out, err = call("bench", *SMALL, "--op=attend")
    assert status == 1 and "error: reference: attend var-d30-t1: RuntimeError: out of" in err
    assert "dense xla" in out  # the table is printed all the same


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--check"], "cpu has none: choose --implementation=triton-interpret"),
        (["--tune"], "run it on the GPU or TPU"),
        (["--tune", "--implementation=triton-interpret"], "run it on the GPU or TPU"),
        (["--implementation=triton"], "triton needs a GPU, this machine offers cpu"),
        (["--implementation=mosaic", "--check"], "mosaic needs a GPU, this machine offers cpu"),
        (["--implementation=triton-interpret"], "only --check takes it"),
        (["--tune", "--check"], "--check and --tune exclude each other"),
        (["--minutes=5"], "--minutes belongs to --draw: leave it out"),
        (["--draw=all", "--op=attend"], "--op belongs to timing and --check and --tune: leave"),
        (["--draw=var-d30-b1,var"], "unknown task 'var': choose one of all, var-d30-b1, infinity"),
        (["--check", "--budget=1"], "--budget belongs to timing: leave it out"),
        (["--check", "--repeats=1"], "--repeats belongs to timing and --tune and --draw: leave"),
        (["--tune", "--json=x.json"], "--json belongs to timing and --check and --draw"),
        (["--model=var-d31"], "unknown model 'var-d31'"),
        (["--shape=var"], "unknown shape 'var'"),
        (["--op=read"], "unknown operation 'read'"),
        (["--op=rank", "--shape=var-d30-t1"], "no model of the shapes chosen asks for --op=rank"),
        (["--check", "--op=rank", "--implementation=triton-interpret"], "no kernel triton-interp"),
        (["--dtype=float64"], "unknown dtype 'float64'"),
        (["--budget=0.5,2"], "--budget=0.5,2: shares above 0, at most 1"),
        (["--budget=x"], "--budget=x"),
        (["--draw="], "--draw= is empty"),
        (["--op="], "--op= is empty"),
        (["--model="], "--model= is empty"),
        (["--shape="], "--shape= is empty"),
    ],
)
def test_wrong_flags(refused, flags, message):
    refused("bench", message, *flags)


def test_check_names_shapes_that_a_kernel_refuses(call, monkeypatch):
    def refuse(*_):
        raise NotImplementedError("it takes heads of 64, 128")

    monkeypatch.setattr(bench, "errors", refuse)
    flags = ("--check", "--implementation=triton-interpret", "--op=write")
    status, out, err = call("bench", *SMALL[:2], *flags)
    assert status == 1 and not err
    assert "REFUSED  write  var-d30-t1" in out and "it takes heads of 64, 128" in out
    assert "0 of 2 right" in out


def test_tuning_takes_the_fastest_right_tiles(monkeypatch):
    """The kernel runs interpreted here, so times mean nothing and are made up."""
    run = tune._run
    spec = arg_specs.SPECS["var-d30-t1"].reduced(rows=1, heads=1)
    call = tune.call_of("attend", spec)
    every = tune.tiles(call, "triton")
    assert every[0] == config.heuristic(call, "triton") and len(every) == len(set(every)) > 10
    assert all(tile.block_q == 16 for tile in every)
    monkeypatch.setattr(tune, "tiles", lambda *_: every[:3])
    seconds = iter([3.0, 1.0])
    monkeypatch.setattr(bench, "measure", lambda *_: next(seconds))

    def refusing(kernel, operation, tile, *args, **options):
        if tile == every[2]:
            raise RuntimeError("refused")
        return run(kernel, operation, tile, *args, **options)

    monkeypatch.setattr(tune, "_run", refusing)
    found = list(tune.trials("attend", spec, "triton-interpret", repeats=1))
    assert [(tile, time) for tile, time, _ in found] == [
        (every[0], 3.0),
        (every[1], 1.0),
        (every[2], float("inf")),
    ]
    assert "refused" in found[2][2]


@pytest.mark.slow
@pytest.mark.parametrize("operation", often(("attend",), tune.OPERATIONS))
@pytest.mark.parametrize("wrong", [1.1, float("nan")])
def test_tuning_refuses_wrong_tiles(monkeypatch, operation, wrong):
    """The second tiles give results that are a little too large, or no numbers, and are fastest."""
    spec = arg_specs.SPECS["var-d30-t36"].reduced(rows=1, heads=1)
    every = tune.tiles(tune.call_of(operation, spec), "triton")[:2]
    run = tune._run

    def faulty(kernel, operation, tile, *args, **options):
        found = run(kernel, operation, tile, *args, **options)
        factor = wrong if tile == every[1] else 1.0
        return jax.tree.map(lambda a: a * factor, found)

    monkeypatch.setattr(tune, "_run", faulty)
    monkeypatch.setattr(tune, "tiles", lambda *_: every)
    seconds = iter([3.0, 1.0])
    monkeypatch.setattr(bench, "measure", lambda *_: next(seconds))
    found = list(tune.trials(operation, spec, "triton-interpret", repeats=1))
    assert found == [(every[0], 3.0, ""), (every[1], float("inf"), "wrong result")]


@pytest.fixture
def tuning(call, monkeypatch, tmp_path):
    """tuning(works, *flags): outcome of --tune and the files written, as on a GPU on which tiles
    of the operations `works` can be timed."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(config, "TUNED", tmp_path)

    def invoke(works, *flags):
        def trials(operation, spec, name, repeats):
            tile = config.heuristic(tune.call_of(operation, spec), name)
            works_here = operation in works
            yield tile, 1e-3 if works_here else float("inf"), "" if works_here else "refused"

        monkeypatch.setattr(tune, "trials", trials)
        outcome = call("bench", "--tune", "--shape=var-d30-t1", "--size=small", *flags)
        return *outcome, sorted(path.name for path in tmp_path.rglob("*") if path.is_file())

    return invoke


def test_tuning_keeps_what_works(tuning):
    status, out, err, files = tuning(tune.OPERATIONS)
    assert (status, files) == (0, [f"{name}.json" for name in tune.OPERATIONS]), err
    assert "tiles of 2 of 2 calls tuned" in out


@pytest.mark.parametrize("works", [(), ("attend",)])
def test_tuning_without_tiles_that_work_writes_nothing_and_fails(tuning, works):
    status, out, err, files = tuning(works)
    assert (status, files) == (1, [f"{name}.json" for name in works])
    assert "attention_moments var-d30-t1: no tiles work: refused" in err
    assert f"tiles of {len(works)} of 2 calls tuned" in out


def compiled_loop(candidate) -> str:
    def loop(carry, arguments):
        return jax.lax.fori_loop(0, 9, lambda i, c: candidate.step(c, *arguments), carry)

    return jax.jit(loop).lower(candidate.carry, candidate.arguments).compile().as_text()


def around_the_loop(text: str) -> str:
    """What a compiled program does before and after its loop: the entry, in which XLA for CPUs
    calls a computation that holds a small loop (jaxlib from 0.12 on)."""
    entry = text[text.index("ENTRY") :]
    for call, name in re.findall(r"(.* call\(.*to_apply=(%[\w.-]+).*xla_cpu_small_call.*)", entry):
        called = text[text.index(f"\n{name} (") :]
        entry = entry.replace(call, called[: called.index("\n}")])
    assert " while(" in entry
    return entry


@pytest.mark.parametrize(
    ("operation", "name"),
    [(name, "llamagen-xl-t1") for name in ("attend", "token_scores", "rank", "sample")]
    + [pytest.param(name, "infinity-2b-t64", marks=pytest.mark.slow) for name in SCALES]
    + [pytest.param(name, "llamagen-xl-t1", marks=pytest.mark.slow) for name in OTHERS],
)
def test_nothing_of_an_operation_is_done_before_the_loop(operation, name, optimized):
    spec = arg_specs.SPECS[name].reduced(rows=2, heads=2)
    candidate = bench.prepare(operation, spec, 1.0, "reference")
    text = compiled_loop(candidate)
    entry = around_the_loop(text)
    lines = [line.strip()[:200] for line in entry.splitlines() if WORK.search(line)]
    assert not lines, lines


def test_measured_loops_run_the_operation_every_time(optimized):
    """A loop whose body does not depend on what goes before would be computed once."""
    spec = arg_specs.SPECS["var-d30-t36"].reduced(rows=1, heads=1)
    candidate = bench.prepare("attend", spec, 1.0, "reference")
    text = compiled_loop(candidate)
    body = text.split("while(")[0]
    entry = around_the_loop(text)
    assert "gather" in body and "gather" not in entry
    # the lengths of queries and keys, although these do not change
    assert " sqrt(" in body and " sqrt(" not in entry
