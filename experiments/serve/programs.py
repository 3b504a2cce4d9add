"""The compiled programs of a server, and the waiting room before them.

Pictures that are drawn as the server draws by default share batches, of the sizes 1, 2, 4 ... Every
other way to draw (`Choice`), and every picture that somebody watches, has a program for one image,
compiled when it is first asked for; the last few are kept. The server's own way has such a program
from the start, which is also its batch of one.
"""

import asyncio
import contextlib
import functools
import logging
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import jax
import numpy as np
import prometheus_client as prometheus

from experiments.serve.drawing import Drawn, Item, Watched, decoded, draw, draw_nothing
from experiments.serve.guard import AGAIN, Refused, ends
from varjax.core.errors import UserError
from varjax.core.plan import CachePlan
from varjax.core.sampling import Sampling
from varjax.editing.edit import source_tokens
from varjax.generation.build import Build
from varjax.generation.generator import Generator
from varjax.models.model import Model
from varjax.policies import Policy

LOG = logging.getLogger("varjax.serve")
COMPILING, DRAWING = "compiling", "drawing"  # names of threads
KEPT = 8  # programs for one image, and programs that may wait to be compiled
PLANS = 64  # that are kept: they are small
FULL_ENOUGH = 3 / 4  # of a batch that is padded; else a smaller one is filled


@dataclass(frozen=True)
class Choice:
    """Settings that pictures are drawn with."""

    policy: Policy
    sampling: Sampling


class Programs:
    """Compiles programs, and draws batches with them. Methods belong to the event loop, but for
    those that say otherwise.

    make: returns a generator of (plan, sampling, batch size, build=...). build: of all of them.
    usual: the server's own choice. plan_of: the plan of a choice; `UserError` if the model cannot
      have it. most: images at once.
    """

    def __init__(
        self,
        model: Model,
        usual: Choice,
        *,
        make: Callable[..., Generator],
        plan_of: Callable[[Choice], CachePlan],
        most: int,
        build: Build,
    ):
        self.model, self.usual, self._make, self._build = model, usual, make, build
        self.plan_of = functools.lru_cache(PLANS)(plan_of)
        self.sizes = sorted({most, *(2**i for i in range(most.bit_length()))})
        self.batches: dict[int, Generator | Watched] = {}
        self.own: Watched | None = None  # of the usual choice, once it is compiled
        self.seconds: float | None = None  # of the last picture that was drawn alone as usual
        self._alone, self._wanted = OrderedDict[Choice, Future[Watched]](), Counter[Choice]()
        self._compiled = 0
        # one program at a time: compiling takes all cores
        self._compiler = ThreadPoolExecutor(1, COMPILING)
        self._drawer = ThreadPoolExecutor(1, DRAWING)

    def compile(self) -> None:
        """Compile what draws one picture, what shows it meanwhile, and what encodes one that is
        edited: no request pays for it."""
        decoded(self.model, np.zeros((1, *self.model.code_map), np.float32))
        with contextlib.suppress(UserError):  # a codec that encodes nothing: edits are refused
            source_tokens(self.model, np.zeros((1, *self.model.pixels, 3), np.float32))
        self.own = self.batches[1] = self._new_program(self.usual)

    async def compile_more(self) -> None:
        """Compile the larger batches in the background, one after the other, so that programs that
        somebody asks for come between."""
        for size in self.sizes[1:]:
            compiling = self._compiler.submit(self._new_batch, size)
            try:
                self.batches[size] = await asyncio.wrap_future(compiling)
            except UserError as error:  # too little memory: those that are there serve
                return LOG.warning("no batches of %d: %s", size, error)

    async def program(self, choice: Choice) -> Watched:
        """The program of a choice, once it is compiled. When nobody waits for it any more before
        that begins, it will not be. `Refused` if too many wait, `UserError` if it has no plan."""
        if choice == self.usual:
            return self.own
        held = self._alone.get(choice)
        if held is None or held.cancelled() or held.done() and held.exception():
            done = [other for other, future in self._alone.items() if future.done()]
            if len(self._alone) - len(done) >= KEPT:
                words = "many programs wait to be compiled: try later"
                raise Refused(429, words, retry_after=AGAIN)
            # those that were asked for longest ago; one that draws goes when it has drawn
            for other in done[: max(0, len(self._alone) + 1 - KEPT)]:
                del self._alone[other]
            try:
                held = self._compiler.submit(self._new_program, choice)
            except RuntimeError:  # it was shut down
                raise ends() from None
            self._alone[choice] = held
        self._alone.move_to_end(choice)
        self._wanted[choice] += 1
        try:
            return await asyncio.shield(asyncio.wrap_future(held))
        finally:
            self._wanted[choice] -= 1
            if not self._wanted[choice]:
                del self._wanted[choice]
                held.cancel()

    def close(self) -> None:
        """Compile nothing more than what is being compiled."""
        self._compiler.shutdown(wait=False, cancel_futures=True)

    def _new_program(self, choice: Choice) -> Watched:
        make = functools.partial(self._make, self.plan_of(choice), choice.sampling, 1)
        found = Watched(make, replace(self._build, keep_contents=True))
        draw_nothing(found.generator)
        self._compiled += 1
        if self._compiled % KEPT == 0:
            # JAX keeps the traces of programs that nobody can call any more, a few MB each; while
            # nobody draws they go. Helpers that it forgets as well are compiled again.
            self._drawer.submit(jax.clear_caches).result()
        return found

    def _new_batch(self, size: int) -> Generator:
        plan, sampling = self.plan_of(self.usual), self.usual.sampling
        generator = self._make(plan, sampling, size, build=self._build)
        draw_nothing(generator)
        return generator

    @property
    def largest(self) -> int:
        return max(self.batches)

    def size_for(self, waiting: int) -> int:
        """The batch size for so many items that wait: one that they fill, or nearly."""
        full = max(size for size in self.batches if size <= max(1, waiting))
        padded = min((size for size in self.batches if size >= waiting), default=full)
        return padded if waiting >= FULL_ENOUGH * padded else full

    async def draw(self, items: Sequence[Item]) -> list[Drawn]:
        """Draw one item, or at most `largest` that have no program of their own."""
        size = min(size for size in self.batches if size >= len(items))
        program = items[0].program or self.batches[size]
        found = await asyncio.wrap_future(self._drawer.submit(draw, program, items))
        self.seconds = found[0].seconds if program is self.own else self.seconds
        return found


