"""Pictures and masks that people hand in."""

import io
import zlib

import numpy as np
import pytest
from PIL import Image

from varjax.core.errors import UserError
from varjax.storage import pictures


def file_of(array, mode=None, kind="PNG", **options):
    file = io.BytesIO()
    Image.fromarray(array).convert(mode or "RGB").save(file, format=kind, **options)
    return file.getvalue()


def some_picture(height=6, width=4):
    return np.random.default_rng(0).integers(0, 256, (height, width, 3)).astype(np.uint8)


def test_pictures_of_all_kinds():
    picture = some_picture()
    np.testing.assert_array_equal(pictures.read_picture(file_of(picture), "it"), picture)
    flat = np.full((6, 4, 3), 200, np.uint8)
    for kind in ("JPEG", "WEBP"):
        np.testing.assert_array_equal(pictures.read_picture(file_of(flat, kind=kind), "it"), flat)
    grey = pictures.read_picture(file_of(picture, "L"), "it")
    assert grey.shape == (6, 4, 3) and (grey == grey[..., :1]).all()
    assert pictures.read_picture(file_of(picture, "P"), "it").shape == (6, 4, 3)


def test_sixteen_bits():
    """The upper eight count: pillow would cut them off at 255."""
    deep = np.arange(24, dtype=np.uint16).reshape(6, 4) * 2600
    file = io.BytesIO()
    Image.fromarray(deep).save(file, format="PNG")
    found = pictures.read_picture(file.getvalue(), "it")
    np.testing.assert_array_equal(found, np.repeat((deep >> 8).astype(np.uint8)[..., None], 3, 2))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_pictures_and_masks_are_turned_alike(orientation):
    """Each by what its own file says, in all eight ways."""
    drawn = np.zeros((6, 4), np.uint8)
    drawn[:2, 0] = 255
    exif = Image.Exif()
    exif[0x0112] = orientation
    picture = pictures.read_picture(file_of(drawn, exif=exif), "it")
    mask = pictures.read_mask(file_of(drawn, exif=exif), "it")
    assert mask.shape == ((6, 4) if orientation < 5 else (4, 6))
    np.testing.assert_array_equal(mask, picture[..., 0] == 255)
    assert mask.sum() == 2 and (orientation == 1) == np.array_equal(mask, drawn == 255)
    clear = np.dstack([np.full((6, 4, 3), 9, np.uint8), 255 - drawn])
    np.testing.assert_array_equal(pictures.read_mask(file_of(clear, "RGBA", exif=exif), "it"), mask)
    np.testing.assert_array_equal(pictures.read_mask(file_of(drawn), "it"), drawn == 255)


def test_files(tmp_path):
    path = tmp_path / "a.png"
    pictures.save_png(path, some_picture())
    np.testing.assert_array_equal(pictures.read_picture(path, "it"), some_picture())
    for path, reason in ((tmp_path / "none.png", "No such file"), ("/dev/zero", "no ordinary")):
        with pytest.raises(UserError, match=f"cannot read it {path}: .*{reason}"):
            pictures.read_picture(path, "it")


def bomb():
    """A PNG of a few bytes whose head asks for 60,000 x 60,000 pixels."""
    data = bytearray(file_of(np.zeros((8, 8, 3), np.uint8)))
    data[16:24] = (60_000).to_bytes(4, "big") * 2
    data[29:33] = zlib.crc32(bytes(data[12:29])).to_bytes(4, "big")
    return bytes(data)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "no picture"),
        (b"<svg onload='x'/>", "begins like none"),
        (b"\x89PNG\r\n\x1a\n" + bytes(20), "no picture"),
        (file_of(some_picture())[:-30], "no picture"),
        (b"GIF89a" + bytes(40), "begins like none"),
        (bomb(), "at most"),
    ],
    ids=["empty", "svg", "head", "short", "gif", "bomb"],
)
def test_what_is_no_picture(data, message):
    for read in (pictures.read_picture, pictures.read_mask):
        with pytest.raises(UserError, match=message) as error:
            read(data, "the upload")
        assert str(error.value).startswith("the upload")


def test_masks():
    drawn = np.zeros((6, 4), bool)
    drawn[2:, 1:] = True
    values = drawn.astype(np.uint8) * 255
    for mode in ("L", "RGB", "1", "P", "RGBA"):
        found = pictures.read_mask(file_of(values, mode), "it")
        np.testing.assert_array_equal(found, drawn)
    clear = np.zeros((6, 4, 4), np.uint8)  # transparent is to be drawn, whatever its colour
    clear[..., 3] = 255 - values
    np.testing.assert_array_equal(pictures.read_mask(file_of(clear, "RGBA"), "it"), drawn)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.full((6, 4), 128, np.uint8), "grey in 24 of 24"),
        (np.array([[[255, 0, 0]]], np.uint8), "colours"),
        (np.array([[[0, 0, 0, 100]]], np.uint8), "grey in 1 of 1"),
        (np.array([[0, 300, 65535]], np.uint16), "grey in 1 of 3"),
    ],
)
def test_wrong_masks(array, message):
    file = io.BytesIO()
    Image.fromarray(array).save(file, format="PNG")
    with pytest.raises(UserError, match=message):
        pictures.read_mask(file.getvalue(), "it")


def test_linked_folders_are_read_once(tmp_path):
    """Also where links lead in a circle."""
    own, other = tmp_path / "own", tmp_path / "other"
    for folder in (own / "a", other):
        folder.mkdir(parents=True)
        pictures.save_png(folder / "x.png", some_picture())
    (own / "linked").symlink_to(other)
    (other / "back").symlink_to(own)
    found = sorted(path.relative_to(own).as_posix() for path in pictures.picture_files([own]))
    assert found == ["a/x.png", "linked/x.png"]


def test_values_that_are_not_finite_are_refused():
    with pytest.raises(UserError, match="not finite"):
        pictures.to_uint8(np.full((1, 2, 2, 3), np.nan))
