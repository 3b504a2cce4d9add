"""Draws docs/images/edit.png: edits of a picture that the demo drew itself.

python tests/editing/draw_examples.py
"""

from pathlib import Path

import numpy as np

import varjax
from experiments.images import save_grid
from varjax.storage.pictures import to_uint8

ROOT = Path(__file__).parents[2]
FRUIT, OTHERS, SEED = (22, 6, 26), (38, 17, 12), 4  # lemon, red apple, orange; their replacements


def round_mask(height: int, width: int) -> np.ndarray:
    rows, columns = np.mgrid[:height, :width]
    return np.hypot(rows - height / 2 + 0.5, columns - width / 2 + 0.5) < 0.45 * width


def main() -> None:
    model = varjax.load()
    pictures = varjax.generate(model, labels=FRUIT, seed=SEED)
    height, width = model.pixels
    half = np.zeros((height, width), bool)
    half[height // 2 :] = True
    masked = np.where(half[..., None], np.float32(1), pictures)
    full = varjax.edit(model, pictures, half, FRUIT, seed=SEED + 1)
    quarter = varjax.edit(model, pictures, half, FRUIT, "headkv", 0.25, seed=SEED + 1)
    hole = round_mask(height, width)
    other = varjax.edit(model, pictures, hole, OTHERS, seed=SEED + 1)
    columns = (pictures, masked, full.images, quarter.images, other.images)
    tiles = np.stack(columns, axis=1).reshape(-1, height, width, 3)
    save_grid(ROOT / "docs" / "images" / "edit.png", to_uint8(tiles), columns=len(columns))


if __name__ == "__main__":
    main()
