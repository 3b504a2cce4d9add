"""Models by name: fetched from a server that looks like the hub, converted, found again."""

import json
import shutil
import socket
import types
from pathlib import Path

import pytest
from huggingface_hub import constants
from huggingface_hub.utils import _headers

from experiments.cli import command_line
from ported_weights import __main__ as command
from ported_weights import hub
from tests import models_under_test as models
from tests.conftest import ROOT
from tests.ported_weights.hub_server import Hub, serving
from varjax.core.errors import UserError
from varjax.models import registry
from varjax.models.loading import load
from varjax.models.registry import found
from varjax.storage import names

FIXTURES = ROOT / "tests" / "fixtures" / "var"
REPO = "FoundationVision/var"
WEIGHTS = FIXTURES / "c_k5_nol2norm" / "var.safetensors"
TOKENIZER = FIXTURES / "vae_small" / "vae.safetensors"
CONFIG = FIXTURES / "c_k5_nol2norm" / "config.json"
TOKENIZER_CONFIG = FIXTURES / "vae_small" / "config.json"
FLAGS = (
    "--model=var-custom",
    "--source=hub",
    f"--config={CONFIG}",
    f"--tokenizer_config={TOKENIZER_CONFIG}",
)


@pytest.fixture
def served(tmp_path, monkeypatch):
    """A hub with the files of a small VAR, which is called var-custom there."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # between attempts
    places_of = {"source": [REPO, "var.safetensors"], "tokenizer_source": [REPO, "vae.safetensors"]}
    data = {"models": {"var-custom": places_of}, "repositories": {REPO: {"files": {}}}}
    monkeypatch.setattr(hub, "_data", lambda: data)
    files = {f"{REPO}/var.safetensors": WEIGHTS, f"{REPO}/vae.safetensors": TOKENIZER}
    server = Hub({name: path.read_bytes() for name, path in files.items()})
    with serving(server) as address:
        monkeypatch.setattr(hub, "ENDPOINT", address)
        server.data = data
        yield server


@pytest.fixture
def convert(capsys):
    """convert("--flag=..."): (exit status, standard output, standard error)."""

    def invoke(*flags):
        with pytest.raises(SystemExit) as stop:
            command_line.run(command.main, ["ported_weights", *(flags or FLAGS)])
        said = capsys.readouterr()
        return stop.value.code, said.out, said.err

    return invoke


def refused(outcome, *words):
    status, out, err = outcome
    assert status == 2 and err.count("error:") == 1 and "Traceback" not in err, err
    line = next(line for line in err.splitlines() if line.startswith("error:"))
    for word in words:
        assert word in line, line
    assert not names.converted("var-custom").exists()
    assert not list(names.converted("x").parent.glob(".*"))


def test_by_name(served, convert):
    """Fetched, checked, converted, found; a second conversion takes the files from the cache."""
    status, out, err = convert()
    assert status == 0, err
    assert "385,755 parameters written" in out and f"revision {'c' * 40}" in err
    folder = names.converted("var-custom")
    described = json.loads((folder / "model.json").read_text(encoding="utf-8"))
    assert {Path(s["file"]).name for s in described["sources"]} == {
        "var.safetensors",
        "vae.safetensors",
    }
    assert load(folder).config.depth == described["transformer"]["depth"]
    status, _, err = convert()
    assert status == 2 and "exists already" in err
    before = len([line for line in served.asked if line.startswith("GET /FoundationVision")])
    assert convert(*FLAGS, "--overwrite")[0] == 0
    after = len([line for line in served.asked if line.startswith("GET /FoundationVision")])
    assert before == after == 2


def test_a_broken_download_goes_on(served, convert):
    served.cut = 100_000
    refused(convert(), "var-custom: ", "same command goes on from there")
    served.cut = None
    served.asked.clear()
    assert convert()[0] == 0


@pytest.mark.parametrize("entry", [{"size": 5}, {"sha256": "0" * 64}])
def test_other_files_than_expected(served, convert, entry, tmp_path):
    served.data["repositories"][REPO]["files"]["var.safetensors"] = entry
    refused(convert(), "var.safetensors of FoundationVision/var has", "removed")
    assert not list((tmp_path / "hub").rglob("var.safetensors"))


def test_what_the_hub_says_is_checked(served, convert):
    served.lies[f"{REPO}/var.safetensors"] = "1" * 64
    refused(convert(), "var.safetensors of FoundationVision/var has other bytes", "'1111")


@pytest.mark.parametrize("name", ["etag", "commit", "revision", "file"])
def test_names_that_lead_out_of_the_cache(served, convert, name, tmp_path):
    """What the library would make paths of, and what we would then compare and remove."""
    precious = tmp_path / "precious"
    precious.write_text("mine")
    if name == "etag":
        served.lies[f"{REPO}/var.safetensors"] = "../../../precious"
    elif name == "file":
        served.files[f"{REPO}/../../precious.json"] = b"{}"
        served.data["models"]["var-custom"]["source"] = [REPO, "/"]
    else:
        setattr(served, name, "../../../precious")
    refused(
        convert(), "precious", "refused: " if name != "file" else "cannot be the name of a file"
    )
    assert precious.read_text() == "mine"
    made = {path.name for path in tmp_path.iterdir()}
    assert made <= {"precious", "hub", "cache"}
    assert not [path for path in (tmp_path / "hub").rglob("*") if path.is_symlink()]


def test_plain_headers_of_any_hub():
    def answer(**headers):
        request = types.SimpleNamespace(method="HEAD")
        return types.SimpleNamespace(request=request, headers=headers)

    for etag in ("", "ab12", '"ab12"', 'W/"ab12-gzip"', '"0x8D+="'):
        hub._check_headers(answer(etag=etag))
    for etag in ("..", '".."', "W/..", "WW..", '"/abs"', "W//abs", '"a/../.."', '"a\\b"', '"."'):
        with pytest.raises(UserError, match="refused"):
            hub._check_headers(answer(etag=etag))


def test_a_link_out_of_the_cache(served, convert, tmp_path):
    """It is neither read nor removed. The cache itself, and a repository in it, may be links."""
    assert convert()[0] == 0
    shutil.rmtree(names.converted("var-custom"))
    [found] = (tmp_path / "hub").rglob("var.safetensors")
    blob, precious = found.resolve(), tmp_path / "precious"
    blob.rename(precious)
    blob.symlink_to(precious)
    served.data["repositories"][REPO]["files"]["var.safetensors"] = {"size": 5}
    refused(convert(), "var.safetensors of FoundationVision/var", str(precious), "neither read nor")
    assert precious.read_bytes() == WEIGHTS.read_bytes() and found.is_symlink()
    precious.replace(blob)
    served.data["repositories"][REPO]["files"].clear()
    [repository] = (tmp_path / "hub").glob("models--*")
    repository.rename(tmp_path / "elsewhere")
    repository.symlink_to(tmp_path / "elsewhere")
    assert convert()[0] == 0


def test_wrong_token(served, convert, monkeypatch):
    served.token = "right"
    monkeypatch.setattr(_headers, "get_token", lambda: "wrong")
    refused(convert(), "the token is not accepted")


def test_no_network(served, convert, monkeypatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setattr(hub, "ENDPOINT", f"http://127.0.0.1:{port}")
    refused(convert(), "check the network")


def test_files_that_are_gone(served, convert):
    del served.files[f"{REPO}/vae.safetensors"]
    refused(convert(), "has no vae.safetensors", "it holds var.safetensors")
    served.files.clear()
    refused(convert(), "no such repository")


def test_a_wheel_without_the_library(served, convert, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub", None)
    refused(convert(), "huggingface_hub", "[port]")


def test_names():
    """Every name is a model; what is known is a number or a hash; Lumina's tokenizer is Meta's."""
    data = json.loads(hub.DATA.read_text(encoding="utf-8"))
    assert set(data["models"]) <= {*registry.PRESETS, "flan-t5"}
    for model, places_of in data["models"].items():
        for flag, (repo, path) in places_of.items():
            assert flag.endswith("source") and path in data["repositories"][repo]["files"], model
    for repo in data["repositories"].values():
        for file in repo["files"].values():
            assert set(file) == {"size", "sha256"}
    with pytest.raises(UserError, match="did you mean 'var-d16'"):
        hub.fetch("var-d1", {})
    with pytest.raises(UserError, match="get vqgan.ckpt of Chameleon from Meta"):
        hub.fetch("lumina-mgpt-7b-768", {})


def test_weights_of_a_folder():
    names = "config.json model-1.safetensors pytorch_model.bin tf_model.h5 spiece.model README.md"
    listed = hub.Repository("a/b", "c", {name: (1, None) for name in names.split()})
    assert listed.chosen("/") == ["config.json", "model-1.safetensors", "spiece.model"]
    with pytest.raises(UserError, match="has no x/ with weights"):
        listed.chosen("x/")


def test_a_converted_model_is_found_by_its_name(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="--model=var-d16 --source=hub` converts them"):
        load("var-d16")
    shutil.copytree(models.checkpoint_folder("c_k5_nol2norm"), names.converted("var-d16"))
    model = load("var-d16")
    assert model.name == "var-d16" and model.directory == names.converted("var-d16")
    assert found("var-d20") == "var-d20" and found(None) is None
    (tmp_path / "var-d16").mkdir()  # a folder that is here comes first
    assert found("var-d16") == "var-d16"
