"""Prompt files as benchmarks publish them, and what can be wrong with them."""

import json
import pathlib
import re

import pytest

from experiments.prompts import sets
from experiments.prompts.sets import PromptFormat, read_prompts
from varjax.core.errors import UserError

GENEVAL = (
    {"tag": "single_object", "include": [{"class": "bench", "count": 1}], "prompt": "a bench"},
    {
        "tag": "counting",
        "include": [{"class": "clock", "count": 4}],
        "exclude": [{"class": "clock", "count": 5}],
        "prompt": "a photo of four clocks",
    },
)
COCO = {
    "info": {"year": 2014},
    "images": [{"id": 42, "file_name": "COCO_val2014_000000000042.jpg"}, {"id": 391895}],
    "licenses": [],
    "annotations": [
        {"image_id": 391895, "id": 771687, "caption": "A young girl inhales.\n"},
        {"image_id": 42, "id": 641613, "caption": "This wire metal rack holds shoes"},
        {"image_id": 42, "id": 637956, "caption": "A dog sleeping on a show rack"},
    ],
}


def write_json_lines(path, entries):
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return path


def write_sample(kind: PromptFormat, folder):
    """A small file or folder in the published format."""
    if kind is PromptFormat.LINES:
        (folder / "prompts.txt").write_text("a cat\n\n  ein Löwe \r\nlast", encoding="utf-8")
        return folder / "prompts.txt"
    if kind is PromptFormat.GENEVAL:
        return write_json_lines(folder / "evaluation_metadata.jsonl", GENEVAL)
    if kind is PromptFormat.DPG:
        for name, text in (("partiprompts10", "ten\nlines"), ("2", "two"), ("partiprompts9", "9")):
            (folder / f"{name}.txt").write_text(text)
        (folder / "._2.txt").write_bytes(b"\x00\x05\xff")  # a resource fork of macOS
        return folder
    if kind is PromptFormat.HPSV2:
        for style, prompts in (("photo", ["p0", "p1"]), ("anime", ["a0"]), ("drawbench", ["d"])):
            (folder / f"{style}.json").write_text(json.dumps(prompts))
        return folder
    (folder / "captions_val2014.json").write_text(json.dumps(COCO))
    return folder / "captions_val2014.json"


EXPECTED = {
    PromptFormat.LINES: [
        ("a cat", "00000"),
        ("", "00001"),
        ("ein Löwe", "00002"),
        ("last", "00003"),
    ],
    PromptFormat.GENEVAL: [("a bench", "00000"), ("a photo of four clocks", "00001")],
    PromptFormat.DPG: [("two", "2"), ("9", "partiprompts9"), ("ten lines", "partiprompts10")],
    PromptFormat.HPSV2: [("a0", "anime/00000"), ("p0", "photo/00000"), ("p1", "photo/00001")],
    PromptFormat.COCO: [
        ("A dog sleeping on a show rack", "000000000042"),
        ("A young girl inhales.", "000000391895"),
    ],
    PromptFormat.COCO_CAPTIONS: [
        ("A dog sleeping on a show rack", "000000000042_637956"),
        ("This wire metal rack holds shoes", "000000000042_641613"),
        ("A young girl inhales.", "000000391895_771687"),
    ],
}


@pytest.mark.parametrize("kind", PromptFormat)
def test_published_formats(kind, tmp_path):
    found = read_prompts(write_sample(kind, tmp_path), kind)
    assert [(p.text, p.name) for p in found.prompts] == EXPECTED[kind]
    assert found.kind is kind
    assert found.images_per_prompt == {PromptFormat.GENEVAL: 4, PromptFormat.DPG: 4}.get(kind, 1)
    assert all(str(tmp_path) in where for where in found.names)


@pytest.mark.parametrize("kind", [k for k in PromptFormat if k is not PromptFormat.COCO_CAPTIONS])
def test_formats_are_recognised(kind, tmp_path):
    assert read_prompts(write_sample(kind, tmp_path)).kind is kind


