"""Requests for pictures, as clients of OpenAI's images API send them, checked field by field.

Field names are OpenAI's. `class`, `seed` and `paste` are ours; fields of OpenAI's that mean nothing
here are taken and have no effect. All else is refused, so that a misspelt field is noticed.
"""

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass

from experiments.serve.subjects import checked_prompt
from varjax.errors import UserError, nearest, show

NO_EFFECT = frozenset(
    "background input_fidelity moderation output_compression partial_images quality stream style"
    " user".split()
)
FIELDS = frozenset("prompt class n size seed response_format model output_format".split())
EDIT_FIELDS = FIELDS | {"paste"}
LARGEST_SEED = 2**31 - 1
MOST_DIGITS = 18


class BadRequest(Exception):
    """What is wrong with a request: a status, words for people, and the field that it is about."""

    def __init__(self, status: int, message: str, param: str | None = None):
        super().__init__(message)
        self.status, self.message, self.param = status, message, param


@dataclass(frozen=True)
class ImageRequest:
    """A request, checked but for what only the model knows.

    seed: as given, else drawn at random. paste: of edits.
    """

    prompt: str | None
    label: int | None
    n: int
    seed: int
    paste: bool = True


@dataclass(frozen=True)
class Limits:
    """What a server takes. model: its name. pixels: height and width of its pictures. most: images
    of one request."""

    model: str
    pixels: tuple[int, int]
    most: int

    @property
    def size(self) -> str:
        """Width x height, as OpenAI has it."""
        return f"{self.pixels[1]}x{self.pixels[0]}"


def parse_json(body: bytes) -> Mapping:
    """The fields of a JSON body."""
    try:
        found = json.loads(body, object_pairs_hook=_once)
    except BadRequest:
        raise
    except (ValueError, RecursionError):  # also of bytes that are no text
        raise BadRequest(400, "the body is no JSON: send an object of fields") from None
    if not isinstance(found, dict):
        raise BadRequest(400, f"the body is {show(found)}: send an object of fields, as {{...}}")
    return found


def _once(pairs: list[tuple[str, object]]) -> dict:
    """An object, none of whose fields is there twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise BadRequest(400, "a field is given twice: give each once")
    return found


def parse_form(form: Mapping[str, str]) -> Mapping:
    """The fields of a form, whose numbers are texts."""
    found = dict(form)
    for name in ("n", "seed", "class"):
        text = found.get(name)
        if isinstance(text, str) and text.removeprefix("-").isdecimal() and len(text) < MOST_DIGITS:
            found[name] = int(text)
    if (text := found.get("paste")) is not None:
        words = {"true": True, "false": False, "1": True, "0": False}
        found["paste"] = words.get(str(text).lower(), text)
    return found


def check(fields: Mapping, limits: Limits, *, edit: bool = False) -> ImageRequest:
    """Return the request of these fields; `BadRequest` (422) names the first that is wrong."""
    allowed = EDIT_FIELDS if edit else FIELDS
    for name in fields:
        if name not in allowed | NO_EFFECT:
            close = nearest(name, allowed)
            known = ", ".join(sorted(allowed))
            raise BadRequest(422, f"there is no field {show(name)}: choose of {known}{close}", name)
    given = {name: value for name, value in fields.items() if value is not None}
    _one_of("model", given, (limits.model,))
    _one_of("response_format", given, ("b64_json",))
    _one_of("output_format", given, ("png",))
    _one_of("size", given, (limits.size, "auto"))
    prompt, label = given.get("prompt"), None
    if "class" in given:
        label = _integer("class", given["class"], -LARGEST_SEED, LARGEST_SEED)
    if prompt is not None:
        with field("prompt"):
            prompt = checked_prompt(prompt)
    if prompt is None and label is None:
        raise BadRequest(422, "prompt is missing: say what to draw", "prompt")
    seed = given.get("seed")
    seed = secrets.randbelow(LARGEST_SEED) if seed is None else seed
    paste = given.get("paste", True)
    if not isinstance(paste, bool):
        raise BadRequest(422, f"paste={show(paste)}: true or false", "paste")
    return ImageRequest(
        prompt=prompt,
        label=label,
        n=_integer("n", given.get("n", 1), 1, limits.most),
        seed=_integer("seed", seed, 0, LARGEST_SEED),
        paste=paste,
    )


def _one_of(name: str, given: Mapping, allowed: tuple[str, ...]) -> None:
    if name in given and given[name] not in allowed:
        words = " or ".join(allowed)
        raise BadRequest(422, f"{name}={show(given[name])}: this server has {words}", name)


def _integer(name: str, value: object, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise BadRequest(422, f"{name}={show(value)}: it must be a whole number", name)
    if not low <= value <= high:
        raise BadRequest(422, f"{name}={show(value)}: choose {low} to {high}", name)
    return value


class field:
    """Turns a `UserError` inside into a `BadRequest` about a field."""

    def __init__(self, name: str, status: int = 422):
        self.name, self.status = name, status

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace) -> None:
        if isinstance(error, UserError):
            raise BadRequest(self.status, str(error), self.name) from None
