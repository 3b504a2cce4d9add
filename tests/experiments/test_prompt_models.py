"""Commands on models that read prompts as token ids: what they write, and what they refuse."""

import json

import numpy as np
import pytest

from tests import models_under_test as models
from tests import prompt_models_under_test as small
from tests.experiments.conftest import flags_as_text
from tests.often import often
from varjax.text.prompt_ids import PromptIds

FAST = ("--dtype=float32", "--batch_size=2")


@pytest.fixture(scope="module", params=often(("janus",), small.CONFIGS))
def family(request):
    return request.param


@pytest.fixture(scope="module")
def checkpoint(family):
    return f"--checkpoint={small.checkpoint_folder(family)}"


@pytest.fixture(scope="module")
def files(family, tmp_path_factory):
    """Prompts as ids: two, of which the second is longer; and what is none."""
    folder, ids = tmp_path_factory.mktemp("inputs"), small.IDS[family]
    two = PromptIds.of([ids, [ids[0], *ids]])
    two.save(folder / "two.npz")
    PromptIds.of([ids, ids], ["a red apple", "a"]).save(folder / "named.npz")
    PromptIds.of([[80, *ids]]).save(folder / "foreign.npz")
    PromptIds.of([[ids[0]] * 121 + ids]).save(folder / "long.npz")
    PromptIds.of([ids[-1:]]).save(folder / "short.npz")
    np.savez(folder / "other.npz", kv=np.zeros((2, 3), np.float32), lens=[2])
    np.savez(folder / "unequal.npz", ids=[1, 2, 3], lens=[2])
    (folder / "prompts.txt").write_text("a red apple\ntwo green pears\n")
    (folder / "three.txt").write_text("a\na\na\n")
    return folder


def test_run(call, family, checkpoint, files, tmp_path):
    """The arrays of the interface: codes in raster order, without new lines."""
    out, config = tmp_path / "out", small.CONFIGS[family]
    flags = (f"--prompt_ids={files / 'two.npz'}", "--save_arrays", f"--out={out}", *FAST)
    status, text, err = call("run", checkpoint, *flags, "--policy=headkv", "--budget=0.9")
    assert status == 0, err
    assert "allocated KV" in text
    height, width = config.grid
    with np.load(out / "arrays.npz") as found:
        kinds = {name: (found[name].dtype.name, found[name].shape) for name in found.files}
        assert found["tokens"].max() < config.vocab_size
    pixels = (2 * height, 2 * width)
    assert kinds == {
        "tokens": ("int32", (2, height * width)),
        "logits": ("float32", (2, height * width, 20)),
        "code_map": ("float32", (2, 8, height, width)),
        "images": ("float32", (2, 3, *pixels)),
    }
    with np.load(out / "samples.npz") as found:
        assert found["arr_0"].shape == (2, *pixels, 3)
        np.testing.assert_array_equal(found["arr_1"], [0, 1])
    assert sorted(p.name for p in (out / "images").iterdir()) == ["00000.png", "00001.png"]
    report = json.loads((out / "report.json").read_text(encoding="utf-8"))
    assert report["text"]["ids"]["longest"] == len(small.IDS[family]) + 1
    assert report["memory"]["phases"]["text"] is None


@pytest.mark.slow
def test_places_do_not_change_pictures(call, family, checkpoint, files, tmp_path):
    found = []
    for more in ((), ("--prompt_tokens=30",)):
        out = tmp_path / f"out{len(found)}"
        flags = (f"--prompt_ids={files / 'two.npz'}", "--greedy", "--save_arrays", f"--out={out}")
        status, _, err = call("run", checkpoint, *flags, *FAST, *more)
        assert status == 0, err
        with np.load(out / "arrays.npz") as arrays:
            found.append({name: arrays[name] for name in ("tokens", "logits")})
    np.testing.assert_array_equal(found[0]["tokens"], found[1]["tokens"])
    np.testing.assert_allclose(found[0]["logits"], found[1]["logits"], atol=1e-4)