def test_byte_order_mark_and_other_separators(tmp_path):
    """Only line feeds end lines: numbers agree with those of editors."""
    (tmp_path / "f.txt").write_bytes("\ufeffa cat\u2028and a dog\x0b!\nb".encode())
    assert read_prompts(tmp_path / "f.txt").texts == ["a cat\u2028and a dog\x0b!", "b"]


def _file(name, content):
    def write(folder):
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        (folder / name).write_bytes(data)
        return folder / name

    return write


def _folder(**files):
    def write(folder):
        for name, data in files.items():
            (folder / name.replace("_", ".")).write_bytes(data)
        return folder

    return write


_NO_TAG = json.dumps(GENEVAL[0]).encode() + b'\n{"prompt": "a cow", "include": []}\n'
REFUSED = {
    "nothing": (lambda folder: folder / "no.txt", "auto", "there is no prompt file"),
    "encoding": (_file("f.txt", b"a\nb\xff\n"), "auto", "f.txt, line 2 is not UTF-8"),
    "geneval nan": (
        _file("f.jsonl", b'{"tag": "a", "include": [NaN], "prompt": "a"}'),
        "auto",
        "f.jsonl, line 1 holds NaN or an infinite number",
    ),
    "geneval twice": (
        _file("f.jsonl", b'{"tag": "a", "include": [], "prompt": "a", "prompt": "b"}'),
        "auto",
        "f.jsonl, line 1 is not JSON: key 'prompt' is there twice",
    ),
    "geneval tag": (_file("f.jsonl", _NO_TAG), "auto", "line 2: .*'tag' is missing"),
    "hpsv2 entry": (_file("anime.json", ["a", 3]), "auto", "anime.json, entry 1: .*found 3"),
    "json": (_file("f.json", {"a": 1}), "auto", "neither a list of prompts .* nor a COCO"),
    "coco twice": (
        _file("f.json", {"annotations": [{"image_id": 1, "id": 2, "caption": "a"}] * 2}),
        "coco",
        r"annotations\[1\]: caption .* is there twice",
    ),
    "both": (_folder(a_txt=b"x", anime_json=b"[]"), "auto", "both .txt files .* and style lists"),
    "file as dpg": (_file("f.txt", b"a"), "dpg", "is a file: prompts of DPG-Bench"),
    "surrogate": (_file("anime.json", ["a", "\ud800"]), "auto", "entry 1: .*half of a surrogate"),
    "kind": (_file("f.txt", b"a"), "gneval", "unknown kind of prompts .*did you mean 'geneval'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_files_that_are_refused(case, tmp_path):
    write, kind, message = REFUSED[case]
    with pytest.raises(UserError, match=message):
        read_prompts(write(tmp_path), kind)


def test_files_that_are_too_large(tmp_path, monkeypatch):
    """Nothing is read beyond the limits, and nothing of what has no end."""
    with pytest.raises(UserError, match="/dev/zero: it is no ordinary file"):
        read_prompts("/dev/zero")
    with monkeypatch.context() as patch, pytest.raises(UserError, match="f.txt: it has more than"):
        patch.setattr(sets, "LARGEST_FILE", 3)
        (tmp_path / "f.txt").write_text("four")
        read_prompts(tmp_path / "f.txt")
    monkeypatch.setattr(sets, "MOST_PROMPTS", 3)
    (tmp_path / "f.txt").write_text("\n" * 4)
    (tmp_path / "f.json").write_text('["a", "a", "a", "a"]')
    for name in ("f.txt", "f.json"):
        with pytest.raises(UserError, match="more than 3"):
            read_prompts(tmp_path / name)


def test_every_kind_is_a_value_of_the_flag_and_documented():
    page = (pathlib.Path(__file__).parents[2] / "docs" / "howto" / "text.md").read_text("utf-8")
    table = re.findall(r"^\| `([\w-]+)` \| .*\| (\d) \|$", page, re.MULTILINE)
    assert ("auto", *(kind for kind, _ in table)) == sets.KINDS
    for kind, each in table:
        assert sets.IMAGES_PER_PROMPT.get(kind, 1) == int(each)
