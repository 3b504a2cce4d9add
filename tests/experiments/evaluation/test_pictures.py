"""Sets of pictures: what is read, what is refused, how two sets are paired."""

import io
import zipfile

import numpy as np
import pytest
from PIL import Image

from experiments.evaluation.pictures import PictureArray, PictureFolder, paired
from varjax.core.errors import UserError


def some_pictures(count: int = 5, height: int = 12, width: int = 16) -> np.ndarray:
    generator = np.random.default_rng(count)
    return generator.integers(0, 256, (count, height, width, 3), dtype=np.uint8)


def folder_of(path, images, name="{:05d}.png"):
    for number, image in enumerate(images):
        file = path / name.format(number)
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(file)
    return path


def test_a_folder_is_read_in_the_order_of_its_paths(tmp_path):
    images = some_pictures()
    folder_of(tmp_path, images, "class{0}/{0}.png")
    (tmp_path / "manifest.json").write_text("{}")
    (tmp_path / ".hidden.png").write_bytes(b"x")
    found = PictureFolder(tmp_path)
    assert (found.count, found.size) == (5, (12, 16)) and list(found.keys) == [0, 1, 2, 3, 4]
    np.testing.assert_array_equal(found.read(1, 4), images[1:4])
    digest = PictureFolder(tmp_path).sha256
    assert digest == found.sha256
    Image.fromarray(images[0]).save(tmp_path / "class3" / "3.png")
    assert PictureFolder(tmp_path).sha256 != digest


