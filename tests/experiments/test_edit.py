"""`python -m experiments.edit`: files, the report, and what is refused."""

import json

import numpy as np
import pytest
from PIL import Image

from tests import models_under_test as models
from varjax.storage import pictures

MODEL = "c_k5_nol2norm"
QUICK = "--segments=1"


@pytest.fixture
def files(tmp_path):
    """A folder with a picture and masks for the small VAR, and its --checkpoint."""
    height, width = models.fixture_model(MODEL).pixels
    rows = np.linspace(0, 255, height).astype(np.uint8)
    picture = np.broadcast_to(rows[:, None, None], (height, width, 3))
    drawn = np.zeros((height, width), np.uint8)
    drawn[height // 2 :] = 255
    folder = tmp_path / "in"
    folder.mkdir()
    named = {
        "image": picture,
        "mask": drawn,
        "black": drawn * 0,
        "grey": drawn // 2,
        "small": drawn[1:],
        "large": np.repeat(np.repeat(picture, 2, 0), 3, 1),
        "large_mask": np.repeat(np.repeat(drawn, 2, 0), 3, 1),
    }
    for name, array in named.items():
        pictures.save_png(folder / f"{name}.png", np.ascontiguousarray(array))
    (folder / "text.png").write_text("no picture")
    return folder, f"--checkpoint={models.checkpoint_folder(MODEL)}"


def test_an_edit(call, files, tmp_path):
    (folder, checkpoint), out = files, tmp_path / "out"
    flags = (f"--image={folder}/image.png", f"--mask={folder}/mask.png", checkpoint, f"--out={out}")
    more = ("--labels=1,2", "--policy=streaming", "--budget=0.6", "--seed=7", QUICK)
    status, said, err = call("edit", *flags, *more)
    assert status == 0 and "2 edits" in said, err
    report = json.loads((out / "report.json").read_text())
    assert report["edit"]["drawn_pixels"] == 0.5 and report["edit"]["paste"] is True
    assert 0.3 < report["kept_tokens"] <= report["tokens_of_the_picture"] < 1
    assert report["kv"]["fraction"] <= 0.6 and report["policy"] == "streaming"
    edits, source = (np.asarray(Image.open(f)) for f in (out / "edit.png", folder / "image.png"))
    half, width = source.shape[0] // 2, source.shape[1]
    np.testing.assert_array_equal(edits[:half, :width], source[:half])
    assert (edits[half:, :width] != source[half:]).any()
    assert np.asarray(Image.open(out / "reconstruction.png")).shape == source.shape
    status, _, err = call("edit", *flags, *more)
    assert status == 2 and "exists already" in err
    # nothing drawn, nothing pasted: the reconstruction; of a picture of another size
    flags = (f"--image={folder}/large.png", f"--mask={folder}/large_mask.png", "--fit", checkpoint)
    status, _, err = call("edit", *flags, "--labels=1", QUICK, f"--out={out}", "--overwrite")
    assert status == 0 and "cut and resized" in err


def test_nothing_is_drawn(call, files, tmp_path):
    (folder, checkpoint), out = files, tmp_path / "out"
    flags = (
        f"--image={folder}/image.png",
        f"--mask={folder}/black.png",
        checkpoint,
        f"--out={out}",
    )
    status, _, err = call("edit", *flags, checkpoint, "--labels=1", "--nopaste", QUICK)
    assert status == 0 and "all black" in err
    assert (out / "edit.png").read_bytes() == (out / "reconstruction.png").read_bytes()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "--image is required"),
        (("--image=image.png",), "either --mask"),
        (("--image=image.png", "--mask=mask.png", "--source_prompt=a"), "either --mask"),
        (("--image=none.png", "--mask=mask.png"), "No such file"),
        (("--image=text.png", "--mask=mask.png"), "no picture"),
        (("--image=image.png", "--mask=grey.png"), "grey"),
        (("--image=image.png", "--mask=small.png"), "draw the mask over"),
        (("--image=large.png", "--mask=large_mask.png"), "add --fit"),
        (("--image=image.png", "--mask=mask.png", "--labels=9999"), "outside the model's"),
        (("--image=image.png", "--mask=mask.png", "--keep_scales=2"), "leave it out"),
        (("--image=image.png", "--source_prompt=a", "--nopaste"), "--paste belongs to --mask"),
        (("--image=image.png", "--source_prompt=a", "--feather=0"), "--feather belongs to --mask"),
        (("--image=image.png", "--source_prompt=a"), "--source_probability=P is needed"),
        (("--image=image.png", "--source_prompt=a", "--source_probability=2"), "draws no bits"),
        (("--image=image.png", "--mask=mask.png", "--prompts=a"), "--prompts"),
    ],
)
def test_what_is_refused(refused, files, tmp_path, monkeypatch, flags, message):
    folder, checkpoint = files
    here = [f.replace("=", f"={folder}/", 1) if f.endswith(".png") else f for f in flags]
    empty = tmp_path.parent / f"{tmp_path.name}-empty"
    folder.rename(empty)
    here = [f.replace(str(folder), str(empty)) for f in here]
    refused("edit", message, checkpoint, *here)
