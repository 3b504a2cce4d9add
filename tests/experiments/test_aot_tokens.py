"""What programs that draw token by token hold when they are compiled for chips that are not here;
only where their compilers are."""

from dataclasses import replace

import pytest

from experiments.aot.program import Compilation, CompiledProgram, Workload
from experiments.generation import ProgramOptions
from pallas_kernels import chips, implementations
from varjax.generation import api
from varjax.generation.build import Build
from varjax.generation.mesh import MeshSpec
from varjax.models.loading import describe
from varjax.models.model import Model

TYPES = {name: "bfloat16" for name in ("dtype", "weights_dtype", "kv_dtype")}
OPTIONS = ProgramOptions(
    **TYPES, build=Build(layers="unroll", decode_dtype="float32"), mesh=MeshSpec()
)
PROMPT = 200


def codes_of_a_janus(target: str, layers: int) -> CompiledProgram:
    """The compiled program of a narrow Janus-Pro with heads as large as the published ones."""
    model = describe("janus-pro-1b").with_prompt_tokens(PROMPT)
    narrow = replace(model.config, num_hidden_layers=layers, intermediate_size=256)
    transformer = model.family.parts["transformer"].abstract(narrow)
    model = Model(model.name, {**model.parts, "transformer": transformer}, model.metadata)
    chip = chips.get_chip(target)
    attention = implementations.choices(chip.platform, chip.capability)[0]
    workload = Workload(
        model=model,
        plan=api.plan(model),
        sampling=model.sampling(),
        program=OPTIONS,
        attention=attention,
        text_tokens=None,
    )
    compilation = Compilation(workload, chip, 2)
    compilation.compile_codes()
    return compilation.codes


@pytest.mark.parametrize("target", ["tpu-v5e", "h200"])
def test_caches_exist_once(target):
    """No second pool, and no keys and values of a prompt that wait for the other layers.

    A TPU would put a pool of 16 heads otherwise than the kernel reads it, and copy it. A GPU would
    store what all layers know of the prompt after the last one.
    """
    if why := chips.why_unavailable(target):
        pytest.skip(why)
    two, four = (codes_of_a_janus(target, layers) for layers in (2, 4))
    assert two.copies == four.copies == {}
    keys_and_values = 4 * 16 * PROMPT * 256 * 2  # of a layer: two images, guided, bfloat16
    more = four.memory.temp_size_in_bytes - two.memory.temp_size_in_bytes
    assert more < keys_and_values
