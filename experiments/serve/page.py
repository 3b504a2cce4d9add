"""The page: a picture beside that of the full cache, while it is drawn; and editing.

Made with gradio, mounted at / beside the API. What a visitor types or uploads is escaped before it
is shown, names no file, and reaches no template. Fonts and scripts come from this server alone.
"""

import contextlib
import html
import threading
from collections.abc import Callable, Iterator

import gradio as gr
import numpy as np
from fastapi import FastAPI
from PIL import Image

from experiments.serve import look, shown, typed
from experiments.serve.api import MOST_UPLOAD_PIXELS, Service
from experiments.serve.drawer import Patch
from experiments.serve.guard import UPLOAD, most_bytes
from experiments.serve.shown import SHOWN, large
from experiments.serve.studio import Choice, Drawn, Studio
from experiments.serve.typed import FULL, LOWER, WAYS
from varjax.errors import UserError
from varjax.generator import Generator
from varjax.sampling import Sampling

GALLERY = 24  # pictures that are kept of a visitor
SESSIONS, SESSION = (
    64,
    3600,
)  # visitors of whom they are, and seconds after which they are forgotten
CACHE = 600, 3600  # seconds between two looks for old files, and after which they are old
VISITORS, JOBS = 32, 8  # that may wait, and that are served at once
USUAL, USUAL_BUDGET = "headkv", 0.25


def mount(app: FastAPI, service: Service, make: Callable[..., Generator]) -> FastAPI:
    """Mount the page at /. make: as in `Studio`."""
    Image.MAX_IMAGE_PIXELS = MOST_UPLOAD_PIXELS // 2  # pillow refuses twice as many
    studio = Studio(service, make)
    service.closing.append(studio.close)
    page = Page(service, studio)
    blocks = page.build()
    blocks.state_session_capacity = SESSIONS
    blocks.queue(max_size=VISITORS, default_concurrency_limit=JOBS, api_open=False)
    mounted = gr.mount_gradio_app(
        app,
        blocks,
        path="/",
        show_error=False,  # messages of ours are shown anyway; others would show internals
        max_file_size=most_bytes(UPLOAD),  # not less: the guard refuses, in its own form
        ssr_mode=False,
        theme=gr.themes.Default(**look.FONTS),
        css=look.CSS,
        js=look.SCRIPT,
        footer_links=[],
    )
    (page_app,) = (r.app for r in app.routes if isinstance(getattr(r, "app", None), gr.routes.App))
    # every open page holds a connection, which ends then: else the end would wait for visitors
    service.closing.append(page_app.stop_event.set)
    return mounted


class Page:
    """What the page shows, and what it does."""

    def __init__(self, service: Service, studio: Studio):
        self.service, self.studio, self.model = service, studio, service.model
        self.names = service.subjects.names
        sampling = self.model.sampling()
        one = lambda value: value if isinstance(value, (int, float)) else None  # noqa: E731
        self.cfg, self.tau = one(sampling.cfg), one(sampling.tau)
        self.sampling = sampling
        self._stops: dict[str, threading.Event] = {}  # of the jobs in progress, by visitor and tab
        self.policies = studio.offered(USUAL_BUDGET)
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
            tau = gr.Number(self.tau, label="Temperature (tau; empty: the checkpoint's)")
            top_k = gr.Number(self.sampling.top_k, label="Keep the k best (top_k; 0: all)")
            top_p = gr.Slider(0, 1, self.sampling.top_p, step=0.01, label="Nucleus (top_p; 0: all)")
            greedy = gr.Checkbox(False, label="Always the best token (greedy)")
        return [seed, policy, budget, cfg, tau, top_k, top_p, greedy]

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
        kept = gr.State([], time_to_live=SESSION)
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
        self.studio.prepare([usual, typed.choice(FULL, None, self.sampling)])

    def draw(
        self, subject, seed, policy, budget, cfg, tau, top_k, top_p, greedy, kept
    ) -> Iterator[tuple]:
        """Draw with the policy, then with the full cache; yields what is shown."""
        with shown.told():
            condition = self._condition(subject)
            seed = typed.seed(seed)
            sampling = self._sampling(cfg, tau, top_k, top_p, greedy)
            mine, full = typed.choice(policy, budget, sampling), typed.choice(FULL, None, sampling)
            found, nothing = {}, (gr.skip(),) * 2
            for name, choice in (("mine", mine), ("full", full)):
                for seen in self.studio.draw(choice, condition, seed):
                    if isinstance(seen, Drawn):
                        found[name] = seen
                    seen_now = shown.shown(seen)
                    pair = (*seen_now, *nothing) if name == "mine" else (*nothing, *seen_now)
                    yield shown.line(choice, seed, seen), *pair, *(gr.skip(),) * 3
            words = shown.compared(found["mine"], found["full"])
            kept = [*shown.pair(found, subject, seed, policy), *kept][:GALLERY]
            mine_shown = large(found["mine"].picture), words
            full_shown = large(found["full"].picture), shown.cost(found["full"])
            gallery = [(large(picture), caption) for picture, caption in kept]
            done = f"Seed {seed}: done."
            yield done, *mine_shown, *full_shown, found["mine"].keeps, gallery, kept

    def edit(
        self, canvas, way, subject, paste, seed, policy, budget, cfg, tau, top_k, top_p, greedy
    ) -> Iterator[tuple]:
        """Edit the picture on the canvas."""
        with shown.told():
            picture, drawn, done_to_it = typed.canvas(canvas, way, self.model.pixels)
            condition, seed = self._condition(subject), typed.seed(seed)
            choice = typed.choice(policy, budget, self._sampling(cfg, tau, top_k, top_p, greedy))
            hole = np.where(drawn[..., None], np.uint8(255), picture)
            before = large(hole), f"{drawn.mean():.0%} are drawn anew{done_to_it}"

            def patch() -> Patch:
                return Patch.of(self.model, picture, drawn, bool(paste))

            for seen in self.studio.draw(choice, condition, seed, patch):
                after = shown.shown(seen)
                yield shown.line(choice, seed, seen), *before, *after
            yield f"Seed {seed}: done.", *before, *after

    def _condition(self, subject):
        if not isinstance(subject, str) or not subject.strip():
            raise UserError("say what to draw")
        return self.service.subjects.of(subject, None)

    def _sampling(self, cfg, tau, top_k, top_p, greedy) -> Sampling:
        found = {"top_k": typed.whole("top_k", top_k), "top_p": top_p, "greedy": bool(greedy)}
        for name, value in (("cfg", cfg), ("tau", tau)):
            found[name] = None if value is None else float(value)
        return self.model.sampling(**found)


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