class Batcher:
    """Draws what waits, in the order in which it came, in batches.

    A request's images are taken together or not at all, and room is kept for them before they are
    made: decoding what somebody sent comes after that. What was taken is drawn, also while the
    server ends; only a client that went away takes its images back, as long as nobody draws them.
    All of it lives in the event loop.

    most: images of requests that may be in the house; those that are being drawn do not count.
    """

    def __init__(self, programs: Programs, most: int):
        self.programs, self.most = programs, most
        self._waiting: deque[tuple[Item, asyncio.Future[Drawn]]] = deque()
        self._changed, self._closed, self._task = asyncio.Event(), False, None
        self._taken = self._drawing = 0
        self.registry = here = prometheus.CollectorRegistry()
        counter = functools.partial(prometheus.Counter, registry=here)
        self.requests = counter("varjax_requests", "Answers.", ["path", "status"])
        self._images = counter("varjax_images", "Pictures that were drawn.")
        self._batches = counter("varjax_batches", "Batches.", ["images"])
        for name, words, value in (
            ("queue_images", "Pictures that wait.", lambda: self.depth),
            ("queue_limit", "Pictures that may wait.", lambda: most),
            ("largest_batch", "Images that are drawn at once.", lambda: programs.largest),
        ):
            prometheus.Gauge(f"varjax_{name}", words, registry=here).set_function(value)

    def start(self) -> None:
        self._task = asyncio.create_task(self._work())

    @property
    def depth(self) -> int:
        """Images that wait, or for which room is kept."""
        return max(0, self._taken - self._drawing)

    @contextlib.contextmanager
    def room(self, count: int, *, idle: bool = False) -> Iterator[None]:
        """Keep room for all images of a request as long as it lasts. `Refused` if there is no room
        for all of them, or the server ends. idle: also if anybody else is here."""
        if self._closed:
            raise ends()
        if self.depth + count > self.most or idle and self._taken:
            raise Refused(429, "too many pictures wait: try again later", retry_after=AGAIN)
        self._taken += count
        try:
            yield
        finally:
            self._taken -= count
            self._changed.set()

    def put(self, items: Sequence[Item]) -> list[asyncio.Future[Drawn]]:
        """Have images drawn for which room is kept. This works also while the server ends."""
        waiting = [(item, asyncio.get_running_loop().create_future()) for item in items]
        self._waiting.extend(waiting)
        self._changed.set()
        return [future for _, future in waiting]

    async def close(self, seconds: float) -> None:
        """Take nothing more, draw what waits, and return when all is done, or after so many
        seconds."""
        self._closed = True
        self._changed.set()
        await asyncio.wait([self._task], timeout=seconds)

    async def _work(self) -> None:
        while not self._closed or self._taken:
            if batch := self._next():
                await self._draw(*zip(*batch, strict=True))
            else:
                self._changed.clear()
                await self._changed.wait()

    def _next(self) -> list[tuple[Item, asyncio.Future[Drawn]]]:
        """The next batch. Images behind one that has a program of its own may come before it."""
        self._waiting = deque(one for one in self._waiting if not one[1].done())
        if not self._waiting or self._waiting[0][0].program is not None:
            return [self._waiting.popleft()] if self._waiting else []
        shared = [one for one in self._waiting if one[0].program is None]
        batch = shared[: self.programs.size_for(len(shared))]
        self._waiting = deque(one for one in self._waiting if one not in batch)
        return batch

    async def _draw(self, items: Sequence[Item], futures: Sequence[asyncio.Future]) -> None:
        self._drawing = len(items)
        try:
            found = await self.programs.draw(items)
        except Exception as error:  # one batch that fails must not end the server
            if not isinstance(error, UserError):  # that is told to who asked
                LOG.exception("drawing failed")
            for future in futures:
                if not future.done():
                    future.set_exception(error)
                    future.exception()  # nobody may wait for it any more
            return
        finally:
            self._drawing = 0
        self._batches.labels(len(items)).inc()
        self._images.inc(len(items))
        for future, drawn in zip(futures, found, strict=True):
            if not future.done():
                future.set_result(drawn)
