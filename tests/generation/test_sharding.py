"""Several devices: same images as one, pools divided, what cannot be divided refused."""

import dataclasses
import json
import math
import os
import subprocess
import sys

import numpy as np
import pytest

import varjax
from tests.generation import sharded
from tests.models_under_test import checkpoint_folder, fixture_model
from varjax import Generator, policies
from varjax.core.errors import UserError
from varjax.fast import arrange
from varjax.generation import memory, sharding, weights
from varjax.generation.mesh import MeshSpec
from varjax.storage import parameters


@pytest.mark.parametrize("more", [[], pytest.param(["--slow"], marks=pytest.mark.slow)])
def test_every_mesh_gives_the_same_images(more):
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    found = subprocess.run(
        [sys.executable, "-m", "tests.generation.sharded", *more],
        env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stderr[-2000:]
    cases = sharded.MORE if more else sharded.CASES
    assert found.stdout.count("same images") == sum(len(meshes) for *_, meshes in cases)


@pytest.mark.parametrize("name", ["full", "swa", "streaming", "heatkv"])
@pytest.mark.parametrize("groups", [2, 4])
def test_every_device_keeps_the_budget(name, groups):
    """Also where a policy would rather keep the heads of one: those of all are full then."""
    model = varjax.describe("demo")
    policy = policies.registry.get_policy(name, None if name == "full" else 0.1)
    mesh = MeshSpec(data=2, model=groups)
    alone, plan = varjax.plan(model, policy), varjax.plan(model, policy, mesh=mesh)
    share = plan.allocated_bytes(2, "float32", groups) / plan.dense_bytes(2, "float32")
    assert 0.85 * policy.budget <= share <= policy.budget
    sharding.check_plan(plan, mesh)
    uneven = len({part.capacity.sum() for part in alone.divide(groups)}) > 1
    assert uneven == (name == "heatkv")
    if uneven:
        with pytest.raises(UserError, match=r"would take (1\d|2\d)\.\d+%: plan for the mesh"):
            sharding.check_plan(alone, mesh)
    else:
        np.testing.assert_array_equal(plan.allocation.last_use, alone.allocation.last_use)
    loose = dataclasses.replace(policy, accounting="tokens")
    sharding.check_plan(varjax.plan(model, loose, mesh=mesh), mesh)  # which promises no bytes


def test_given_contents_that_do_not_fit_a_mesh_are_refused(tmp_path):
    """They cannot be lowered."""
    model = varjax.describe("demo")
    alone = varjax.plan(model, "heatkv", 0.1)
    np.savez(tmp_path / "keep.npz", keep_scale=alone.arrays()["keep_scale"])
    table = policies.Table(path=str(tmp_path / "keep.npz"), budget=0.1)
    varjax.plan(model, table)
    with pytest.raises(UserError, match="heads on 4 devices: .* more than its share"):
        varjax.plan(model, table, mesh=MeshSpec(model=4))


@pytest.mark.parametrize(
    ("name", "policy", "message"),
    [
        ("a_k10", policies.H2O(budget=0.5), "decides on the device what to keep"),
        (
            "llamagen_c2i",  # token by token every head decides by itself, but for a quota
            policies.HeadKV(budget=0.5, global_heads=2),
            r"'headkv' compares heads \(global_heads=2\).*use data only",
        ),
    ],
)
def test_contents_that_stay_with_one_group_of_heads(name, policy, message):
    plan = varjax.plan(fixture_model(name), policy)
    sharding.check_plan(plan, MeshSpec(data=2))
    with pytest.raises(UserError, match=message):
        sharding.check_plan(plan, MeshSpec(model=2))


@pytest.mark.parametrize("name", ["a_k10", "llamagen_c2i"])
@pytest.mark.parametrize("images", [1, 2])
def test_contents_of_single_images_stay_on_one_device(name, images, tmp_path):
    """A table with rows for a single image, too; one for all images is the same everywhere."""
    model = fixture_model(name)
    schedule, layers, heads = (
        getattr(model.geometry, n) for n in ("schedule", "num_layers", "num_heads")
    )
    tokens = getattr(schedule, "image_tokens", None) or schedule.total_tokens
    stages = 1 + -(-schedule.steps // 8) if name == "llamagen_c2i" else schedule.num_scales
    keep = np.zeros((stages, layers, 2 * images, heads, tokens), bool)
    for path, rows in (("rows.npz", keep), ("all.npz", keep[:, :, 0])):
        np.savez(tmp_path / path, keep_token=rows)
    by_row, for_all = (
        varjax.plan(model, policies.Table(path=str(tmp_path / path)))
        for path in ("rows.npz", "all.npz")
    )
    sharding.check_plan(for_all, MeshSpec(data=2))
    with pytest.raises(UserError, match="'table' treats the images of a batch differently"):
        sharding.check_plan(by_row, MeshSpec(data=2))


def test_a_mesh_larger_than_the_machine_is_refused():
    model = fixture_model("a_k10")
    with pytest.raises(UserError, match="this machine has at most"):
        Generator(model, batch_size=64, mesh=MeshSpec(data=64))


def test_every_matrix_can_be_divided():
    """Widths are whatever a configuration says, so heads are not all that has to be checked."""
    # 4 heads, a feed-forward of width 144
    model = varjax.load(checkpoint_folder("lumina_tiny"), "float32")
    before = weights.bytes_per_device(model.networks, 4)
    weights.check_weights(model.networks, MeshSpec(model=4))
    # a program of one CPU device leaves matrices turned; those are divided along the other axis
    arrange.separate(model.transformer.blocks, turned=True)
    weights.check_weights(model.networks, MeshSpec(model=4))
    assert weights.bytes_per_device(model.networks, 4) == before
    config = dataclasses.replace(model.config, intermediate_size=146)
    part = model.family.parts["transformer"]
    odd = {**model.networks, "transformer": part.abstract(config)}
    weights.check_weights(odd, MeshSpec(model=2))
    with pytest.raises(UserError, match="146 cannot be split evenly over model=4.*a divisor of"):
        weights.check_weights(odd, MeshSpec(model=4))


@pytest.mark.parametrize("name", ["llamagen_c2i", "a_k10"])
def test_what_a_device_is_predicted_to_hold(name):
    """Of two: half of the layers' matrices, all other weights, half of the pool."""
    model, names = fixture_model(name), ("qkv", "proj", "gate_up", "down", "fc1", "fc2")
    plan = varjax.plan(model, "full")
    one, two = (memory.predict(model, plan.divide(n)[0], 2, "float32", "float32") for n in (1, 2))
    # by name: another test may have left the layers of this model as separate arrays
    sizes = parameters.named(model.transformer.blocks)
    divided = sum(math.prod(sizes[f"{n}/kernel"].shape) for n in names if f"{n}/kernel" in sizes)
    assert one.weights - two.weights >= divided // 2 * 4
    assert two.weights > one.weights // 2 and two.kv_pool <= 0.6 * one.kv_pool


def placed(*arguments, devices: int = 4) -> dict:
    """What `tests.generation.placing` prints, in a process of its own."""
    found = subprocess.run(
        [sys.executable, "-m", "tests.generation.placing", *map(str, arguments)],
        env={
            **os.environ,
            "JAX_NUM_CPU_DEVICES": str(devices),
            "JAX_PLATFORMS": "cpu",
            "MALLOC_MMAP_THRESHOLD_": str(2**20),  # glibc gives back what is free
        },
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stderr[-2000:]
    return json.loads(found.stdout.splitlines()[-1]) if found.stdout else {}


@pytest.mark.slow
@pytest.mark.parametrize("how", [("scan",), ("unroll",), ("unroll", "int8")])
@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="peaks are read from /proc")
def test_weights_arrive_sharded(tmp_path, how):
    """No device holds more than its part at any time, nor the host more than one array beside what
    its devices hold (here the same memory)."""
    placed("make", tmp_path / "made", 3, 896)
    found = placed("measure", tmp_path / "made", *how)
    assert len(found["part"]) == 4 and found["most"] == found["part"]
    assert set(found["part"].values()) == {found["predicted"]}
    held, allocator = sum(found["part"].values()), 40 * 2**20  # TensorStore's threads and buffers
    assert held / 2 > found["largest"] + allocator  # else a whole model on the host would pass, too
    assert found["grown"] <= held + found["largest"] + allocator


@pytest.mark.parametrize(
    ("policy", "mesh", "message"),
    [
        (policies.Full(), MeshSpec(model=3), "4 heads cannot be split evenly over model=3"),
        (policies.Full(block_size=16), MeshSpec(model=4), "choose block_size=8 or smaller"),
        (policies.SlidingWindow(budget=0.1, block_size=64), MeshSpec(model=2), "block_size=32"),
    ],
)
def test_plans_that_no_mesh_takes(policy, mesh, message):
    with pytest.raises(UserError, match=message):
        varjax.plan(varjax.describe("demo"), policy, mesh=mesh)
