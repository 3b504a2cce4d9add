"""Templates of all pages, and pictures in them. The template engine escapes every text. Only the
charting library, which is code, goes in unescaped."""

import base64
import functools
import io
import pathlib
import re

import jinja2
import markupsafe
import numpy as np
from PIL import Image

SMALL_PICTURE = 160  # pixels: smaller ones are shown with hard edges


@functools.cache
def template(name: str) -> jinja2.Template:
    """Return a template of this folder: values are escaped, and a missing one is an error."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(pathlib.Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"ensure_ascii": False, "separators": (",", ":")}
    environment.globals["library"] = _library
    return environment.get_template(name)


@functools.cache
def _library() -> markupsafe.Markup:
    """Return Vega, Vega-Lite and vega-embed, without anything that could end their script."""
    import vl_convert  # pages without charts need none

    code = vl_convert.javascript_bundle()
    return markupsafe.Markup(re.sub(r"<(?=/script|!--)", r"\\x3c", code, flags=re.IGNORECASE))


def data_uri(pixels: np.ndarray) -> str:
    """Return a data URI with the pixels, uint8 [H, W, 3], as a lossless WebP file."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "webp", lossless=True)
    return "data:image/webp;base64," + base64.b64encode(file.getvalue()).decode("ascii")
