"""Page of the server: one file that speaks to the API alone; the pictures of its first view, one of
each class (or example prompt), which the server draws by itself after its start, as long as that
takes little time; and a description of the API."""

import asyncio
import base64
import contextlib
import hashlib
import html
import pathlib
import re
import time

from fastapi.responses import HTMLResponse

from experiments.serve.drawing import Item
from experiments.serve.guard import Refused
from experiments.serve.programs import Choice
from experiments.serve.service import LEVEL, Service
from varjax.core.errors import UserError
from varjax.storage import pictures

SEED, FULL = 0, "full"
SECONDS, MOST = 20.0, 256  # of drawing for all pictures, and pictures
LARGEST = 128  # pixels
IDLE = 0.2  # seconds between two looks whether anybody else draws
DONE = -1  # its number says that all are there
FILE = pathlib.Path(__file__).with_name("page.html")
RULES = (
    "default-src 'none'; img-src 'self' blob: data:; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {"Cache-Control": "no-cache", "Referrer-Policy": "no-referrer"}
HEADERS |= {"X-Content-Type-Options": "nosniff", "Cross-Origin-Opener-Policy": "same-origin"}


def answer() -> HTMLResponse:
    """The page, of which no script and no style runs but those of its file."""
    text, rules = FILE.read_text("utf-8"), [RULES]
    for kind, part in re.findall(r"<(script|style)>(.*?)</\1>", text, re.DOTALL):
        digest = base64.b64encode(hashlib.sha256(part.encode()).digest()).decode()
        rules.append(f"{kind}-src 'sha256-{digest}'")
    return HTMLResponse(text, headers=HEADERS | {"Content-Security-Policy": "; ".join(rules)})


def _names(service: Service) -> list[str]:
    return (service.subjects.names or service.subjects.examples)[:MOST]


def listed(service: Service) -> dict:
    """The pictures that are there by now, as /v1/gallery lists them."""
    names, found = _names(service), sorted(set(service.gallery) - {DONE})
    data = [{"number": n, "name": names[n], "seed": SEED, "url": f"/v1/gallery/{n}"} for n in found]
    return {"object": "list", "complete": DONE in service.gallery, "data": data}


async def prepare(service: Service) -> None:
    """Compile what will soon be asked for, then draw the pictures while nobody else draws."""
    programs, names, first, spent = service.programs, _names(service), 0, 0.0
    if names and FULL in service.offered:
        with contextlib.suppress(UserError):  # that request will be told
            await programs.program(Choice(service.offered[FULL], programs.usual.sampling))
    await programs.compile_more()
    while first < len(names) and spent < SECONDS:
        numbers, start = range(first, min(first + programs.largest, len(names))), time.monotonic()
        try:
            with service.batcher.room(len(numbers), idle=True):
                await _draw(service, names, numbers)
        except Refused:  # others come first
            await asyncio.sleep(IDLE)
            continue
        first, spent = numbers.stop, spent + time.monotonic() - start
    service.gallery[DONE] = b""


async def _draw(service: Service, names: list[str], numbers: range) -> None:
    of = service.subjects.of
    conditions = [await asyncio.to_thread(of, names[number], None) for number in numbers]
    futures = service.batcher.put([Item(condition, SEED, 0) for condition in conditions])
    for number, future in zip(numbers, futures, strict=True):
        picture = (await future).picture
        part = min(1, LARGEST / max(picture.shape[:2]))
        size = tuple(max(1, round(part * length)) for length in picture.shape[:2])
        small = picture if part == 1 else pictures.fit_picture(picture, size)
        service.gallery[number] = pictures.png(small, LEVEL)


def described(api: dict) -> str:
    """An OpenAPI description for people: no script, nothing from elsewhere."""
    parts = ["<!doctype html><html lang='en'><title>API</title><a href='/openapi.json'>JSON</a>"]
    routes = [(p, m, told) for p, methods in api["paths"].items() for m, told in methods.items()]
    for path, method, told in routes:
        words = told.get("description", told["summary"])
        parts.append(f"<h2>{method.upper()} {html.escape(path)}</h2><p>{html.escape(words)}</p>")
        for body in told.get("requestBody", {}).get("content", {}).values():
            name = body["schema"].get("$ref", "").rpartition("/")[2]
            schema = api["components"]["schemas"][name] if name else body["schema"]
            for field, about in schema["properties"].items():
                line = f"{field}: {about.get('description', '')}"
                parts.append(f"<li>{html.escape(line)}</li>")
    return "".join(parts)
