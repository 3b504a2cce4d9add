"""`experiments.evaluate`: the figures of the originals, end to end, and clear answers to wrong
input."""

import functools
import json
import re
import shutil

import numpy as np
import pytest
from PIL import Image

from experiments.evaluate import inputs, sets
from experiments.evaluation import extractors
from experiments.evaluation.extractors import CompiledNetwork
from experiments.evaluation.statistics import Moments, frechet
from tests.experiments.evaluation import recipe

EXACT = recipe.expected()["e2e"]
IMAGES = recipe.arrays("e2e")


@pytest.fixture(scope="session")
def networks():
    """Folder of the converted networks: inception-fid of 1/8 width, lpips-alex."""
    inception, alex = map(recipe.converted, ("inception-fid", "lpips-alex"))
    assert inception.parent == alex.parent
    return alex.parent


@pytest.fixture(scope="session")
def pictures(tmp_path_factory):
    """Folder with the pictures of the fixtures: samples/ (files), samples.npz, reference.npz."""
    folder = tmp_path_factory.mktemp("pictures")
    save_folder(folder / "samples", IMAGES["samples"])
    np.savez(folder / "samples.npz", arr_0=IMAGES["samples"])
    np.savez_compressed(folder / "reference.npz", arr_0=IMAGES["reference"])
    return folder


def save_folder(folder, images):
    folder.mkdir(parents=True)
    for number, image in enumerate(images):
        Image.fromarray(image).save(folder / f"{number:05d}.png")
    return folder


@pytest.fixture
def read_once(monkeypatch):
    """Networks that a test opens again and again are read from the disk once."""
    monkeypatch.setattr(extractors, "_load", functools.cache(extractors._load))


@pytest.fixture
def flags(networks, pictures):
    """Reference and network; one size of batches, so that programs are compiled once."""
    network = f"--inception={networks / 'inception-fid'}"
    return (f"--reference={pictures / 'reference.npz'}", network, "--batch_size=8")


def content(folder):
    return json.loads((folder / "metrics.json").read_text(encoding="utf-8"))


def close(found, exact, tolerance=1e-4):
    return abs(found - exact) < tolerance * abs(exact)


# --- figures --------------------------------------------------------------------------------------


def test_adms_figures(call, flags, pictures, tmp_path):
    """FID, sFID, IS, precision and recall of a folder of files against an array; the recipe."""
    samples = f"--samples={pictures / 'samples'}"
    out = tmp_path / "out"
    status, text, err = call("evaluate", samples, *flags, "--split_size=16", f"--out={out}")
    assert status == 0, err
    found = content(out)
    assert close(found["fid"], EXACT["fid_tf1_path"])
    assert close(found["sfid"], EXACT["sfid_tf1_path"])
    assert close(found["inception_score"], EXACT["is_tf1_path"]["split_size_16"][1])
    exact = EXACT["prc_tf1_path_k3"]
    assert [found[k] for k in ("precision", "recall")] == [
        exact[k] for k in ("precision", "recall")
    ]
    said = found["recipe"]
    assert said["protocol"]["name"] == "adm" and said["protocol"]["path"] == "tf1"
    assert said["protocol"]["inception_score"]["split_size"] == 16
    assert (said["samples"]["count"], said["reference"]["count"]) == (40, 48)
    assert len(said["reference"]["sha256"]) == len(said["extractor"]["sha256"]) == 64
    assert any("40 pictures are not more than the 256 features" in r for r in found["remarks"])
    assert re.search(r"^fid +5\.57", text, re.M) and not (tmp_path / "out.partial").exists()


@pytest.mark.slow
@pytest.mark.parametrize("protocol, key", [("clean-fid", "clean"), ("pytorch-fid", "pytorch_fid")])
def test_other_protocols(call, flags, pictures, tmp_path, protocol, key):
    """Their own resizing; statistics that they leave serve as a reference for them alone."""
    samples, saved = f"--samples={pictures / 'samples.npz'}", tmp_path / "saved.npz"
    given = (f"--protocol={protocol}", f"--out={tmp_path / 'out'}", f"--save_statistics={saved}")
    status, _, err = call("evaluate", samples, *flags, *given)
    assert status == 0, err
    found = content(tmp_path / "out")
    assert close(found["fid"], EXACT[f"fid_{key}_path"]) and "sfid" not in found
    assert found["recipe"]["protocol"]["name"] == protocol
    again = (f"--reference={saved}", *flags[1:], f"--out={tmp_path / 'more'}")
    status, _, err = call("evaluate", samples, *again, "--protocol=adm")
    assert status == 2 and "made with another protocol" in err and not (tmp_path / "more").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("read_once")