@pytest.mark.parametrize("kind", ["png", "jpg", "bmp", "webp", "tif", "ppm"])
def test_kinds_of_files(tmp_path, kind):
    folder_of(tmp_path, some_pictures(2), f"{{}}.{kind}")
    assert PictureFolder(tmp_path).read(0, 2).shape == (2, 12, 16, 3)
    data = (tmp_path / f"1.{kind}").read_bytes()
    (tmp_path / f"1.{kind}").write_bytes(data[: len(data) // 2])
    with pytest.raises(UserError, match=rf"1\.{kind} is no picture, damaged or cut short"):
        PictureFolder(tmp_path)


@pytest.mark.parametrize("mode", ["L", "1", "CMYK"])
def test_pictures_without_transparency_become_rgb(tmp_path, mode):
    """As in the programs of the protocols; COCO's and ImageNet's folders have grey ones."""
    folder_of(tmp_path, some_pictures(2))
    other = Image.fromarray(some_pictures(1)[0]).convert(mode)
    other.save(tmp_path / "00002.tif")
    found = PictureFolder(tmp_path)
    np.testing.assert_array_equal(found.read(2, 3)[0], np.asarray(other.convert("RGB")))
    (remark,) = found.remarks
    assert remark == f"{tmp_path}: 1 pictures are grey or of inks, and taken as RGB"


@pytest.mark.parametrize("mode", ["RGBA", "P", "LA", "I;16"])
def test_other_colours_are_refused(tmp_path, mode):
    folder_of(tmp_path, some_pictures(2))
    Image.new(mode, (16, 12)).save(tmp_path / "00001.png")
    with pytest.raises(UserError, match=r"00001\.png is no RGB picture.*convert"):
        PictureFolder(tmp_path)


def test_no_picture_is_left_out_in_silence(tmp_path):
    """A kind that is not read is named, where it would only have made the set smaller."""
    folder_of(tmp_path, some_pictures(2))
    folder_of(tmp_path / "more", some_pictures(1), "a.gif")
    with pytest.raises(UserError, match=r"a\.gif is of a kind that is not read: convert it"):
        PictureFolder(tmp_path)


@pytest.mark.parametrize("name", ["arr_1", "numbers"])
def test_lists_of_other_pictures_are_refused(tmp_path, name):
    """They were taken for absent: pictures were then paired by their places."""
    path = tmp_path / "samples.npz"
    np.savez(path, arr_0=some_pictures(4), **{name: np.arange(3)})
    with pytest.raises(UserError, match=f"array `{name}` has 3 entries for 4 pictures"):
        PictureArray(path)
    np.savez(path, arr_0=some_pictures(4), **{name: np.zeros((3, 2))})  # something else
    assert PictureArray(path).labels is None and list(PictureArray(path).keys) == [0, 1, 2, 3]


def test_mixed_sizes_and_empty_folders_are_refused(tmp_path):
    with pytest.raises(UserError, match="holds no pictures"):
        PictureFolder(tmp_path)
    folder_of(tmp_path, some_pictures(2))
    folder_of(tmp_path / "more", some_pictures(1, 16, 12))
    with pytest.raises(UserError, match=r"00000\.png has 16x12 pixels, .*00000\.png has 12x16"):
        PictureFolder(tmp_path)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_an_array_is_read_in_parts(tmp_path, save):
    images = some_pictures(9)
    save(tmp_path / "a.npz", arr_0=images, arr_1=np.arange(9))
    found = PictureArray(tmp_path / "a.npz")
    for first, end in ((0, 3), (3, 9), (2, 4), (8, 9)):
        np.testing.assert_array_equal(found.read(first, end), images[first:end])
    assert found.labels.tolist() == list(range(9)) == list(found.keys)


ARRAYS = {
    "floats": ({"arr_0": np.zeros((2, 4, 4, 3))}, "float64 .2, 4, 4, 3.*uint8"),
    "grey": ({"arr_0": np.zeros((2, 4, 4, 1), np.uint8)}, r"\[2, 4, 4, 1\]"),
    "none": ({"arr_0": np.zeros((0, 4, 4, 3), np.uint8)}, "at least one"),
    "one": ({"arr_0": np.zeros((4, 4, 3), np.uint8)}, r"\[4, 4, 3\]"),
    "other": ({"images": np.zeros(3)}, "no array `arr_0`: it holds images"),
    "columns": ({"arr_0": np.asfortranarray(some_pictures(2))}, "columns first"),
    "number": ({"arr_0": np.uint8(3)}, "has no rows"),
}


@pytest.mark.parametrize("case", ARRAYS)
def test_other_arrays_are_refused(tmp_path, case):
    arrays, problem = ARRAYS[case]
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(UserError, match=problem) as caught:
        PictureArray(tmp_path / "a.npz")
    assert "a.npz" in str(caught.value)


def test_damaged_arrays_are_refused(tmp_path):
    np.savez(tmp_path / "a.npz", arr_0=some_pictures(9))
    data = bytearray((tmp_path / "a.npz").read_bytes())
    (tmp_path / "b.npz").write_bytes(data[:-300])
    with pytest.raises(UserError, match="cannot read .*b.npz"):
        PictureArray(tmp_path / "b.npz")
    data[2000] ^= 1
    (tmp_path / "c.npz").write_bytes(data)
    with pytest.raises(UserError, match="cannot read .*c.npz.*CRC"):
        PictureArray(tmp_path / "c.npz").read(0, 9)
    held = io.BytesIO()
    np.lib.format.write_array(held, some_pictures(2))
    with zipfile.ZipFile(tmp_path / "d.npz", "w") as archive:
        archive.writestr("arr_0.npy", held.getvalue()[:-1])
    with pytest.raises(UserError, match="another size than its shape"):
        PictureArray(tmp_path / "d.npz")


def test_pairs_are_found_by_name_or_number(tmp_path):
    images = some_pictures(4)
    by_number = PictureFolder(folder_of(tmp_path / "a", images, "{}.png"))
    padded = PictureFolder(folder_of(tmp_path / "b", images, "x/{:04d}.bmp"))
    named = PictureFolder(folder_of(tmp_path / "c", images, "p{}.png"))
    np.savez(tmp_path / "d.npz", arr_0=images[[2, 0, 3, 1]], numbers=np.array([2, 0, 3, 1]))
    shuffled = PictureArray(tmp_path / "d.npz")
    for other in (padded, shuffled):
        for i, j in enumerate(paired(by_number, other)):
            np.testing.assert_array_equal(by_number.read(i, i + 1), other.read(j, j + 1))
    with pytest.raises(UserError, match="paired by number or name.*p0, p1, p2, p3"):
        paired(by_number, named)


def test_sets_that_do_not_fit_are_not_paired(tmp_path):
    def array(name, *shape):
        np.savez(tmp_path / name, arr_0=some_pictures(*shape))
        return PictureArray(tmp_path / name)

    first = array("a.npz", 4)
    with pytest.raises(UserError, match="a.npz has 4 pictures, .*b.npz has 3"):
        paired(first, array("b.npz", 3))
    with pytest.raises(UserError, match="one size: 12x16 pixels in .*a.npz, 16x16"):
        paired(first, array("c.npz", 4, 16, 16))
