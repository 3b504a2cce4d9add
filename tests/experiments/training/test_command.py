"""The command: flags become settings, and wrong ones end with status 2 and one message."""

import pytest

from experiments import train
from experiments.cli import command_line


def _run(*flags: str) -> int:
    with pytest.raises(SystemExit) as stop:
        command_line.run(train.main, ["train", *flags])
    return stop.value.code or 0


@pytest.fixture
def seen(monkeypatch):
    """What trainings were asked for, which do not begin."""
    seen = []
    monkeypatch.setattr(train.session, "train", lambda *given: seen.append(given))
    return seen


WRONG = {
    "list": (["--settings=patch_nums=1,a"], "patch_nums=1,a is not valid: it must be integers"),
    "sizes": (["--settings=patch_nums=1,2,5"], "which makes 40 pixels"),
    "data": (["--data=nowhere"], "there is no file or folder nowhere"),
    "interval": (["--settings=log_every=7"], "must be a multiple of log_every=7"),
    "batch": (["--max_images=8", "--image_size=64"], "vqvae_batch_size=16 given, but there are"),
    "classifier": (["--stage=classifier", "--image_size=64"], "classifier_batch_size=64 given"),
    "no out": (["--out="], "--out= is empty"),
    "other family": (["--settings=dropout=0.2"], "dropout=0.2 is for family=llamagen only"),
    "preset": (["--preset=small"], "preset=small is for 1000 pictures or more, and there are 64: "),
    "preset of few": (["--preset=tiny", "--max_images=9"], "and there are 9: give more pictures"),
    "preset of much": (["--preset=base", "--max_images=9"], "preset=base is for 10000 pictures"),
    "preset of nothing": (["--preset=tiny", "--data=nowhere"], "no file or folder nowhere"),
    "preset of init": (["--preset=tiny", "--init=demo"], "sizes are those of init: leave one out"),
    "init": (["--init=nowhere"], "nowhere"),
    "size of init": (
        ["--init=demo", "--settings=depth=9"],
        "depth=9 given, but init=demo has depth=4, which training does",
    ),
    "Infinity": (["--init=infinity-2b"], "init=infinity-2b is of the family infinity: var and"),
    "mesh": (["--mesh=data=0"], "error: --mesh=data=0: data=0 is no number of devices"),
    "parts": (
        ["--settings=vqvae_batch_size=16", "--accumulate=3"],
        "vqvae_batch_size=16 cannot be split evenly over accumulate=3: choose a",
    ),
}


@pytest.mark.parametrize(("flags", "message"), WRONG.values(), ids=WRONG)
def test_wrong_flags(pictures, tmp_path, capsys, flags, message):
    out = tmp_path / "run"
    assert _run(f"--data={pictures}", f"--out={out}", *flags) == 2
    assert message in capsys.readouterr().err
    assert not out.exists()


def test_what_is_required_is_named(capsys):
    assert _run() == 2
    said = capsys.readouterr().err
    assert "--out is required (Folder of the run" in said
    assert "--data is required (Folder or .npz file of pictures)" in said and said.count("\n") == 1


def test_flags_become_settings(pictures, tmp_path, seen, capsys):
    flags = [
        "--settings=patch_nums=1,4",
        "--settings=ch_mult=1,2,2,shared_aln=false",
        "--image_size=16",
    ]
    assert _run(f"--data={pictures}", f"--out={tmp_path}/x", "--stage=vqvae", *flags) == 0
    settings, stage, out, quiet, mesh = seen[0]
    assert (settings.patch_nums, settings.ch_mult) == ((1, 4), (1, 2, 2))
    assert (settings.shared_aln, settings.depth, stage, quiet) == (False, 4, "vqvae", False)
    assert out == f"{tmp_path}/x" and settings.log_every == 20 and mesh.size == 1
    assert "continue with --stage=var" in capsys.readouterr().out


def test_a_preset_comes_after_flags(pictures, tmp_path, seen, capsys):
    """It prints what it decides, and says how to draw with what was trained."""
    flags = [f"--data={pictures}", f"--out={tmp_path}/x", "--preset=tiny"]
    assert _run(*flags, "--settings=depth=2,var_steps=500") == 0 and _run(*flags) == 0
    assert [(s.depth, s.var_steps, s.vqvae_steps, s.ch) for s, *_ in seen] == [
        (2, 500, 300, 16),
        (4, 300, 300, 16),
    ]
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith("preset=tiny for 64 pictures on cpu: ch=16,") and len(said) == 2
    assert "var_steps=500" not in said[0] and "var_steps=300" in said[1]


def test_init_has_defaults_of_its_own(pictures, tmp_path, seen, capsys):
    """Without a stage the codec stays as it is."""
    flags = [f"--data={pictures}", f"--out={tmp_path}/x"]
    assert _run(*flags, "--init=demo") == 0
    assert (
        _run(*flags, "--init=demo-llamagen", "--stage=both", "--settings=var_lr=1e-3,shifts=1") == 0
    )
    assert _run(*flags) == 0
    assert [stage for _, stage, *_ in seen] == ["var", "both", "both"]
    demo, llamagen, nothing = (settings for settings, *_ in seen)
    assert (demo.family, demo.depth, demo.ch, demo.image_size) == ("var", 4, 32, 64)
    assert (demo.var_lr, demo.autoencoder_steps, llamagen.var_lr) == (1e-4, 0, 1e-3)
    assert (llamagen.family, llamagen.shifts, nothing.start) == ("llamagen", 1, None)
    assert demo.start.digest != llamagen.start.digest
    assert demo.deciding("var")["init"] == demo.start.digest
    capsys.readouterr()


def test_defaults_of_a_family(pictures, tmp_path, seen, capsys):
    """Where they are not given; the help says so."""
    flags = [f"--data={pictures}", f"--out={tmp_path}/x", "--family=llamagen"]
    assert _run(*flags) == 0 and _run(*flags, "--settings=vocab_size=512,shifts=0") == 0
    assert [(s.vocab_size, s.shifts, s.ch_mult) for s, *_ in seen] == [
        (1024, 4, (1, 1, 1)),
        (512, 0, (1, 1, 1)),
    ]
    own, codec = (seen[0][0].deciding(stage).keys() for stage in ("var", "vqvae"))
    assert own - codec >= {"dropout"}
    capsys.readouterr()
    assert _run("--help") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "(with --family=llamagen 1,1,1)" in said and "(of --family=var only)" in said
