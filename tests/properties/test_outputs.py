"""What texts and damaged folders do to outputs: either all is well, or `UserError` and all is as it
was."""

import contextlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments import batch_files
from experiments.batch_files import Damaged
from experiments.prompts import layouts
from experiments.prompts.sets import KINDS, PromptFormat, read_prompts
from tests import unfinished_runs as runs
from tests.properties import mutations
from varjax.core.errors import UserError
from varjax.storage.atomic import write_text
from varjax.storage.names import inside

pillow = pytest.importorskip("PIL.Image", reason="pillow is not installed (extra `eval`)")

LETTERS = st.characters(codec=None, exclude_categories=[])  # halves of surrogate pairs too
TEXT = st.text(LETTERS, max_size=20) | st.sampled_from(mutations.TEXTS)


# --- folders of unfinished runs -------------------------------------------------------------------


class Example:
    """Unfinished runs to damage, made once: by how many batches they have."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.sound = {n: runs.interrupted(folder / f"run{n}", n) for n in range(7)}
        self.other = runs.interrupted(folder / "other", 6, {"seed": 1})

    def copy(self, batches: int) -> Path:
        """The place of results; the damaged folder belongs beside it."""
        place = mutations.emptied(self.folder / "place")
        if batches:
            shutil.copytree(self.sound[batches], place / "out.partial")
        return place / "out"


@pytest.fixture(scope="module")
def example(tmp_path_factory):
    return Example(tmp_path_factory.mktemp("runs"))


@st.composite
def damaged_run(draw, example: Example) -> Path:
    """`OUT` of an unfinished run, damaged once to three times."""
    out = example.copy(draw(st.integers(1, 6)))
    work = out.with_name("out.partial")
    for _ in range(draw(st.integers(1, 3))):
        names = [path.name for path in sorted(example.other.glob("*.npz"))]
        files = [work / name for name in names if (work / name).is_file()]
        kind = draw(st.sampled_from(["folder", "zip", "zip", "settings", "other", "swap"]))
        if kind == "folder" or not files:
            draw(mutations.damaged_folder(work))
            continue
        path = draw(st.sampled_from(files))
        if kind == "zip" and path.read_bytes()[:2] == b"PK":
            try:
                path.write_bytes(draw(mutations.damaged_zip(path.read_bytes())))
            except Exception:  # it is no zip any more: damaged before
                path.write_bytes(b"")
        elif kind == "settings" and not (work / "settings.json").is_dir():
            settings = draw(mutations.damaged_json(runs.SETTINGS) | TEXT)
            (work / "settings.json").unlink(missing_ok=True)
            write_text(work / "settings.json", json.dumps(settings))
        elif kind == "other":
            path.write_bytes((example.other / path.name).read_bytes())
        elif kind == "swap" and not (work / "main-00000004.npz").is_dir():
            (work / "main-00000004.npz").write_bytes(path.read_bytes())
    return out


def same(one: np.ndarray, other: np.ndarray) -> bool:
    return one.dtype == other.dtype and np.array_equal(one, other)


def sound_batches(work: Path) -> set[tuple[str, int]]:
    """Batches whose file holds what was drawn, and nothing else."""
    found = set()
    for name in runs.SERIES:
        for start in runs.STARTS:
            index = runs.index(start)
            drawn = {**runs.batch(name, index), "index": index}
            path = work / f"{name}-{start:08d}.npz"
            with contextlib.suppress(Damaged, OSError):
                arrays = batch_files.read_batch(path)
                if arrays.keys() == drawn.keys() and all(
                    same(arrays[key], drawn[key]) for key in drawn
                ):
                    found.add((name, start))
    return found


def check_mutated_run_folder(out: Path, overwrite: bool) -> str:
    """Continue a damaged run, and check that nothing is lost; says how it ended.

    It ends with the arrays of an undisturbed run, and only what was missing or damaged was drawn
    again; or with `UserError`, and not a byte has changed. Nothing outside is touched.
    """
    work = out.with_name("out.partial")
    before = runs.tree(out.parent)
    sound = sound_batches(work)
    try:
        store = runs.store(out, overwrite=overwrite)
        drawn, found = runs.finish(store)
    except UserError as error:
        assert len(str(error)) < 1000 and "\n" not in str(error)
        assert runs.tree(out.parent) == before
        return "refused"
    everything = {(name, x) for name in runs.SERIES for x in runs.STARTS}
    drawn = set(drawn)
    assert len(drawn & sound) == 0 or (overwrite and drawn == everything)
    assert drawn | sound == everything
    for name, arrays in runs.expected().items():
        for key, array in arrays.items():
            np.testing.assert_array_equal(found[name][key], array)
    after = runs.tree(out.parent)
    assert not work.exists() and "out/report.json" in after
    for name, content in before.items():
        if not name.startswith("out.partial"):
            assert after[name] == content
    return "continued" if drawn != everything else "drawn"


@given(draw=st.data())
def test_damaged_runs(example, draw):
    out = draw.draw(damaged_run(example))
    check_mutated_run_folder(out, draw.draw(st.booleans()))


# --- names ----------------------------------------------------------------------------------------


@given(name=TEXT | st.lists(TEXT, max_size=3).map("/".join))
def test_names_stay_inside(tmp_path, name):
    folder = mutations.emptied(tmp_path / "names")
    try:
        path = inside(folder / "images", name)
    except UserError:
        return
    path.parent.mkdir(parents=True)
    write_text(path, name)
    (found,) = (p for p in folder.rglob("*") if p.is_file())
    assert found.relative_to(folder / "images").as_posix() == name
    assert not {".", ".."} & set(found.relative_to(folder).parts)


# --- prompt sets ----------------------------------------------------------------------------------

GENEVAL = {"tag": "counting", "include": [{"class": "clock", "count": 4}], "prompt": "a clock"}
COCO = {
    "annotations": [
        {"image_id": 42, "id": 641613, "caption": "This wire rack"},
        {"image_id": 7, "id": 5, "caption": "A dog\n"},
    ]
}
FILE_NAMES = st.sampled_from(["a", "anime", "...", "con", "a b", "Ä", "x" * 240, " ", "photo"])


@st.composite
def prompt_files(draw, folder: Path) -> Path:
    """A file or folder of prompts of any kind, with hostile text in it."""
    kind = draw(st.sampled_from(["lines", "geneval", "hpsv2", "coco", "folder", "bytes"]))
    name = draw(FILE_NAMES)
    if kind == "folder":
        for other in {name, draw(FILE_NAMES), draw(FILE_NAMES)}:
            ending = draw(st.sampled_from([".txt", ".txt", ".json", ".TXT"]))
            write_text(folder / f"{other}{ending}", draw(TEXT))
        return folder
    if kind in ("lines", "bytes"):
        data = draw(TEXT).encode("utf-8", "surrogatepass")
        path = folder / f"{name}.txt"
        path.write_bytes(draw(mutations.damaged_bytes(data)) if kind == "bytes" else data)
        return path
    sound = {"geneval": GENEVAL, "hpsv2": ["a dog", "a cat"], "coco": COCO}[kind]
    text = json.dumps(draw(mutations.damaged_json(sound) | st.just(sound)))
    path = folder / (f"{name}.jsonl" if kind == "geneval" else f"{name}.json")
    path.write_text(f"{json.dumps(GENEVAL)}\n{text}" if kind == "geneval" else text)
    return path


@given(draw=st.data())
def test_prompts_that_are_accepted_can_be_written(tmp_path, draw):
    """What `check_layout` lets pass cannot fail when the images are there."""
    place = mutations.emptied(tmp_path / "place")
    for name in ("given", "out"):
        (place / name).mkdir()
    path = draw.draw(prompt_files(place / "given"))
    before = runs.tree(place)
    try:
        found = read_prompts(path, draw.draw(st.sampled_from(KINDS)))
        each = draw.draw(st.integers(1, 2))
        layouts.check_layout(found, each, 8, 8)
    except UserError as error:
        assert len(str(error)) < 2000
        assert runs.tree(place) == before
        return
    pixels = np.zeros((len(found) * each, 8, 8, 3), np.uint8)
    layouts.write_images(place / "out", found, pixels, each, seed=0)
    after = runs.tree(place)
    assert {n: c for n, c in after.items() if not n.startswith("out/")} == before
    files = [n for n in after if Path(n).suffix in (".png", ".jpg")]
    images_each = 1 if found.kind is PromptFormat.DPG else each
    assert len(files) == len(found) * images_each
    assert all(n.startswith("out/images/") for n in files)
    manifest = json.loads((place / "out/manifest.json").read_text(encoding="utf-8"))
    assert [entry["prompt"] for entry in manifest["images"][::each]] == found.texts
