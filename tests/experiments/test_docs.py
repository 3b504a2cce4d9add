"""docs/: links lead somewhere, every flag is named, and only flags that there are."""

import importlib
import re

import pytest

from experiments.__main__ import commands
from tests.conftest import ROOT

PAGES = [ROOT / "README.md", ROOT / "WORKSPACE.md", *sorted((ROOT / "docs").rglob("*.md"))]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
CODE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
COMMAND = re.compile(r"python -m (experiments\.\w+|ported_weights)((?:[^\n]*\\\n)*[^\n]*)")
GENERAL = {"help", "version"}


def anchors(text: str) -> set[str]:
    """What headings are called in links, as GitHub does it."""
    titles = re.findall(r"^#+ (.*)$", CODE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_links_lead_somewhere(page):
    for address in LINK.findall(CODE.sub("", page.read_text("utf-8"))):
        if address.startswith(("http://", "https://")):
            continue
        path, _, anchor = address.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), address
        assert not anchor or anchor in anchors(target.read_text("utf-8")), address


def test_pages_that_the_code_names_exist():
    for place in ("varjax", "experiments", "ported_weights", "pallas_kernels"):
        for path in (ROOT / place).rglob("*"):
            if path.suffix in (".py", ".json", ".md"):
                for name in re.findall(r"docs/[\w/]+\.md", path.read_text("utf-8")):
                    assert (ROOT / name).exists(), (path, name)


def flags_of(command: str) -> set[str]:
    package = importlib.import_module(command)
    module = f"{command}.__main__" if hasattr(package, "__path__") else command
    return set(importlib.import_module(module).FLAGS.values)


@pytest.mark.parametrize("command", commands())
def test_the_reference_names_every_flag(command):
    page = (ROOT / "docs" / "reference" / "commands.md").read_text("utf-8")
    text = page.split(f"\n## {command}\n")[1].split("\n## ")[0]
    named = set(re.findall(r"(?<![\w-])--(\w+)", text))
    assert named - GENERAL == flags_of(command) - GENERAL


def test_commands_as_written_have_these_flags():
    known = {command: flags_of(command) | GENERAL for command in commands()}
    for page in PAGES:
        for command, rest in COMMAND.findall(page.read_text("utf-8")):
            words = re.split(r"`|\s#|\)", rest)[0]
            for flag in re.findall(r"(?<![\w-])--(\w+)", words):
                plain = flag.removeprefix("no")
                assert {flag, plain} & known[command], (page.name, command, flag)
