"""Edited and damaged sweeps and calibrations: the report is a sound page that holds the data, or
one line that names the file and the place in it."""

import io
import json

import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from experiments.report import sweep_files
from tests.experiments import made_up_sweep
from tests.experiments.html_page import check_self_contained
from tests.properties import mutations
from varjax.calibration import files as calibrations
from varjax.errors import UserError

for package in ("altair", "jinja2", "vl_convert", "PIL"):
    pytest.importorskip(package)
from experiments.report import page  # noqa: E402


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A folder that is read-only to the tests: they damage what is in it in memory."""
    folder = tmp_path_factory.mktemp("sound") / "sweep"
    made_up_sweep.write(folder)
    made_up_sweep.write_calibration(folder / "calibration.json")
    return folder


@pytest.fixture
def sweep(tmp_path, sound):
    """A folder for the damaged copy."""
    folder = tmp_path / "sweep"
    mutations.emptied(folder)
    for name in ("sweep.json", "samples.npz", "calibration.json"):
        (folder / name).write_bytes((sound / name).read_bytes())
    return folder


def check_one_line(error, *names):
    message = str(error)
    assert "\n" not in message and len(message) < 1000, message
    assert any(name in message for name in names), message


def read(folder):
    """What the command reads; None if it is refused in one line that names the file."""
    try:
        report, samples, geometry = sweep_files.read(folder)
    except UserError as error:
        check_one_line(error, "sweep.json", "samples.npz", "format_version")
        event("sweep refused")
        return None
    try:
        calibration = calibrations.load(folder / "calibration.json", geometry)
    except UserError as error:
        check_one_line(error, "calibration.json: ")
        event("calibration refused")
        return None
    return report, samples, geometry, calibration


def check_page(folder):
    """If it can be read, it can be drawn."""
    found = read(folder)
    if found is not None:
        text = page.build(*found, 1)
        event("drawn")
        check_self_contained(text.encode("utf-8").decode("utf-8"))


def write_damaged_json(draw, path):
    content = draw.draw(mutations.damaged_json(json.loads(path.read_text(encoding="utf-8"))))
    path.write_text(json.dumps(content), encoding="utf-8")


@given(draw=st.data())
def test_edited_reports(sweep, sound, draw):
    (sweep / "sweep.json").write_bytes((sound / "sweep.json").read_bytes())
    write_damaged_json(draw, sweep / "sweep.json")
    check_page(sweep)


@given(draw=st.data())
def test_edited_calibrations(sweep, sound, draw):
    (sweep / "calibration.json").write_bytes((sound / "calibration.json").read_bytes())
    write_damaged_json(draw, sweep / "calibration.json")
    check_page(sweep)


@given(draw=st.data(), name=st.sampled_from(["sweep.json", "samples.npz", "calibration.json"]))
def test_damaged_bytes(sweep, sound, draw, name):
    for each in sound.iterdir():
        (sweep / each.name).write_bytes(each.read_bytes())
    content = (sound / name).read_bytes()
    (sweep / name).write_bytes(draw.draw(mutations.damaged_bytes(content)))
    check_page(sweep)


DTYPES = st.sampled_from("uint8 int64 float32 bool complex64 U3 S2 M8[s] V4".split())
SHAPES = st.lists(st.integers(0, 17), max_size=5).map(tuple) | st.sampled_from(
    [(2, 16, 16, 3), (1, 16, 16, 3), (2, 1, 17000, 3), (0, 16, 16, 3), (2, 16, 16, 1)]
)


@given(draw=st.data(), other=st.booleans())
def test_other_arrays(sweep, sound, draw, other):
    data = (sound / "samples.npz").read_bytes()
    if other:
        with np.load(io.BytesIO(data)) as archive:
            arrays = dict(archive)
        name = draw.draw(st.sampled_from([*arrays, "more"]))
        shape = draw.draw(SHAPES)
        if np.prod(shape) < 1e6:
            arrays[name] = np.zeros(shape, draw.draw(DTYPES))
        np.savez(sweep / "samples.npz", **arrays)
    else:
        (sweep / "samples.npz").write_bytes(draw.draw(mutations.damaged_zip(data)))
    check_page(sweep)
