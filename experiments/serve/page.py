"""The page: a picture beside that of the full cache, while it is drawn; and editing.

Made with gradio, mounted at / beside the API. What a visitor types or uploads is escaped before it
is shown, names no file, and reaches no template. Fonts and scripts come from this server alone.
"""

import contextlib
import html
import secrets
import threading
from collections.abc import Callable, Iterator

import gradio as gr
import numpy as np
from fastapi import FastAPI
from PIL import Image

from experiments.serve.api import MOST_UPLOAD_PIXELS, Service
from experiments.serve.batcher import Closed, QueueFull
from experiments.serve.drawer import Patch
from experiments.serve.requests import LARGEST_SEED
from experiments.serve.studio import Choice, Drawn, Preview, Studio, Waiting
from varjax import metrics
from varjax.engine.memory import show_bytes
from varjax.errors import UserError
from varjax.generator import Generator
from varjax.io import pictures
from varjax.policies import POLICIES
from varjax.sampling import Sampling

MOST_FILE = "16mb"  # of an upload
SHOWN = 384  # pixels of a picture on the page: small ones are enlarged without smoothing
GALLERY = 24  # pictures that are kept
CACHE = 600, 3600  # seconds between two looks for old files, and after which they are old
VISITORS, JOBS = 32, 8  # that may wait, and that are served at once
FULL, USUAL, USUAL_BUDGET = "full", "headkv", 0.25
NEEDS_FILES = ("table", "compose")  # policies that the page cannot ask for
PAINTED, LOWER, MIDDLE = WAYS = ("what I paint", "the lower half", "the middle")
CSS = """
.picture img {image-rendering: pixelated}
.keeps {overflow-x: auto}
.keeps svg {max-width: none; background: white}
footer {display: none !important}
"""
FONTS = {"font": ["system-ui", "sans-serif"], "font_mono": ["ui-monospace", "monospace"]}


def mount(app: FastAPI, service: Service, make: Callable[..., Generator]) -> FastAPI:
    """Mount the page at /. make: as in `Studio`."""
    Image.MAX_IMAGE_PIXELS = MOST_UPLOAD_PIXELS // 2  # pillow refuses twice as many
    studio = Studio(service, make)
    service.closing.append(studio.close)
    page = Page(service, studio)
    blocks = page.build()
    blocks.queue(max_size=VISITORS, default_concurrency_limit=JOBS, api_open=False)
    key = service.api_key
    return gr.mount_gradio_app(
        app,
        blocks,
        path="/",
        auth=None if key is None else (lambda user, given: _same(given, key)),
        auth_message="Any name, and the server's API key as password.",
        show_error=False,  # messages of ours are shown anyway; others would show internals
        max_file_size=MOST_FILE,
        ssr_mode=False,
        theme=gr.themes.Default(**FONTS),
        css=CSS,
        footer_links=[],
    )


def _same(given: str, key: str) -> bool:
    return secrets.compare_digest(given.encode(), key.encode())


