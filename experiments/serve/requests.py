"""Requests for pictures, as clients of OpenAI's images API send them, and answers.

Field names are OpenAI's where OpenAI has the field. Of its fields that mean nothing here only the
values are taken that ask for nothing special; all else is refused by name, so that nobody waits for
an effect that does not come.
"""

import json
from collections.abc import Callable
from typing import Annotated, Literal

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, BeforeValidator, Field, ValidationError, model_validator
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect

from experiments.serve.guard import MOST_FORM, MOST_JSON, Refused
from experiments.serve.subjects import MOST_CHARACTERS
from varjax.core.errors import nearest, show
from varjax.storage.manifest import parse_json

FILES = ("image", "mask")
_read = lambda given: json.loads(given) if isinstance(given, str) else given  # noqa: E731
Value = bool | int | float | str
Text = Annotated[str, Field(max_length=MOST_CHARACTERS)]


class ImageRequest(BaseModel):
    """A request for pictures. What only the model knows is checked later."""

    model_config = {"extra": "forbid", "strict": True, "allow_inf_nan": False}

    @model_validator(mode="before")
    @classmethod
    def _given(cls, fields: object) -> object:
        """Drops fields that are null."""
        if not isinstance(fields, dict):
            return fields
        return {name: value for name, value in fields.items() if value is not None}

    prompt: Text | None = Field(None, description="Words, or a class.")
    label: int | None = Field(None, alias="class", description="Number of a class.")
    n: int = Field(1, ge=1, description="Pictures.")
    seed: int | None = Field(None, ge=0, lt=2**31, description="Without it any, and told.")
    size: str | None = Field(None, description="Width x height, that of the model, or auto.")
    policy: str | None = Field(None, description="How the KV cache is compressed (/v1/models).")
    budget: float | None = Field(None, gt=0, le=1, description="Part of the full cache's bytes.")
    policy_args: Annotated[dict[str, Value], BeforeValidator(_read)] = Field(
        {}, description="Further arguments of the policy; in a form as JSON."
    )
    cfg: float | None = Field(None, description="Guidance strength.")
    tau: float | None = Field(None, description="Temperature.")
    top_k: int | None = Field(None, description="Keep the k best tokens; 0: all.")
    top_p: float | None = Field(None, description="Nucleus; 0: all.")
    greedy: bool | None = Field(None, description="Always the best token.")
    kept: bool = Field(False, description="Tell which tokens every head held at the end.")
    tokens: bool = Field(False, description="Tell the tokens that were drawn.")
    stream: bool = Field(False, description="Answer with events.")
    partial_images: int | None = Field(None, ge=0, description="Previews, at most.")
    model: str | None = Field(None, description="The model's name (/v1/models).")
    user: Text | None = Field(None, description="Not looked at.")
    response_format: Literal["b64_json"] | None = None
    output_format: Literal["png"] | None = None
    output_compression: Literal[100] | None = None
    background: Literal["auto", "opaque"] | None = None
    quality: Literal["auto", "standard"] | None = None
    moderation: Literal["auto", "low"] | None = None


class EditRequest(ImageRequest):
    """A form: these fields, and the files image and mask (white, or transparent, is drawn)."""

    paste: bool = Field(True, description="Put the picture's own pixels back outside the mask.")
    feather: float = Field(0, ge=0, le=64, description="Pixels of a soft seam outside the mask.")
    input_fidelity: Literal["low"] | None = None


class Picture(BaseModel):
    """A PNG as base64, and the seed it was drawn with. kept: bits [layers, heads, tokens], base64,
    the first in the highest bit: the tokens that every head held when the last scale (or token) was
    drawn. tokens: little-endian numbers, base64, with shape and dtype."""

    b64_json: str
    seed: int
    kept: dict[str, int | str] | None = None
    tokens: dict[str, str | list[int]] | None = None


class Pictures(BaseModel):
    """The answer to a request for pictures: how they were drawn, the bytes of keys and values that
    one takes and those of a full cache, the seconds of the batches that they were drawn in."""

    created: int
    size: str
    policy: str
    budget: float
    policy_args: dict[str, Value]
    kv_bytes: int
    dense_bytes: int
    seconds: float
    data: list[Picture]


class Errors(BaseModel):
    """The form of every answer that is no picture: message, type, and the field it is about."""

    error: dict[str, str | None]


class _StrictRequest(Request):
    """A request whose JSON has every field once."""

    async def json(self) -> object:
        try:
            return parse_json((await self.body()).decode())
        except ValueError as error:  # also of bytes that are no text
            words = f"the body cannot be read ({error!s:.80}): send an object of fields as JSON"
            raise Refused(400, words) from None


class StrictRoute(APIRoute):
    """A route whose JSON is read strictly."""

    def get_route_handler(self) -> Callable:
        handler = super().get_route_handler()

        async def strict(request: Request) -> Response:
            return await handler(_StrictRequest(request.scope, request.receive))

        return strict


class _InMemory(MultiPartParser):
    """A form of which nothing is written to a disk. whole: whether its end has come."""

    spool_max_size, whole = 2 * MOST_FORM, False

    def on_end(self) -> None:
        self.whole = True


async def read_form(request: Request) -> tuple[EditRequest, dict[str, bytes]]:
    """The checked fields of an edit, and its files. `Refused` for a form that is none, was cut off
    or has a field twice."""
    limits = {"max_files": 4, "max_fields": 64, "max_part_size": MOST_JSON}
    parser, found = _InMemory(request.headers, request.stream(), **limits), {}
    try:
        form = await parser.parse()
    except ClientDisconnect:
        raise Refused(408, "the client went away") from None
    except (MultiPartException, KeyError, ValueError) as error:
        words = f"the form cannot be read: {getattr(error, 'message', '')!s:.120}"
        raise Refused(400, words) from None
    if not parser.whole:
        raise Refused(400, "the form ends before its last boundary: it was cut off")
    for name, value in form.multi_items():
        name = name.removesuffix("[]")  # OpenAI's clients name a list of pictures image[]
        if name in found:
            raise Refused(400, f"{name[:100]} is there twice: send each field once", name)
        found[name] = await value.read() if isinstance(value, UploadFile) else value
    files = {name: found.pop(name, None) for name in FILES}
    try:
        asked = EditRequest.model_validate(found, strict=False)
    except ValidationError as error:
        raise wrong(error, EditRequest) from None
    for name, data in files.items():
        if not isinstance(data, bytes):
            raise Refused(422, f"{name} is missing: send it as a file of the form", name)
    return asked, files


def wrong(error: ValidationError | RequestValidationError, kind: type[BaseModel]) -> Refused:
    """The first thing that is wrong with a request, and its field."""
    first = error.errors()[0]
    place = [part for part in first["loc"] if part != "body"]
    if not place or not isinstance(place[0], str):
        return Refused(400, "send an object of fields as JSON")
    name, reason = place[0], first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        known = sorted(field.alias or n for n, field in kind.model_fields.items())
        words = f"there is no field {show(name)}: choose of {', '.join(known)}"
        return Refused(422, words + nearest(name, known), name)
    reason = f"{reason[:1].lower()}{reason[1:]}"
    return Refused(422, f"{name}={show(first.get('input'))}: {reason}", name)
