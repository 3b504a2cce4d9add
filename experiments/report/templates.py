"""Templates of the pages: values are escaped, and a missing one is an error."""

import pathlib

import jinja2


def template(name: str, **dumps) -> jinja2.Template:
    """Return a template of this folder. dumps: how `tojson` writes, as for `json.dumps`."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(pathlib.Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"ensure_ascii": False, **dumps}
    return environment.get_template(name)
