"""Programs that a new process neither traces nor compiles: the same pictures; damaged files, other
threads, folders that are not ours. Rung 2: the programs themselves."""

import os
import pathlib
import threading
import types
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache as jax_cache

import varjax
from tests.engine.test_fingerprint import SMALL, OwnPolicy, fingerprint_of
from tests.models_under_test import fixture_model
from varjax.engine import fingerprint, kept_programs, pixels, program


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where programs are kept; the session's own settings come back afterwards."""
    names = ("jax_compilation_cache_dir", "jax_enable_compilation_cache")
    saved = {name: getattr(jax.config, name) for name in names}
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    jax.config.update("jax_enable_compilation_cache", True)
    jax_cache.reset_cache()
    monkeypatch.setattr(kept_programs, "PLATFORMS", ("cpu",))
    yield tmp_path / kept_programs.FOLDER
    for name, value in saved.items():
        jax.config.update(name, value)
    jax_cache.reset_cache()


@pytest.fixture(params=[SMALL, "llamagen_c2i"])
def model(request):
    return fixture_model(request.param)


def drawn(model, **options) -> tuple[np.ndarray, str]:
    """Pictures of a new generator, and where its programs came from."""
    generator = varjax.Generator(model, "streaming", 0.5, batch_size=2, **options)
    return generator(labels=[0, 1], seed=3), generator.timing.cache


def refuse(*args, **options):
    raise AssertionError("it is kept")


def names(folder: pathlib.Path, suffix: str) -> set[str]:
    return {path.name for path in folder.glob(f"*{suffix}")}


def test_nothing_is_traced_again(model, folder, monkeypatch):
    plain, cold = drawn(model)
    monkeypatch.setattr(program, "trace_codes", refuse)
    monkeypatch.setattr(pixels, "trace_pixels", refuse)
    again, warm = drawn(model)
    assert (cold, warm) == ("cold", "warm")
    np.testing.assert_array_equal(plain, again)


def test_other_sources_of_the_same_program(folder, monkeypatch):
    """A comment was changed: it is traced, and not compiled."""
    model = fixture_model(SMALL)
    plain, _ = drawn(model)
    programs, traced = (names(folder, s) for s in (kept_programs.PROGRAM, kept_programs.TRACED))
    monkeypatch.setattr(fingerprint, "_files", lambda: "changed")
    with monkeypatch.context() as patch:
        patch.setattr(jax.stages.Lowered, "compile", refuse)
        again, said = drawn(model)
    assert said == "warm" and names(folder, kept_programs.PROGRAM) == programs
    assert len(names(folder, kept_programs.TRACED) - traced) == 2  # known from now on
    np.testing.assert_array_equal(plain, again)


def plus(number: float) -> tuple[np.ndarray, str]:
    """The result of a small program, and where it came from."""
    arguments = ({}, np.arange(3, dtype=np.float32))

    def trace():
        return jax.jit(lambda _, x: jnp.sort(x) + number).trace(*arguments)

    found, said = kept_programs.compiled(trace, {}, (number, arguments))
    return np.asarray(found(*arguments)), said


def test_equal_texts_of_other_arguments(folder, monkeypatch):
    """Arguments that a program does not use are not in its text."""
    texts = set()
    for functions in (None, "private parts of JAX are elsewhere"):
        if functions:
            monkeypatch.setattr(kept_programs, "_inputs", lambda lowered: None)
        for sizes, used in (((2, 2), 0), ((2, 2), 1), ((3, 2), 1), ((2, 4), 0)):
            arguments = ({}, *(np.full(size, i, np.float32) for i, size in enumerate(sizes)))
            jitted = jax.jit(lambda _, *arrays, used=used: arrays[used] + 1)
            texts.add(jitted.lower(*arguments).as_text())
            said = (functions, used)
            for expected in ("cold", "warm"):
                found, verdict = kept_programs.compiled(
                    lambda: jitted.trace(*arguments),  # noqa: B023
                    {},
                    (said, arguments),
                )
                assert verdict == expected
                np.testing.assert_array_equal(found(*arguments), np.full(2, used + 1))
    assert len(texts) == 1


def test_this_version_of_jax_says_which_arguments_are_used():
    """If not, changed sources compile anew: slower, no more."""
    lowered = jax.jit(lambda a, b: b + 1).lower(np.zeros(1), np.zeros(2))
    assert kept_programs._inputs(lowered).endswith("[1]")


