"""The fused projection inside TPU kernels, which read blocks of it where they lie and finish them.

The product is seen as [R, T, 3 N H], a reshape of neighbouring axes. Its blocks are 128 lanes wide
or more: a head of 128 or 256, or a pair of smaller heads side by side. Work on one head of a pair
is done with its numbers in the first lanes (`HeadGroups.first`), where the pool has them, too.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from pallas_kernels.projection import K, Projection, Q, V
from pallas_kernels.refs import Ref, Scalar
from pallas_kernels.shared.tpu_operands import LANES
from pallas_kernels.tables import BlockTable, BlockWrites

# Tokens of all heads of a grid step. Every step costs time of its own, so heads of small scales
# share one.
TOKENS_AT_ONCE = 1024
TABLE_BYTES = 2**19  # of scalar memory, which is 1 MiB
PARTS = {"q": Q, "k": K, "v": V}
Operands = dict[str, tuple[Array, pl.BlockSpec]]  # by name: an array and the part of it in a step


@dataclass(frozen=True)
class HeadGroups:
    """Heads that a grid step serves.

    count: N, rounded up to whole groups.
    size: H.
    together: heads of a group, which lie side by side in 128 lanes.
    groups: groups of a grid step, which serves one after the other.
    """

    count: int
    size: int
    together: int
    groups: int

    @classmethod
    def of(cls, projection: Projection, table: BlockTable | BlockWrites) -> "HeadGroups":
        """As many heads as may share a grid step, for this many tokens and a packed table of this
        size."""
        _, heads, tokens, size = projection.shape
        together = 2 if size < LANES else 1
        groups = -(-heads // together)
        # twice, because the next step's rows of the table are fetched meanwhile
        rows = 2 * 4 * together * table.packed.shape[-1]
        most = max(1, min(TOKENS_AT_ONCE // max(16, tokens), TABLE_BYTES // rows))
        at_once = max(n for n in range(1, groups + 1) if groups % n == 0 and n <= most)
        return cls(groups * together, size, together, at_once)

    @property
    def width(self) -> int:
        """Lanes of a group."""
        return self.together * self.size

    @property
    def step(self) -> int:
        """Heads of a grid step."""
        return self.groups * self.together

    @property
    def steps(self) -> int:
        """Grid steps that serve all heads."""
        return self.count // self.step

    def padded(self, array: Array, axis: int) -> Array:
        """The array with zeros for a head that the last group lacks; no copy where it lacks
        none."""
        lacking = self.count - array.shape[axis]
        if not lacking:
            return array
        return jnp.pad(array, [(0, lacking * (i == axis % array.ndim)) for i in range(array.ndim)])

    def lanes(self, group):
        """The lanes of a group in a block of all groups."""
        if self.groups == 1:
            return slice(None)
        return pl.ds(pl.multiple_of(group * self.width, self.width), self.width)

    def first(self, x: Float[Array, "T W"], which: int) -> Float[Array, "T W"]:
        """The lanes of a group, turned so that those of head `which` come first."""
        return pltpu.roll(x, self.width - which * self.size, 1) if which else x

    def alone(self, x: Float[Array, "T W"], which: int) -> Float[Array, "T W"]:
        """The numbers of head `which` in the first lanes, zeros behind them."""
        if self.together == 1:
            return x
        lane = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)
        return jnp.where(lane < self.size, self.first(x, which), 0.0)

    def side_by_side(self, k, v, which: int) -> Float[Array, "T KV"]:
        """The key and the value of head `which` in one row, as the pool holds them."""
        if self.together == 1:
            return jnp.concatenate([k, v], axis=-1)
        lane, last = jax.lax.broadcasted_iota(jnp.int32, k.shape, 1), self.together - 1
        v = pltpu.roll(v, (last - which) * self.size, 1) if which < last else v
        return jnp.where(lane < self.size, self.first(k, which), v)

    def each(self, do, shape) -> Array:
        """An array [T, W] in which the lanes of every head of a group hold `do(which)` [T, 1]."""
        found = do(0)
        lane = jax.lax.broadcasted_iota(jnp.int32, shape, 1)
        for which in range(1, self.together):
            found = jnp.where(lane < which * self.size, found, do(which))
        return found

    def for_each_group(self, do) -> None:
        """Call `do(group)` for one group after the other."""
        if self.groups == 1:
            do(0)
        else:
            jax.lax.fori_loop(0, self.groups, lambda i, _: (do(i), 0)[1], 0)


def operands(
    projection: Projection, heads: HeadGroups, tokens: dict[str, tuple[int, Callable]]
) -> Operands:
    """The operands with which `OwnTokens` finishes some parts of a projection.

    tokens: {"q", "k" or "v": (tokens of a block, function from the grid's indices to the place of
      the block along the tokens)}.
    """
    projection = projection.sliced().multiplied()
    rows, _, length, _ = projection.shape
    # neighbouring axes are merged without a copy, unless an odd head is padded
    qkv = heads.padded(projection.qkv, 3).reshape(rows, length, -1)
    width = heads.groups * heads.width

    def spec(part: str, size: int, place) -> pl.BlockSpec:
        first = PARTS[part] * heads.steps
        return pl.BlockSpec((1, size, width), lambda r, n, *i: (r, place(*i), first + n))

    found = {part: (qkv, spec(part, *tokens[part])) for part in tokens}
    for part, bias in (("q", projection.q_bias), ("v", projection.v_bias)):
        if bias is not None and part in tokens:
            row = heads.padded(bias, 0).reshape(1, -1)
            found[part + "_bias"] = row, pl.BlockSpec((1, width), lambda r, n, *_: (0, n))
    if projection.multiplier is not None:
        # scalar memory: a head's multiplier is read as one number
        multiplier = heads.padded(projection.multiplier.astype(jnp.float32), 0)
        found["multiplier"] = multiplier, pl.BlockSpec(memory_space=pltpu.SMEM)
    if projection.rotation is not None and tokens.keys() != {"v"}:  # values are not rotated
        size = max(-(-length // n) * n for part, (n, _) in tokens.items() if part != "v")
        # All tokens, because all keys meet every tile of queries. Both numbers of a pair have the
        # same angle. Its cosine stands at the first number, its sine at the second, which halves
        # the memory. One buffer is enough: all grid steps read the same.
        cos, sin = projection.rotation
        both = jnp.where(jnp.arange(cos.shape[1]) % 2 == 0, cos, sin)
        spec = pl.BlockSpec((size, heads.width), lambda *_: (0, 0), pipeline_mode=pl.Buffered(1))
        found["rotation"] = jnp.tile(both, (1, heads.together)), spec
    return found


@dataclass(frozen=True)
class OwnTokens:
    """A projection inside a kernel, which gives finished tokens of a group of heads, float32
    [tokens, W].

    refs: references to `operands`, by name.
    first: the first head of the grid step.

    Tokens beyond T are undefined (NaN perhaps). They do no harm, because no token mixes with
    another; users mask them.
    """

    heads: HeadGroups
    scale: float
    refs: dict[str, Ref]
    first: Scalar

    @classmethod
    def of(cls, heads: HeadGroups, scale: float, refs: dict[str, Ref]) -> "OwnTokens":
        """For a kernel whose grid has the heads in its second axis."""
        return cls(heads, scale, refs, pl.program_id(1) * heads.step)

    @property
    def dtype(self):
        return next(self.refs[part].dtype for part in PARTS if part in self.refs)

    def queries(self, group, here, place=None) -> Float[Array, "T W"]:
        """Finished queries `here` of the block. place: their place among all tokens; None: the
        same."""
        x = self._plain("q", group, here)
        if "multiplier" not in self.refs:
            return self._rotated(x, here if place is None else place) * self.scale
        first = self.first + group * self.heads.together
        # lengths are those before the rotation, which keeps them
        factor = self.heads.each(
            lambda which: self.refs["multiplier"][first + which] / self._length(x, which), x.shape
        )
        return self._rotated(x, here if place is None else place) * factor

    def keys(self, group, here) -> Float[Array, "T W"]:
        x = self._plain("k", group, here)
        found = self._rotated(x, here)
        if "multiplier" not in self.refs:
            return found
        return found * self.heads.each(lambda which: 1 / self._length(x, which), x.shape)

    def values(self, group, here) -> Float[Array, "T W"]:
        return self._plain("v", group, here)

    def _plain(self, part: str, group, here) -> Float[Array, "T W"]:
        lanes = self.heads.lanes(group)
        found = self.refs[part][0, here, lanes].astype(jnp.float32)
        bias = self.refs.get(part + "_bias")
        return found if bias is None else found + bias[:, lanes].astype(jnp.float32)

    def _length(self, x, which: int) -> Float[Array, "T 1"]:
        """The length of a head's vectors; see `projection.length`."""
        squares = x * x
        # the other head of a pair has a length of its own
        if self.heads.together > 1:
            lane = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)
            squares = jnp.where(lane // self.heads.size == which, squares, 0.0)
        return jnp.maximum(jnp.sqrt(squares.sum(axis=1, keepdims=True)), 1e-12)

    def _rotated(self, x, place) -> Float[Array, "T W"]:
        if "rotation" not in self.refs:
            return x
        angle = self.refs["rotation"][place]
        even = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1) % 2 == 0
        # a roll by one lane brings each number of a pair (a, b) its partner
        cos = jnp.where(even, angle, pltpu.roll(angle, 1, 1))
        sin = jnp.where(even, pltpu.roll(angle, x.shape[1] - 1, 1), angle)
        turned = jnp.where(even, -pltpu.roll(x, x.shape[1] - 1, 1), pltpu.roll(x, 1, 1))
        return x * cos + turned * sin


def tokens_of_step(step, size: int, length):
    """The place of a step's own tokens, and a mask bool [size, 1] of those that are real."""
    first = pl.multiple_of(step * size, size)
    valid = jax.lax.broadcasted_iota(jnp.int32, (size, 1), 0) + first < length
    return pl.ds(first, size), valid
