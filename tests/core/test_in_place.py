"""The compiled program updates the pool in place: no second pool, no copy of its shape."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.often import often
from varjax import policies
from varjax.codecs.vqvae import VQVAE, VQVAEConfig
from varjax.core.allocation import Geometry
from varjax.core.planner import plan_cache
from varjax.core.sampling import Sampling, image_keys
from varjax.core.scales import ScaleSpec
from varjax.core.segments import plan_segments
from varjax.core.sequence import Schedule
from varjax.core.state import KVState
from varjax.core.step import cache_step
from varjax.generation import build
from varjax.models.var import VAR, VARConfig
from varjax.storage import parameters

SCHEDULE = Schedule.square((1, 2, 4, 6, 9, 12, 16))
POLICIES = {
    "full": policies.Full(),
    "streaming": policies.Streaming(budget=0.5),
    "headkv": policies.HeadKV(budget=0.5),
    "h2o": policies.H2O(budget=0.5),
}


LAYERS = {"scan": 128, "unroll": 3}  # how many; unrolled ones take long to compile


def abstract_networks(depth: int) -> dict[str, nnx.Module]:
    """Many thin layers and few codes, so that the pool is the largest thing in the program."""
    transformer = VARConfig(
        depth=depth, embed_dim=64, num_heads=2, vocab_size=16, z_channels=4, schedule=SCHEDULE
    )
    codec = VQVAEConfig(ch=32, ch_mult=(1,), vocab_size=16, z_channels=4, schedule=SCHEDULE)
    return {
        "transformer": parameters.abstract(VAR, transformer),
        "codec": parameters.abstract(VQVAE, codec),
    }


CASES = itertools.product(POLICIES, ["float32", "int8"], ["scan", "unroll"])


@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize(("policy", "dtype", "layers"), often([("h2o", "int8", "scan")], CASES))
def test_pool_is_never_copied(policy, dtype, layers):
    policy = POLICIES[policy]
    depth = LAYERS[layers]
    networks, batch = abstract_networks(depth), 4
    build.arrange_layers(networks, layers, "cpu")
    transformer = networks["transformer"]
    geometry = Geometry(schedule=SCHEDULE, num_layers=depth, num_heads=2, head_dim=32)
    plan = plan_cache(geometry, policy)
    segments = plan_segments(SCHEDULE)
    cache = tuple(cache_step(plan, s.scales, None) for s in segments)
    spec = ScaleSpec(plan, segments, cache, Sampling(greedy=True))
    state = jax.eval_shape(lambda: KVState.empty(plan, batch, dtype))
    shared = spec.shared_inputs(transformer)
    compiled = (
        jax.jit(spec.generate, donate_argnums=1)
        .lower(
            networks,
            state,
            jax.ShapeDtypeStruct((batch,), jnp.int32),
            jax.eval_shape(lambda: image_keys(0, jnp.arange(batch))),
            spec.for_images(shared, np.arange(batch)),
            None,
        )
        .compile()
    )
    pool = state.kv_pool
    rows, blocks, size, width = pool.shape
    copies = re.findall(
        rf"= (?:f32|s8)\[{rows},(?:{blocks},{size}|{blocks * size}),{width}\]\S* copy\(",
        compiled.as_text(),
    )
    assert not copies
    analysis = compiled.memory_analysis()
    if layers == "scan":  # so few layers have a pool that is smaller than a scale's own arrays
        assert analysis.temp_size_in_bytes < pool.size * 4
    assert analysis.alias_size_in_bytes >= pool.size * pool.dtype.itemsize
