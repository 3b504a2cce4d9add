"""What a device or a compiler says becomes something to do."""

import jax
import pytest

import varjax
from tests.models_under_test import fixture_model
from varjax.core.errors import UserError
from varjax.generation import pixels, program
from varjax.generation.compiled import Program

# XLA's words for GPUs and CPUs, for TPUs that compile, and that run
MEMORY = [
    "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 34359738368 bytes.\nBuffers: ...",
    "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. "
    "Used 26.84G of 15.75G hbm.",
    "RESOURCE_EXHAUSTED: Error allocating device buffer: Attempting to allocate 8.00G. That was "
    "not possible. There are 4.94G free.",
]
OTHER = [
    "RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem. Used 20M of 16M",
    "RESOURCE_EXHAUSTED: Shared memory size limit exceeded",
    "INTERNAL: Mosaic failed to compile TPU kernel: unsupported shape cast",
]
# where they are raised: while memory is taken for the arguments, or as either program is made
PLACES = ["arguments", "jit_codes", "trace_pixels"]


def cases(messages: list[str]) -> list[tuple[str, str]]:
    """Every message at the first place, which is fast, and one at each of the others."""
    return [(PLACES[0], text) for text in messages] + [(place, messages[1]) for place in PLACES[1:]]


@pytest.fixture(params=["llamagen_c2i", "c_k5_nol2norm"])
def generator(request):
    return varjax.Generator(fixture_model(request.param), batch_size=2)


def failing(message: str):
    def fail(*args, **options):
        raise jax.errors.JaxRuntimeError(message)

    return fail


def fail_at(place: str, message: str, generator, patch: pytest.MonkeyPatch) -> None:
    """Let a step of `Generator.compile` fail: the arguments, or either program."""
    owner = {PLACES[0]: generator, PLACES[2]: pixels}.get(place, program)
    fast = jax.jit(len), ((),)
    patch.setattr(program, "jit_codes", lambda *args, **options: fast)
    patch.setattr(owner, place, failing(message))


@pytest.mark.parametrize(("place", "message"), cases(MEMORY))
def test_too_little_memory(place, message, generator, monkeypatch):
    fail_at(place, message, generator, monkeypatch)
    with pytest.raises(UserError) as refusal:
        generator([0, 1])
    said = str(refusal.value)
    assert "the device ran out of memory compiling a batch of 2: RESOURCE" in said
    assert "smaller batch_size" in said and "Buffers" not in said


def test_too_little_memory_while_drawing(generator, monkeypatch):
    generator.program = Program(failing(MEMORY[0]), None, generator._empty)
    with pytest.raises(program.OutOfMemory, match="out of memory drawing a batch of 2"):
        generator([0, 1])


@pytest.mark.parametrize("message", OTHER)
def test_kernels_can_be_done_without(message):
    with pytest.raises(jax.errors.JaxRuntimeError) as failure:
        with program.explained("compiling", "tpu"):
            failing(message)()
    [note] = failure.value.__notes__
    assert "compiling failed with kernels (tpu)" in note and "--attention=reference" in note
