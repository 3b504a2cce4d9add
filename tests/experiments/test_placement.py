"""Which chip, which mesh, which batch: `experiments.plan --fit`, --mesh and --target."""

import re

from experiments.budgets import parse_bytes
from tests.conftest import ROOT
from varjax.generation import api
from varjax.models.loading import describe

PAGE = ROOT / "docs" / "reference" / "chips.md"
MODEL, POLICY = "--model=llamagen-b-256", "--policy=streaming"


def test_the_largest_batch_on_every_chip(call):
    """One image more does not fit; the page of all models has these numbers."""
    flags = "--targets=rtx4090,tpu-v5e:8", "--kv_dtype=bfloat16"
    status, out, err = call("plan", MODEL, "--fit", *flags)
    assert status == 0, err
    full, most = map(int, re.search(r"^rtx4090 +(\d+) +(\d+)$", out, re.MULTILINE).groups())
    mesh = re.findall(r"(\d+) \(data=8,model=1\)", out)  # no more than `data` for a small model
    start = "FRACTION=0.95 python -m experiments.run --kv_dtype=bfloat16 --checkpoint="
    assert f"{start}llamagen-b-256 {POLICY} --batch_size={most} --num_images={most}\n" in out
    for batch, said in ((most, ": fits rtx4090"), (most + 1, ": DOES NOT FIT rtx4090")):
        assert said in call("plan", MODEL, POLICY, f"--batch_size={batch}", "--target=rtx4090")[1]
    row = re.search(r"\| llamagen-b-256 \| (.*) \|\n", PAGE.read_text("utf-8"))[1].split(" | ")
    assert row[0] == f"{full}, {most}" and row[-1] == ", ".join(mesh)


def test_bytes_of_each_device(call, checkpoint):
    status, out, err = call("plan", checkpoint, POLICY, "--mesh=data=2,model=2", "--batch_size=4")
    found = re.search(r"each of 4 devices .*KV pool ([\d.]+ \w+), .*\)$", out, re.MULTILINE)
    plan = api.plan(describe(checkpoint.partition("=")[2]), "streaming", mesh=api.MeshSpec(model=2))
    there = plan.allocated_bytes(4, "bfloat16", 2) / 4
    assert status == 0 and there <= parse_bytes(found[1]) < 1.2 * there + 4096, err
