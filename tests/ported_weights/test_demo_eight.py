"""The embedded checkpoint of eight scales, with which policies are compared."""

import varjax
from varjax.model import describe
from varjax.models import registry
from varjax.policies import HeatKV
from varjax.storage import checkpoint, manifest


def test_the_embedded_demo_of_eight_scales():
    folder = checkpoint.demo_directory("demo-eight")
    content = manifest.read(folder, registry.FAMILIES)
    assert content["family"] == "var" and content["dtype"] == "bfloat16"
    assert content["parameters"] == 5_405_667
    demo = manifest.read(checkpoint.demo_directory(), registry.FAMILIES)
    assert content["class_names"] == demo["class_names"]
    assert content["sampling"] == demo["sampling"]  # pictures of both can be compared
    size = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())
    assert size < 10e6


def test_its_cache_is_twice_the_demos_and_calibrated():
    eight, demo = describe("demo-eight"), describe("demo")
    assert eight.name == "demo-eight" and eight.geometry.schedule.num_scales == 8
    # nothing reads the last scale of 8 x 8, so no budget counts it
    cached = [model.geometry.schedule.total_tokens - 64 for model in (eight, demo)]
    assert cached == [140, 66]
    plan = varjax.plan(eight, policy=HeatKV(budget=0.1))  # with its own calibration
    assert plan.num_bytes(1, "float32") <= 0.1 * varjax.plan(eight).num_bytes(1, "float32")