@pytest.mark.slow
def test_prompts_become_a_benchmarks_folder(call, family, tmp_path):
    """The checkpoint's tokenizer; images lie where GenEval's scorer looks."""
    folder, out = small.with_tokenizer(family, tmp_path / "checkpoint"), tmp_path / "out"
    prompts = tmp_path / "evaluation_metadata.jsonl"
    texts = ("a red apple", "two green pears")
    entries = [{"prompt": text, "tag": "color", "include": []} for text in texts]
    prompts.write_text("\n".join(map(json.dumps, entries)))
    flags = (f"--checkpoint={folder}", f"--prompts={prompts}", "--num_images=2/prompt", *FAST)
    status, plan, err = call("run", *flags, "--dry_run")
    assert status == 0, err
    # the second prompt is the longer one: its 5 words and spaces, and what the format adds
    sentence = "Generate an image of 32x64 according to the following prompt:\n"
    added = {"janus": 9, "lumina": len(small.by_hand(sentence)) + 5}[family]
    assert f"schedule          {added + 5}+" in plan
    status, _, err = call("run", *flags, f"--out={out}")
    assert status == 0, err
    for prompt in range(2):
        samples = out / f"images/{prompt:05d}/samples"
        assert sorted(p.name for p in samples.iterdir()) == ["0000.png", "0001.png"]
    manifest = json.loads((out / "manifest.json").read_text(encoding="utf-8"))
    assert [entry["prompt"] for entry in manifest["images"]] == [t for t in texts for _ in "12"]
    report = json.loads((out / "report.json").read_text(encoding="utf-8"))
    assert report["text"]["kind"] == "geneval" and report["text"]["ids"]["images"] == 4


BAD = [
    ((), "reads prompts as token ids; give --prompts=TEXT, --prompts=FILE or --prompt_ids=FILE"),
    (("--labels=3",), "--labels: random-"),
    (("--text_features=IN/other.npz",), "--text_features: random-"),
    (("--negative_prompts=a",), "--negative_prompts: random-"),
    (("--prompts=a",), "there is no tokenizer file"),
    (("--prompts=a",), "--prompt_ids=FILE.npz"),
    (("--prompts=IN/prompts.txt",), "there is no tokenizer file"),
    (("--prompt_ids=/nowhere.npz",), "there is no file /nowhere.npz"),
    (("--prompt_ids=IN/other.npz",), "ids missing; needed are ids and lens"),
    (("--prompt_ids=IN/unequal.npz",), "lens sums up to 2, ids has 3 rows"),
    (("--prompt_ids=IN/foreign.npz",), "foreign.npz, text 0: prompt ids 80 are outside the vo"),
    (("--prompt_ids=IN/long.npz",), "long.npz, text 0: a prompt of 12"),
    (("--prompt_ids=IN/short.npz",), "short.npz, text 0: "),
    (("IDS", "--prompts=IN/three.txt"), "--prompt_ids holds 2 texts, there are 3 prompts"),
    (("--prompt_ids=IN/named.npz", "--prompts=IN/prompts.txt"), "was made of 'a', but"),
    (("IDS", "--prompt_tokens=5"), "two.npz, text 1 is the longest and has"),
    (("IDS", "--prompt_tokens=0"), "positive integer"),
    (("IDS", "--prompt_tokens=127"), "takes at most 128"),
    (("IDS", "--prompt_tokens=100000"), "choose 1 to"),
    (("IDS", "--grid=3"), "grid='3': write height x width, for example 3x2"),
    (("IDS", "--grid=0x2"), "grid='0x2': write height x width"),
    (("IDS", "--grid=2x2", "--size=64"), "grid and size (or aspect) exclude each other"),
    (("IDS", "--grid=40x40"), "choose a shorter prompt or a smaller image"),
    (("IDS", "--aspect=2"), "aspect"),
    (("IDS", "--size=1M"), "size"),
    (("IDS", "--policy=headkv", "--budget=0.01"), "smallest feasible budget"),
]


@pytest.mark.parametrize(("flags", "message"), BAD, ids=flags_as_text)
def test_bad_input(refused, checkpoint, files, flags, message):
    flags = [f.replace("IDS", "--prompt_ids=IN/two.npz") for f in flags]
    refused("run", message, checkpoint, *(f.replace("IN", str(files)) for f in flags))


