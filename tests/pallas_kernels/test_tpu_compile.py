"""The TPU kernels go through the compiler of every TPU (none is needed), leave the cache in place
and read queries, keys and values where the product left them.

By default the shapes of VAR and Infinity on v5e; with --slow all chips, types, head and block
sizes.
"""

import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import jax
import pytest

from pallas_kernels import chips

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).with_name("tpu_programs.py")
TPUS = [name for name, chip in chips.CHIPS.items() if chip.platform == "tpu"]
TYPES = ["bfloat16", "float32", "int8"]

WHY_NOT = chips.why_unavailable("tpu-v5e")
pytestmark = [pytest.mark.aot, pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))]


def results(chip: str, cases: list[str], **environment: str) -> list[dict]:
    """What `tpu_programs` finds, in a process of its own."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    child = subprocess.run(
        [sys.executable, str(PROGRAMS), chip, *cases],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": path} | environment,
    )
    found = [json.loads(line) for line in child.stdout.splitlines() if line.startswith("{")]
    assert [result["case"] for result in found] == cases, child.stderr[-2000:]
    return found


def is_small(line: str) -> bool:
    """A copy into vector memory, S(1): libtpu 0.0.48 makes one of 256 KiB in 4,140 cycles where
    0.0.42 makes none."""
    return jax.__version_info__ >= (0, 11) and "S(1)} copy(" in line


def check(chip: str, cases: list[str]) -> None:
    found = results(chip, cases)
    assert {r["case"]: r["error"] for r in found if "error" in r} == {}
    assert [r["moved"] for r in found if r["case"].startswith("sample")] == [[]] * sum(
        case.startswith("sample") for case in cases
    )
    for tokens in (r for r in found if r["case"].startswith(("token", "stage"))):
        assert tokens["copies"] == [], tokens["case"]
        assert tokens["temp"] < tokens["pool"] / 4, tokens["case"]
    for scan in (r for r in found if r["case"].startswith("scan")):
        assert scan["copies"] == [], scan["case"]
        assert [line for line in scan["turned"] if not is_small(line)] == [], scan["case"]
        assert scan["temp"] < scan["pool"], scan["case"]


ONE_CHIP = """
    attend-bfloat16-h64-b16-t169 attend-int8-h128-b32-t4096
    attend-bfloat16-h64-b16-t1-n20-rows attend-bfloat16-h64-b16-t36-n15
    moments-bfloat16-h128-b16-t400 write-bfloat16-h64-b16-t169 write-int8-h128-b64-t1
    write-bfloat16-h64-b16-t36-n15 scan-bfloat16-h64-b16-t169 scan-int8-h128-b16-t64-rows
    sample-8-256-4096 sample-1-16-65536 token-bfloat16-h64-s105 token-bfloat16-h100-s600
    token-int8-h128-s105 token-bfloat16-h64-s577-used rank-1024-20-95
    token-bfloat16-h64-s96-stored token-int8-h64-s96-stored
    token-bfloat16-h100-s105-stored token-bfloat16-h64-s577-used-stored
    token-bfloat16-h128-s600-g8-stored token-int8-h128-s577-g8-used-stored
    token-bfloat16-h64-s96-stored-probed token-int8-h128-s105-g2-stored-probed
    stage-bfloat16-h64-s105-q1 stage-int8-h100-s600-q8
""".split()


def test_one_chip():
    check("tpu-v5e", ONE_CHIP)


def test_highest_precision():
    """It is for float32 only; the compiler takes no bfloat16 with it."""
    cases = ["attend-bfloat16-h64-b16-t64", "moments-int8-h64-b16-t64"]
    found = results("tpu-v5e", cases, JAX_DEFAULT_MATMUL_PRECISION="highest")
    assert [r.get("error") for r in found] == [None, None]


@pytest.mark.slow
@pytest.mark.parametrize("operation", ["attend", "moments", "write", "scan", "others"])
@pytest.mark.parametrize("chip", TPUS)
def test_every_chip(chip, operation):
    check(chip, others() if operation == "others" else cases_of(operation))


def others() -> list[str]:
    """Choosing, ranks; token attention and decisions with slots in whole tiles and with one that is
    cut off."""
    tokens = "s105 s600-stored s577-used s577-g3-used-stored s96-stored-probed s105-stored-probed"
    sizes = [*product(TYPES, (64, 128), tokens.split()), *product(TYPES, [100], ["s105-stored"])]
    found = [f"token-{dtype}-h{size}-{rest}" for dtype, size, rest in sizes]
    stages = product(TYPES, (64, 100, 128), ("s105-q1", "s600-q48"))
    found += [f"stage-{dtype}-h{size}-{rest}" for dtype, size, rest in stages]
    sizes = "8-256-4096 1-16-65536 8-1-4096 3-9-1000 2-36-512".split()
    found += [f"sample-{size}" for size in sizes]
    return found + [f"rank-{size}" for size in "1024-20-95 2-16-1024 8-4-1 600-3-1536".split()]


def cases_of(operation: str) -> list[str]:
    """All types, head and block sizes; one long scale, one of a token, an odd number of heads."""
    sizes = [(16, 169), (64, 169)] if operation == "scan" else [(16, 169), (32, 169), (64, 169)]
    sizes += [] if operation == "scan" else [(8, 36), (16, 4096)]
    sizes = [f"b{block}-t{tokens}" for block, tokens in sizes]
    sizes += [] if operation == "scan" else ["b16-t1-n20-rows", "b16-t36-n15"]
    return [f"{operation}-{t}-h{h}-{size}" for t, h, size in product(TYPES, [64, 128], sizes)]
