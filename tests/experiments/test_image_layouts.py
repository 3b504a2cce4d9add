"""Folders of images as the official scorers read them."""

import json

import numpy as np
import pytest

from experiments.prompts.layouts import check_layout, write_images
from experiments.prompts.sets import IMAGES_PER_PROMPT, Prompt, PromptFormat, PromptSet
from varjax.core.errors import UserError

pillow = pytest.importorskip("PIL.Image", reason="pillow is not installed (extra `eval`)")

NAMES = {
    PromptFormat.HPSV2: ("anime/00000", "photo/00000"),
    PromptFormat.DPG: ("2", "partiprompts10"),
    PromptFormat.COCO: ("000000000042", "000000391895"),
    PromptFormat.COCO_CAPTIONS: ("000000000042_7", "000000000042_9"),
}


def _set(kind: PromptFormat) -> PromptSet:
    names = NAMES.get(kind, ("00000", "00001"))
    prompts = tuple(
        Prompt(text, name, "here", {"tag": name, "prompt": text})
        for name, text in zip(names, ("a cat", "zwei Löwen"), strict=True)
    )
    return PromptSet(prompts, kind, IMAGES_PER_PROMPT.get(kind, 1))


def _images(count, height=8, width=8):
    return np.random.default_rng(0).integers(0, 256, (count, height, width, 3)).astype(np.uint8)


def _read(path):
    with pillow.open(path) as file:
        return np.asarray(file)


def _tree(folder):
    return sorted(f.relative_to(folder).as_posix() for f in folder.rglob("*") if f.is_file())


EXPECTED = {
    PromptFormat.LINES: ["00000.png", "00001.png"],
    PromptFormat.HPSV2: ["anime/00000.jpg", "photo/00000.jpg"],
    PromptFormat.COCO: ["000000000042.png", "000000391895.png"],
    PromptFormat.COCO_CAPTIONS: ["000000000042_7.png", "000000000042_9.png"],
}


@pytest.mark.parametrize("kind", EXPECTED)
def test_one_image_per_prompt(kind, tmp_path):
    images = _images(2)
    write_images(tmp_path, _set(kind), images, 1, seed=5)
    assert _tree(tmp_path / "images") == EXPECTED[kind]
    if kind is not PromptFormat.HPSV2:  # whose JPEG loses a little
        for name, image in zip(EXPECTED[kind], images, strict=True):
            np.testing.assert_array_equal(_read(tmp_path / "images" / name), image)
    manifest = json.loads((tmp_path / "manifest.json").read_text(encoding="utf-8"))
    assert [e["file"] for e in manifest["images"]] == [f"images/{n}" for n in EXPECTED[kind]]
    assert [e["prompt"] for e in manifest["images"]] == ["a cat", "zwei Löwen"]
    assert [e["number"] for e in manifest["images"]] == [0, 1]
    assert {e["seed"] for e in manifest["images"]} == {5} and manifest["kind"] == kind


def test_geneval(tmp_path):
    """Numbered folders with the line of the prompt file; every prompt has its four samples."""
    images, prompts = _images(8), _set(PromptFormat.GENEVAL)
    write_images(tmp_path, prompts, images, 4, seed=0)
    samples = [f"samples/{i:04d}.png" for i in range(4)]
    names = [f"{n}/{f}" for n in ("00000", "00001") for f in ("metadata.jsonl", *samples)]
    assert _tree(tmp_path / "images") == names
    np.testing.assert_array_equal(_read(tmp_path / "images/00001/samples/0002.png"), images[6])
    metadata = json.loads((tmp_path / "images/00001/metadata.jsonl").read_text())
    assert metadata == prompts.prompts[1].metadata


def _tiles(grid):
    """As DPG-Bench's scorer cuts: left, right, then the lower two."""
    side = grid.shape[0] // 2
    rows = (grid[:side], grid[side:])
    return np.stack([part for row in rows for part in (row[:, :side], row[:, side:])])


@pytest.mark.parametrize("each", [3, 4])
def test_dpg(each, tmp_path):
    """A grid per prompt file; with fewer than four images the rest of it is black."""
    images = _images(2 * each)
    write_images(tmp_path, _set(PromptFormat.DPG), images, each, seed=0)
    assert _tree(tmp_path / "images") == ["2.png", "partiprompts10.png"]
    for i, name in enumerate(("2", "partiprompts10")):
        tiles = _tiles(_read(tmp_path / "images" / f"{name}.png"))
        np.testing.assert_array_equal(tiles[:each], images[each * i : each * (i + 1)])
        assert not tiles[each:].any()
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert [e["sample"] for e in manifest["images"]] == [*range(each)] * 2


REFUSED = {
    "hpsv2": (PromptFormat.HPSV2, _images(4), 2, "2 images per prompt: hpsv2 takes 1 to 1$"),
    "dpg": (PromptFormat.DPG, _images(5), 5, "5 images per prompt: dpg takes 1 to 4"),
    "dpg shape": (PromptFormat.DPG, _images(2, 8, 12), 1, "8x12 pixels: .*choose a square aspect"),
}


NAMES_REFUSED = {
    "above": (PromptFormat.HPSV2, "../00000"),
    "device": (PromptFormat.DPG, "con"),
    "undecodable": (PromptFormat.DPG, "a\udcff"),
    "long": (PromptFormat.COCO, f"{10**300}"),
}


@pytest.mark.parametrize("case", NAMES_REFUSED)
def test_names_are_refused_before_anything_is_drawn(case, tmp_path):
    """The prompt is named; without pillow too."""
    kind, name = NAMES_REFUSED[case]
    prompts = PromptSet((Prompt("a", name, "in line 3", {}),), kind, 1)
    with pytest.raises(UserError, match="^in line 3: .*cannot be the name of a file"):
        check_layout(prompts, 1, 8, 8)
    with pytest.raises(UserError, match="^in line 3: .*cannot be the name of a file"):
        write_images(tmp_path / "a" / "b", prompts, _images(1), 1, seed=0)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_write_nothing(case, tmp_path):
    kind, images, each, message = REFUSED[case]
    with pytest.raises(UserError, match=message):
        write_images(tmp_path / "out", _set(kind), images, each, seed=0)
    assert not (tmp_path / "out").exists()