class Page:
    """What the page shows, and what it does."""

    def __init__(self, service: Service, studio: Studio):
        self.service, self.studio, self.model = service, studio, service.model
        self.names = service.subjects.names
        sampling = self.model.sampling()
        self.cfg = sampling.cfg if isinstance(sampling.cfg, float) else None
        self.sampling = sampling
        self._stops: dict[str, threading.Event] = {}  # of the jobs in progress, by visitor and tab
        self.policies = [name for name in POLICIES if name not in NEEDS_FILES]
        self.usual = USUAL if USUAL in self.policies else self.policies[0]

    # --- what it is made of -----------------------------------------------------------------------

    def build(self) -> gr.Blocks:
        model = self.model
        with gr.Blocks(title="varjax", analytics_enabled=False, delete_cache=CACHE) as blocks:
            height, width = model.pixels
            gr.Markdown(
                f"# varjax\n{html.escape(model.name)}: {width} x {height} pixels. Compress the KV "
                "cache, and see what it costs: the same seed with the full cache is beside it."
            )
            with gr.Tab("Draw"):
                self._draw_tab()
            with gr.Tab("Edit"):
                self._edit_tab()
            blocks.load(self.prepare, queue=False, api_visibility="private")
        return blocks

    def _subject(self) -> gr.Textbox:
        label = "Class (name or number)" if self.names else "Prompt"
        first = self.names[0] if self.names else "a red apple on a white table"
        return gr.Textbox(first, label=label, max_lines=1, submit_btn=False, max_length=4000)

    def _examples(self, subject: gr.Textbox, elem_id: str) -> None:
        names = self.names or ["a red apple on a white table", "a lighthouse at night"]
        some = names[:: max(1, len(names) // 8)][:8]
        gr.Examples([[name] for name in some], [subject], elem_id=elem_id, label="Examples")

    def _how(self) -> list[gr.components.Component]:
        """Seed, policy, budget, and under Advanced the sampling."""
        seed = gr.Textbox("", label="Seed (empty: any)", max_lines=1, max_length=20)
        with gr.Row():
            policy = gr.Dropdown(self.policies, value=self.usual, label="Policy", filterable=False)
            budget = gr.Slider(0.02, 1, USUAL_BUDGET, step=0.01, label="Budget")
        with gr.Accordion("Advanced", open=False):
            cfg = gr.Number(self.cfg, label="Guidance (cfg; empty: the checkpoint's)")
            top_k = gr.Number(self.sampling.top_k, label="Keep the k best (top_k; 0: all)")
            top_p = gr.Slider(0, 1, self.sampling.top_p, step=0.01, label="Nucleus (top_p; 0: all)")
            greedy = gr.Checkbox(False, label="Always the best token (greedy)")
        return [seed, policy, budget, cfg, top_k, top_p, greedy]

    def _draw_tab(self) -> None:
        with gr.Row():
            with gr.Column(scale=1, min_width=280):
                subject = self._subject()
                how = self._how()
                with gr.Row():
                    go = gr.Button("Draw", variant="primary", elem_id="draw")
                    stop = gr.Button("Cancel", elem_id="cancel")
                self._examples(subject, "examples")
            with gr.Column(scale=2, min_width=280):
                said = gr.Markdown("", elem_id="said")
                with gr.Row():
                    mine, of_mine = _picture("Compressed", "mine")
                    full, of_full = _picture("Full cache", "full")
                with gr.Accordion("What each head keeps", open=False):
                    keeps = gr.HTML("", elem_classes="keeps")
                gallery = gr.Gallery(
                    label="Drawn so far: compressed, full",
                    columns=6,
                    height=240,
                    elem_classes="picture",
                    elem_id="gallery",
                    buttons=["fullscreen"],
                )
        kept = gr.State([])
        outputs = [said, mine, of_mine, full, of_full, keeps, gallery, kept]
        self._on(go, subject, stop, self.draw, [subject, *how, kept], outputs)

    def _edit_tab(self) -> None:
        with gr.Row():
            with gr.Column(scale=1, min_width=280):
                canvas = gr.ImageEditor(
                    label="Upload a picture, and paint over what is to be drawn",
                    type="pil",
                    sources=("upload", "clipboard"),
                    brush=gr.Brush(default_size="auto", colors=["#ff00ff"], color_mode="fixed"),
                    transforms=(),
                    canvas_size=(SHOWN, SHOWN),
                    elem_id="canvas",
                )
                ways = (LOWER,) if self.model.draws_tokens else WAYS
                way = gr.Radio(ways, value=ways[0], label="Draw anew")
                subject = self._subject()
                how = self._how()
                paste = gr.Checkbox(True, label="Keep the picture's own pixels elsewhere")
                with gr.Row():
                    go = gr.Button("Edit", variant="primary", elem_id="edit")
                    stop = gr.Button("Cancel")
            with gr.Column(scale=1, min_width=280):
                said = gr.Markdown("", elem_id="edit-said")
                before, of_before = _picture("The picture, without what is drawn anew", "before")
                after, of_after = _picture("Edited", "after")
        outputs = [said, before, of_before, after, of_after]
        self._on(go, subject, stop, self.edit, [canvas, way, subject, paste, *how], outputs)

    def _on(self, go, subject, stop, do: Callable, inputs: list, outputs: list) -> None:
        """Do it on a click or Enter, until the other button is clicked.

        gradio's own way of cancelling ends its task, but neither the thread that waits for a
        picture nor the place of the event in its queue. So jobs end by themselves when asked to.
        """

        def job(request: gr.Request, *given) -> Iterator[tuple]:
            yield from self._until_stopped(f"{do.__name__} {request.session_hash}", do(*given))

        def ask(request: gr.Request) -> None:
            if found := self._stops.get(f"{do.__name__} {request.session_hash}"):
                found.set()

        hidden = {"api_visibility": "private", "show_progress": "minimal"}
        gr.on(
            [go.click, subject.submit],
            job,
            inputs,
            outputs,
            concurrency_limit=JOBS,
            trigger_mode="multiple",
            **hidden,
        )
        stop.click(ask, None, None, queue=False, **hidden)

    def _until_stopped(self, name: str, steps: Iterator[tuple]) -> Iterator[tuple]:
        """The steps of a job until somebody stops it, or the same visitor starts another one."""
        stop = threading.Event()
        if before := self._stops.get(name):
            before.set()
        self._stops[name] = stop
        try:
            with contextlib.closing(steps):
                for step in steps:
                    if stop.is_set():
                        yield "Cancelled.", *(gr.skip(),) * (len(step) - 1)
                        return
                    yield step
        finally:
            if self._stops.get(name) is stop:
                del self._stops[name]

    # --- what it does -----------------------------------------------------------------------------

    def prepare(self) -> None:
        """Compile what the first visitor will most likely ask for."""
        usual = Choice(self.usual, USUAL_BUDGET, self.sampling)
        self.studio.prepare([usual, _choice(FULL, None, self.sampling)])

    def draw(
        self, subject, seed, policy, budget, cfg, top_k, top_p, greedy, kept
    ) -> Iterator[tuple]:
        """Draw with the policy, then with the full cache; yields what is shown."""
        with _told():
            condition = self._condition(subject)
            seed = _seed(seed)
            sampling = self._sampling(cfg, top_k, top_p, greedy)
            mine, full = _choice(policy, budget, sampling), _choice(FULL, None, sampling)
            found, nothing = {}, (gr.skip(),) * 2
            for name, choice in (("mine", mine), ("full", full)):
                for seen in self.studio.draw(choice, condition, seed):
                    if isinstance(seen, Drawn):
                        found[name] = seen
                    shown = _shown(seen)
                    pair = (*shown, *nothing) if name == "mine" else (*nothing, *shown)
                    yield _line(choice, seed, seen), *pair, *(gr.skip(),) * 3
            words = _compared(found["mine"], found["full"])
            kept = [*_pair(found, subject, seed, policy), *kept][:GALLERY]
            mine_shown = large(found["mine"].picture), words
            full_shown = large(found["full"].picture), _cost(found["full"])
            done = f"Seed {seed}: done."
            yield done, *mine_shown, *full_shown, found["mine"].keeps, kept, kept

    def edit(
        self, canvas, way, subject, paste, seed, policy, budget, cfg, top_k, top_p, greedy
    ) -> Iterator[tuple]:
        """Edit the picture on the canvas."""
        with _told():
            picture, drawn = self._canvas(canvas, way)
            condition, seed = self._condition(subject), _seed(seed)
            choice = _choice(policy, budget, self._sampling(cfg, top_k, top_p, greedy))
            patch = Patch.of(self.model, picture, drawn, bool(paste))
            hole = np.where(drawn[..., None], np.uint8(255), picture)
            before = large(hole), f"{drawn.mean():.0%} are drawn anew"
            for seen in self.studio.draw(choice, condition, seed, patch):
                after = _shown(seen)
                yield _line(choice, seed, seen), *before, *after
            yield f"Seed {seed}: done.", *before, *after

    def _condition(self, subject):
        if not isinstance(subject, str) or not subject.strip():
            raise UserError("say what to draw")
        return self.service.subjects.of(subject, None)

    def _sampling(self, cfg, top_k, top_p, greedy) -> Sampling:
        found = {"top_k": _whole("top_k", top_k), "top_p": top_p, "greedy": bool(greedy)}
        return self.model.sampling(cfg=None if cfg is None else float(cfg), **found)

    def _canvas(self, canvas, way: str) -> tuple[np.ndarray, np.ndarray]:
        """The picture and its mask, in the model's size."""
        background = (canvas or {}).get("background")
        if background is None:
            raise UserError("upload a picture first")
        size = self.model.pixels
        picture = np.asarray(background.convert("RGB"))
        drawn = np.zeros(size, bool)
        if way == LOWER:
            drawn[size[0] // 2 :] = True
        elif way == MIDDLE:
            (h, w) = size
            drawn[h // 4 : h - h // 4, w // 4 : w - w // 4] = True
        else:
            painted = np.zeros(picture.shape[:2], bool)
            for layer in canvas.get("layers") or ():
                painted |= np.asarray(layer.convert("RGBA").resize(background.size))[..., 3] > 127
            drawn = pictures.fit_mask(painted, size)
        if not drawn.any() or drawn.all():
            raise UserError("paint over a part of the picture: that part is drawn anew")
        return pictures.fit_picture(picture, size), drawn


def _picture(label: str, name: str) -> tuple[gr.Image, gr.Markdown]:
    with gr.Column(min_width=240):
        image = gr.Image(
            label=label,
            interactive=False,
            format="png",
            elem_id=name,
            elem_classes="picture",
            buttons=["download", "fullscreen"],
        )
        return image, gr.Markdown("", elem_id=f"of-{name}")


class _told:
    """Turns what a visitor can help into a message on the page, escaped."""

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace) -> None:
        if isinstance(error, (UserError, QueueFull, Closed)):
            raise gr.Error(html.escape(str(error)), print_exception=False) from None


def _seed(text: str | None) -> int:
    text = (text or "").strip()
    if not text:
        return secrets.randbelow(LARGEST_SEED)
    if not text.isdecimal() or len(text) > 10 or int(text) > LARGEST_SEED:
        raise UserError(f"seed {text[:20]!r}: a whole number, 0 to {LARGEST_SEED}, or nothing")
    return int(text)


def _whole(name: str, value: float | None) -> int:
    if value is None or value != int(value):
        raise UserError(f"{name}={value}: a whole number")
    return int(value)


def large(picture: np.ndarray) -> np.ndarray:
    """A small picture enlarged without smoothing, so that its pixels can be compared."""
    times = max(1, SHOWN // max(picture.shape[:2]))
    return picture.repeat(times, axis=0).repeat(times, axis=1)


def _choice(policy: str, budget: float | None, sampling: Sampling) -> Choice:
    """The full cache has one budget only."""
    return Choice(policy, None if policy == FULL else budget, sampling)


def _line(choice: Choice, seed: int, seen: Waiting | Preview | Drawn) -> str:
    """What is going on."""
    words = "drawn" if isinstance(seen, Drawn) else seen.words
    part = f" ({seen.part:.0%})" if isinstance(seen, Preview) else ""
    return f"Seed {seed}, {html.escape(choice.policy)}: {words}{part}"


def _shown(seen: Waiting | Preview | Drawn) -> tuple:
    """A picture and the words under it."""
    if isinstance(seen, Waiting):
        return gr.skip(), gr.skip()
    return large(seen.picture), seen.words if isinstance(seen, Preview) else _cost(seen)


def _cost(drawn: Drawn) -> str:
    part = drawn.num_bytes / max(1, drawn.dense_bytes)
    size = show_bytes(drawn.num_bytes)
    return f"**{size}** of keys and values ({part:.0%}), **{drawn.seconds:.2f} s**"


def _compared(mine: Drawn, full: Drawn) -> str:
    decibels = float(metrics.psnr(full.pixels[None], mine.pixels[None])[0])
    equal = float(metrics.token_agreement(full.tokens, mine.tokens)[0])
    near = f"{decibels:.1f} dB" if np.isfinite(decibels) else "the same picture"
    return f"{_cost(mine)}; beside the full cache: PSNR **{near}**, **{equal:.0%}** equal tokens"


def _pair(found: dict[str, Drawn], subject: str, seed: int, policy: str) -> list[tuple]:
    what = f"{subject[:40]}, seed {seed}"
    return [
        (large(found["mine"].picture), f"{what}, {policy}"),
        (large(found["full"].picture), f"{what}, full"),
    ]
