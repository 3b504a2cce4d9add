"""Templates of the pages: values are escaped, and a missing one is an error."""

import pathlib

import jinja2


def template(name: str) -> jinja2.Template:
    """Return a template of this folder."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(pathlib.Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"ensure_ascii": False, "separators": (",", ":")}
    return environment.get_template(name)
