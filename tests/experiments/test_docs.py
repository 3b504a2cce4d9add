"""docs/: links lead somewhere, every flag is named, and only flags that there are."""

import importlib
import re

import pytest

from experiments.__main__ import commands, short_names
from tests.conftest import ROOT

PAGES = [ROOT / "README.md", ROOT / "WORKSPACE.md", *sorted((ROOT / "docs").rglob("*.md"))]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
CODE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
PACKAGES = ("varjax", "experiments", "ported_weights", "pallas_kernels")
LINK = re.compile(r"\]\(([^)\s]+)\)")
SHORT = short_names()
NAMED = f"(?:python -m |varjax )({'|'.join([*commands(), *SHORT]).replace('.', '[.]')})"
COMMAND = re.compile(rf"{NAMED}\b((?:[^\n]*\\\n)*[^\n]*)")
PLACE = re.compile(rf"`((?:tests|docs|{'|'.join(PACKAGES)})/[\w./-]+\.(?:py|md|json|ipynb))`")
FLAG = re.compile(r"(?<![\w-])--(\w+)")
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
    for place in PACKAGES:
        for path in (ROOT / place).rglob("*"):
            if path.suffix in (".py", ".json", ".md"):
                for name in re.findall(r"docs/[\w/]+\.md", path.read_text("utf-8")):
                    assert (ROOT / name).exists(), (path, name)


def test_files_that_the_pages_name_exist():
    for page in PAGES:
        for name in PLACE.findall(page.read_text("utf-8")):
            assert "NAME" in name or (ROOT / name).exists(), (page.name, name)


@pytest.mark.parametrize("command", commands())
def test_pages_that_help_names_for_a_flag_have_it(command):
    module = module_of(command)
    texts = re.split(r"\.\s|\n\n", module.__doc__)
    texts += [f"--{name} {module.FLAGS.values[name].help}" for name in module.FLAGS.values]
    for text in texts:
        for page in re.findall(r"docs/[\w/]+\.md", text):
            there = set(FLAG.findall((ROOT / page).read_text("utf-8")))
            assert set(FLAG.findall(text)) <= there, (text, page)


def module_of(command: str):
    package = importlib.import_module(command)
    name = f"{command}.__main__" if hasattr(package, "__path__") else command
    return importlib.import_module(name)


def flags_of(command: str) -> set[str]:
    return set(module_of(command).FLAGS.names())


def shared(page: str, text: str) -> set[str]:
    """Flags of the groups that a command's section names."""
    named = set()
    for group, but in re.findall(r"(\w+)(?: \(not ([^)]*)\))?[,.]", text):
        rows = page.split(f"\n### {group}\n")[1].split("\n##")[0]
        there = re.findall(r"^\| `--(\w+)", rows, re.MULTILINE)
        named |= set(there) - set(FLAG.findall(but))
    return named


@pytest.mark.parametrize("command", commands())
def test_the_reference_names_every_flag(command):
    page = (ROOT / "docs" / "reference" / "commands.md").read_text("utf-8")
    text = page.split(f"\n## {command}\n")[1].split("\n## ")[0]
    own, _, groups = text.partition("\nGroups: ")
    named = set(FLAG.findall(own)) | shared(page, groups)
    assert named - GENERAL == flags_of(command) - GENERAL


def test_commands_as_written_have_these_flags():
    known = {command: flags_of(command) | GENERAL for command in commands()}
    code = [path for place in PACKAGES for path in (ROOT / place).rglob("*.py")]
    for page in (*PAGES, *code):
        for command, rest in COMMAND.findall(page.read_text("utf-8")):
            words = re.split(r"`|\s#|\)", rest)[0]
            for flag in FLAG.findall(words):
                forms = {flag, flag.removeprefix("no")}
                assert forms & known[SHORT.get(command, command)], (page.name, command, flag)
