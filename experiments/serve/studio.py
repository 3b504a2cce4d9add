"""Drawing for the page: one picture at a time, with any policy, seen while it is drawn, beside the
picture of the full cache.

Every combination of policy, budget and sampling is a program of its own, compiled when somebody
first asks for it; the last few are kept. Drawing waits in the server's queue like everything else.
"""

import contextlib
import queue
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from dataclasses import dataclass

import jax
import numpy as np
from jaxtyping import PyTree

from experiments.serve import memory
from experiments.serve.api import Service
from experiments.serve.batcher import COMPILING, Closed, QueueFull
from experiments.serve.drawer import Patch
from experiments.serve.previews import Preview, Previews, Waiting
from varjax.cache.plan import CachePlan
from varjax.cache.planner import plan_cache
from varjax.calibration import files as calibration_lib
from varjax.engine.given import Given
from varjax.errors import UserError
from varjax.generator import Generator
from varjax.io.images import to_uint8
from varjax.policies import POLICIES, get_policy
from varjax.sampling import Sampling

KEPT = 8  # programs, and programs that may wait to be compiled
NEEDS_MORE = ("table", "compose")  # policies that want more than a budget
LOOKING = 0.5  # seconds between two signs of life


@dataclass(frozen=True)
class Choice:
    """How a picture is drawn. budget: None for the policy's own."""

    policy: str
    budget: float | None
    sampling: Sampling


@dataclass(frozen=True, eq=False)
class Drawn:
    """A picture uint8 [H, W, 3], its pixels and tokens as they were drawn, and what it cost.

    num_bytes: of keys and values. keeps: SVG of how much each head keeps.
    """

    picture: np.ndarray
    pixels: np.ndarray
    tokens: np.ndarray
    num_bytes: int
    dense_bytes: int
    seconds: float
    keeps: str


class _Watch:
    """Hears what is drawn. JAX keeps what it has traced for a while, and with it who hears: so this
    knows no generator, whose programs would stay as long."""

    def __init__(self):
        self.seen: queue.SimpleQueue | None = None  # of the run in progress, if somebody looks

    def __call__(self, number, what) -> None:
        seen = self.seen
        if seen is not None:
            seen.put((int(number), np.array(what)))


class _Program:
    """A generator for one image, and the way by which it is watched."""

    def __init__(self, make: Callable[..., Generator]):
        self.watch = _Watch()
        self.generator = make(watch=self.watch)


