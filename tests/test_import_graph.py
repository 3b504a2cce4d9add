"""Imports go one way: no circle of files or of rooms of varjax, and a wall around its core."""

import ast
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("pallas_kernels", "varjax", "ported_weights", "experiments")
LIBRARIES = {"flax", "jax", "jaxtyping", "numpy"}  # what the core may import beside Python's own
# of the kernels: what their packages hand out, references, and what operations have in common
KERNELS = {"implementations", "projection", "reference", "tables", "target"}
Graph = dict[str, set[str]]  # {file or room: those that it imports}


def module_of(file: Path) -> str:
    words = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(words[:-1] if words[-1] == "__init__" else words)


FILES = {module_of(f): f for name in PACKAGES for f in sorted((ROOT / name).rglob("*.py"))}


def imported(module: str) -> set[str]:
    """Modules and packages that a file imports, also inside its functions and for annotations."""
    found = set()
    for node in ast.walk(ast.parse(FILES[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in FILES else node.module for name in names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found - {module}


def graph_of(part: Callable[[str], str | None]) -> Graph:
    """Imports between parts. part: of a module; None: it is left out."""
    graph: Graph = {}
    for module in FILES:
        if own := part(module):
            others = {part(name) for name in imported(module) if name in FILES}
            graph.setdefault(own, set()).update(others - {None, own})
    return graph


def circles(graph: Graph) -> list[str]:
    """Imports that lead back to where they start."""

    def reached(start: str) -> set[str]:
        found, waiting = set(), [start]
        while waiting:
            new = graph.get(waiting.pop(), set()) - found
            found |= new
            waiting += new
        return found

    far = {part: reached(part) for part in graph}
    edges = [(part, other) for part, others in graph.items() for other in others]
    return [f"{part} -> {other}" for part, other in sorted(edges) if part in far[other]]


def room_of(module: str) -> str | None:
    """The folder or file at the top of varjax; none for `varjax` itself, which hands on names."""
    package, _, rest = module.partition(".")
    return rest.partition(".")[0] if package == "varjax" and rest else None


def test_files_do_not_import_each_other_in_circles():
    assert not circles(graph_of(lambda module: module))


def test_rooms_of_varjax_do_not_import_each_other_in_circles():
    graph = graph_of(room_of)
    assert {"core", "policies", "models", "generation"} <= graph.keys()
    assert not circles(graph)


def test_packages_import_one_way():
    """A command, which nobody imports, may stand above its package."""
    command = lambda module: module.endswith("__main__")  # noqa: E731
    graph = graph_of(lambda module: None if command(module) else module.partition(".")[0])
    for place, package in enumerate(PACKAGES):
        assert graph[package] <= set(PACKAGES[:place]), package


def test_core_imports_nothing_outside_its_wall():
    for module in FILES:
        if room_of(module) != "core":
            continue
        for name in imported(module):
            package, *words = name.split(".")
            inside = name.startswith("varjax.core")
            kernels = package == "pallas_kernels" and (len(words) == 1 or words[-1] in KERNELS)
            python = package in sys.stdlib_module_names
            assert inside or kernels or python or package in LIBRARIES, f"{module}: {name}"
