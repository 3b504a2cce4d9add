"""Flag errors, help and exit statuses, on a tiny real command."""

import importlib
import os
import platform
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from experiments.cli.command_line import run
from experiments.cli.flags import GONE, CommandFlags
from tests.often import often
from varjax import __version__

ROOT = Path(__file__).resolve().parents[3]
COMMAND = '''
"""Tiny command: says what it was given."""
import os
import sys
from absl import flags
from experiments.cli import command_line
from experiments.cli.flags import CommandFlags
from varjax.core.errors import UserError

FLAGS = CommandFlags()

NAMES = FLAGS.list("names", ["a", "b"], "who")
BUDGET = FLAGS.floating("budget", 0.5, "fraction of the cache", lower_bound=0.0)
COUNT = FLAGS.integer("count", 3, "how many images")
POLICY = FLAGS.enum("policy", "full", ["full", "headkv"], "which tokens stay")
GREEDY = FLAGS.boolean("greedy", False, "take the best token")
MORE = FLAGS.group("more", "Further settings.", alone=("tau", "more_fast"))
TAU = MORE.floating("tau", None, "a temperature")
FAST = MORE.boolean("fast", False, "not slow")
SIZE = MORE.list("size", None, "sizes")
FAIL = FLAGS.string("fail", None, "how to fail")
flags.register_validator(
    "count", lambda n: n != 13, message="13 brings bad luck", flag_values=FLAGS.values
)


def main(argv):
    if FAIL.value == "user":
        raise UserError("label 99 is outside 0..43")
    if FAIL.value == "escapes":
        raise UserError("\\x1b[31mred\\u202e")
    if FAIL.value == "device":
        import jax
        jax.devices()
    if FAIL.value == "missing":
        open("no/such/file")
    if FAIL.value == "full":
        raise OSError(28, "No space left on device")
    if FAIL.value == "interrupt":
        raise KeyboardInterrupt
    if FAIL.value == "bug":
        raise RuntimeError("impossible state")
    if FAIL.value == "status":
        return 7
    if TAU.present or FAST.present or SIZE.present:
        print(TAU.value, FAST.value, SIZE.value)
    print(len(argv), BUDGET.value, COUNT.value, POLICY.value, GREEDY.value)
    if FAIL.value == "text":
        print("L\\u00f6we", "\\udcff")


if __name__ == "__main__":
    command_line.run(main)
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Folder with the tiny command."""
    folder = tmp_path_factory.mktemp("command")
    (folder / "tiny.py").write_text(COMMAND.lstrip())
    return folder


@pytest.fixture(scope="module")
def environment(folder):
    return dict(os.environ, PYTHONPATH=os.pathsep.join([str(folder), str(ROOT)]))


@pytest.fixture(scope="module")
def tiny(environment):
    """Runs the tiny command in its own process: `tiny(*arguments)`."""

    def call(*arguments):
        command = [sys.executable, "-m", "tiny", *arguments]
        process = subprocess.run(command, env=environment, capture_output=True, text=True)
        return process.returncode, process.stdout, process.stderr

    return call


@pytest.fixture
def tiny_here(folder, monkeypatch, capfd):
    """Runs it in this process, which saves starting Python and importing jax for every case."""
    monkeypatch.syspath_prepend(folder)
    module = importlib.import_module("tiny")

    def call(*arguments):
        with pytest.raises(SystemExit) as exit_of:
            run(module.main, ["tiny", *arguments])
        return exit_of.value.code, *capfd.readouterr()

    return call


def assert_one_message(outcome, status, *parts):
    """Exit `status`, nothing on standard output, one `error:` line that holds all `parts`."""
    returned, output, errors = outcome
    assert (returned, output) == (status, ""), errors
    lines = errors.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), errors
    for part in parts:
        assert part in lines[0]


def test_values_arrive_and_do_not_stay_for_the_next_command(tiny_here):
    given = ("--budget=0.25", "--count", "-4", "--policy=headkv", "--greedy")
    assert tiny_here(*given) == (0, "1 0.25 -4 headkv True\n", "")
    assert tiny_here() == (0, "1 0.5 3 full False\n", "")


@pytest.mark.parametrize(
    "argument, parts",
    [
        ("--budgte=0.1", ["unknown flag --budgte", "did you mean '--budget'?", "--help"]),
        ("--budget=lots", ["--budget=lots", "must be a non-negative number"]),
        ("--budget=-1", ["--budget=-1", "non-negative number"]),
        ("--count=2.5", ["--count=2.5", "must be an integer"]),
        ("--policy=haedkv", ["--policy=haedkv", "one of full, headkv", "did you mean 'headkv'?"]),
        ("--greedy=perhaps", ["--greedy=perhaps", "true or false"]),
        ("--nogreedy=1", ["nogreedy", "does not take an argument"]),
        ("--count=13", ["--count=13", "13 brings bad luck"]),
        ("--budget", ["Missing value", "--budget", "--help"]),
        ("--fail=", ["--fail= is empty: give a value, or leave the flag out"]),
        ("--names=", ["--names= is empty: give a value, or leave the flag out"]),
        ("surplus", ["unexpected argument 'surplus'", "--flag=value"]),
        (os.fsdecode(b"--fail=\xff"), [r"argument '--fail=\udcff' is not UTF-8 text"]),
        ("--fail=a\0b", [r"argument '--fail=a\x00b' holds a NUL character"]),
    ],
)
def test_wrong_flags_are_one_message_and_status_2(tiny_here, argument, parts):
    assert_one_message(tiny_here(argument), 2, *parts)
    assert_one_message(tiny_here("--count=5", argument), 2, *parts)


def test_a_flag_is_no_value_of_the_flag_before(tiny_here):
    """Which would write into a folder called `--count=5`."""
    for flags in (("--fail", "--count=5"), ("--fail=user", "--count", "--fail")):
        said = [f"{flags[-2]} has no value, '{flags[-1]}' follows: write {flags[-2]}=VALUE"]
        assert_one_message(tiny_here(*flags), 2, *said)
    assert tiny_here("--greedy", "--count", "-5")[0] == 0
    assert tiny_here("--fail", "--help")[0] == 0


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--more=tau=2,size=1,2"], "2.0 False ['1', '2']"),
        (["--more=size=1", "--tau", "2", "--more_fast"], "2.0 True ['1']"),
        (["--tau=3", "--nomore_fast", "--more=size=2"], "3.0 False ['2']"),
    ],
)
def test_settings_of_a_group(tiny_here, given, said):
    """Together or, some of them, as flags."""
    assert tiny_here(*given) == (0, f"{said}\n1 0.5 3 full False\n", "")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("--more=tua=2", "--more has no tua; did you mean 'tau'?"),
        ("--more=tau=x", "--tau=x is not valid: it must be a number"),
        ("--more=fast=2", "--more_fast=2 is not valid"),
        ("--more=size=1,size=2", "size is given twice"),
        ("--more=tau", "cannot read 'tau'"),
        ("--more=", "--more= is empty"),
        ("--size=2", "there is no flag --size: use --more=size=VALUE"),
        *((f"--{name}", f"--{name} is gone: {instead}") for name, instead in GONE.items()),
        ("--nopage", "--page is gone"),
    ],
)
def test_wrong_settings_and_flags_that_are_gone(tiny_here, given, said):
    assert_one_message(tiny_here(given), 2, said)


@pytest.mark.parametrize("also", ["--tau=3", "--more=tau=3"])
def test_a_setting_given_twice(tiny_here, also):
    assert_one_message(tiny_here("--more=tau=2", also), 2, "tau is given twice: keep one of them")


def test_help_shows_manual_and_own_flags_only(tiny, tiny_here):
    status, output, errors = tiny("--count=1", "--help")
    assert (status, errors) == (0, "")
    assert output.startswith("Tiny command: says what it was given.")
    assert "Flags of `python -m tiny`" in output
    assert "--policy=full|headkv\n      which tokens stay (default: full)" in output
    assert "--[no]greedy" in output
    assert "fraction of the cache (a non-negative number; default: 0.5)" in output
    for foreign in ("--verbosity", "--logtostderr", "--flagfile"):
        assert foreign not in output
    for flag in ("-h", "--helpfull"):
        assert "--policy=full|headkv" in tiny_here(flag)[1]


def test_help_is_for_people(tiny_here):
    """No empty defaults, no shouting types; the flags that every command has are named."""
    output = tiny_here("--help")[1]
    assert "--fail=STRING\n      how to fail\n" in output and "default: )" not in output
    assert (
        "--more=KEY=VALUE,...\n      Further settings.\n      --tau=FLOAT: a temperature" in output
    )
    assert "--names=LIST\n" in output and "separated by commas; default: a,b)" in output
    assert output.rstrip().endswith("--help, --version")


def test_version(tiny_here):
    """Of everything that results may depend on; other flags do not matter, nothing is started."""
    status, output, errors = tiny_here("--version")
    assert (status, errors) == (0, "")
    said = dict(line.split(maxsplit=1) for line in output.splitlines())
    assert said["varjax"] == __version__ and said["Python"] == platform.python_version()
    for package in ("jax", "jaxlib", "flax", "numpy"):
        assert said[package] == metadata.version(package)
    assert said["device"]
    assert tiny_here("--budgte=0.1", "--version")[:2] == (0, output)
    assert tiny_here("--", "--version")[0] == 2


@pytest.mark.parametrize(
    "how, status, part",
    [
        ("user", 2, "label 99 is outside 0..43"),
        ("missing", 2, "No such file or directory: no/such/file"),
        ("full", 2, "No space left on device"),
        ("interrupt", 130, "interrupted"),
    ],
)
def test_expected_failures_have_no_traceback(tiny_here, how, status, part):
    assert_one_message(tiny_here(f"--fail={how}"), status, part)


def test_bug_keeps_its_traceback(tiny):
    status, _, errors = tiny("--fail=bug")
    assert status == 1
    assert "Traceback" in errors and "impossible state" in errors


def test_main_may_return_a_status(tiny_here):
    assert tiny_here("--fail=status")[0] == 7


def test_any_text_is_printed(environment):
    environment = {**environment, "PYTHONIOENCODING": "ascii:strict"}
    command = [sys.executable, "-m", "tiny", "--fail=text", "--budget=0.25", "--greedy"]
    found = subprocess.run(command, env=environment, capture_output=True)
    expected = b"1 0.25 3 full True\nL\\xf6we \\udcff\n"
    assert (found.returncode, found.stdout) == (0, expected), found.stderr


# --- what surrounds a command ---


def test_home_is_expanded(monkeypatch):
    """At the beginning of texts and of arguments' values; prompts stay as they are."""
    monkeypatch.setenv("HOME", "/home/of me")
    own = CommandFlags()
    out, args = own.string("out", "~/kept", ""), own.list("args", [], "")
    prompts = own.texts("prompts", None, "")
    own.parse(["x", "--args=path=~/a.npz,~,b~/c", "--prompts=~/d"])
    assert args.value == ["path=/home/of me/a.npz", "/home/of me", "b~/c"]
    assert prompts.value == ["~/d"] and out.value == "~/kept"
    own.parse(["x", "--out=~/e"])
    assert out.value == "/home/of me/e"
    own.parse(["x", "--out=~other/e"])
    assert out.value == "~other/e"


GONE = [">&- 2>&- <&-", "2>&- | head -c 1", ">&-", ">&- <&-"]


@pytest.mark.parametrize("closed", often(GONE[:2], GONE))
def test_a_reader_that_is_gone_is_no_error(closed, environment, tmp_path):
    """All is written; no file takes the place of a stream."""
    program = (
        "from experiments.cli import streams; streams.keep(); import sys; f = open('f', 'w'); "
    )
    program += "print('x' * 10**6); print('y' * 10**6, file=sys.stderr); f.write(str(f.fileno()))"
    line = f"set -o pipefail; {sys.executable} -c {shlex.quote(program)} {closed}"
    done = subprocess.run(["bash", "-c", line], env=environment, cwd=tmp_path, capture_output=True)
    assert done.returncode == 0, done.stderr[-300:]
    assert int((tmp_path / "f").read_text()) > 2


def test_streams_without_a_buffer_stay_so(environment):
    """And show what would control a terminal."""
    program = "from experiments.cli import streams; streams.keep(); import os; "
    program += "print('a\\x1b[31m\\tb'); os._exit(0)"
    command = [sys.executable, "-u", "-c", program]
    assert subprocess.check_output(command, env=environment) == b"a\\x1b[31m\tb\n"


def test_messages_obey_no_escapes(tiny_here):
    """As a file or a module of somebody else's may hold them."""
    assert tiny_here("--fail=escapes")[2] == "error: \\x1b[31mred\\u202e\n"


def test_platforms_that_are_not_there(tiny, environment, monkeypatch):
    platforms = "cpu,foo"
    monkeypatch.setitem(environment, "JAX_PLATFORMS", platforms)
    assert_one_message(tiny("--fail=device"), 2, f"JAX_PLATFORMS={platforms}: one of these")
