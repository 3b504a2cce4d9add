"""What a program depends on, said before it is traced: every change of it is another fingerprint,
and what cannot be told has none. Rung 2: the programs' texts."""

import dataclasses
import functools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import varjax
from tests.models_under_test import fixture_model
from tests.often import often
from varjax.engine import fingerprint, program
from varjax.engine.pixels import Decoding
from varjax.policies.h2o import H2O
from varjax.schedule import Schedule

SMALL = "c_k5_nol2norm"


@dataclasses.dataclass(frozen=True, kw_only=True)
class OwnPolicy(H2O):
    """Of the user's own: its module may depend on anything."""


@pytest.mark.parametrize("name", often((SMALL,), (SMALL, "llamagen_c2i")))
def test_the_same_in_another_process(name):
    """Whatever the order of sets there is."""
    call = f"from tests.engine import test_fingerprint as t; print(t.codes_of({name!r}))"
    said = []
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", call]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        said.append(done.stdout.strip())
        assert len(said[-1]) == 64, done.stderr
    assert said[0] == said[1]


def codes_of(name: str) -> str | None:
    return fingerprint_of(varjax.Generator(fixture_model(name), "headkv", 0.5, batch_size=2))


def fingerprint_of(generator: varjax.Generator) -> str | None:
    state, arguments = generator.runner.traced_arguments(None, None)
    said = (generator.spec, generator.precision)
    return fingerprint.of(said, generator.runner.networks, (state, *arguments))


def text_of(generator: varjax.Generator) -> str:
    state, arguments = generator.runner.traced_arguments(None, None)
    how = {"precision": generator.precision}
    traced = program.trace_codes(generator.runner.networks, state, arguments, generator.spec, **how)
    return traced.lower().as_text()


VARIANTS = [
    {},
    {"budget": 0.25},
    {"policy": "h2o"},
    {"kv_dtype": "int8"},
    {"keep_logits": True},
    {"sampling": varjax.Sampling(top_k=7)},
    {"sampling": varjax.Sampling(cfg=2.5)},
]


def test_programs_that_differ_have_other_fingerprints():
    """Of all pairs; and the same one twice has the same, from another model object, too."""
    found = {}
    for options in VARIANTS:
        model = fixture_model(SMALL)
        options = {"policy": "streaming", "budget": 0.5, "batch_size": 2, **options}
        generator = varjax.Generator(model, **options)
        found.setdefault(fingerprint_of(generator), set()).add(text_of(generator))
        assert fingerprint_of(varjax.Generator(fixture_model(SMALL), **options)) in found
    assert None not in found and all(len(texts) == 1 for texts in found.values())
    assert len(found) > 5


def digest(said=None, networks=None, arrays=None) -> str | None:
    return fingerprint.of(said, networks, arrays)


def test_values_are_not_told_apart_and_objects_are():
    """Twice the same schedule, or two equal ones; but one array twice is one argument less."""
    one, other = (Schedule.square((1, 2)) for _ in range(2))
    assert one is not other and digest(said=[one, one]) == digest(said=[one, other])
    assert digest(said=[(1, one), (1, one)]) == digest(said=[(1, one)] * 2)
    assert digest(said=[one]) != digest(said=[Schedule.square((1, 3))])
    ones, again = (np.ones(3, np.float32) for _ in range(2))
    assert digest(networks=[ones, ones]) != digest(networks=[ones, again])
    held = {"a": one}
    held["b"] = (held, one)  # through itself
    assert len(digest(said=held)) == 64


def test_static_arrays_count_by_contents_and_arguments_by_shape():
    ones, twos = np.ones(3, np.float32), np.full(3, 2, np.float32)
    assert digest(said=ones) != digest(said=twos)
    assert digest(said=jnp.asarray(ones)) != digest(said=jnp.asarray(twos))
    assert digest(arrays=ones) == digest(arrays=jnp.asarray(twos))
    assert digest(arrays=ones) != digest(arrays=ones.astype(np.float16))
    assert digest(arrays=ones) != digest(arrays=ones[:2])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, 1.0),
        (1, True),
        ((1, 2), [1, 2]),
        ((1, (2,)), ((1, 2),)),
        ({"a": 1}, {"a": 2}),
        ({1, 2}, {1, 3}),
        ("ab", ("a", "b")),
        (Decoding("float32", 1), Decoding("float32", 2)),
        (jnp.sum, jnp.max),
        (np.dtype("int8"), np.dtype("uint8")),
    ],
)
def test_what_differs_differs(one, other):
    assert digest(one) and digest(one) != digest(other) and digest(one) == digest(one)


def nested(depth: int) -> list:
    return [nested(depth - 1)] if depth else []


# Python 3.11 says that they are of the module `types`
Made = dataclasses.make_dataclass("Made", [], bases=(H2O,), frozen=True)
executed: dict = {}
exec("class Executed: pass\ndef function(x): return x", executed)


@pytest.mark.parametrize(
    "unknown",
    [
        object(),
        lambda x: x,
        OwnPolicy(budget=0.5),
        Made(budget=0.5),
        executed["Executed"](),
        executed["function"],
        iter("ab"),
        jax.jit(functools.partial(max, 2)),
        jax.jit(lambda x: x),
        nested(500),
        np.array([None]),
        jax.random.key(0),
    ],
)
def test_what_cannot_be_told_has_none(unknown):
    assert digest(said=[unknown]) is None


def test_a_constant_that_is_a_parameter_elsewhere_counts_by_contents():
    def both(number):
        array = jnp.full(3, number)
        return nnx.Param(array), array

    assert digest(networks=both(1.0)) != digest(networks=both(2.0))
    assert digest(networks=both(1.0)[0]) == digest(networks=both(2.0)[0])


def test_files_that_were_changed_since_they_were_imported(monkeypatch):
    assert digest()
    monkeypatch.setattr(fingerprint, "IMPORTED", os.stat(fingerprint.__file__).st_ctime)
    assert digest() is None
    monkeypatch.setattr(fingerprint, "FILES", (".pyc",))
    assert digest() is None


def test_settings_of_jax_count(monkeypatch):
    plain = digest()
    with jax.numpy_dtype_promotion("strict"):
        assert digest() != plain
    monkeypatch.setattr(fingerprint, "FLAGS_THEN", ["--xla_cpu_enable_fast_math=true", ""])
    assert digest() is None  # XLA may have read them, or not
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "")
    assert digest() not in (None, plain)
