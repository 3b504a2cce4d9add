"""Compiled programs kept on disk: where, and what is said about a start."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache as jax_cache

from varjax.generation import compilation_cache


@pytest.fixture(autouse=True)
def settings_of_the_session():
    """What the tests themselves use comes back afterwards."""
    names = [
        "jax_compilation_cache_dir",
        "jax_persistent_cache_min_compile_time_secs",
        "jax_enable_compilation_cache",
    ]
    saved = {name: getattr(jax.config, name) for name in names}
    yield
    for name, value in saved.items():
        jax.config.update(name, value)
    jax_cache.reset_cache()


def start(size: int) -> str:
    """Compile a program as a new process would, and say where it came from."""
    before = compilation_cache.events.copy()
    jax.jit(lambda x: jnp.sort(x) @ x).lower(jnp.zeros(size)).compile()
    return compilation_cache.verdict(before)


def test_cold_warm_and_off(tmp_path, monkeypatch):
    monkeypatch.setattr(compilation_cache, "SHORTEST_S", 0.0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.use()
    assert start(100) == "cold"
    assert start(100) == "warm"
    assert any((tmp_path / "varjax" / "programs").iterdir())
    jax.config.update("jax_compilation_cache_dir", None)
    jax_cache.reset_cache()
    assert start(100) == "off"


def test_generators_keep_their_programs(tmp_path, monkeypatch):
    """Where nobody has chosen a folder, and nothing else of the process."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(compilation_cache, "SHORTEST_S", 0.0)
    jax.config.update("jax_compilation_cache_dir", None)
    jax_cache.reset_cache()
    for expected in ("cold", "warm"):
        with compilation_cache.kept():
            assert start(102) == expected
        assert start(103) == "off"
    kept = list((tmp_path / "varjax" / "programs").iterdir())
    jax.config.update("jax_enable_compilation_cache", False)
    with compilation_cache.kept():
        assert start(104) == "off"
    assert kept and kept == list((tmp_path / "varjax" / "programs").iterdir())


def test_places(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.use()
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "varjax" / "programs")
    mine = str(tmp_path / "mine")
    jax.config.update("jax_compilation_cache_dir", mine)
    compilation_cache.use()  # set already: it stays
    assert jax.config.jax_compilation_cache_dir == mine
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.use()  # cannot write there: no cache
    assert jax.config.jax_compilation_cache_dir is None
