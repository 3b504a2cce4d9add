"""Images of a prompt set in the folders that the official scorers read.

    FOLDER/manifest.json    prompt, number, seed and file of every image
    FOLDER/images/          the folder to give to the scorer; nothing else is in it

| kind | below images/ |
| --- | --- |
| `lines` | 00000.png by line, counted from 0; with several images per prompt 00000_0.png, ... |
| `geneval` | 00000/metadata.jsonl and 00000/samples/0000.png, ... |
| `dpg` | one PNG named as the prompt's file; several images as tiles of a 2x2 grid |
| `hpsv2` | STYLE/00000.jpg |
| `coco` | 000000000042.png by number of the image (`coco-captions`: image and caption) |

The manifest lies outside of `images`, since HPSv2's and DPG-Bench's scorers take everything in that
folder for images or styles.
"""

import json
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from experiments.json_text import json_text
from experiments.prompts.sets import Prompt, PromptFormat, PromptSet
from varjax.core.errors import UserError, about
from varjax.storage.atomic import new_file, write_text
from varjax.storage.manifest import read_json
from varjax.storage.names import check_distinct, inside
from varjax.storage.values import require

FOLDER = "images"
MANIFEST = "manifest.json"
METADATA = "metadata.jsonl"
JPEG_QUALITY = 95
FILES = {
    PromptFormat.GENEVAL: "{name}/samples/{sample:04d}.png",
    PromptFormat.DPG: "{name}.png",
    PromptFormat.HPSV2: "{name}.jpg",
}
TILES = ((0, 0), (0, 1), (1, 0), (1, 1))  # (row, column) in the order in which DPG-Bench cuts


def check_layout(
    prompt_set: PromptSet,
    images_per_prompt: int,
    height: int | None = None,
    width: int | None = None,
) -> None:
    """Refuse what the official scorer cannot read, before images are made. `UserError` for more
    images than the scorer takes, images that are not square, and a prompt whose name cannot be the
    name of a file, or is the name of another prompt; `MissingExtra` without pillow.

    height, width: pixels of an image, where known.
    """
    most = {PromptFormat.HPSV2: 1, PromptFormat.DPG: len(TILES)}.get(prompt_set.kind)
    if most and images_per_prompt > most:
        raise UserError(
            f"{images_per_prompt} images per prompt: {prompt_set.kind} takes 1 to {most}"
        )
    if prompt_set.kind is PromptFormat.DPG and height != width:
        raise UserError(
            f"images of {height}x{width} pixels: the scorer of DPG-Bench cuts squares; choose a"
            " square aspect"
        )
    files = []
    for prompt in prompt_set.prompts:
        files.append(_file(prompt_set.kind, prompt, images_per_prompt - 1, images_per_prompt))
        with about(prompt.where):
            inside(Path(), files[-1])
    check_distinct(files)
    require("PIL.Image", extra="eval", purpose="writing images")


def write_images(
    folder: Path,
    prompt_set: PromptSet,
    images: UInt8[np.ndarray, "N H W 3"],
    images_per_prompt: int,
    *,
    seed: int,
) -> None:
    """Write the images of a prompt set, image i of prompt i // images_per_prompt, and the manifest.

    images: read from where they are, one prompt after the other. seed: of the run, for the
    manifest. Raises the errors of `check_layout`.
    """
    each, kind = images_per_prompt, prompt_set.kind
    check_layout(prompt_set, each, height=images.shape[1], width=images.shape[2])
    entries = []
    for number, prompt in enumerate(prompt_set.prompts):
        samples = images[number * each : (number + 1) * each]
        _write_prompt(folder / FOLDER, kind, prompt, samples)
        entries += [
            {
                "number": number * each + sample,
                "file": f"{FOLDER}/{_file(kind, prompt, sample, each)}",
                "prompt": prompt.text,
                "prompt_number": number,
                "name": prompt.name,
                "sample": sample,
                "seed": seed,
                "metadata": dict(prompt.metadata),
            }
            for sample in range(each)
        ]
    content = {"kind": str(kind), "images_per_prompt": each, "seed": seed, "images": entries}
    write_text(folder / MANIFEST, json_text(content))


def image_files(folder: Path) -> set[str]:
    """Return the files below `images/` that the manifest of a folder lists."""
    found: set[str] = set()
    try:
        content = read_json(folder / MANIFEST)
        for file in (entry["file"] for entry in content["images"]):
            if file.startswith(f"{FOLDER}/"):
                found.add(file)
                if content["kind"] == PromptFormat.GENEVAL:
                    found.add(f"{file.rsplit('/', 2)[0]}/{METADATA}")
    except (UserError, KeyError, TypeError, AttributeError):  # none, or damaged
        return set()
    return found


def _write_prompt(
    folder: Path, kind: PromptFormat, prompt: Prompt, images: UInt8[np.ndarray, "N H W 3"]
) -> None:
    """Write the files of one prompt; of DPG-Bench a grid, black where there is no image."""
    each, side = len(images), images.shape[1]
    if kind is PromptFormat.DPG and each > 1:
        grid = np.zeros((2 * side, 2 * side, 3), np.uint8)
        for image, (row, column) in zip(images, TILES, strict=False):
            grid[row * side :, column * side :][:side, :side] = image
        images = grid[None]
    pillow = require("PIL.Image", extra="eval", purpose="writing images")
    for sample, image in enumerate(images):
        path = inside(folder, _file(kind, prompt, sample, each))
        path.parent.mkdir(parents=True, exist_ok=True)
        is_jpeg = path.suffix == ".jpg"
        options = {"format": "JPEG", "quality": JPEG_QUALITY, "subsampling": 0}
        with new_file(path) as file:
            pillow.fromarray(image).save(file, **(options if is_jpeg else {"format": "PNG"}))
    if kind is PromptFormat.GENEVAL:
        path = inside(folder, f"{prompt.name}/{METADATA}")
        write_text(path, json.dumps(prompt.metadata))


def _file(kind: PromptFormat, prompt: Prompt, sample: int, each: int) -> str:
    """Return the path of an image below `images/`."""
    usual = "{name}.png" if each == 1 else "{name}_{sample}.png"
    return FILES.get(kind, usual).format(name=prompt.name, sample=sample)