@pytest.mark.slow
def test_another_size_of_lumina(call, tmp_path):
    """The size decides the prompt's last ids; prompts of another size are refused."""
    folder = f"--checkpoint={small.checkpoint_folder('lumina')}"
    PromptIds.of([[0, 41, 39, 30, 33, 34]]).save(tmp_path / "wide.npz")
    flags = (folder, f"--prompt_ids={tmp_path / 'wide.npz'}", "--dry_run")
    for shape in ("--size=4x8", "--grid=1x2"):  # the codec draws two pixels a code
        status, text, err = call("run", *flags, shape)
        assert status == 0, err
        assert "schedule" in text and "6+10" in text  # two lines of four codes and a new line
    status, _, err = call("run", *flags)
    assert status == 2 and "ask for an image of 1x2 units, the model draws 2x1" in err
    status, _, err = call("run", *flags, "--size=32x64")  # of a released codec
    assert status == 2 and "HEIGHTxWIDTH in pixels is one of 4x4, 4x8, 8x4" in err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "shown"),
    [
        (("--model=janus-pro-7b",), "32+576"),
        (("--model=janus-pro-1b", "--prompt_tokens=50"), "50+576"),
        (("--model=lumina-mgpt-7b-768", "--prompts=a cat"), "70+2352"),
        (("--model=lumina-mgpt-7b-768", "--size=640x896", "--prompt_tokens=64"), "64+2280"),
        (("--model=lumina-mgpt-7b-1024",), "70+4160"),
    ],
    ids=flags_as_text,
)
def test_dry_run_of_published_sizes(call, flags, shown):
    """Without weights and tokenizer: places as the model has them, or as --prompt_tokens says."""
    status, out, err = call("run", *flags, "--dry_run", "--policy=streaming", "--budget=0.25")
    assert status == 0, err
    assert f"schedule          {shown}\n" in out


# --- against the originals ------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", often(list(models.PROMPT_MODELS)[-1:], models.PROMPT_MODELS))
def test_the_original_through_the_command(call, name, tmp_path):
    """Greedy tokens are identical, guided logits agree to 3e-4 per stream, and so do images."""
    arrays, out = _reference(name), tmp_path / "out"
    PromptIds.of([arrays["prompt_ids"]]).save(tmp_path / "ids.npz")
    flags = (f"--prompt_ids={tmp_path / 'ids.npz'}", f"--cfg={arrays['cfg']}", "--greedy")
    flags += ("--top_k=0", "--matmul_precision=highest", "--save_arrays", f"--out={out}")
    flags += (f"--grid={arrays['grid'][0]}x{arrays['grid'][1]}", "--dtype=float32")
    status, _, err = call("run", f"--checkpoint={models.checkpoint_folder(name)}", *flags)
    assert status == 0, err
    with np.load(out / "arrays.npz") as found:
        np.testing.assert_array_equal(found["tokens"], arrays["tokens"][None])
        bound = 3e-4 * (2 * arrays["cfg"] - 1)  # |cfg| + |1 - cfg| times the error of a stream
        np.testing.assert_allclose(found["logits"][0], arrays["logits"], rtol=0, atol=bound)
        expected = (np.clip(arrays["decoded"], -1, 1) + 1) / 2
        np.testing.assert_allclose(found["images"][0], expected, rtol=0, atol=1.5e-4)


def _reference(name: str) -> dict:
    """What the original drew for one prompt: tokens [L], guided logits [L, V], decoded picture."""
    family = name.partition("_")[0]
    read = {"janus": models.janus_fixture, "lumina": models.lumina_fixture}[family]
    found = read(f"{name}_gen")
    if family == "janus":
        cond, uncond = found["head_logits"]
        cfg, tokens, grid = float(found["cfg_weight"]), found["gen_tokens"][0], found["grid"]
    else:
        cfg, tokens, grid = float(found["cfg"]), found["vq_indices"].reshape(-1), found["grids_hw"]
        # 4 tokens and a new line in each of 6 lines, then the image's end
        steps = np.arange(30).reshape(6, 5)[:, :4].reshape(-1)
        columns = models.fixture_model(name).config.image_ids
        streams = (found[f"step_logits_{which}"] for which in ("cond", "uncond"))
        cond, uncond = (stream[steps][:, columns] for stream in streams)
    own = {"cfg": cfg, "tokens": tokens, "grid": grid, "decoded": found["decoded"][0]}
    return own | {"logits": uncond + cfg * (cond - uncond), "prompt_ids": found["prompt_ids"]}
