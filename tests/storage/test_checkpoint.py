"""The checkpoint folder: round trips, descriptions that do not fit, and damaged files."""

import dataclasses
import gc
import json
import shutil

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from varjax.codecs.vqvae import VQVAEConfig
from varjax.core.errors import UserError
from varjax.core.sequence import Schedule
from varjax.models import registry
from varjax.models.judges import JUDGES
from varjax.models.loading import describe
from varjax.models.registry import CATALOGUE, FAMILIES
from varjax.models.var import VARConfig
from varjax.storage import arrays, checkpoint, checksums, manifest, parameters
from varjax.text.encoder import TEXT_ENCODER
from varjax.text.t5 import T5Config

SCHEDULE = Schedule(((1, 1), (1, 2), (2, 3)))
TRANSFORMER = VARConfig(
    num_classes=3,
    depth=2,
    embed_dim=16,
    num_heads=2,
    schedule=SCHEDULE,
    vocab_size=12,
    z_channels=4,
)
T5 = T5Config(vocab_size=9, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
CODEC = VQVAEConfig(vocab_size=12, z_channels=4, ch=32, ch_mult=(1,), schedule=SCHEDULE)
# its checkpoints may hold a part with a folder of its own, too
FAMILY = dataclasses.replace(
    FAMILIES["var"], parts={**FAMILIES["var"].parts, "text_encoder": TEXT_ENCODER}
)


@pytest.fixture(scope="module")
def modules():
    family = registry.family("var")
    configs = {"transformer": TRANSFORMER, "codec": CODEC}
    return {name: _random(family.parts[name], config) for name, config in configs.items()}


def _random(part, config):
    """The module with random parameters, made by NumPy, which needs no compilation."""
    rng, abstract = np.random.default_rng(0), part.abstract(config)
    drawn = {
        name: jnp.asarray(rng.standard_normal(leaf.shape), leaf.dtype)
        for name, leaf in parameters.named(abstract).items()
    }
    return parameters.fill(abstract, drawn)


@pytest.fixture(scope="module")
def saved(modules, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "checkpoint"
    _save(folder, modules, metadata={"class_names": ["a", "b", "c"], "sampling": {"cfg": 2.0}})
    return folder


@pytest.fixture
def copy(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "copy")


def _save(folder, modules, **arguments):
    checkpoint.save(folder, FAMILY, modules, **arguments)


def test_round_trip(saved, modules):
    found, described = checkpoint.load(saved, CATALOGUE)
    assert list(found) == ["transformer", "codec"]
    for name, ours in modules.items():
        assert ours.config == found[name].config
        _assert_equal(parameters.named(found[name]), parameters.named(ours))
    assert described["schedule"] == [list(pair) for pair in SCHEDULE.maps]
    assert described["class_names"] == ["a", "b", "c"] and described["num_classes"] == 3
    assert described["sampling"] == {"cfg": 2.0}


def _assert_equal(found, wanted):
    chex.assert_trees_all_equal_dtypes(found, wanted)
    chex.assert_trees_all_equal(found, wanted)


def test_some_parts_in_host_memory(saved, modules):
    """Nothing is put on a device, where a model of several devices may not fit."""
    gc.collect()  # modules of earlier tests, which have cycles, hold arrays
    before = len(jax.live_arrays())
    found, _ = checkpoint.load(
        saved, CATALOGUE, {"codec": None, "transformer": "bfloat16"}, on_host=True
    )
    for module in found.values():
        assert all(type(leaf) is np.ndarray for leaf in parameters.named(module).values())
    assert len(jax.live_arrays()) == before and list(found) == ["codec", "transformer"]
    _assert_equal(parameters.named(found["codec"]), parameters.named(modules["codec"]))
    half, _ = checkpoint.load(saved, CATALOGUE, {"transformer": "bfloat16"})
    assert list(half) == ["transformer"]
    chex.assert_type(list(parameters.named(half["transformer"]).values()), jnp.bfloat16)
    chex.assert_trees_all_equal(*(parameters.named(p["transformer"]) for p in (found, half)))
    with pytest.raises(UserError, match="unknown part 'codek'.*did you mean 'codec'"):
        checkpoint.load(saved, CATALOGUE, {"codek": None})


def test_a_part_with_a_folder_of_its_own(tmp_path, modules):
    """It is loaded on request only, from the checkpoint or from its folder, wherever that lies."""
    encoder = _random(TEXT_ENCODER, T5)
    (tmp_path / "spiece.model").write_bytes(b"pieces")
    files = {"text_encoder": {"spiece.model": tmp_path / "spiece.model"}}
    sources = [{"part": name, "file": f"{name}.pth"} for name in ("codec", "text_encoder")]
    _save(
        tmp_path / "all",
        {**modules, "text_encoder": encoder},
        metadata={"sources": sources},
        files=files,
    )
    assert list(checkpoint.load(tmp_path / "all", CATALOGUE)[0]) == ["transformer", "codec"]
    assert manifest.read_manifest(tmp_path / "all", FAMILIES)["sources"] == sources[:1]
    checkpoint.save(
        tmp_path / "alone",
        TEXT_ENCODER,
        {"text_encoder": encoder},
        metadata={"sources": sources},
        files=files,
    )
    for folder in (tmp_path / "all", tmp_path / "all" / "text_encoder", tmp_path / "alone"):
        found, described = checkpoint.load(folder, CATALOGUE, {"text_encoder": None})
        _assert_equal(parameters.named(found["text_encoder"]), parameters.named(encoder))
        assert described["kind"] == "t5" and described["sources"] == [{"file": "text_encoder.pth"}]
        assert "spiece.model" in described["files"]
    assert list(checkpoint.describe(tmp_path / "alone", CATALOGUE)[0]) == ["text_encoder"]
    (tmp_path / "alone" / "spiece.model").write_bytes(b"others")
    with pytest.raises(UserError, match="spiece.model has been altered"):
        checkpoint.load(tmp_path / "alone", CATALOGUE)


def test_only_what_was_written_with_a_checkpoint_is_replaced(tmp_path, modules):
    """An encoder that came later, or another one, is not."""
    encoder = _random(TEXT_ENCODER, T5)
    other = _random(TEXT_ENCODER, dataclasses.replace(T5, num_layers=2))
    both = {**modules, "text_encoder": encoder}
    _save(tmp_path / "all", both)
    _save(tmp_path / "all", both, overwrite=True)
    for folder, part in ((tmp_path / "alone", encoder), (tmp_path / "other", other)):
        checkpoint.save(folder, TEXT_ENCODER, {"text_encoder": part})
    _save(tmp_path / "tree", modules, metadata=manifest.read_manifest(tmp_path / "all", FAMILIES))
    shutil.copytree(tmp_path / "alone", tmp_path / "tree" / "text_encoder")
    shutil.rmtree(tmp_path / "all" / "text_encoder")
    shutil.copytree(tmp_path / "other", tmp_path / "all" / "text_encoder")
    for folder in (tmp_path / "tree", tmp_path / "all"):
        with pytest.raises(UserError, match="holds 'text_encoder' and is not replaced"):
            _save(folder, modules, overwrite=True)
        assert checkpoint.load(folder, CATALOGUE, {"text_encoder": None})
    shutil.rmtree(tmp_path / "all" / "text_encoder")
    _save(tmp_path / "all", modules, overwrite=True)


def test_stored_and_requested_types(tmp_path, modules):
    _save(tmp_path / "half", modules, dtype="bfloat16")
    assert manifest.read_manifest(tmp_path / "half", FAMILIES)["dtype"] == "bfloat16"
    assert checkpoint.load(tmp_path / "half", CATALOGUE)[0]["transformer"].dtype == jnp.bfloat16
    found = checkpoint.load(tmp_path / "half", CATALOGUE, {"transformer": "float32"})[0][
        "transformer"
    ]
    expected = modules["transformer"].head.kernel[...].astype(jnp.bfloat16).astype(jnp.float32)
    np.testing.assert_array_equal(found.head.kernel[...], expected)
    with pytest.raises(UserError, match="choose float32, bfloat16"):
        checkpoint.load(tmp_path / "half", CATALOGUE, {"transformer": "int8"})


def test_relative_paths_and_metadata_of_a_loaded_checkpoint(tmp_path, modules, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _save("one", modules, metadata={"note": "kept"})
    found, described = checkpoint.load("one", CATALOGUE)
    _save("deep/two", found, metadata=described)
    assert checkpoint.load("deep/two", CATALOGUE)[1]["note"] == "kept"
    assert str(tmp_path) not in (tmp_path / "one" / "params" / "_METADATA").read_text()
    assert not list(tmp_path.glob(".*"))


def test_the_description_alone_needs_no_weights(copy):
    shutil.rmtree(copy / "params")
    found, described = checkpoint.describe(copy, CATALOGUE)
    assert described["family"] == "var"
    assert sum(map(parameters.count, found.values())) == described["parameters"]
    with pytest.raises(UserError, match="is missing"):
        checkpoint.load(copy, CATALOGUE)


def test_saving_refuses_existing_folders_and_unknown_families(copy, modules, tmp_path):
    before = (copy / "model.json").read_bytes()
    with pytest.raises(UserError, match="exists already"):
        _save(copy, modules)
    with pytest.raises(UserError, match="unknown model family 'vra'.*did you mean 'var'"):
        registry.family("vra")
    assert (copy / "model.json").read_bytes() == before
    _save(copy, modules, overwrite=True)
    assert "class_names" not in checkpoint.load(copy, CATALOGUE)[1]
    assert [p.name for p in tmp_path.iterdir()] == ["copy"]


# --- descriptions that do not fit -----------------------------------------------------------------


def _edit(folder, **changes):
    file = folder / "model.json"
    content = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({k: v for k, v in content.items() if v is not None}))


ABSENT = object()
_RECORD = {"size": 3, "crc32": "00000000"}
ENTRIES = {  # ABSENT: without the entry
    "version": ({"format_version": 2}, "format version 2, this varjax reads version 1"),
    "true_version": ({"format_version": True}, "format version True"),
    "family": ({"family": "vrr"}, "unknown family 'vrr', known are var"),
    "no_transformer": ({"transformer": ABSENT}, "entry 'transformer' is missing"),
    "schedule": ({"schedule": [[1, 1], [2, 2]]}, "inconsistent: schedule"),
    "codec": ({"codec": {"ch": "wide"}}, "entry 'codec'.*ch is 'wide'"),
    "no_classes": ({"num_classes": ABSENT}, "num_classes 0 but"),
    "no_count": ({"parameters": ABSENT}, "'parameters' is missing"),
    "no_files": ({"files": ABSENT}, "'files' is missing"),
    "few_names": ({"class_names": ["a", "b"]}, "has 2 names: it must be a list of 3 texts"),
    "number_name": ({"class_names": ["a", "b", 3]}, "must be a list of 3 texts"),
    "sampling_null": ({"sampling": None}, "'sampling'.*must hold names and values"),
    "top_k": ({"sampling": {"top_k": 1.5}}, "'sampling': top_k=1.5"),
    "cfg_nan": ({"sampling": {"cfg": float("nan")}}, "'sampling': cfg=nan"),
    "files_list": ({"files": ["x"]}, "'files' is missing"),
    "record_null": ({"files": {"x": None}}, "'files': 'x' has the record None"),
    "record_outside": ({"files": {"../x": _RECORD}}, "needed are paths inside the folder"),
    "record_long": ({"files": {"x" * 5000: _RECORD}}, "cannot be read"),
    "no_checksums": ({"files": {}}, "damaged or incomplete: there is no checksum of"),
    "other_classes": ({"num_classes": 10**12}, "inconsistent: num_classes 1000000000000 but .* 3"),
    "dtype": ({"dtype": "x"}, "dtype: 'x' in the description, float32 in the"),
    "true_count": ({"parameters": True}, "parameters: True in the description"),
    "sources": ({"sources": 3}, "entry 'sources' is missing or malformed"),
    "count": ({"parameters": 7}, "describes: parameters: 7 in the description, [0-9]+ in the"),
}


@pytest.mark.parametrize("case", ENTRIES)
def test_wrong_entries(copy, case):
    changes, match = ENTRIES[case]
    file = copy / "model.json"
    content = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({k: v for k, v in content.items() if v is not ABSENT}))
    with pytest.raises(UserError, match=match):
        checkpoint.load(copy, CATALOGUE)


@pytest.mark.parametrize(
    "changes", [{"patch_nums": [1, [2, 3]]}, {"vocab_size": 13}, {"z_channels": 5}]
)
def test_both_parts_must_belong_together(copy, changes):
    content = json.loads((copy / "model.json").read_text())
    _edit(copy, codec={**content["codec"], **changes})
    with pytest.raises(UserError, match=f"is inconsistent: {next(iter(changes))} is"):
        manifest.read_manifest(copy, FAMILIES)


@pytest.mark.parametrize(
    "metadata", [{"class_names": ["a"]}, {"sampling": {"cfg": "x"}}, {"sampling": None}]
)
def test_wrong_entries_are_not_written(tmp_path, modules, metadata):
    with pytest.raises(UserError, match=next(iter(metadata))):
        _save(tmp_path / "new" / "x", modules, metadata=metadata)
    assert not list(tmp_path.iterdir())


def test_all_differences_are_listed_before_anything_is_restored(copy, monkeypatch):
    content = json.loads((copy / "model.json").read_text())
    changes = {"num_classes": 4, "attn_l2_norm": False, "shared_aln": True}
    _edit(copy, transformer={**content["transformer"], **changes}, num_classes=4)
    _edit(copy, class_names=list("abcd"))
    monkeypatch.setattr(arrays, "by_part", lambda *_: pytest.fail("weights were read"))
    with pytest.raises(UserError) as caught:
        checkpoint.load(copy, CATALOGUE)
    text = str(caught.value)
    for line in (
        "missing: transformer/shared_modulation/kernel",
        "surplus: transformer/blocks/log_scale",
        "wrong shape: transformer/class_embedding is [4, 16], not [5, 16]",
    ):
        assert line in text


UNREADABLE = {
    "{": "model.json",
    "[1]": "must hold a JSON object",
    "[" * 100 + "]" * 100: "nested more than 64 deep",
    '{"a":' * 10**5 + "1" + "}" * 10**5: "nested more than 64 deep",
    '{"family": "var", "sizes": {"a": 1, "a": 2}}': "key 'a' is there twice",
}


def test_not_a_checkpoint(tmp_path):
    with pytest.raises(UserError, match="no checkpoint folder"):
        checkpoint.load(tmp_path / "nowhere", CATALOGUE)
    with pytest.raises(UserError, match="is not a varjax checkpoint: it has no model.json"):
        checkpoint.load(tmp_path, CATALOGUE)
    for text, message in UNREADABLE.items():
        (tmp_path / "model.json").write_text(text)
        with pytest.raises(UserError, match=message):
            checkpoint.load(tmp_path, CATALOGUE)


# --- damaged files --------------------------------------------------------------------------------


def _files(folder):
    return sorted(f for f in (folder / "params").rglob("*") if f.is_file())


def _altered(data: bytes) -> bytes:
    middle = len(data) // 3, len(data) // 3 + len(data) // 2
    return data[: middle[0]] + bytes(middle[1] - middle[0]) + data[middle[1] :]


DAMAGES = {
    "has .* bytes instead of": lambda file, data: file.write_bytes(data[:-1]),
    "is missing": lambda file, data: file.unlink(),
    "has been altered": lambda file, data: file.write_bytes(_altered(data)),
}


@pytest.mark.parametrize("said", DAMAGES)
def test_every_damaged_file_is_named(saved, tmp_path, said):
    for number, file in enumerate(_files(saved)):
        damaged = shutil.copytree(saved, tmp_path / str(number))
        DAMAGES[said](damaged / file.relative_to(saved), file.read_bytes())
        with pytest.raises(UserError, match=f"{file.name} {said}"):
            checkpoint.load(damaged, CATALOGUE)


@pytest.mark.parametrize("name", ["_METADATA", "manifest.ocdbt"])
def test_what_orbax_finds_is_a_user_error_too(copy, name):
    (copy / "params" / name).write_bytes(b"nonsense")
    _edit(copy, files=checksums.file_records(copy / "params"))
    with pytest.raises(UserError, match="params: the files are damaged"):
        checkpoint.load(copy, CATALOGUE)


@pytest.mark.parametrize("name", ["classifier", "inception"])
def test_a_network_of_evaluation_is_no_model(name, tmp_path):
    (tmp_path / f"{name}.json").write_text('{"format_version": 1, "kind": "x", "files": {}}')
    with pytest.raises(UserError, match=f"is a {name} alone: give the checkpoint of a whole model"):
        describe(tmp_path)


def test_own_folders_are_those_of_all_catalogues():
    known = registry.CATALOGUE.parts | JUDGES.parts
    assert set(known) == set(checkpoint.OWN_FOLDERS)
