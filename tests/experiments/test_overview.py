"""`python -m experiments`: what there is, and what is wrong with a space for the dot."""

import importlib
import os
import shlex
import subprocess
import sys
import tomllib

import pytest
from absl.testing import flagsaver

from experiments import __main__ as overview
from experiments.aot import worker
from experiments.cli import command_line
from experiments.cli.flags import CommandFlags
from experiments.cli.help import WIDTH
from experiments.cli.reading import bare
from tests.conftest import ROOT

COMMANDS = overview.commands()


def test_all_commands_are_listed(capsys):
    assert overview.main(["experiments"]) == 0
    listed = capsys.readouterr().out
    names = [
        "aot",
        "bench",
        "calibrate",
        "classes",
        "edit",
        "encode_text",
        "evaluate",
        "learn",
        "merge",
    ]
    names += ["plan", "report", "reproduce", "run", "serve", "sweep", "train"]
    assert list(COMMANDS) == [*(f"experiments.{name}" for name in names), "ported_weights"]
    for command, manual in COMMANDS.items():
        assert f"python -m {command} " in listed and len(manual) > 20 and manual in listed


@pytest.mark.parametrize("command", COMMANDS)
def test_help_and_version_of_each(command, capsys):
    """It fits a terminal, and every flag says what it is."""
    package = importlib.import_module(command)
    module = f"{command}.__main__" if hasattr(package, "__path__") else command
    module = importlib.import_module(module)
    assert isinstance(module.FLAGS, CommandFlags)

    def said(flag):
        with pytest.raises(SystemExit) as stopped:
            command_line.run(module.main, [command, flag])
        assert stopped.value.code == 0
        return capsys.readouterr().out

    assert said("--version").startswith("varjax ")
    text = said("--help")
    assert text.startswith("Try:\n    python ")  # here followed by what runs the tests
    assert set(module.FLAGS.essential) <= set(module.FLAGS.values)
    arguments = shlex.split(module.FLAGS.example.splitlines()[-1])
    saved = [(values, flagsaver.save_flag_values(values)) for values in module.FLAGS.all_values()]
    module.FLAGS.parse([command, *arguments])  # they exist, with such values
    for values, before in saved:
        flagsaver.restore_flag_values(before, values)
    assert max(map(len, text.splitlines())) <= WIDTH
    for name in module.FLAGS.values:
        words = bare(module.FLAGS.values[name])
        assert f"--{name}=" in text or f"--[no]{name}\n" in text
        assert words.endswith("."), (name, words)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("run", "did you mean `python -m experiments.run`?"),
        ("experiments.sweeep", "did you mean `python -m experiments.sweep`?"),
        ("zzz", "unexpected argument 'zzz': `python -m experiments` lists the"),
        ("ported-weights", "did you mean `python -m ported_weights`?"),
        ("--polcy=full", "unexpected argument '--polcy=full'"),
    ],
)
def test_a_name_that_is_no_command(name, message, capsys):
    assert overview.main(["experiments", name, "--seed=1"]) == 2
    out, err = capsys.readouterr()
    assert message in err and err.count("\n") == 1 and not out


def test_classes_are_listed_as_labels_take_them(call):
    status, out, err = call("classes")
    assert status == 0 and len(out.splitlines()) == 44 and "  22  lemon\n" in out, err
    status, _, err = call("run", "--labels=Lemon,22,pea", "--dry_run")
    assert status == 2 and "no class is called 'pea': " in err
    status, _, err = call("classes", "--checkpoint=infinity-2b")
    assert status == 2 and "has no classes: it draws from text" in err


def console(monkeypatch, capsys, *arguments):
    """(exit status, standard output, standard error) of `varjax ARGUMENTS`."""
    monkeypatch.setattr(sys, "argv", ["/somewhere/bin/varjax", *arguments])
    try:
        status = overview.console()
    except SystemExit as stopped:
        status = stopped.code
    out, err = capsys.readouterr()
    return status, out, err


def test_the_console_script(monkeypatch, capsys):
    status, out, _ = console(monkeypatch, capsys)
    assert status == 0 and {"run", "sweep", "port"} <= set(overview.short_names())
    assert all(f"varjax {name} " in out for name in overview.short_names())
    status, out, _ = console(monkeypatch, capsys, "--version")
    assert status == 0 and out.startswith("varjax ")
    status, out, _ = console(monkeypatch, capsys, "plan", "--help")
    assert status == 0 and out.startswith("Try:\n    varjax plan --model=")
    status, out, err = console(monkeypatch, capsys, "plan", "--model=var-d16", "--batch_size=2")
    assert status == 0 and "16 layers" in out, err
    status, _, err = console(monkeypatch, capsys, "rnu")
    assert status == 2 and "did you mean `varjax run`?" in err and err.count("\n") == 1
    status, _, err = console(monkeypatch, capsys, "plan", "--modle=x")
    assert status == 2 and "run `varjax plan --help`" in err


@pytest.fixture
def elsewhere(tmp_path):
    """A project with an `experiments` of its own, whose modules end with status 3."""
    (tmp_path / "experiments").mkdir()
    for name in ("__init__", "__main__", "plan"):
        (tmp_path / "experiments" / f"{name}.py").write_text("raise SystemExit(3)")
    return tmp_path


@pytest.mark.slow
def test_the_installed_script_works_beside_other_experiments(elsewhere):
    """The file is what pip writes for the entry point."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, _, function = project["scripts"]["varjax"].partition(":")
    script = elsewhere / "bin" / "varjax"
    script.parent.mkdir()
    script.write_text(f"import sys\nfrom {module} import {function}\nsys.exit({function}())")
    command = [sys.executable, str(script), "plan", "--model=var-d16"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=elsewhere, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("var-d16: 16 layers"), done.stderr


def test_processes_that_commands_start_are_ours(elsewhere):
    command, environment = worker.own_process("experiments.plan")
    options = {"env": environment, "capture_output": True, "text": True}
    done = subprocess.run([*command, "--model=var-d16"], cwd=elsewhere, **options)
    assert done.returncode == 0 and done.stdout.startswith("var-d16: 16 layers"), done.stderr