def test_two_runs_give_the_same_digits(call, flags, tmp_path, monkeypatch):
    """Also one that was interrupted: it repeats nothing that was finished."""
    monkeypatch.setattr(sets, "LEAST_CHUNK", 8)
    for name in ("samples", "reference"):
        np.savez(tmp_path / f"{name}.npz", arr_0=IMAGES[name][:12])
    files = [f"--{name}={tmp_path / name}.npz" for name in ("samples", "reference")]
    given = (*files, *flags[1:], "--metrics=fid,is")
    assert call("evaluate", *given, f"--out={tmp_path / 'whole'}")[0] == 0
    begin, ran = CompiledNetwork.start, []

    def counts(self, *arrays):
        ran.append(len(arrays[0]))
        return begin(self, *arrays)

    def dies(self, *arrays):
        if len(ran) == 3:
            raise KeyboardInterrupt
        return counts(self, *arrays)

    monkeypatch.setattr(CompiledNetwork, "start", dies)
    out = f"--out={tmp_path / 'out'}"
    assert call("evaluate", *given, out)[0] == 130 and ran == [8, 4, 8]
    monkeypatch.setattr(CompiledNetwork, "start", counts)
    status, _, err = call("evaluate", *given, "--split_size=4", out)
    assert status == 2 and "an unfinished run with other settings" in err and len(ran) == 3
    status, _, err = call("evaluate", *given, out)
    assert status == 0 and ran == [8, 4, 8, 8, 4] and "12 of 12" not in err, (err, ran)
    assert content(tmp_path / "out") == content(tmp_path / "whole")
    assert call("evaluate", *given, out)[0] == 2
    files[0] = f"--samples={tmp_path / 'whole'}"
    status, _, err = call("evaluate", *given[1:], files[0], out, "--overwrite")
    assert status == 2 and "holds no pictures" in err and content(tmp_path / "out")


@pytest.mark.slow
@pytest.mark.usefixtures("read_once")
def test_a_reference_of_several_sizes_and_grey(call, networks, tmp_path):
    """Folders as COCO's, by clean-fid's rule: each picture becomes RGB and is resized on its own,
    here by Pillow. The other protocols' programs take one size."""
    photos = [IMAGES["reference"][i][: 32 - i, : 24 + i] for i in range(6)]
    photos[2] = photos[2][..., 1]
    reference = save_folder(tmp_path / "photos", photos)
    np.savez(tmp_path / "samples.npz", arr_0=IMAGES["samples"][:8])
    given = (f"--samples={tmp_path / 'samples.npz'}", f"--reference={reference}", "--batch_size=8")
    given += (f"--inception={networks / 'inception-fid'}", "--metrics=fid")
    for protocol in ("adm", "pytorch-fid"):
        refused(call, tmp_path, "pictures of a set need one size", *given, f"--protocol={protocol}")
    status, _, err = call("evaluate", *given, "--protocol=clean-fid", f"--out={tmp_path / 'out'}")
    assert status == 0, err
    found = content(tmp_path / "out")
    exact = frechet(*(clean_features(networks, side) for side in (IMAGES["samples"][:8], photos)))
    assert close(found["fid"], exact) and found["recipe"]["reference"]["count"] == 6
    assert f"{reference}: 1 pictures are grey or of inks, and taken as RGB" in found["remarks"]
    assert f"{reference}: pictures of 6 sizes, each resized on its own" in found["remarks"]


def clean_features(networks, images):
    """Mean and covariance of the features of pictures that Pillow has resized."""
    network = extractors.open_inception(str(networks / "inception-fid"), recipe.PATHS["clean"])
    program, moments = CompiledNetwork(network, (299, 299), 8), Moments(network.widths["pool"])
    moments.add(np.asarray(program.start(np.stack([*map(resized, images)]))["pool"])[: len(images)])
    return moments.gaussian()


def resized(image):
    rgb = np.asarray(Image.fromarray(image).convert("RGB"), np.float32)
    channels = (Image.fromarray(rgb[..., c]) for c in range(3))
    return np.stack([c.resize((299, 299), Image.Resampling.BICUBIC) for c in channels], -1)


def test_statistics_need_no_network(call, tmp_path):
    """ADM's files against each other; what they cannot give is left out, or refused if asked."""
    given = [
        f"--{flag}={recipe.FIXTURES / f'adm_tiny_{flag}.npz'}" for flag in ("samples", "reference")
    ]
    status, _, err = call("evaluate", *given, f"--out={tmp_path / 'out'}")
    assert status == 0, err
    found, exact = content(tmp_path / "out"), recipe.expected()["adm_tiny"]
    assert all(close(found[key], exact[key], 1e-7) for key in ("fid", "sfid"))
    assert "is, precision, recall left out" in found["remarks"][0]
    status, _, err = call("evaluate", *given, "--metrics=recall", f"--out={tmp_path / 'more'}")
    assert status == 2 and "recall: --inception=DIR is needed: download pt_inception" in err


