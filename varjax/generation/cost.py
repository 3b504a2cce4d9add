"""Operations and bytes of a traced program, counted from its jaxpr, and those of attention and its
observation, counted from a plan.

The compiler's own count takes a loop body once, however often it runs, so it says nothing about a
program that scans over scales and layers. Here the body of a scan counts as often as it runs.
"""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from functools import singledispatch

import jax
import numpy as np
from jax.extend.core import JaxprEqn
from jaxtyping import PyTree

from pallas_kernels.jax_versions import AnyJaxpr, open_jaxpr
from varjax.core.plan import CachePlan
from varjax.core.scale_plan import ScalePlan
from varjax.core.scales import ScaleSpec
from varjax.core.stages import TokenPlan
from varjax.core.step import DecidingStep
from varjax.core.tokens import TokenSpec

# Equations that call a function once. A scan, a while loop or a branch is none of them.
_CALLS = ("jit", "pjit", "closed_call", "core_call", "remat", "checkpoint", "shard_map")
_KERNELS = ("pallas_call", "mpmd_map")  # Mosaic GPU kernels are maps over a mesh of programs


@dataclass(frozen=True)
class PallasWork:
    """One call of a Pallas kernel, as its author estimates it (`pallas_kernels.estimates`); zeros
    without an estimate."""

    name: str
    flops: float = 0.0
    bytes: float = 0.0


@dataclass(frozen=True)
class Cost:
    """Operations and bytes of a program.

    flops: operations of matrix products and convolutions, two for a multiply-add.
    flops_8_bits: those of them whose operands are both in 8 bits.
    scanned_bytes: bytes of the slices that scans take from their inputs, one slice per iteration:
      stacked weights and tables.
    kernels: {PallasWork: how often it is called}; what they compute is not among the flops.
    loops: number of while loops whose length is not known; their bodies count once.
    """

    flops: float = 0.0
    flops_8_bits: float = 0.0
    scanned_bytes: float = 0.0
    kernels: Counter = field(default_factory=Counter)
    loops: int = 0

    def __add__(self, other: "Cost") -> "Cost":
        pairs = ((getattr(self, f.name), getattr(other, f.name)) for f in fields(self))
        return Cost(*(mine + others for mine, others in pairs))

    def times(self, count: int) -> "Cost":
        # `loops` stays: it tells that numbers are missing, not how many
        kernels = Counter({name: calls * count for name, calls in self.kernels.items()})
        times = {n: count * getattr(self, n) for n in ("flops", "flops_8_bits", "scanned_bytes")}
        return Cost(**times, kernels=kernels, loops=self.loops)


def program_cost(jaxpr: AnyJaxpr) -> Cost:
    """The cost of a jaxpr (`jax.make_jaxpr`, `Traced.jaxpr`); inside `shard_map` that of one
    device. A `cond` counts as its branch with the most FLOPs."""
    return sum(map(_equation_cost, open_jaxpr(jaxpr).eqns), Cost())


def times_read(jaxpr: AnyJaxpr) -> list[int]:
    """The number of times that a program reads each of its inputs: once for every equation that
    takes it, and for every output that it is. A scan that takes it reads it as often as it runs,
    times the runs of the scans within. `jax.jit` leaves out those that nothing reads."""
    # Variables are told apart by identity. Constants in equations are no variables of the jaxpr, so
    # they match none of its inputs.
    inner = open_jaxpr(jaxpr)
    times = Counter(map(id, inner.outvars))
    for equation in inner.eqns:
        called = list(_inner(equation.params.values()))
        each = [equation.params.get("length", 1)] * len(equation.invars)
        if equation.primitive.name == "scan":
            inside = _scans_that_read(called[0])
            each = [n * times for n, times in zip(each, inside, strict=True)]
        # a call reads an input as often as its function does, which may ignore some
        if equation.primitive.name in _CALLS and len(called) == 1:
            each = times_read(called[0])
        for variable, count in zip(equation.invars, each, strict=True):
            times[id(variable)] += count
    return [times[id(v)] for v in inner.invars]


def _scans_that_read(jaxpr: AnyJaxpr) -> list[int]:
    """For each input of a scan's body, how often scans within it read it whole; 1 if none does."""
    inner, times = open_jaxpr(jaxpr), Counter()
    for equation in inner.eqns:
        if equation.primitive.name == "scan":
            body = equation.params["jaxpr"]
            inside = open_jaxpr(body).invars, _scans_that_read(body)
            for variable, within, below in zip(equation.invars, *inside, strict=True):
                # an input that the inner scan slices has another shape in its body
                whole = variable.aval.shape == within.aval.shape
                times[id(variable)] += whole * equation.params["length"] * below
    return [max(1, times[id(v)]) for v in inner.invars]


