"""Reading a file that `experiments.bench --machine` has written, to adopt it: whether it is one, of
a whole run on a chip that is known, and whether its rows and tiles can be what they say."""

import contextlib
import re
from collections.abc import Collection, Mapping
from pathlib import Path

from experiments.aot.worker import versions
from experiments.bench import machine, possible
from experiments.bench.rows import Row
from experiments.output import partial_folder
from experiments.work_folder import SETTINGS
from pallas_kernels import bench, implementations
from pallas_kernels.chips import CHIPS, Chip
from pallas_kernels.ragged_attention import config, tune
from varjax import arguments
from varjax.errors import UserError, choose, show, some
from varjax.storage.manifest import read_json

SAME = ("varjax", "jax", "jaxlib")  # versions that have to be those here
COMMIT = re.compile(r"[0-9a-f]{7,}")


def read(path: Path, without: Collection[str] = ()) -> dict:
    """The content of a finished file of results.

    without: failed steps that it may lack.

    Raises:
      UserError: why it cannot be adopted, and what to do.
    """
    _check_file(path)
    content = read_json(path)
    if not isinstance(content, dict) or content.get("format") != machine.FORMAT["format"]:
        raise UserError("it is no file that `experiments.bench --machine` has written")
    if content.get("version") != machine.FORMAT["version"]:
        given, known = show(content.get("version")), machine.FORMAT["version"]
        raise UserError(f"it has version {given}, this varjax reads {known}: measure again")
    _check_device(_part(content, "device", dict))
    for name in ("date", "revision"):
        arguments.text(name, content.get(name))
    if content.get("driver", "missing") is not None:  # null where it was not known
        arguments.text("driver", content.get("driver"))
    _check_whole(content, without)
    return content


def _check_file(path: Path) -> None:
    """Refuse folders. Beside a file that is not there may be the unfinished run that writes it."""
    folder = path if path.is_dir() else partial_folder(path)
    if (path.is_dir() or not path.exists()) and _is_run(folder):
        raise UserError(
            f"{folder} is the folder of an unfinished run: the same --machine command goes on, "
            "and writes the file to adopt when it is done"
        )
    if path.is_dir():
        raise UserError("it is a folder that no --machine has made: name the file of its results")


def _is_run(folder: Path) -> bool:
    """Whether a folder is that of an unfinished --machine."""
    with contextlib.suppress(UserError):
        settings = read_json(folder / SETTINGS)
        return isinstance(settings, dict) and machine.OF_A_MACHINE <= settings.keys()
    return False


def _part(content: Mapping, name: str, kind: type):
    return arguments.instance(name, content.get(name), kind, f"a {kind.__name__}, as it is written")


def _check_device(device: Mapping) -> None:
    """Refuse a CPU, a chip that is not known, another one than it says, other versions."""
    kind, chip, theirs = (device.get(name) for name in ("kind", "chip", "versions"))
    if device.get("platform") == "cpu":
        raise UserError(
            "it was measured on a CPU, where kernels are interpreted and times mean nothing: "
            "adopt a file from a GPU or TPU"
        )
    known = bench.chip(kind) if isinstance(kind, str) else None
    if known is None:
        raise UserError(
            f"it is of the chip {show(kind)}, whose peaks are not known: add it to "
            f"pallas_kernels/chips.py, which has {', '.join(CHIPS)}, and measure again"
        )
    if chip != known.name:
        raise UserError(
            f"it says chip {show(chip)}, but {kind} is {known.name}: it was changed, or is of "
            "another chip; adopt the file as it was written"
        )
    here, theirs = versions(), theirs if isinstance(theirs, dict) else {}
    for name in SAME:
        if theirs.get(name) != here.get(name):
            given = theirs.get(name)
            given = given if isinstance(given, str) else show(given)
            raise UserError(
                f"it was measured with {name} {given:.60}, here is {here.get(name)}: adopt "
                "it with the versions that it names, or measure again with those that are here"
            )


def _check_whole(content: Mapping, without: Collection[str]) -> None:
    """Refuse results of a part of the steps, but for failed ones that are named in `without`."""
    if content.get("quick") is not False:
        raise UserError("it is from --quick, which measures too little: run without --quick")
    steps = _statuses(_part(content, "steps", list))
    left = [name for name, status in steps.items() if status == "not run"]
    if left or not steps:
        raise UserError(
            f"{len(left)} steps were not run ({some(left, 5)}): the same --machine command runs "
            "them"
        )
    failed = [name for name, status in steps.items() if status == "failed"]
    for name in without:
        if choose("step", name, steps) not in failed:
            raise UserError(f"--skip: step {name} is finished: leave it out of --skip")
    if asked := [name for name in failed if name not in without]:
        raise UserError(
            f"{len(asked)} steps failed ({some(asked, 5)}): the same --machine command runs them "
            f"again; where they fail for good, adopt without them: --skip={','.join(failed)}"
        )


def _statuses(steps: list) -> dict[str, str]:
    """{step: "finished", "failed" or "not run"}."""
    found = {}
    for number, step in enumerate(steps):
        step = arguments.instance(f"steps[{number}]", step, dict, "a step, as it is written")
        name = arguments.text(f"steps[{number}].name", step.get("name"))
        found[name] = choose(f"status of step {name:.60}", step.get("status"), machine.STATUSES)
    return found


# --- what it holds ---


def rows_of(content: Mapping, chip: Chip) -> list[Row]:
    """Its rows; `UserError` for one that is none, or whose numbers cannot be true of the chip."""
    found = []
    for number, given in enumerate(_part(content, "rows", list)):
        try:
            found.append(Row.read(given))
        except (TypeError, KeyError, AttributeError, ValueError) as error:
            why = f"{error!r:.200}"
            raise UserError(f"its rows cannot be read: rows[{number}]: {why}") from None
        possible.check(number, found[-1], chip)
    return found


def tiles_of(content: Mapping, chip: Chip) -> dict[tuple[str, str], dict]:
    """{(operation, implementation): {call: its tiles}}. The implementation is the one that runs on
    the chip, since a file of tuned tiles holds those of one. `UserError` for what is none."""
    found: dict[tuple[str, str], dict] = {}
    best = implementations.choices(chip.platform, chip.capability)[0]
    for number, entry in enumerate(_part(content, "tuned", list)):
        where = f"tuned tiles of {content['device']['kind']} cannot be read: tuned[{number}]"
        try:
            operation, name = entry["operation"], entry["implementation"]
            if operation not in config.OPERATIONS or name not in config.KINDS:
                raise ValueError(f"operation {show(operation)}, implementation {show(name)}")
            call, tiles = config.read_entry(entry, operation, name)
            known = name == best and tiles in tune.tiles(call, name)
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise UserError(f"{where}: {error!s:.300}") from None
        if name != best:
            raise UserError(f"{where}: they are of {name}, {chip.name} runs {best}: leave them out")
        if not known:
            raise UserError(f"{where}: --tune does not try {tiles!s:.200}: leave them out")
        found.setdefault((operation, name), {})[call] = tiles
    return found


def another_revision(content: Mapping) -> str | None:
    """The commit here, if the file was measured at another one; None too where it is not known."""
    here, theirs = machine.commit(), content["revision"]
    if here is None or here == theirs:
        return None
    same = COMMIT.fullmatch(theirs) and (here.startswith(theirs) or theirs.startswith(here))
    return None if same else here
