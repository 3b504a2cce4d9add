"""Pages of the API, made while the site is built: one for each public package, with all names that
it hands out. Texts are the docstrings."""

import ast
import re
from pathlib import Path

import griffe
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
KERNELS = sorted(path.parent.name for path in ROOT.glob("pallas_kernels/*/api.py"))
PACKAGES = ["varjax", "varjax.policies", "varjax.models", "varjax.core"]
PACKAGES += [f"pallas_kernels.{name}.api" for name in KERNELS]
OTHERS = {*PACKAGES, "varjax.core.SCALES", "varjax.core.TOKENS"}  # constants without a text


def public(package: str) -> list[str]:
    """Names that a package imports for its users, or functions that a module defines."""
    place = ROOT / package.replace(".", "/")
    file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    body = ast.parse(file.read_text("utf-8")).body
    if not place.is_dir():
        return [n.name for n in body if isinstance(n, ast.FunctionDef) and n.name[0] != "_"]
    imports = (node for node in body if isinstance(node, ast.ImportFrom))
    return [alias.name for node in imports for alias in node.names]


class Lists(griffe.Extension):
    """Lines `name: text` of docstrings as items of a list."""

    def on_object(self, *, obj: griffe.Object, **_) -> None:
        if obj.docstring:
            items = re.compile(r"^([a-z_]\w*(?:, \w+)*): ", re.MULTILINE)
            obj.docstring.value = items.sub(r"- `\1`: ", obj.docstring.value)


def on_files(files: Files, config) -> Files:
    for package in PACKAGES:
        title = package.removeprefix("pallas_kernels.").removesuffix(".api")
        folder = "kernels/" if package.endswith(".api") else ""
        page = f"api/{folder}{'index' if package == 'varjax' else title}.md"
        names = [f"{package}.{name}" for name in public(package)]
        text = "\n".join(f"::: {name}" for name in names if name not in OTHERS)
        files.append(File.generated(config, page, content=f"# {title}\n\n{text}"))
    return files
