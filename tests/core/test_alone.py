"""The idea in one page: a small transformer, a policy of its own, one program; from the core alone.
It draws scale by scale, and what a head may keep of the scales before is a fraction of them."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from varjax import core
from varjax.core.layers import Linear, ResidualStream, fused_qkv
from varjax.core.stacked import stack


class EqualRoom(core.Rule):
    """The same room for every head: `budget` of all tokens that are ever stored."""

    kind = core.SCALES

    def minimum_budget(self, geometry):
        return 1 / geometry.schedule.persistent_tokens

    def allocate(self, geometry, budget):
        room = int(budget * geometry.schedule.persistent_tokens)
        held = np.minimum(geometry.schedule.starts, room).astype(np.int32)
        shape = (len(held), geometry.num_layers, geometry.num_heads)
        return core.RegionAllocation(np.broadcast_to(held[:, None, None], shape))


@dataclass(frozen=True, kw_only=True)
class MostAttended(core.Policy):
    """What the queries of a scale look at most stays."""

    name = "most_attended"
    rules = (EqualRoom,)
    needs = core.Needs(scale_mass=True)

    def select(self, obs):
        return core.masks.top(obs, obs.scale_mass, obs.live, obs.capacity)


@dataclass(frozen=True)
class Config:
    schedule: core.Schedule = core.Schedule.square((1, 2, 3, 4))
    depth: int = 2
    num_heads: int = 2
    head_dim: int = 8
    code_map: tuple = (4, 4, 3)  # height, width, channels
    logits_per_token: int = 16


class Block(nnx.Module):
    def __init__(self, width: int, *, rngs: nnx.Rngs):
        self.qkv = Linear(width, 3 * width, use_bias=False, rngs=rngs)
        self.q_bias, self.v_bias = (nnx.Param(jnp.zeros(width)) for _ in range(2))
        self.proj = Linear(width, width, rngs=rngs)


class Transformer(core.NextScaleTransformer):
    def __init__(self, config: Config, rngs: nnx.Rngs):
        width, self.config = config.num_heads * config.head_dim, config
        rows = 10 + config.schedule.total_tokens  # ten classes, then the places of all tokens
        self.table = nnx.Param(2 * jax.random.normal(rngs.params(), (rows, width)))
        self.word = Linear(config.code_map[2], width, rngs=rngs)
        self.blocks = stack(lambda r: Block(width, rngs=r), config.depth, rngs)
        self.head = Linear(width, config.logits_per_token, rngs=rngs)

    def encode_condition(self, condition, *, guided, implementation=None):
        start = self.table[condition][:, None]  # modulated norms would take the other two
        none = jnp.zeros((len(condition), 2, start.shape[2])), jnp.zeros((self.config.depth, 0))
        return {"start": start, "head": none[0], "layers": none[1]}

    def embed(self, context, codes, step):
        x = jnp.where(step.scale == 0, context["start"], self.word(codes))
        return x + self.table[10 + step.token_index]

    def project(self, block, vectors, shared, stream):
        found = fused_qkv(block, stream.value, self.config.head_dim)
        return replace(found, scale=self.config.head_dim**-0.5), stream

    def post_attention(self, block, vectors, shared, stream, attended):
        x = stream.value
        return ResidualStream(x + block.proj(attended.reshape(x.shape)))

    def logits(self, head, x, step, sampling):
        return core.Scores(self.head(x))


class Codec(nnx.Module):
    def __init__(self, config: Config, rngs: nnx.Rngs):
        shape = (config.logits_per_token, config.code_map[2])
        self.book = nnx.Param(jax.random.normal(rngs.params(), shape))

    def codes(self, tokens):
        return self.book[tokens]

    def accumulate(self, code_map, enlarged, scale):
        return code_map + enlarged


def draw(budget: float, images: int = 2):
    """Tokens and code maps of some images, the cache behind them, and its plan."""
    config, rngs = Config(), nnx.Rngs(0)
    params = {"transformer": Transformer(config, rngs), "codec": Codec(config, rngs)}
    geometry = core.Geometry(
        schedule=config.schedule,
        num_layers=config.depth,
        num_heads=config.num_heads,
        head_dim=config.head_dim,
        rows_per_image=1,
    )
    plan = core.plan_cache(geometry, MostAttended(budget=budget))
    cuts = core.plan_segments(config.schedule)  # scales that share a program
    steps = tuple(core.cache_step(plan, cut.scales, "reference") for cut in cuts)
    spec = core.ScaleSpec(plan, cuts, steps, core.Sampling(greedy=True), "reference")
    tables = spec.for_images(spec.shared_inputs(params["transformer"]), np.arange(images))
    state = plan.empty_state(images, jnp.float32, jnp.float32)
    keys = jax.random.split(jax.random.key(0), images)
    found = core.Inputs(spec, tables)
    return *jax.jit(core.decode)(params, state, jnp.arange(images), keys, found), plan


def test_the_core_draws_with_a_fraction_of_the_cache():
    (full, _, whole), (few, state, plan) = draw(1.0), draw(0.4)
    first = Config().schedule.starts[2]  # nothing is dropped before scale 2 begins
    assert (full["tokens"][:, :first] == few["tokens"][:, :first]).all()
    assert np.abs(full["code_map"] - few["code_map"]).max() > 0.1
    # 14 tokens are stored in all, 5 of them fit; the pool holds these and no more
    assert plan.capacity.max() == 5 and whole.capacity.max() == 14
    assert state.kv_pool.nbytes == plan.num_bytes(2, "float32")
    assert plan.num_bytes(2, "float32") <= 0.4 * plan.dense_bytes(2, "float32")
