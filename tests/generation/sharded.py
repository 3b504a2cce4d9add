"""Runs on eight CPU devices, in a process of its own: the same images on every mesh.

XLA_FLAGS=--xla_force_host_platform_device_count=8 python -m tests.generation.sharded [--slow]
"""

import gc
import sys
import tempfile

import jax
import numpy as np

import varjax
from tests import compilation
from tests import models_under_test as models
from varjax import Generator
from varjax.core.sampling import Sampling
from varjax.generation.mesh import MeshSpec
from varjax.models.loading import load_weights

DEMO, TEXT = "demo", models.FAMILIES["infinity"]
INT8, FP8, W8A8 = (f" in {scheme}" for scheme in ("int8", "fp8", "w8a8"))  # after a model's name
BY_TOKEN, TOKEN_TEXT = "llamagen_c2i", "llamagen_t2i"
CASES = [  # weights and ragged heads divided
    (DEMO, "heatkv", {"budget": 0.2}, "int8", ("data=2,model=4",))
]
MORE = [  # contents decided on a part of the machine; meshes of one axis
    # contents decided by every head for itself: positions, sums and reaches divided
    (BY_TOKEN, "headkv", {"budget": 0.5}, "int8", ("model=2",)),
    # norms of heads whole: two sets of weights for the heads of four devices
    (models.FEW_NORMS, "full", {}, None, ("model=4",)),
    # matrices and their scales divided, layers apart and stacked
    (models.GROUPS + INT8, "headkv", {"budget": 0.6}, "int8", ("model=2",)),
    # rows of activations are scaled alike on all devices that share them
    (DEMO + FP8, "full", {}, None, ("model=2",)),
    (TEXT, "h2o", {"budget": 0.3}, None, ("data=4",)),
    (DEMO, "full", {}, None, ("data=8", "data=4,model=2")),
    (BY_TOKEN, "diagonal", {"budget": 0.5}, "int8", ("data=2,model=4",)),
    (TOKEN_TEXT, "linear", {"budget": 0.5}, "int8", ("data=8", "data=2")),
    (TOKEN_TEXT, "full", {}, None, ("model=2", "data=4,model=2")),
    (TOKEN_TEXT, "snapkv", {"budget": 0.5}, None, ("model=2", "data=4,model=2")),
    (BY_TOKEN, "compose", {"budget": 0.5}, None, ("model=2",)),
    (BY_TOKEN, "table", {}, None, ("data=2,model=2",)),
    (DEMO + INT8, "heatkv", {"budget": 0.2}, "int8", ("data=2,model=4",)),
    (BY_TOKEN + W8A8, "full", {}, None, ("model=2",)),
]
APART = TEXT, "streaming", True  # layers of a model that draws by scales, on a mesh


def load(name: str, on_disk: bool = False):
    """The demo, or a fixture."""
    own, _, scheme = name.partition(" in ")
    model = varjax.describe() if own == DEMO else models.fixture_model(own)
    model = model.quantized(scheme, emulated=scheme != "int8") if scheme else model
    return load_weights(model, "float32", on_disk=on_disk) if own == DEMO else model


