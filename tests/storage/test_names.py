"""Names of files stay in their folder, on every file system."""

import re
from pathlib import Path

import pytest

from varjax.core.errors import UserError
from varjax.storage.names import check_distinct, inside


@pytest.mark.parametrize("name", ["00000", "a/b/c.png", "partiprompts10", "Löwe", "a b", "a..b"])
def test_usual_names(name):
    assert inside(Path("x"), name) == Path("x") / name


REFUSED = {
    "begin with a dot": ("..", ".", "...png", ".hidden", "../x", "a/../x", "a/.."),
    "empty or end with": ("", "/x", "a//b", "a/", "a ", "a."),
    "is not allowed": ("a\0", "a\nb", "a\\b", "C:x", "a*", 'a"', "a?", "\udcff", "\ud800", "<a>"),
    "a device": ("con", "NUL.png", "a/Com1", "lpt9.txt", "aux"),
    "at most 231 bytes": ("x" * 232, "ö" * 116, f"a/{10**300}"),
}


@pytest.mark.parametrize(
    ("name", "message"), [(name, m) for m, names in REFUSED.items() for name in names]
)
def test_other_names(name, message):
    with pytest.raises(UserError, match=f"cannot be the name of a file: .*{re.escape(message)}"):
        inside(Path("x"), name)


def test_names_differ_everywhere():
    check_distinct(["a", "b", "a/b", "ä"])
    for one, other in (("a/B", "A/b"), ("\u00e4", "a\u0308"), ("x", "x"), ("straße", "STRASSE")):
        with pytest.raises(UserError, match="the same file on many systems"):
            check_distinct(["c", one, other])