class Studio:
    """Draws for the page.

    make: returns a generator from (model, plan, sampling, batch size, watch=...).
    """

    def __init__(self, service: Service, make: Callable[..., Generator]):
        self.service, self._make = service, make
        self.model = service.model
        self._programs: OrderedDict[Choice, Future[_Program]] = OrderedDict()
        self._waiting: Counter[Choice] = Counter()  # how many look at a program that may compile
        self._lock = threading.RLock()
        # one at a time: compiling takes all cores
        self._compiler = ThreadPoolExecutor(1, thread_name_prefix=COMPILING)
        self._previews = Previews(self.model)
        self._closed = False
        self._count = 0  # of programs that were compiled
        self._nothing = self.model.transformer.no_tokens(1)

    # --- programs ---------------------------------------------------------------------------------

    def program(self, choice: Choice) -> "Future[_Program]":
        """The program of a choice, which may still be compiling. `UserError` if it cannot be
        planned."""
        with self._lock:
            held = self._programs.get(choice)
            if held is None or held.cancelled() or held.done() and held.exception():
                if self._closed:
                    raise UserError("the server ends: ask again")
                if sum(not other.done() for other in self._programs.values()) >= KEPT:
                    raise UserError("many programs wait to be compiled: try again in a minute")
                plan = self.plan(choice)
                self._programs.pop(choice, None)
                self._make_room()
                self._programs[choice] = self._compiler.submit(self._compiled, choice, plan)
            self._programs.move_to_end(choice)
            return self._programs[choice]

    def _make_room(self) -> None:
        """Forget the programs that were asked for longest ago, so that with one more there are at
        most `KEPT`. One that waits to be compiled stays; one that draws goes when it has drawn."""
        done = [choice for choice, future in self._programs.items() if future.done()]
        for choice in done[: max(0, len(self._programs) + 1 - KEPT)]:
            del self._programs[choice]

    def _left(self, choice: Choice) -> None:
        """Nobody waits for a program any more that somebody waited for."""
        with self._lock:
            self._waiting[choice] -= 1
            if not self._waiting[choice]:
                del self._waiting[choice]
                held = self._programs.get(choice)
                if held is not None and held.cancel():  # it had not begun
                    del self._programs[choice]

    def close(self) -> None:
        """Compile nothing more than what is being compiled."""
        with self._lock:  # a visitor may ask for the next program meanwhile
            self._closed = True
            self._compiler.shutdown(wait=False, cancel_futures=True)

    def _compiled(self, choice: Choice, plan: CachePlan) -> _Program:
        memory.give_back()  # programs that were forgotten, before there is another one
        sampling = self.model.resolve_sampling(choice.sampling)
        program = _Program(lambda **more: self._make(self.model, plan, sampling, 1, **more))
        shapes = self.model.transformer.condition_shapes(1)
        condition = jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), shapes)
        # once for nothing: the first run is slower, and its time would be compared
        program.generator.run_batch(
            condition, np.zeros(1, np.int32), given=self._given(None), keep_cache=False
        )
        memory.give_back()  # what compiling took
        self._count += 1
        if self._count % KEPT == 0:
            self._forget_traces()
        self._previews.warm()
        return program

    def _forget_traces(self) -> None:
        """Forget JAX's traces while nobody draws, and warm up again what the API needs."""

        def forget() -> None:
            memory.forget_traces()
            self.service.batcher.drawer.warm()

        with contextlib.suppress(QueueFull, Closed):  # then after as many programs more
            self.service.batcher.run(forget).result()

    def plan(self, choice: Choice) -> CachePlan:
        """The plan of a choice. `UserError` if the model cannot have it."""
        policy = get_policy(choice.policy, choice.budget, {})
        sampling = self.model.resolve_sampling(choice.sampling)
        calibration = calibration_lib.find(policy, self.model, None, sampling.guidance)
        plan = plan_cache(self.model.geometry_for(sampling), policy, calibration)
        policy.check_images(1)
        return plan

    def offered(self, budget: float) -> list[str]:
        """Names of the policies that this model can have: at this budget, or at their own."""
        return [name for name in POLICIES if name not in NEEDS_MORE and self._can(name, budget)]

    def _can(self, name: str, budget: float) -> bool:
        for one in (budget, None):
            with contextlib.suppress(UserError):
                self.plan(Choice(name, one, self.model.sampling()))
                return True
        return False

    def prepare(self, choices: list[Choice]) -> None:
        """Compile programs in the background, before somebody asks for them."""
        for choice in choices:
            with contextlib.suppress(UserError):  # a policy that this model cannot have
                self.program(choice)

    def _given(self, patch: Patch | None) -> Given:
        if patch is None:
            return Given(self._nothing, np.zeros(self._nothing.shape[:2], bool))
        return Given(patch.tokens[None], patch.kept[None])

    # --- drawing ----------------------------------------------------------------------------------

    def draw(
        self,
        choice: Choice,
        condition: PyTree,
        seed: int,
        patch: Callable[[], Patch] | None = None,
    ) -> Iterator[Waiting | Preview | Drawn]:
        """Draw a picture: what it waits for, previews as they come, then the picture. Something
        comes every now and then, so that the iterator can be closed: that takes the picture out of
        the queue, or leaves it to itself if it is being drawn.

        patch: returns what is edited; it is called when it is this picture's turn.

        Raises:
          UserError: what cannot be planned, or of `patch`. QueueFull, Closed: as of `Batcher.run`.
        """
        with self._lock:
            compiled = self.program(choice)
            self._waiting[choice] += 1
        try:
            yield from _until(compiled, "compiling its program, once ...")
        finally:
            self._left(choice)
        if compiled.cancelled():
            raise UserError("the server ends, or nobody waited for this program: ask again")
        program, seen = compiled.result(), queue.SimpleQueue()
        future = self.service.batcher.run(lambda: self._run(program, condition, seed, patch, seen))
        future.add_done_callback(lambda future: seen.put(None))
        try:
            yield from self._previews.of(_told(seen))
            yield self._finished(program, future)
        finally:
            future.cancel()

    def _run(
        self, program, condition, seed, make, seen
    ) -> tuple[dict[str, np.ndarray], Patch | None, float]:
        """On the drawing thread: results on the host, what was edited, and the seconds it took."""
        patch = None if make is None else make()
        start, program.watch.seen = time.perf_counter(), seen
        try:
            results, _ = program.generator.run_batch(
                condition,
                np.zeros(1, np.int32),
                seed=seed,
                given=self._given(patch),
                keep_cache=False,
            )
            found = {name: np.asarray(results[name]) for name in ("images", "tokens")}
            jax.effects_barrier()  # what was seen is told before anybody else draws
        finally:
            program.watch.seen = None
        return found, patch, time.perf_counter() - start

    def _finished(self, program: _Program, future: Future) -> Drawn:
        found, patch, seconds = future.result()
        generator, pixels = program.generator, found["images"][0]
        if patch is not None and patch.paste:
            pixels = np.where(patch.drawn[..., None], pixels, patch.picture)
        plan, dtype = generator.plan, generator.kv_dtype
        return Drawn(
            picture=to_uint8(pixels[None])[0],
            pixels=pixels,
            tokens=found["tokens"],
            num_bytes=plan.num_bytes(1, dtype),
            dense_bytes=plan.dense_bytes(1, dtype),
            seconds=seconds,
            keeps=plan.picture(),
        )


def _until(future: Future, words: str) -> Iterator[Waiting]:
    """Say what is waited for until a future is done."""
    while not future.done():
        yield Waiting(words)
        with contextlib.suppress(NotYet, Exception):  # the caller asks for the result
            future.exception(LOOKING)


def _told(seen: queue.SimpleQueue) -> Iterator:
    """What is put into a queue until None, and `Waiting` while nothing comes."""
    while True:
        try:
            one = seen.get(timeout=LOOKING)
        except queue.Empty:
            yield Waiting("waiting for its turn ...")
        else:
            if one is None:
                return
            yield one
