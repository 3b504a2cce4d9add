"""What messages and pages say of installing: from this folder, never from an index, where a package
called like this project is somebody else's."""

import re

import pytest

from tests.conftest import ROOT
from varjax.storage.values import MissingExtra, require

PLACES = ("varjax", "experiments", "ported_weights", "pallas_kernels", "tests", "docs")
FROM_AN_INDEX = re.compile(r"""pip3? install[^\n`]*?[\s'"]varjax\b(?!/)""")
EXTRA = re.compile(r"""pip3? install[^\n`]*?'\.\[([\w,]+)\]'""")


def _texts():
    """(path, text) of everything that a user may read."""
    files = [path for path in ROOT.iterdir() if path.suffix in (".md", ".toml")]
    files.append(ROOT / "Makefile")
    for place in PLACES:
        kinds = (".py", ".md", ".html", ".js")
        files += [path for path in (ROOT / place).rglob("*") if path.suffix in kinds]
    return [(path.relative_to(ROOT), path.read_text(encoding="utf-8")) for path in files]


def test_nobody_is_sent_to_an_index_for_this_package():
    found = [f"{path}: {m[0]}" for path, text in _texts() for m in FROM_AN_INDEX.finditer(text)]
    assert not found
    for form in ("varjax", "'varjax[eval]'", '"varjax[text]"', "-U varjax==1"):  # what it looks for
        assert FROM_AN_INDEX.search("run `pip " + f"install {form}`")
    assert not FROM_AN_INDEX.search("pip " + "install -e '.[eval]'")


def test_extras_that_are_named_exist():
    extras = set(re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE))
    for path, text in _texts():
        for names in EXTRA.findall(text):
            assert set(names.split(",")) <= extras, path
        for name in re.findall(r'extra="(\w+)"', text):
            assert name in extras, path


def test_the_hint():
    with pytest.raises(MissingExtra) as error:
        require("no_such_package.part", extra="eval", purpose="drawing")
    assert str(error.value) == (
        "drawing needs the package no_such_package, which is not installed: run "
        "`pip install -e '.[eval]'` in the folder of varjax, or "
        "`pip install 'FILE.whl[eval]'` with its wheel"
    )
