"""Bytes that are promised without compiling, beside those of compiled programs."""

from dataclasses import replace

import pytest

from experiments.aot.program import Compilation, Workload
from pallas_kernels import chips, implementations
from pallas_kernels.chips import Chip
from tests.experiments.test_aot_tokens import OPTIONS
from varjax.generation import api
from varjax.generation.build import Build
from varjax.models.loading import describe

GIB = 2**30
# model, policy, budget, batch, chip, layers; GiB of the compiled program that draws codes
# (docs/lab/compiled_memory.md). Of heatkv's programs the budget alone counts here.
COMPILED = [
    ("infinity-2b", "streaming", 0.1, 16, "rtx4090", "scan", 18.22),
    ("infinity-2b", "streaming", 0.1, 16, "rtx4090", "unroll", 18.69),
    ("infinity-2b", "streaming", 0.46, 32, "h100", "scan", 67.93),
    ("infinity-2b", "streaming", 0.155273, 8, "tpu-v5e", "scan", 15.85),
    ("infinity-2b", "streaming", 0.4, 4, "tpu-v5e", "scan", 13.70),
    ("var-d30", "streaming", 1.0, 64, "rtx4090", "unroll", 17.18),
    ("llamagen-xl-384", "headkv", 1.0, 64, "rtx4090", "unroll", 14.38),
    ("var-d30", "streaming", 0.27, 128, "tpu-v5e", "scan", 12.87),
    ("var-d30", "streaming", 1.0, 256, "h100", "scan", 54.40),
    ("llamagen-xl-384", "headkv", 0.9, 64, "tpu-v5e", "unroll", 14.80),
    ("janus-pro-1b", "headkv", 0.7, 64, "tpu-v5e", "unroll", 13.56),
]


def workload(model: str, policy: str, budget: float, chip: Chip, layers: str) -> Workload:
    model = describe(model)
    return Workload(
        model=model,
        plan=api.plan(model, policy, budget),
        sampling=model.sampling(),
        program=replace(OPTIONS, build=Build(layers=layers, decode_dtype="float32")),
        attention=implementations.choices(chip.platform, chip.capability)[0],
        text_tokens=None,
    )


@pytest.mark.parametrize("case", COMPILED, ids=lambda case: " ".join(map(str, case[:-1])))
def test_promises_are_near_what_was_compiled(case):
    model, policy, budget, batch, chip, layers, compiled = case
    chip = chips.get_chip(chip)
    promised = (
        workload(model, policy, budget, chip, layers).predict(batch, chip.platform).total / GIB
    )
    assert promised == pytest.approx(compiled, rel=0.1)


@pytest.mark.aot
@pytest.mark.parametrize("case", [COMPILED[0], COMPILED[-1]], ids=lambda case: case[0])
def test_promises_are_near_what_is_compiled(case):
    model, policy, budget, batch, chip, layers, _ = case
    if why := chips.why_unavailable(chip):
        pytest.skip(why)
    chip = chips.get_chip(chip)
    asked = workload(model, policy, budget, chip, layers)
    found = Compilation(asked, chip, batch)
    found.compile_codes()
    promised = asked.predict(batch, chip.platform).total
    assert promised == pytest.approx(found.codes.resident, rel=0.1)
    assert found.codes.resident <= chip.memory