def plan_for(model, policy: str, arguments: dict, folder: str, meshes: tuple[str, ...]):
    """The plan of a case, for its meshes; for `table` of what random heads see, each something
    else."""
    if policy != "table":
        most = max(map(MeshSpec.parse, meshes), key=lambda mesh: mesh.model)
        return varjax.plan(model, policy, **arguments, mesh=most)
    geometry, period = model.geometry, 8
    sequence = geometry.schedule
    shape = (geometry.num_layers, geometry.num_heads, sequence.image_tokens)
    drawn = np.arange(sequence.image_tokens)
    keep, kept = [np.zeros(shape, bool)], np.random.default_rng(0).random(shape)
    for stage in range(-(-sequence.steps // period)):  # ever fewer of what is there
        keep.append((drawn < stage * period) & (kept > (stage - drawn // period) / 5))
    path = f"{folder}/table.npz"
    np.savez(path, keep_token=np.stack(keep))
    return varjax.plan(model, varjax.policies.Table(path=path))


def check_decisions(found, expected, kv_dtype: str | None) -> None:
    """What heads hold at the end is the same, and each device holds that of its heads.

    Sums over the mesh are added in another order, so keys differ in their last bits. In 8 bits that
    rounds some of them the other way, by a whole step, and two scores that are nearer to each other
    than that may change places. Measured where they did (llamagen_c2i, rkv, model=2): 253 numbers
    of the head's keys were a step apart, its scores by up to 1.7e-5; two scores were 2.7e-6 apart,
    neighbours usually 4.8e-4. So in 8 bits: as many tokens in every head, the same ones in nearly
    all, and then no number further apart than a step."""
    alike = []
    for ours, theirs in zip(found, expected, strict=True):
        mine, other = np.asarray(ours.position), np.asarray(theirs.position)
        known = mine.shape[-1] < ours.pool.shape[2]  # contents that nobody decides
        same = (mine == other).all(-1)
        if theirs.reach is not None:
            same = same & (np.asarray(ours.reach) == np.asarray(theirs.reach))
        if known or kv_dtype is None:
            assert same.all()
            continue
        alike.append(same)
        np.testing.assert_array_equal((mine >= 0).sum(-1), (other >= 0).sum(-1))
        pools = (np.asarray(cache.pool).astype(int) for cache in (ours, theirs))
        apart = np.abs(np.subtract(*pools)).max(-1)  # [rows, heads, slots]
        assert apart[same[..., None] & (mine >= 0)].max() <= 1
    assert not alike or np.mean(alike) > 0.98, np.mean(alike)


def check_draws(name: str, found: dict, expected: dict, exact: bool) -> None:
    """The same tokens and images; unless `exact`, of most images: see `check_decisions`. Measured
    where one of eight was another (llamagen_c2i, diagonal, data=2,model=4): logits of the same
    tokens were 1.9 apart with the cache in 8 bits, 1.9e-5 in float32.

    Where activations are in 8 bits, sums over the mesh, which are added in another order, round a
    few of them otherwise, and tokens that were close may differ, and what is drawn after them. How
    many depends on the kind of CPU: the demo in fp8 kept 98.7 % of its tokens on one, 91.0 % on
    another."""
    equal = np.asarray(found["tokens"]) == np.asarray(expected["tokens"])
    if name.endswith((FP8, W8A8)):
        assert equal.mean() > 0.8
        return
    same = equal.reshape(len(equal), -1).all(1)
    assert same.all() or not exact and same.mean() > 0.7, same
    ours, theirs = (np.asarray(results["images"])[same] for results in (found, expected))
    np.testing.assert_allclose(ours, theirs, atol=1e-4)


def check_weights(generator: Generator) -> None:
    """What is divided over `model` exists once over all devices of the axis: the first device holds
    its share of it, and nothing holds the whole model besides."""
    shards = generator.mesh.model
    blocks = jax.tree.leaves(generator.networks["transformer"].blocks)
    divided = [a for a in blocks if a.addressable_shards[0].data.size == a.size // shards]
    assert shards == 1 or sum(a.size for a in divided) > 0.5 * sum(a.size for a in blocks)
    assert generator.model.is_abstract
    gc.collect()  # what the mesh before has held goes only now: modules refer to themselves
    # matrices, less the shapes that a share of another matrix has as well
    whole = {a.shape for a in divided if a.ndim == 3} - {
        a.addressable_shards[0].data.shape for a in divided
    }
    assert len(whole) > 1 or shards == 1
    alone = [a for a in jax.live_arrays() if len(a.sharding.device_set) == 1]
    assert not [a.shape for a in alone if a.shape in whole]


def main(cases, images: int) -> None:
    jax.config.update("jax_default_matmul_precision", "highest")
    compilation.share_contexts()
    gc.set_threshold(100_000, 50, 100)  # as tests/conftest.py
    assert len(jax.devices()) == 8
    index = np.arange(images, dtype=np.int32)
    for name, policy, arguments, kv_dtype, meshes in cases:
        with tempfile.TemporaryDirectory() as folder:
            plan = plan_for(load(name), policy, arguments, folder, meshes)
        by_token = load(name).draws_tokens

        def run(mesh, name=name, policy=policy, plan=plan, kv_dtype=kv_dtype, by_token=by_token):
            model = load(name, bool(mesh))
            generator = models.built(
                model,
                sampling=Sampling(cfg=2.0, top_k=100),
                batch_size=images,
                segments="auto" if by_token else 1,
                plan=plan,
                kv_dtype=kv_dtype,
                mesh=MeshSpec.parse(mesh),
                # separate weights are divided as stacked ones are
                layers="unroll" if by_token or (name, policy, bool(mesh)) == APART else "scan",
            )
            return generator, generator.run_batch(models.arrays_of(model, index), index)

        expected, held = run("")[1]  # whose generator goes, with its weights
        for mesh in meshes:
            generator, (found, state) = run(mesh)
            check_draws(name, found, expected, exact=not (by_token and kv_dtype == "int8"))
            if name.partition(" in ")[0] == DEMO:
                check_weights(generator)
            spec = generator.mesh
            if by_token and spec.data == 1:  # else rows are in another order
                check_decisions(state, held, kv_dtype)
            assert len(found["images"].sharding.device_set) == spec.num_devices
            pool, *_ = generator.plan.kv_arrays(generator.empty_state())
            assert {a.data.size for a in pool.addressable_shards} == {pool.size // spec.num_devices}
            print(f"{name} {policy} {kv_dtype or 'float32'} {mesh}: same images", flush=True)


if __name__ == "__main__":
    main(*((MORE, 8) if "--slow" in sys.argv else (CASES, 4)))
