"""A model that draws token by token made of random numbers: what every layer asks, holds and gives
is drawn beforehand, so that an oracle can be given the same. Its logits are what its attention
found, so that a program's results can be compared with it number by number."""

import dataclasses
from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from varjax.core import token_state
from varjax.core import tokens as engine
from varjax.core.allocation import Geometry
from varjax.core.next_token import TokenLayers
from varjax.core.planner import plan_cache
from varjax.core.sampling import Sampling, Scores
from varjax.core.sequence import TokenSequence

GREEDY = Sampling(cfg=1.0, greedy=True)


class Projected(NamedTuple):
    """Finished queries, keys and values, as a `Projection` gives them, the last two of fewer heads
    where they are shared."""

    q: jax.Array
    k: jax.Array
    v: jax.Array

    def queries(self):
        return self.q

    def keys(self):
        return self.k

    def values(self):
        return self.v


@dataclasses.dataclass(frozen=True, eq=False)
class StandIn:
    """Keys and values float32 [L, R, N, M + N_image, H], queries of G times as many heads, and
    which of the condition's tokens count, bool [R, M]."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    visible: np.ndarray

    config = SimpleNamespace(condition_tokens=1, grid=None)

    def token_layers(self, implementation: str | None) -> TokenLayers:
        return TokenLayers(self)

    @classmethod
    def random(cls, geometry: Geometry, rows: int, seed: int = 0, padding: bool = True):
        """Queries resemble the keys of some earlier tokens, so that attention is not even."""
        g, rng = geometry, np.random.default_rng(seed)
        condition, total = g.schedule.condition, g.schedule.total_tokens
        heads = (g.query_heads, g.num_heads, g.num_heads)
        shapes = [(g.num_layers, rows, n, total, g.head_dim) for n in heads]
        q, k, v = (rng.normal(size=shape).astype(np.float32) for shape in shapes)
        for i in range(g.queries_per_head):  # every query head of a group looks elsewhere
            back = rng.integers(0, 1 + np.minimum(np.arange(total), 3 + np.arange(total) // 2))
            q[:, :, i :: g.queries_per_head] += 1.5 * k[..., np.arange(total) - back, :]
        q = q / np.sqrt(g.head_dim)
        padded = rng.integers(0, condition, rows) if padding else np.zeros(rows, int)
        visible = np.arange(condition) >= padded[:, None]
        return cls(q.astype(np.float32), k, v, visible)

    def rows(self, index) -> "StandIn":
        """Some of the rows alone."""
        q, k, v = (a[:, index] for a in (self.q, self.k, self.v))
        return StandIn(q, k, v, self.visible[index])

    # --- what the engine calls ---

    @property
    def blocks(self):
        return {"number": jnp.arange(len(self.q))}

    def encode_condition(self, condition, *, guided):
        del condition, guided
        layers, rows, heads, _, size = self.q.shape
        x = jnp.zeros((rows, self.visible.shape[1], layers * heads * size))
        return {"condition": x, "visible": jnp.asarray(self.visible)}

    def rotation(self, context, index):
        return (index + self.visible.shape[1],)

    def project(self, block, rotation, x):
        (index,) = rotation
        arrays = (jnp.asarray(a)[block["number"]][:, :, index] for a in (self.q, self.k, self.v))
        return Projected(*arrays)

    def post_attention(self, block, x, attended):
        by_layer = x.reshape(*x.shape[:2], len(self.q), *attended.shape[2:])
        return by_layer.at[:, :, block["number"]].set(attended).reshape(x.shape)

    def embed(self, context, tokens):
        return jnp.zeros_like(context["condition"][:, :1])

    @staticmethod
    def condition_mask(visible):
        total = visible.shape[1]
        seen = jnp.tri(total, dtype=bool) & visible[:, None]
        return (seen | jnp.eye(total, dtype=bool))[:, None]

    def logits(self, x, index, sampling):
        return Scores(x)

    def sample(self, scores, keys, sampling, implementation):
        return jnp.argmax(scores.plain, -1).astype(jnp.int32), None


def geometry(condition=3, tokens=49, line=7, layers=1, heads=3, size=8, group=1) -> Geometry:
    return Geometry(
        schedule=TokenSequence(tokens, condition, line),
        num_layers=layers,
        num_heads=heads,
        head_dim=size,
        rows_per_image=1,
        queries_per_head=group,
    )


def traced(model: StandIn, plan, dtype="float32", decide=None, attention="reference"):
    """The jitted program of a plan, and its arguments. decide: wraps every layer's strategy."""
    numbers = range(plan.geometry.num_layers)
    layers = tuple(engine.token_step(plan, i, attention) for i in numbers)
    spec = engine.TokenSpec(plan, layers, GREEDY, attention, keep_logits=True)
    if decide is not None:
        spec = dataclasses.replace(spec, layers=tuple(map(decide, spec.layers)))
    rows = model.q.shape[1]
    state = token_state.empty(plan, rows, dtype)
    keys = jax.random.split(jax.random.key(0), rows)

    inputs = None
    if not plan.static_content:
        inputs = plan.rule.inputs(plan.geometry, plan.allocation, np.arange(rows))
    inputs = () if inputs is None else tuple(map(jnp.asarray, inputs))

    def program(state, keys):
        codec = SimpleNamespace(code_map=lambda tokens, grid: tokens)
        networks = {"transformer": model, "codec": codec}
        return spec.generate(networks, state, None, keys, inputs, None)

    return jax.jit(program, donate_argnums=0), (state, keys)


def run(model: StandIn, plan, **options):
    """float32 [R, N, L, query heads, H], what the attention of every step found, and the final
    caches."""
    program, arguments = traced(model, plan, **options)
    results, state = program(*arguments)
    layers, rows, heads, _, size = model.q.shape
    return np.asarray(results["logits"]).reshape(rows, -1, layers, heads, size), state


def of_head(model: StandIn, layer: int, row: int, head: int):
    """What `oracles.simulate` takes of a head of keys and values: the queries of its group
    [G, T, H], k and v [T, H]."""
    k, v = (a[layer, row, head] for a in (model.k, model.v))
    return model.q[layer, row, of_group(model, head)], k, v


def of_group(model: StandIn, head: int) -> slice:
    """The query heads that share a head of keys and values."""
    group = model.q.shape[2] // model.k.shape[2]
    return slice(head * group, (head + 1) * group)


def plan_for(policy, **shape):
    return plan_cache(geometry(**shape), policy)


class Endless(StandIn):
    """The same numbers for every token: for programs of which only the size matters."""

    def __init__(self, geometry: Geometry, rows: int):
        g = geometry
        heads = (g.query_heads, g.num_heads, g.num_heads)
        shapes = [(g.num_layers, rows, n, 1, g.head_dim) for n in heads]
        visible = np.ones((rows, g.schedule.condition), bool)
        super().__init__(*(np.ones(shape, np.float32) for shape in shapes), visible)

    def rotation(self, context, index):
        return (jnp.zeros_like(index),)
