"""Token attention on Hopper and Blackwell GPUs with Pallas' Mosaic GPU backend. See `api.attend`.

Tiling. A program of one warpgroup goes through the slots of several heads, one head after another,
in steps of `slots_of_step`: what a step needs is copied asynchronously into one of some
places in shared memory, as many steps ahead as there are places, across the ends of heads. A
multiprocessor has room for several programs, which compute while others wait.

With one query there is no matrix to multiply: products are sums over the columns that a thread
holds, then over the 8 threads that share a slot. Slots of equal number modulo 16 are a class with a
softmax of its own (running maximum, total, sum of values), because they are held by the same
threads: warps meet once per head, where classes are joined, and not in every step.

Heads of 100 are seen through windows of 128 columns: the query is zero where the window of the keys
reaches into the values, and what the window of the values has too many is cut off.

A token that is stored comes beside the slots of every step. In the step of its slot it is put among
them, where attention finds it, and goes from there into the pool. No other step reads that slot.

Sums of attention weights need the statistics of all slots: scores wait in shared memory, and the
sums are read and written once, in place, at the end of a head. So do the scores of a probe, which
are found in each step while its keys lie in shared memory; one call in many asks for them.

Traffic, with b bytes per element: R N C 2 H b for the pool, read once, and per slot 4 bytes for
positions (of one head where heads share them), 8 for sums, 8 for an int8 pool's scales. A call that
asks for the scores of a probe reads 4 H bytes more per head, and writes 4 per slot.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import estimates
from pallas_kernels.implementations import require
from pallas_kernels.shared import mosaic_operands as mosaic
from pallas_kernels.token_attention import reference
from pallas_kernels.token_attention.mosaic_slots import (
    CLASSES,
    LINE,
    SUMMED,
    FlatOperands,
    Layouts,
    Number,
    PlaceRing,
    Places,
    line,
    slots_of_step,
)

LOG2_E = math.log2(math.e)
HEAD_DIMS = (64, 100, 128)
STORED = (64, 128)  # heads whose slots begin at multiples of 128 bytes
DTYPES = ("float32", "bfloat16", "float16", "int8")
MOST_SLOTS = 4096  # scores of all of them wait in shared memory: 16 KiB
LOWEST = -1e30  # the maximum of nothing: finite, so that differences are


def attend(query, slots, *, interpret, step: int | None = None, programs: int | None = None):
    """See `api.attend`. step: slots of a step; None takes `slots_of_step`. programs: how many
    divide all heads; None: as many as run at the same time."""
    return _attend(query, slots, None, interpret, step, programs)[:2]


def scores_on_the_way(slots) -> bool:
    """Whether `store_and_attend` scores a probe itself."""
    stored = slots.scale is None and slots.pool.shape[-1] // 2 in STORED
    return stored and slots.used is None  # every slot is scored, so every slot has to be read


def store_and_attend(
    query, slots, token, *, interpret, step: int | None = None, programs: int | None = None
):
    """See `api.store_and_attend` and `attend`. XLA stores what takes scales, and rows that no copy
    may take."""
    elsewhere = query.probe is not None and not scores_on_the_way(slots)
    if elsewhere or slots.scale is not None or query.q.shape[-1] not in STORED:
        alone = partial(attend, interpret=interpret, step=step, programs=programs)
        return reference.in_two_steps(alone, reference.scores)(query, slots, token)
    out, mass, pool, scores = _attend(query, slots, token, interpret, step, programs)
    return out, replace(slots, pool=pool, mass=mass, scores=scores)


def _attend(query, slots, token, interpret, step: int | None, programs: int | None):
    """The output, the sums, the pool with the token, and the scores."""
    check(query.q, slots.pool, interpret)
    rows, heads, size = query.q.shape
    mass, probe = slots.mass, query.probe
    given = FlatOperands.of(step or slots_of_step(slots.pool), query, slots, token)
    memory, shared = _memory(given)
    programs = min(rows * heads, programs or mosaic.programs_at_once(shared))
    # both are changed in place
    sums = None if mass is None else jax.new_ref(mass.reshape(-1))
    scores = None if probe is None else jax.new_ref(slots.scores.reshape(-1))
    out = pl.kernel(
        lambda *refs: pl.run_scoped(partial(_attend_heads, programs, *refs), *memory),
        out_type=jax.ShapeDtypeStruct((rows, heads, given.width), query.q.dtype),
        mesh=plgpu.Mesh(grid=(programs,), grid_names=("program",)),
        compiler_params=mosaic.PARAMS,
        cost_estimate=estimates.attend_token(query, slots, int(token is not None)),
        name="token_attention",
        interpret=mosaic.simulator(interpret),
    )(given, sums, scores)
    out = out[..., given.width - size :]
    mass = None if mass is None else jax.freeze(sums).reshape(mass.shape)
    scores = slots.scores if probe is None else jax.freeze(scores).reshape(slots.scores.shape)
    return out, mass, slots.pool if token is None else jax.freeze(given.slots.pool), scores


def check(q, pool, interpret) -> None:
    """Raise `NotImplementedError` for what the kernel cannot take."""
    slots, slot = pool.shape[2], pool.shape[3] * pool.dtype.itemsize
    found, names = f"heads of {q.shape[-1]} in {pool.dtype.name}", ", ".join(DTYPES)
    for right, takes in (
        (q.shape[-1] in HEAD_DIMS, f"heads of {', '.join(map(str, HEAD_DIMS))}"),
        (pool.dtype.name in DTYPES, f"a pool of {names}"),
        # copies begin at multiples of 16 bytes (`mosaic_slots`)
        (slot % 16 == 0, "slots of multiples of 16 bytes"),
        (LINE <= slots <= MOST_SLOTS, f"{LINE} to {MOST_SLOTS} slots"),
    ):
        require(right, f"Mosaic token attention takes {takes}, not {slots} slots of {found}")
    mosaic.check_simulator(interpret)


def _memory(given: FlatOperands) -> tuple[tuple, int]:
    """Memory of a program: places of its steps, a place for scores and then for joining classes,
    and one for the scores of a probe if there is one; and bytes of all, without barriers."""
    joined = plgpu.SMEM((CLASSES, given.width), jnp.float32)
    slots = pl.cdiv(given.count, given.step) * given.step
    waiting = plgpu.SMEM((slots,), jnp.float32)
    places, sums = Places.scratch(given), given.query.mass_weight is not None
    asked = [] if given.query.probe is None else [waiting]
    sizes = [
        math.prod(array.shape) * jnp.dtype(array.dtype).itemsize
        for array in jax.tree.leaves((places._replace(full=None), asked))
    ]
    # one after the other in the same place: scores have become sums when classes are joined
    late = plgpu.RefUnion(joined, waiting) if sums else [joined]
    sizes += [4 * max(CLASSES * given.width, slots * sums), mosaic.MEETING]
    # where an array may begin
    return (places, late, asked), sum(-(-size // mosaic.KIB) * mosaic.KIB for size in sizes)


def _attend_heads(programs: int, given: FlatOperands, sums, scores, out, places, late, asked):
    """Serves the heads of one program. All programs have equally many heads, some of them one
    more."""
    program = jax.lax.axis_index("program")
    total, each = given.slots.pool.shape[0] * given.heads, given.steps
    first, last = program * total // programs, (program + 1) * total // programs
    ring, (joined, *waiting) = PlaceRing(given, places, first, last - first, each), late
    # static: a program may have fewer steps than places, which `start` sees
    for number in range(given.buffers):
        ring.start(jnp.int32(number))
    weight = None if sums is None else given.query.mass_weight[0]
    wanted = None if scores is None else given.wanted[0] != 0

    def head(i, limits):
        number = first + i
        # loaded here, long before they are needed
        following = given.limits(jnp.minimum(number + 1, last - 1))
        place = number // given.heads, jax.lax.rem(number, given.heads)
        layouts = Layouts.of(given.slots.pool.dtype)
        this = _Head(ring, place, *limits, waiting, wanted, asked, layouts)
        maximum, total, values = this.see(i * each)
        # every head sees a slot: the largest of 16 maxima is a score, others may be LOWEST
        top = maximum.max(0)
        rescale = jnp.exp2(maximum - top)
        whole = (total * rescale).sum(0)
        if sums is not None:
            this.add(sums, number * given.count, top, weight / whole)
        if scores is not None:
            begin = number * given.count
            put = partial(this.by_lines, asked[0], scores, begin, lambda i, start, found, _: found)
            pl.when(wanted)(put)
        this.put(values, rescale / whole, joined, out.at[place])
        return following

    jax.lax.fori_loop(0, last - first, head, given.limits(first))


# `plain`: otherwise the compiler looks for an order of loads without bank conflicts, and finds none
_load = partial(mosaic.load, plain=True)


@dataclass(frozen=True)
class _Head:
    """Work of a program for one head.

    place: its row and number.
    newest, reach, bias: see `FlatOperands.limits`.
    waiting: shared memory in which scores wait for the statistics of all slots; empty without sums.
    wanted: whether the scores of a probe are; None: there is no probe.
    asked: shared memory in which these wait until they are written in whole sectors.
    """

    ring: PlaceRing
    place: tuple[Number, Number]
    newest: Int[Array, ""]
    reach: Int[Array, ""]
    bias: Float[Array, ""]
    waiting: Sequence[jax.Ref]
    wanted: Bool[Array, ""] | None
    asked: Sequence[jax.Ref]
    layouts: Layouts

    def see(self, before) -> tuple:
        """Go through all slots. Returns the largest score, the sum of weights [16] and the weighted
        sum of values [16, W] of every class; scores count in powers of 2.

        before: steps of the heads that the program has served already.
        """
        ring, given = self.ring, self.ring.given
        carry = (
            plgpu.layout_cast(jnp.full((CLASSES,), LOWEST, jnp.float32), self.layouts.slot),
            plgpu.layout_cast(jnp.zeros((CLASSES,), jnp.float32), self.layouts.slot),
            plgpu.layout_cast(jnp.zeros((CLASSES, given.width), jnp.float32), self.layouts.tile),
        )
        step = partial(self._step, before)
        return jax.lax.fori_loop(0, ring.each, step, carry)

    def _step(self, before, i, carry):
        maximum, total, out = carry
        ring, given, size = self.ring, self.ring.given, self.ring.given.step
        place = jax.lax.rem(before + i, given.buffers)
        plgpu.barrier_wait(ring.places.full.at[place])
        if given.token is not None:
            ring.store(place, self.place, i * size)
        tiles = [pl.ds(start, CLASSES) for start in range(0, size, CLASSES)]
        # in powers of 2, which is what the chip computes
        query = _load(ring.places.q.at[place], self.layouts.column).astype(jnp.float32) * LOG2_E
        scores = [self._scores(place, rows, i * size + rows.start, query) for rows in tiles]
        for waiting in self.waiting:
            for rows, found in zip(tiles, scores, strict=True):
                waiting[pl.ds(i * size + rows.start, CLASSES)] = found
        if self.wanted is not None:
            pl.when(self.wanted)(partial(self._score_probe, place, tiles, i * size))
        # all scores of a step first: sums are rescaled once per step, not once per slot
        highest = maximum
        for found in scores:
            highest = jnp.maximum(highest, found)
        rescale = jnp.exp2(maximum - highest)
        total, out = total * rescale, out * self.layouts.across(rescale, given.width)
        for rows, found in zip(tiles, scores, strict=True):
            weights = jnp.exp2(found - highest)
            total += weights
            if ring.places.scale:
                # scales of slots that are not visible may be NaN
                weights = jnp.where(weights > 0, weights * self._scale(place, rows, 1), 0.0)
            weights = self.layouts.across(weights, given.width)
            # 0 times NaN is NaN
            out += jnp.where(weights > 0, weights * self._half(place, rows, 1), 0.0)
        done = before + i
        plgpu.commit_smem()  # every warp has read what lies in the place, which is taken again
        ring.start(done + given.buffers)
        return highest, total, out

    def _half(self, place, rows, half: int):
        """The window [16, W] of keys (half 0) or values of slots."""
        given = self.ring.given
        columns = pl.ds(half * (2 * given.size - given.width), given.width)
        found = _load(self.ring.places.pool.at[place, rows, columns], self.layouts.tile)
        if found.dtype == jnp.int8:
            found = found.astype(jnp.bfloat16)  # exact, and faster in two steps
        return found.astype(jnp.float32)

    def _scale(self, place, rows, half: int):
        """Factors [16] of an int8 pool's keys (half 0) or values."""
        begin = self.ring.given.scales(*self.place, half)
        return self._line(self.ring.places.scale[half], place, rows, begin)

    def _line(self, line, place, rows, begin):
        """Read 16 slots' numbers of one head. The head's numbers begin at `begin` in global
        memory."""
        here = pl.ds(rows.start + self.ring.given.shift(begin), CLASSES)
        return _load(line.at[place, here], self.layouts.slot)

    def _scores(self, place, rows, start, query):
        """Scores [16] of slots from number `start` on; -inf where a slot is not visible."""
        ring, given = self.ring, self.ring.given
        keys = self._half(place, rows, 0)
        found = (keys * self.layouts.down(query)).sum(1)
        if ring.places.scale:
            found *= self._scale(place, rows, 0)
        layout = self.layouts.slot
        slot = plgpu.broadcasted_iota(jnp.int32, (CLASSES,), 0, layout=layout) + start
        if given.query.first_bias is not None:
            found += jnp.where(slot == 0, self.bias * LOG2_E, 0.0)
        position = self._line(ring.places.position, place, rows, given.positions(*self.place))
        visible = given.sees(position, self.newest, self.reach) & (slot < given.count)
        return jnp.where(visible, found, -jnp.inf)

    def _score_probe(self, place, tiles, start) -> None:
        """Score the second query, for the slots of the step from slot `start` on."""
        probe = self.ring.given.query.probe
        query = _load(probe.total.at[self.place], self.layouts.column) / probe.count
        for rows in tiles:
            found = (self._half(place, rows, 0) * self.layouts.down(query)).sum(1)
            self.asked[0][pl.ds(start + rows.start, CLASSES)] = found

    def put(self, sums, factor, joined, out) -> None:
        """Store the mean of the values, sums of all classes [16, W] times their factors."""
        # through shared memory, where warps exchange columns for slots
        mosaic.store(joined, sums * self.layouts.across(factor, sums.shape[1]))
        out[...] = _load(joined, self.layouts.joined).sum(0).astype(out.dtype)

    def add(self, sums, first, top, factor) -> None:
        """Add the weights of all slots to `sums`, from place `first` on."""
        seen = self.ring.each * self.ring.given.step  # nothing waits behind them

        def added(i, start, found, here):
            (size,), layout = found.shape, line(len(found))
            slot = plgpu.broadcasted_iota(jnp.int32, (size,), 0, layout=layout) + start
            here_first = (slot >= i * size) & (slot < seen)
            new = jnp.where(here_first, jnp.exp2(found - top) * factor, 0.0)
            return _load(here, layout) + new

        self.by_lines(self.waiting[0], sums, first, added)

    def by_lines(self, waiting, target, first, changed: Callable) -> None:
        """Write what waits for all slots to `target`, from place `first` on, in whole sectors.
        changed: from the line's number, its first slot, what waits, and where it goes."""
        slots = self.ring.given.count
        size = max(n for n in SUMMED if n <= slots)

        def tile(i, _):
            # the last one ends with the head, and meets a part of the one before again
            start = jnp.minimum(i * size, slots - size)
            found = _load(waiting.at[pl.ds(start, size)], line(size))
            here = target.at[pl.ds(first + start, size)]
            here[...] = changed(i, start, found, here)
            return 0

        jax.lax.fori_loop(0, pl.cdiv(slots, size), tile, 0)