def _equation_cost(equation: JaxprEqn) -> Cost:
    # Shapes inside `shard_map` are those of one device, so the numbers are, too.
    name, params = equation.primitive.name, equation.params
    if name == "dot_general":  # every output number sums over the contracted axes
        operands, ((contracted, _), _) = (
            [v.aval for v in equation.invars],
            params["dimension_numbers"],
        )
        each = math.prod(operands[0].shape[i] for i in contracted)
        flops = 2.0 * equation.outvars[0].aval.size * each
        return Cost(flops, flops * all(a.dtype.itemsize == 1 for a in operands))
    if name == "conv_general_dilated":  # and here over the weights of its own feature
        weights = equation.invars[1].aval
        features = weights.shape[params["dimension_numbers"].rhs_spec[0]]
        return Cost(2.0 * equation.outvars[0].aval.size * weights.size / features)
    if name in _KERNELS:
        info, estimate = params.get("name_and_src_info"), params.get("cost_estimate")
        work = PallasWork(str(getattr(info, "name", None) or params.get("name") or "pallas_call"))
        if estimate is not None:
            work = PallasWork(work.name, float(estimate.flops), float(estimate.bytes_accessed))
        return Cost(kernels=Counter({work: 1}))
    if name == "scan":
        # Sliced are the inputs whose shape in the body lacks the leading axis (how a scan's
        # parameters say which differs between versions of JAX); unread ones are dropped.
        body = params["jaxpr"]
        inside = (v.aval for v in open_jaxpr(body).invars)
        found = zip(equation.invars, inside, times_read(body), strict=True)
        sliced = (num_bytes(a) for v, a, times in found if times and v.aval.shape != a.shape)
        once = program_cost(body) + Cost(scanned_bytes=float(sum(sliced)))
        return once.times(params["length"])
    if name == "while":
        # nothing in the jaxpr says how often it runs; `loops` tells that something is missing
        parts = (params["body_jaxpr"], params["cond_jaxpr"])
        return sum(map(program_cost, parts), Cost(loops=1))
    if name == "cond":
        # only one branch runs: the most expensive one makes this an upper bound
        return max(map(program_cost, params["branches"]), key=lambda cost: cost.flops)
    return sum(map(program_cost, _inner(params.values())), Cost())


def num_bytes(leaf, shape: tuple[int, ...] | None = None) -> int:
    """Bytes of an array or of anything with a shape and a type. A random key takes 8 bytes.

    shape: of a part of the array, if only that counts.
    """
    # the type of random keys is one of JAX's own, without the size of NumPy's types
    size = math.prod(leaf.shape if shape is None else shape)
    return size * (leaf.dtype.itemsize if isinstance(leaf.dtype, np.dtype) else 8)


def tree_bytes(tree: PyTree) -> int:
    """Bytes of all arrays of a tree."""
    return sum(map(num_bytes, jax.tree.leaves(tree)))


def device_bytes(leaf) -> int:
    """Bytes of an array, or of a shape with a sharding, on each of its devices."""
    return num_bytes(leaf, leaf.sharding.shard_shape(leaf.shape))


def _inner(values: Iterable) -> Iterable:
    """Finds the jaxprs among the parameters of an equation."""
    for value in values:
        for item in value if isinstance(value, tuple | list) else (value,):
            if hasattr(open_jaxpr(item), "eqns"):
                yield item


# --- attention, from the plan ---------------------------------------------------------------------


@singledispatch
def attention_flops(plan: CachePlan, spec: ScaleSpec) -> dict[str, float]:
    """FLOPs per image, padding included: {"attention": ..., "observation": ..., "share":
    observation / attention}.

    Attention is the products of queries with keys and of weights with values. Observation is what
    the policy repeats of them (`Needs`).
    """
    g, attention, observation = plan.geometry, 0.0, 0.0
    for segment, step in zip(spec.segments, spec.cache, strict=True):
        for scale in segment.scales:
            # Kernels read whole blocks, as many for all heads as the fullest one needs, and the
            # scale's own tokens with padding.
            keys = plan.entries(scale) * plan.block_size + segment.length
            product = 2.0 * g.rows_per_image * g.num_layers * g.num_heads * g.head_dim * keys
            # twice: queries with keys, then weights with values
            attention += 2 * product * segment.length
            # scores only: a policy repeats the product with the keys, not the one with the values
            queries = 0  # whose scores are computed once more
            if isinstance(step, DecidingStep) and step.observes:
                needs, queries = step.rule.needs, segment.length * step.sums_attention
                times = needs.window_mass + needs.window_logits  # which may use other queries
                queries += needs.window * times * step.decides
            observation += product * queries
    share = observation / attention if attention else 0.0
    return {"attention": attention, "observation": observation, "share": share}


@attention_flops.register
def token_attention_flops(plan: TokenPlan, spec: TokenSpec) -> dict[str, float]:
    """`attention_flops` for a model that draws token by token.

    The condition's tokens attend to each other. Every image token attends to all slots of its head,
    whether they are in use or not. Policies look once per stage.
    """
    g, sequence, slots = plan.geometry, plan.sequence, sum(plan.layer_slots)
    pair = 2.0 * g.rows_per_image * g.query_heads * g.head_dim  # a query of every head with one key
    attention = 2 * pair * (sequence.steps * slots + g.num_layers * sequence.condition**2)
    observation = 0.0
    if plan.allocation.decides:
        needs, (stages, _) = plan.rule.needs, sequence.stages(plan.allocation.period)
        # `window_logits` are those of one query for each head of keys
        queries = needs.window_logits / g.queries_per_head + needs.window * needs.window_scores
        observation = pair * slots * stages * queries
        if needs.newest_mass and plan.allocation.group_stage is not None:
            observation += 2 * pair * slots
    return {"attention": attention, "observation": observation, "share": observation / attention}


@singledispatch
def tokens_read(plan: ScalePlan) -> np.ndarray:
    """Tokens of all heads of one row that every step finds in the cache: every scale what its heads
    hold when it starts."""
    return plan.capacity.sum((1, 2), dtype=np.float64)


@tokens_read.register
def _(plan: TokenPlan) -> np.ndarray:
    """Every image token finds what is held when it is drawn, itself included."""
    sequence, period, slots = plan.sequence, plan.allocation.period, plan.allocation.slots
    held, number = plan.allocation.held(plan.geometry)[1:], np.arange(plan.sequence.steps)
    before = held[number // period] + (number % period + 1)[:, None]
    read = np.minimum(before, slots) + sequence.condition
    return read.sum(1, dtype=np.float64) * plan.geometry.num_heads
