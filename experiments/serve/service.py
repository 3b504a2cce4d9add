"""The model's side of a server: what may be asked for, in words of the API, what it costs, and the
way from a request to its pictures, all at once or as events while they are drawn."""

import asyncio
import base64
import contextlib
import dataclasses
import json
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from jaxtyping import PyTree

from experiments.serve.drawing import Drawn, Item, Patch, Preview, previews, read_own_size
from experiments.serve.guard import Refused, Rules, about, content, event, refused
from experiments.serve.programs import LOG, Batcher, Choice, Programs
from experiments.serve.requests import EditRequest, ImageRequest
from experiments.serve.subjects import Subjects
from varjax.core.errors import UserError, choose, show
from varjax.models.model import Model
from varjax.policies import POLICIES, Policy, get_policy, text_arguments
from varjax.storage import pictures

LOOKING = 1.0  # seconds between two looks whether a client is still there, and signs of life to it
NEEDS_MORE = ("table", "compose")  # policies that want files or other policies
SAMPLING = ("cfg", "tau", "top_k", "top_p", "greedy")
REQUEST_SECONDS = 600  # that an answer may take
LEVEL = 3  # of PNG's compression: half the time of the usual 6, files a fifteenth larger


@dataclass(frozen=True, kw_only=True)
class Service:
    """Service that answers requests.

    policies: names that requests may give; None: all that the model can have.
    seconds: that an answer may take. gallery: pictures that the server draws by itself, as PNGs.
    """

    model: Model
    subjects: Subjects
    batcher: Batcher
    rules: Rules = Rules()
    policies: Sequence[str] | None = None
    seconds: float = REQUEST_SECONDS
    started: int = field(default_factory=lambda: int(time.time()))
    gallery: dict[int, bytes] = field(default_factory=dict)
    offered: dict[str, Policy] = field(default_factory=dict)
    decoding: asyncio.Lock = field(default_factory=asyncio.Lock)  # one upload at a time

    def __post_init__(self):
        usual = self.programs.usual
        self.offered[usual.policy.name] = usual.policy
        for name in POLICIES if self.policies is None else self.policies:
            try:
                policy = get_policy(choose("policy", name, set(POLICIES) - set(NEEDS_MORE)))
                self.programs.plan_of(dataclasses.replace(usual, policy=policy))
                self.offered.setdefault(name, policy)
            except UserError:  # the model cannot have it, or it wants a calibration
                if self.policies is not None:
                    raise

    @property
    def programs(self) -> Programs:
        return self.batcher.programs

    @property
    def size(self) -> str:
        """Width x height, as OpenAI has it."""
        return f"{self.model.pixels[1]}x{self.model.pixels[0]}"

    # --- what may be asked for --------------------------------------------------------------------

    def check(self, asked: ImageRequest) -> None:
        """`Refused` for what this server does not have."""
        for name, allowed in (("model", [self.model.name]), ("size", [self.size, "auto"])):
            value = getattr(asked, name)
            if value not in (None, *allowed):
                words = f"{name}={show(value)}: this server has {' or '.join(allowed)}"
                raise Refused(422, words, name)
        if asked.n > self.batcher.most:
            raise Refused(422, f"n={asked.n}: choose 1 to {self.batcher.most}", "n")
        if asked.prompt is None and asked.label is None:
            raise Refused(422, "prompt is missing: say what to draw", "prompt")

    def choice(self, asked: ImageRequest) -> Choice:
        """Settings that the pictures of a request are drawn with. `Refused` for what the model
        cannot have."""
        sampling, usual = self.programs.usual.sampling, self.programs.usual.policy
        for name in SAMPLING:
            if (value := getattr(asked, name)) is not None:
                with about(name):
                    sampling = dataclasses.replace(sampling, **{name: value})
                    self.model.config.check_sampling(sampling)
        with about("policy"):
            policy = self.offered[choose("policy", asked.policy or usual.name, self.offered)]
        given = {
            n: v if isinstance(v, str) else json.dumps(v) for n, v in asked.policy_args.items()
        }
        with about("policy_args" if given else "policy" if asked.budget is None else "budget"):
            found = Choice(text_arguments.changed_by(policy, given, asked.budget), sampling)
            self.programs.plan_of(found)
        return found

    async def order(self, asked: ImageRequest, files: dict[str, bytes] | None) -> "Order":
        """Find out how and what to draw; `Refused` for what cannot be."""
        choice, patch = await asyncio.to_thread(self.choice, asked), None
        with about("class" if asked.prompt is None else "prompt"):
            condition = await asyncio.to_thread(self.subjects.of, asked.prompt, asked.label)
        if files is not None:
            async with self.decoding:
                patch = await asyncio.to_thread(self.patch, asked, files)
        seed = secrets.randbelow(2**31) if asked.seed is None else asked.seed
        what = {"choice": choice, "condition": condition, "patch": patch, "seed": seed}
        return Order(service=self, asked=asked, **what)

    def patch(self, asked: EditRequest, files: dict[str, bytes]) -> Patch:
        """The edit that two files ask for. `Refused` for what cannot be."""
        if asked.feather and not asked.paste:
            raise Refused(422, "feather belongs to paste=true: leave it out", "feather")
        with about("image"):
            picture = read_own_size(self.model, files["image"], "image")
        with about("mask"):
            drawn = read_own_size(self.model, files["mask"], "mask", mask=True)
            return Patch.of(self.model, picture, drawn, asked.paste, asked.feather)

    # --- what is told -----------------------------------------------------------------------------

    def cost(self, choice: Choice, seconds: float | None) -> dict:
        """Settings of the pictures and the cost of one (`requests.Pictures`)."""
        plan, dtype = self.programs.plan_of(choice), self.programs.own.generator.kv_dtype
        return {
            "policy": choice.policy.name,
            "budget": plan.budget,
            "policy_args": text_arguments.told(choice.policy),
            "kv_bytes": plan.num_bytes(1, dtype),
            "dense_bytes": plan.dense_bytes(1, dtype),
            "seconds": None if seconds is None else round(seconds, 4),
        }

    def picture(self, asked: ImageRequest, seed: int, drawn: Drawn) -> dict:
        """The fields of `requests.Picture`."""
        png, kept = pictures.png(drawn.picture, LEVEL), drawn.kept
        told = {"b64_json": base64.b64encode(png).decode(), "seed": seed}
        if kept is not None:
            places = self.model.geometry.schedule.places  # without the ends of lines
            kept = kept[..., places[places < kept.shape[-1]]]
            sizes = dict(zip(("layers", "heads", "tokens"), kept.shape, strict=True))
            told["kept"] = sizes | {"b64": base64.b64encode(np.packbits(kept)).decode()}
        if asked.tokens:
            kind = "int32" if drawn.tokens.ndim == 1 else "uint8"
            data = drawn.tokens.astype(np.dtype(kind).newbyteorder("<")).tobytes()
            numbers = base64.b64encode(data).decode()
            told["tokens"] = {"shape": drawn.tokens.shape, "dtype": kind, "b64": numbers}
        return told

    def described(self) -> dict:
        """The model, as /v1/models lists it."""
        model, usual = self.model, self.programs.usual
        g = self.programs.plan_of(usual).geometry
        sampling = {name: getattr(usual.sampling, name) for name in SAMPLING}
        sampling = {n: None if isinstance(v, tuple) else v for n, v in sampling.items()}
        policies = []
        for name, policy in self.offered.items():
            own = {f.name: f.default for f in dataclasses.fields(policy)}
            kinds = text_arguments.open_arguments(type(policy)).items()
            known = {n: {"type": k.split()[0], "default": own[n]} for n, k in kinds}
            shown = {"name": name, "summary": policy.summary, "budget": policy.budget}
            policies.append(shown | {"policy_args": known})
        told = {"id": model.name, "object": "model", "created": self.started, "owned_by": "varjax"}
        told |= {"family": model.family.name, "size": self.size, "draws": g.kind}
        told |= {"classes": self.subjects.names, "examples": self.subjects.examples}
        told |= {"layers": g.num_layers, "heads": g.num_heads, "most_images": self.batcher.most}
        told |= self.cost(usual, self.programs.seconds)
        return told | {"maps": model.config.token_maps, "policies": policies, "sampling": sampling}


