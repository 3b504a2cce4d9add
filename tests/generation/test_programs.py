"""The compiled programs: layouts of weights, decoding in chunks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout

import varjax
from pallas_kernels import jax_versions
from tests.models_under_test import checkpoint_folder
from tests.often import often
from varjax import Generator, Model
from varjax.core.sampling import Sampling
from varjax.generation import program
from varjax.generation.build import Build
from varjax.generation.compiled import Weights


def small_model() -> Model:
    """A model of its own for every call: some tests change where its arrays lie."""
    return varjax.load(checkpoint_folder("c_k5_nol2norm"), "float32")


def test_weights_are_placed_where_a_program_wants_them():
    """Every matrix transposed in memory: other layout, same numbers, nothing left behind."""
    networks = small_model().networks
    weights = Weights(networks)
    before = [np.asarray(a) for a in jax.tree.leaves(networks)]

    def transposed(a):
        order = (*range(a.ndim - 2), *reversed(range(a.ndim)[-2:]))
        return Format(Layout(major_to_minor=order), a.sharding)

    formats = jax.tree.map(transposed, weights.arrays())
    weights.place(formats)
    for array, wanted, old in zip(*map(jax.tree.leaves, (networks, formats)), before, strict=True):
        assert array.format.layout.major_to_minor == wanted.layout.major_to_minor
        np.testing.assert_array_equal(array, old)


@pytest.mark.slow
@pytest.mark.parametrize("layers", often(("unroll",), ("scan", "unroll")))
def test_generation_with_layouts_chosen_by_the_compiler(layers, monkeypatch):
    """What runs on TPU, forced on this platform: same tokens, a cache that lies row by row."""
    labels, index = np.zeros(2, np.int32), np.arange(2, dtype=np.int32)
    build = Build(layers=layers)
    options = dict(sampling=Sampling(greedy=True), batch_size=2, build=build)
    expected = Generator(small_model(), **options).run_batch(labels, index)[0]["tokens"]
    monkeypatch.setattr(program, "AUTO_LAYOUT_PLATFORMS", (jax.default_backend(),))
    generator = Generator(small_model(), **options)
    results, state = generator.run_batch(labels, index)
    assert jnp.array_equal(results["tokens"], expected)
    taken = generator.program.codes.input_formats[0][1]
    for array, wanted in zip(*map(jax.tree.leaves, (state, taken)), strict=True):
        assert wanted.layout.major_to_minor == tuple(range(array.ndim))
        assert array.format == wanted


def test_compiler_options_give_way_to_flags(monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    few = ("xla_gpu_blas_max_algorithms",) if jax_versions.LIMITS_ALGORITHMS else ()
    few = (program.GRAPHS_IN_PROFILES, *few)
    eigen, libraries = "xla_cpu_experimental_ynn_fusion_type", "xla_gpu_enable_triton_gemm"
    for few_rows, cpu in ((False, (eigen,)), (True, ())):
        assert tuple(program.compiler_options("cpu", few_rows=few_rows)) == cpu
        assert tuple(program.compiler_options("gpu", few_rows=few_rows)) == (*few, libraries)
        assert program.compiler_options("tpu", few_rows=few_rows) == {}
        # libraries would make a copy of every int8 matrix in the type of the product
        found = program.compiler_options("gpu", few_rows=few_rows, weights_dtype="int8")
        assert tuple(found) == few
        for scheme in ("w8a8", "fp8"):  # which libraries multiply as they are
            found = program.compiler_options("gpu", few_rows=few_rows, weights_dtype=scheme)
            assert tuple(found) == (*few, libraries)
    monkeypatch.setenv("XLA_FLAGS", f"--{eigen}=LIBRARY_FUSION_TYPE_DOT")
    assert program.compiler_options("cpu") == {}
    monkeypatch.setenv("XLA_FLAGS", " ".join(f"--{name}=1" for name in (*few, libraries)))
    assert program.compiler_options("gpu", few_rows=True) == program.compiler_options("gpu") == {}
