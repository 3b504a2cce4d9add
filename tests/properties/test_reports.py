"""Edited and damaged sweeps and calibrations: the report is a sound page that holds the data, or
one line that names the file and the place in it."""

import functools
import json

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from experiments.report import sweep_files
from tests.experiments import made_up_sweep
from tests.experiments.html_page import check_self_contained
from tests.properties import mutations
from varjax.calibration import files as calibrations
from varjax.core.errors import UserError

for package in ("altair", "jinja2", "vl_convert", "PIL"):
    pytest.importorskip(package)
from experiments.report import page  # noqa: E402

FILES = ("sweep.json", "samples.npz", "calibration.json")
DRAWN = st.integers(0, 19).map(lambda i: i == 19)  # a page takes a hundred times as long as reading


class Files(dict):
    """{name: bytes}; not printed with every example that fails."""

    def __repr__(self):
        return f"Files of {len(self)}"


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """The files of a sound sweep."""
    folder = tmp_path_factory.mktemp("sound") / "sweep"
    made_up_sweep.write_sweep(folder)
    made_up_sweep.write_calibration(folder / "calibration.json")
    return Files({name: (folder / name).read_bytes() for name in FILES})


def written(folder, content):
    """The folder with these files."""
    mutations.emptied(folder)
    for name, data in content.items():
        (folder / name).write_bytes(data)
    return folder


def read(folder):
    """What the command reads; None if it is refused in one line that names the file."""
    try:
        report, samples, geometry = sweep_files.read_sweep(folder)
        return report, samples, geometry, calibrations.load(folder / "calibration.json", geometry)
    except UserError as error:
        message = str(error)
        assert message.isprintable() and len(message) < 1000, message
        assert any(f"{name}" in message for name in FILES), message
        return None


def check(folder, drawn, measured=False):
    """If it can be read, it can be drawn; `measured`: the calibration as well."""
    found = read(folder)
    event("refused" if found is None else "drawn" if drawn else "read")
    if found is not None and drawn:
        text = page.build(*found[:3], found[3] if measured else None, 1)
        check_self_contained(text.encode("utf-8").decode("utf-8"))


def places(value, path=()):
    """Paths to everything inside a JSON value; of a list only to its first and last entries."""
    yield path
    if isinstance(value, dict):
        for key in sorted(value):
            yield from places(value[key], (*path, key))
    elif isinstance(value, list):
        for at in sorted({0, len(value) - 1} & set(range(len(value)))):
            yield from places(value[at], (*path, at))


def replaced(value, path, new):
    """A copy with `new(old)` in one place."""
    if not path:
        return new(value)
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = replaced(copy[path[0]], path[1:], new)
    return copy


def damaged_json(draw, data):
    """Damaged near the top, or in a place that is as likely as any other."""
    sound = json.loads(data)
    if draw(st.booleans()):
        content = draw(mutations.damaged_json(sound))
    else:
        place, new = draw(st.sampled_from(list(places(sound)))), draw(mutations.hostile_values())
        content = replaced(sound, place, lambda old: new)
    return json.dumps(content).encode()


@pytest.mark.parametrize("name", ["sweep.json", "calibration.json"])
@given(data=st.data(), drawn=DRAWN)
def test_edited_json(tmp_path, sound, name, data, drawn):
    edited = damaged_json(data.draw, sound[name])
    folder = written(tmp_path / "sweep", sound | {name: edited})
    check(folder, drawn, measured=name == "calibration.json")


@given(data=st.data(), name=st.sampled_from(FILES), drawn=DRAWN)
def test_damaged_bytes(tmp_path, sound, data, name, drawn):
    damaged = data.draw(mutations.damaged_bytes(sound[name]))
    check(written(tmp_path / "sweep", sound | {name: damaged}), drawn)


@given(data=st.data(), drawn=DRAWN)
def test_damaged_archives(tmp_path, sound, data, drawn):
    damaged = data.draw(mutations.damaged_zip(sound["samples.npz"]))
    check(written(tmp_path / "sweep", sound | {"samples.npz": damaged}), drawn)


# --- texts stay texts ---


def texts(value, path=()):
    """Paths to everything in a report that is free text, and to objects with free keys."""
    free = {"versions", "definitions", "sampling"}
    for at in places(value):
        inner = value
        for key in at:
            inner = inner[key]
        fixed = {"status", "schedule", "samples", "samples_fidelity"} & set(at)
        if (isinstance(inner, str) and not fixed) or (at and at[-1] in free):
            yield at


def text_or_object(word, old):
    return word if isinstance(old, str) else {word: word}


MARKUP = st.lists(
    st.sampled_from(
        ["<", ">", "&", "'", '"', "</script>", "<!--", "-->", "<script>", "</style>", "<img src=x>"]
        + ["]]>", "{{ 1 }}", "{% raw %}", "\u2028", "\0", "&lt;", "=", "/", " onload=", "a", "\n"]
    ),
    min_size=1,
    max_size=6,
).map("".join)


@settings(max_examples=2)  # of two pages each
@given(data=st.data(), words=st.lists(MARKUP, min_size=3, max_size=3))
def test_no_text_becomes_markup(tmp_path, sound, data, words):
    """Whatever texts and keys say, the elements and attributes of the page are the same."""
    report = json.loads(sound["sweep.json"])
    report["cells"] = report["cells"][2:]  # one that has run, and both others
    chosen = data.draw(st.sets(st.sampled_from(sorted(texts(report), key=str)), min_size=9))
    pages = []
    for said in (["x"], words):
        edited = report
        for number, place in enumerate(sorted(chosen, key=str)):
            word = f"{said[number % len(said)]}{number}"
            edited = replaced(edited, place, functools.partial(text_or_object, word))
        files = sound | {"sweep.json": json.dumps(edited).encode()}
        found = read(written(tmp_path / "sweep", files))
        pages.append(check_self_contained(page.build(*found[:3], None, 1)))
    assert pages[0].tags == pages[1].tags and pages[0].attributes == pages[1].attributes