def cut(path: pathlib.Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def change(path: pathlib.Path) -> None:
    path.write_bytes(b"x" + path.read_bytes()[1:])


def write_otherwise(path: pathlib.Path) -> None:
    """Whole, but of something else."""
    kept_programs._write(path, b"other")


@pytest.mark.parametrize("damage", [cut, change, write_otherwise])
def test_damaged_files_are_made_anew(damage, folder):
    assert plus(1.0)[1] == "cold" and plus(1.0)[1] == "warm" and plus(2.0)[1] == "cold"
    for path in list(folder.iterdir()):
        damage(path)
    for expected in ("cold", "warm"):
        result, said = plus(1.0)
        np.testing.assert_array_equal(result, [1, 2, 3])
        assert said == expected


def test_no_space_is_left(folder, monkeypatch):
    def full(path):
        raise OSError("No space left on device")

    monkeypatch.setattr(kept_programs.atomic, "new_file", full)
    for _ in range(2):
        result, said = plus(1.0)
        assert said == "cold" and list(result) == [1, 2, 3] and not names(folder, "")


def test_a_folder_of_somebody_else(folder, monkeypatch):
    """What is kept there is found; what is not is left to JAX."""
    assert plus(1.0)[1] == "cold"

    def not_ours(*args, **options):
        raise PermissionError

    monkeypatch.setattr(os, "utime", not_ours)
    monkeypatch.setattr(kept_programs.tempfile, "TemporaryFile", not_ours)
    monkeypatch.setattr(kept_programs.compilation_cache, "off", refuse)
    assert plus(1.0)[1] == "warm"
    before = names(folder, "")
    result, _ = plus(2.0)
    assert list(result) == [2, 3, 4] and names(folder, "") == before


@pytest.mark.parametrize("place", ["gs://bucket/programs", "/proc/nowhere"])
def test_places_that_are_no_folders_here(place, folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = {"jax_enable_compilation_cache": True, "jax_compilation_cache_dir": place}
    monkeypatch.setattr(kept_programs.compilation_cache, "is_on", lambda: True)
    monkeypatch.setattr(kept_programs.compilation_cache, "off", refuse)
    arguments = ({}, np.zeros(2, np.float32))
    for name, value in settings.items():
        jax.config.update(name, value if name.endswith("dir") else False)  # JAX itself goes there
    found, _ = kept_programs.compiled(
        lambda: jax.jit(lambda _, x: x + 1).trace(*arguments), {}, ("plus", arguments)
    )
    np.testing.assert_array_equal(found(*arguments), [1, 1])
    assert not list(tmp_path.glob("gs:*"))


def test_threads_leave_the_cache_on(folder):
    """JAX's cache is off while one of them compiles."""
    ready = threading.Barrier(4)

    def compile_one(number):
        ready.wait()
        return plus(float(number))[1]

    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(compile_one, range(4))) == {"cold"}
    assert jax.config.jax_enable_compilation_cache and kept_programs.compilation_cache.is_on()
    assert plus(3.0)[1] == "warm"


class Elsewhere:
    """A second device."""

    def default_memory(self):
        return types.SimpleNamespace(kind="device")


def test_arrays_elsewhere_are_left_to_jax(folder, monkeypatch):
    assert kept_programs._are_here(({}, jnp.zeros(2), np.zeros(2)))
    monkeypatch.setattr(jax, "local_devices", lambda: [Elsewhere()])
    assert not kept_programs._are_here(({}, jnp.zeros(2), np.zeros(2)))


def test_a_program_that_calls_the_host(folder, capsys):
    generator = varjax.Generator(fixture_model(SMALL), batch_size=1, watch=print)
    assert generator(labels=[0]).shape[0] == 1 and capsys.readouterr().out
    assert not folder.exists()


def test_what_was_not_used_for_longest_goes(folder, monkeypatch):
    folder.mkdir()
    for age in range(4):
        path = folder / f"{age}{kept_programs.PROGRAM}"
        path.write_bytes(bytes(100))
        os.utime(path, (1e9 - age, 1e9 - age))
    (folder / "other").write_bytes(bytes(1000))
    monkeypatch.setattr(kept_programs, "MOST_BYTES", 250)
    kept_programs._forget(folder)
    assert {path.name for path in folder.iterdir()} == {"0.program", "1.program", "other"}


def test_a_policy_of_the_users_own_is_left_to_jax(folder):
    generator = varjax.Generator(fixture_model(SMALL), OwnPolicy(budget=0.5), batch_size=1)
    assert fingerprint_of(generator) is None
    generator.compile()
    assert len(names(folder, kept_programs.TRACED)) == 1  # pixels do not depend on it


@pytest.mark.parametrize("setting", kept_programs.LEFT_TO_JAX)
def test_who_wants_to_see_jax_at_work_does(setting, folder, monkeypatch):
    values = {**jax.config.values, setting: "somewhere"}
    monkeypatch.setattr(type(jax.config), "values", values)
    arguments = ({}, np.zeros(2, np.float32))
    trace = lambda: jax.jit(lambda _, x: x + 1).trace(*arguments)  # noqa: E731
    for _ in range(2):
        found, _ = kept_programs.compiled(trace, {}, ("plus", arguments))
        assert not folder.exists()
        np.testing.assert_array_equal(found(*arguments), [1, 1])
