"""Bodies of requests, read whole. `experiments.serve.guard` limits their bytes and seconds."""

from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException
from starlette.requests import ClientDisconnect, Request

from experiments.serve.guard import MOST_JSON
from experiments.serve.requests import BadRequest

FILES = ("image", "mask")


async def body(request: Request) -> bytes:
    """The body. `BadRequest` if the client goes away meanwhile."""
    try:
        # `request.body()` would keep it as long as the request is answered
        return b"".join([part async for part in request.stream()])
    except ClientDisconnect:
        raise BadRequest(408, "the client went away") from None


async def form(request: Request) -> dict[str, str | bytes]:
    """The fields of a form, files as bytes. `BadRequest` if it is none, or has a field twice."""
    if "multipart/form-data" not in request.headers.get("content-type", "").lower():
        raise BadRequest(400, "send a form (multipart/form-data) with the files image and mask")
    content = await body(request)

    async def receive():
        return {"type": "http.request", "body": content, "more_body": False}

    parsed = Request(request.scope, receive)
    try:
        async with parsed.form(max_files=4, max_fields=32, max_part_size=MOST_JSON) as found:
            return await _once(found.multi_items())
    except (MultiPartException, HTTPException, KeyError, ValueError) as error:
        reason = getattr(error, "message", None) or getattr(error, "detail", "")
        raise BadRequest(400, f"the form cannot be read: {reason!s:.120}") from None


async def _once(parts: list[tuple[str, UploadFile | str]]) -> dict[str, str | bytes]:
    """{name: content}, none of which is there twice."""
    found = {}
    for name, value in parts:
        name = name.removesuffix("[]")  # OpenAI's clients name a list of pictures image[]
        if name in found:
            one = "one picture is edited, in one mask: send" if name in FILES else "give"
            raise BadRequest(400, f"{name[:100]} is there twice: {one} each once", name)
        found[name] = await value.read() if isinstance(value, UploadFile) else value
    return found