@dataclass(frozen=True, eq=False, kw_only=True)
class Order:
    """A request that was accepted, and when (`time.monotonic`). seed: unless one was asked for."""

    service: Service
    asked: ImageRequest
    choice: Choice
    condition: PyTree
    patch: Patch | None
    seed: int
    started: float = field(default_factory=time.monotonic)

    async def seen(self) -> AsyncIterator[str | tuple[int, Preview | Drawn]]:
        """What comes, in its order: words about what is waited for, previews if the request wants
        events, pictures, by number. Closing it takes back what nobody draws yet."""
        service, asked, loop = self.service, self.asked, asyncio.get_running_loop()
        program, found = None, asyncio.Queue()
        if self.choice != service.programs.usual or asked.stream or asked.kept:
            compiling = asyncio.ensure_future(service.programs.program(self.choice))
            try:
                while not (await asyncio.wait([compiling], timeout=LOOKING))[0]:
                    yield self._waiting(f"compiling the program of {self.choice.policy.name}, once")
                program = compiling.result()
            finally:
                compiling.cancel()

        def hear(index: int, *what) -> None:  # on another thread
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(found.put_nowait, (index, what))

        rest = self.condition, self.seed
        heard = [partial(hear, i) if asked.stream else None for i in range(asked.n)]
        items = [Item(*rest, i, self.patch, program, h, asked.kept) for i, h in enumerate(heard)]
        show = [previews(service.model, asked.partial_images) for _ in items]
        futures = service.batcher.put(items)
        for index, future in enumerate(futures):
            future.add_done_callback(lambda done, index=index: found.put_nowait((index, done)))
        try:
            left = len(futures)
            while left:
                try:
                    index, what = await asyncio.wait_for(found.get(), LOOKING)
                except TimeoutError:
                    yield self._waiting(f"waiting, {service.batcher.depth} pictures wait")
                    continue
                if isinstance(what, asyncio.Future):
                    left -= 1
                    yield index, what.result()
                elif preview := await asyncio.to_thread(show[index], *what):
                    yield index, preview
        finally:
            for future in futures:
                future.cancel()

    def _waiting(self, words: str) -> str:
        seconds = self.service.seconds
        if time.monotonic() > self.started + seconds:
            raise Refused(504, f"no picture within {seconds:g} s: try again later")
        return words

    async def whole(self, went_away: Callable[[], Awaitable[bool]]) -> dict:
        """The answer with all pictures (`requests.Pictures`). went_away: asked now and then about
        the client."""
        drawn: dict[int, Drawn] = {}
        async with contextlib.aclosing(self.seen()) as seen:
            async for what in seen:
                if not isinstance(what, str):
                    drawn[what[0]] = what[1]
                elif await went_away():
                    raise Refused(408, "the client went away")
        seconds = sum({one.batch: one.seconds for one in drawn.values()}.values())
        told = partial(self.service.picture, self.asked, self.seed)
        data = [await asyncio.to_thread(told, drawn[index]) for index in range(self.asked.n)]
        head = {"created": int(time.time()), "size": self.service.size, "output_format": "png"}
        return head | self.service.cost(self.choice, seconds) | {"data": data}

    async def events(self) -> AsyncIterator[str]:
        """Events of OpenAI's API: previews of every picture, then the picture. Comments, which
        clients leave out, say what is waited for. What goes wrong is the last event."""
        kind = "image_edit" if isinstance(self.asked, EditRequest) else "image_generation"
        common = {"created_at": int(time.time()), "size": self.service.size, "quality": "auto"}
        common |= {"background": "opaque", "output_format": "png"}
        try:
            with self.service.batcher.room(self.asked.n):
                async with contextlib.aclosing(self.seen()) as seen:
                    count = [0] * self.asked.n
                    async for what in seen:
                        if isinstance(what, str):
                            yield f": {what}\n\n"
                            continue
                        (index, one), told = what, {"type": f"{kind}.completed", "index": what[0]}
                        if isinstance(one, Preview):
                            told["type"] = f"{kind}.partial_image"
                            told["partial_image_index"] = count[index]
                            count[index] += 1
                            told |= {"progress": one.part, "says": one.words}
                            png = await asyncio.to_thread(pictures.png, one.picture, LEVEL)
                            told["b64_json"] = base64.b64encode(png).decode()
                        else:
                            drawn = self.asked, self.seed, one
                            told |= await asyncio.to_thread(self.service.picture, *drawn)
                            told |= self.service.cost(self.choice, one.seconds)
                        yield event(common | told)
        except Exception as error:
            found = refused(error)
            if found.status_code == 500:
                LOG.exception("drawing failed")
            yield event(content(found))