def test_samples_in_the_order_of_their_classes(tmp_path):
    """ADM's Inception score of such files is far too low: it is said, with the way out."""
    for name, labels in (("sorted", np.arange(40) // 10), ("mixed", np.arange(40) % 4)):
        np.savez(tmp_path / f"{name}.npz", arr_0=IMAGES["samples"], arr_1=labels)
    for name, size, warns in (("sorted", 16, True), ("sorted", 40, False), ("mixed", 16, False)):
        samples = inputs.open_set("--samples", str(tmp_path / f"{name}.npz"))
        remarks = sets.order_remarks(samples, size)
        assert any("order of their classes" in remark for remark in remarks) == warns


# --- pairs ----------------------------------------------------------------------------------------


@pytest.fixture
def runs(tmp_path):
    """Two folders as `experiments.run` leaves them: 6 pictures, the last ones equal."""
    known = recipe.arrays("lpips")
    for name, letter in (("policy", "b"), ("full", "a")):
        folder = tmp_path / name
        folder.mkdir()
        images = np.stack([known[f"{letter}_{i}"] for i in range(6)])
        np.savez(folder / "samples.npz", arr_0=images, arr_1=np.arange(6))
        tokens = np.arange(60).reshape(6, 10) + 100 * np.eye(6, 10, dtype=int) * (name == "full")
        np.savez(folder / "arrays.npz", tokens=tokens.astype(np.int32))
        report = {"policy": name, "model": "demo", "seed": 3, "labels": [1] * 6, "kv": {}}
        (folder / "report.json").write_text(json.dumps(report), encoding="utf-8")
    return tmp_path


def test_pictures_one_by_one(call, networks, runs, tmp_path):
    """PSNR without the identical pair, SSIM, LPIPS, tokens; numbers of every picture."""
    given = (f"--samples={runs / 'policy'}", f"--full={runs / 'full'}")
    out = tmp_path / "out"
    lpips = f"--lpips={networks / 'lpips-alex'}"
    status, text, err = call("evaluate", *given, lpips, f"--out={out}", "--batch_size=4")
    assert status == 0, err
    found, known = content(out), recipe.expected()["psnr_ssim"]
    assert abs(found["psnr"] - known["batch_without_identical"]["psnr_mean_of_images"]) < 1e-4
    assert abs(found["ssim"] - known["batch_with_identical"]["ssim_mean"]) < 1e-4
    exact = recipe.arrays("lpips")["alex_lpips_f32"][:6]
    assert close(found["lpips"], exact.mean(), 2e-5)
    assert found["identical_images"] == 1 and abs(found["token_agreement"] - 0.9) < 1e-9
    said = found["recipe"]
    assert said["samples"]["recipe"] == {"policy": "policy", "model": "demo", "seed": 3}
    assert said["lpips"]["name"] == "lpips alex, version 0.1" and re.search(
        r"^identical_images +1$", text, re.M
    )
    with np.load(out / "per_image.npz") as arrays:
        assert np.isinf(arrays["psnr"]).sum() == 1 and arrays["key"].tolist() == list(range(6))
        np.testing.assert_allclose(arrays["lpips"], exact, rtol=2e-5, atol=1e-8)
        assert arrays["ssim"].shape == (6,)


def test_pairs_that_differ_by_more_than_the_cache(call, runs, tmp_path):
    """Another seed, other sampling, other classes: told, and kept in metrics.json."""
    given = (f"--samples={runs / 'policy'}", f"--full={runs / 'full'}", "--metrics=psnr")
    assert call("evaluate", *given, f"--out={tmp_path / 'same'}")[0] == 0
    assert content(tmp_path / "same")["remarks"] == []
    path = runs / "full" / "report.json"
    report = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(report | {"model": "x"}))
    assert call("evaluate", *given, f"--out={tmp_path / 'model'}")[0] == 0
    assert "another model than the samples" in content(tmp_path / "model")["remarks"][0]
    report |= {"seed": 4, "sampling": {"cfg": 2}, "dtype": "bfloat16"}
    path.write_text(json.dumps(report), encoding="utf-8")
    with np.load(runs / "full" / "samples.npz") as arrays:
        images, labels = arrays["arr_0"], arrays["arr_1"]
    np.savez(runs / "full" / "samples.npz", arr_0=images, arr_1=np.roll(labels, 1))
    status, _, err = call("evaluate", *given, f"--out={tmp_path / 'other'}")
    drawn, classes = content(tmp_path / "other")["remarks"]
    words = "--full was drawn with another sampling, seed, dtype than the samples"
    assert status == 0 and words in drawn
    assert classes == "6 of 6 pairs are of two different classes" and drawn in err


# --- wrong input ----------------------------------------------------------------------------------


def refused(call, tmp_path, problem, *given):
    """Exit status 2, one clear line, nothing written."""
    before = sorted(path.name for path in tmp_path.iterdir())
    status, out, err = call("evaluate", *given, f"--out={tmp_path / 'out'}")
    assert status == 2 and not out, err
    assert problem in err.splitlines()[-1]
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_wrong_flags(call, flags, networks, pictures, tmp_path):
    samples = f"--samples={pictures / 'samples.npz'}"
    lpips = f"--lpips={networks / 'lpips-alex'}"
    full, demo = f"--full={pictures / 'samples.npz'}", ("--features=demo", flags[0])
    for problem, *given in (
        ("--samples is required", *flags),
        ("there is nothing to compare with", samples),
        ("unknown metric 'fdi': choose one of fid", samples, *flags, "--metrics=fdi"),
        ("psnr compares pictures one by one: give --full", samples, *flags, "--metrics=psnr"),
        (
            "fid serves comparisons with a reference",
            samples,
            f"--full={pictures / 'samples'}",
            "--metrics=fid",
        ),
        ("lpips needs --lpips=DIR: download", samples, f"--full={pictures}", "--metrics=lpips"),
        (
            "there is no folder nowhere: download pt_inception",
            samples,
            flags[0],
            "--inception=nowhere",
        ),
        ("--inception=DIR is needed: download pt_inception", samples, flags[0]),
        ("is no inception", samples, flags[0], f"--inception={networks / 'lpips-alex'}"),
        ("--inception belongs to --features=inception", samples, *flags, "--features=demo"),
        ("there is no folder nowhere: train one", *demo, samples, "--classifier=nowhere"),
        ("fid is of --features=inception", *demo, samples, "--metrics=fid"),
        ("samples.npz has none", *demo, samples, "--metrics=class_agreement"),
        ("pictures of 32x32 pixels: the classifier was trained on", *demo, samples),
        ("use data alone", samples, *flags, "--mesh=model=2"),
        ("a mesh of data=64,model=1 takes 64 devices", samples, *flags, "--mesh=data=64"),
        ("--inception serves comparisons", samples, full, flags[1]),
        ("--lpips compares pictures one by one", samples, *flags, "--lpips=nowhere"),
        ("has 40 pictures, ", samples, f"--full={pictures / 'reference.npz'}", lpips),
    ):
        refused(call, tmp_path, problem, *given)


@pytest.mark.usefixtures("read_once")
def test_wrong_references(call, flags, pictures, tmp_path):
    given = (f"--samples={pictures / 'samples.npz'}", *flags[1:])
    reference = f"--reference={tmp_path / 'r.npz'}"
    sound = {"mu": np.zeros(256), "sigma": np.eye(256)}
    for problem, arrays in (
        ("r.npz holds features: pictures (`arr_0`", {"features": np.zeros((4, 256))}),
        (
            "`mu` has 512 numbers, the extractor gives 256",
            {"mu": np.zeros(512), "sigma": np.eye(512)},
        ),
        ("made with another extractor", sound | {"extractor": np.array("0" * 64)}),
    ):
        np.savez(tmp_path / "r.npz", **arrays)
        refused(call, tmp_path, problem, *given, reference)
    np.savez(tmp_path / "r.npz", **sound)
    refused(
        call, tmp_path, "precision: pictures are needed", *given, reference, "--metrics=precision"
    )
    refused(call, tmp_path, "sfid: `mu_s` is needed", *given, reference, "--metrics=sfid")
    np.savez(tmp_path / "r.npz", arr_0=IMAGES["reference"][:3])
    refused(call, tmp_path, "at least 4 pictures are needed", *given, reference, "--metrics=recall")


@pytest.mark.usefixtures("read_once")
def test_wrong_pictures(call, flags, tmp_path):
    """The file at fault is named."""
    folder = save_folder(tmp_path / "s", IMAGES["samples"][:3])
    given, last = (f"--samples={folder}", *flags), folder / "00002.png"
    last.write_bytes(last.read_bytes()[:-20])
    refused(call, tmp_path, "00002.png is no picture, damaged or cut short", *given)
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / "report.json").write_text("{}")
    refused(call, tmp_path, "the folder of a run, but samples.npz is missing", *given)
