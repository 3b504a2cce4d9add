"""The tools of the properties: what they damage is damaged, what they limit is limited."""

import io
import json
import zipfile

from hypothesis import given
from hypothesis import strategies as st

from tests.properties import limits, mutations

SOUND = {"a": [1, 2, {"b": "text"}], "c": {"d": None}}


@given(data=st.binary(max_size=200), draw=st.data())
def test_bytes_are_never_sound(data, draw):
    assert draw.draw(mutations.damaged_bytes(data)) != data


@given(value=mutations.damaged_json(SOUND))
def test_the_sound_value_is_not_touched(value):
    assert SOUND == {"a": [1, 2, {"b": "text"}], "c": {"d": None}}
    json.dumps(value)


@given(draw=st.data())
def test_zip_files(draw):
    sound = io.BytesIO()
    with zipfile.ZipFile(sound, "w") as archive:
        archive.writestr("a/b", b"0" * 50)
        archive.writestr("c", b"1")
    assert draw.draw(mutations.damaged_zip(sound.getvalue())) != sound.getvalue()


@given(draw=st.data())
def test_folders(tmp_path, draw):
    folder = mutations.emptied(tmp_path / "run")
    (folder / "a.json").write_text("{}")
    assert draw.draw(mutations.damaged_folder(folder))


def test_memory_is_limited():
    ended = limits.run_limited("-c", "bytearray(3 * 2**30)", memory=2**30)
    assert ended.status == 1 and "MemoryError" in ended.stderr


def test_time_is_limited():
    ended = limits.run_limited("-c", "while True: pass", seconds=1)
    assert ended.status < 0 and 0.5 < ended.seconds < 3
