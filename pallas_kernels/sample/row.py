"""A row of logits in a program of a GPU, cut into parts of one size, and the reference's filter on
it.

The size of a part is a power of two. The last part ends with the row, so it overlaps the part
before where parts do not fill the row evenly. Numbers that both parts contain are set to -inf in
the last one, which changes no result. So every part is whole, and nothing is read beyond the end of
a row.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Int

from pallas_kernels.refs import Scalar
from pallas_kernels.sample import reference
from pallas_kernels.sample.reference import combined, largest, ordered


@dataclass(frozen=True)
class Parts:
    """Division of a row of `length` numbers into parts of `size`.

    held: whether a program keeps all parts in its registers. If not, it reads and computes a part
      whenever it needs it.
    """

    length: int
    size: int
    held: bool

    @classmethod
    def of(cls, length: int, most: int) -> "Parts":
        """The parts of a row. most: numbers that a program can hold."""
        # the largest power of two that a row contains: then no part reaches beyond its end
        size = min(most, pl.next_power_of_2(length + 1) // 2)
        held = pl.cdiv(length, size) * size <= most
        # where parts are not held, half of the registers are for computing a part
        return cls(length, size if held else min(size, most // 2), held)

    @property
    def count(self) -> int:
        return pl.cdiv(self.length, self.size)

    def start(self, i):
        """The place in the row where part i begins."""
        last = self.length - self.size
        return min(i * self.size, last) if isinstance(i, int) else jnp.minimum(i * self.size, last)


@dataclass(frozen=True)
class Row:
    """A row in parts. part: function from i to part i, an array or several."""

    parts: Parts
    part: Callable[[Scalar], Array | tuple[Array, ...]]

    def map(self, function: Callable) -> "Row":
        """The row with a function of every part; computed now if parts are held."""
        if not self.parts.held:
            return Row(self.parts, lambda i: function(self.part(i)))
        found = [function(self.part(i)) for i in range(self.parts.count)]
        return Row(self.parts, found.__getitem__)

    def reduced(self, function: Callable, join: Callable) -> Array:
        """The values of `function`, one scalar per part, joined into one."""
        if self.parts.held:  # a static number of parts: no loop, all stay in registers
            return reduce(join, (function(self.part(i)) for i in range(self.parts.count)))
        return jax.lax.fori_loop(
            1,
            self.parts.count,
            lambda i, found: join(found, function(self.part(i))),
            function(self.part(0)),
        )

    def sum(self, function: Callable) -> Array:
        """The sum of the numbers that `function` makes of every part."""
        return self.reduced(lambda x: function(x).sum(), jnp.add)


def sample(
    kernel: Callable, most: int, logits, noise, tau, strength, top_k: int, top_p: float
) -> Int[Array, "B T"]:
    """`api.sample` by kernel(parts, (tau, strength), logits [R / B, B, T, V], noise), a program of
    which holds `most` numbers; tau and strength are float32 [1] or None."""
    vocabulary = noise.shape[-1]
    parts = Parts.of(vocabulary, most)
    if not parts.held:
        if not (0 < top_k < vocabulary or 0 < top_p < 1):
            # nothing is read many times, and XLA reads logits once, with the noise as it is made
            return reference.sample(
                logits, noise, tau=tau, strength=strength, top_k=top_k, top_p=top_p
            )
        # parts are read many times: guidance would double each read
        logits, tau, strength = reference.guided(logits, tau, strength), None, None
    given = jax.tree.map(lambda a: jnp.reshape(a, 1).astype(jnp.float32), (tau, strength))
    return kernel(parts, given, logits.reshape(-1, *noise.shape), noise)


def guided(parts: Parts, load: Callable, rows: int, number: Callable, given) -> Row:
    """Logits with temperature and guidance.

    Args:
      load: function from (row, start of a part) to its numbers.
      rows: 2 with guidance, else 1.
      given: references to tau and strength, or None.
      number: function from the start of a part to the places of its numbers in the row.
    """
    tau, strength = jax.tree.map(lambda ref: ref[0], given)

    def part(i):
        start = parts.start(i)
        found = combined((load(row, start) for row in range(rows)), tau, strength)
        if parts.length % parts.size == 0:
            return found
        # the part before has the numbers left of i * size
        return jnp.where(number(start) < i * parts.size, -jnp.inf, found)

    return Row(parts, part).map(lambda x: x)


def choose(
    logits: Row, noise: Callable, number: Callable, top_k: int, top_p: float
) -> Int[Array, ""]:
    """The choice of `reference.sample` from a row of guided logits, in the same steps. noise,
    number: functions from the start of a part to its noise, and to the places of its numbers in the
    row."""
    parts = logits.parts
    # thresholds are searched among integers in the order of the numbers, which makes them exact
    if 0 < top_k < parts.length:
        order = logits.map(ordered)
        kth = largest(lambda t: order.sum(lambda o: jnp.where(o >= t, 1, 0)) >= top_k, ())
        logits = logits.map(lambda x: jnp.where(ordered(x) < kth, -jnp.inf, x))
    if 0 < top_p < 1:
        # the softmax of the reference: the maximum is subtracted before the exponential
        top = logits.reduced(jnp.max, jnp.maximum)
        whole = logits.sum(lambda x: jnp.exp(x - top))
        likely = logits.map(lambda x: (ordered(x), jnp.exp(x - top) / whole))
        most = 1 - top_p
        last = largest(lambda t: likely.sum(lambda a: jnp.where(a[0] <= t, a[1], 0.0)) <= most, ())
        logits = logits.map(lambda x: jnp.where((x < top) & (ordered(x) <= last), -jnp.inf, x))
    starts = Row(parts, lambda i: (logits.part(i), parts.start(i)))
    noisy = starts.map(lambda a: (a[0] + noise(a[1]), number(a[1])))
    top = noisy.reduced(lambda a: a[0].max(), jnp.maximum)
    # numbers that are not the largest stand for the last place, so the minimum is the first largest
    return noisy.reduced(lambda a: jnp.where(a[0] < top, parts.length - 1, a[1]).min(), jnp.minimum)
