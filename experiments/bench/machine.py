"""`experiments.bench --machine`: one command for whoever has a chip.

    FILE            what was found: `content`
    FILE.partial/   finished steps of an unfinished run (`work_folder`, `step_files`)

This process never touches the device. It starts another one (`worker`), watches it (`watch`), and
puts the results together.
"""

import datetime
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from experiments import own_process, step_files
from experiments.bench import device, machine_report
from experiments.bench.watch import Refused, Watch
from experiments.output import RESULTS, partial_folder
from experiments.work_folder import SETTINGS, WorkFolder
from varjax.errors import UserError, some
from varjax.io.json_text import json_text
from varjax.progress import show_seconds
from varjax.storage.atomic import check_new_file, exits_when_terminated, write_text
from varjax.storage.manifest import read_json

FORMAT = {"format": "varjax machine", "version": 1}
STATUSES = ("finished", "failed", "not run")  # of steps
OF_A_MACHINE = {"quick", "platform", "kind", "versions", "plugin"}  # in settings of its folder
DEFAULT = RESULTS / "machine.json"
MINUTES = {False: 40, True: 5}  # by whether the run is quick
ROOT = Path(__file__).resolve().parents[2]


def measure(path: Path, *, quick: bool, minutes: int | None, overwrite: bool) -> int:
    """Check, tune and time this machine, print the table and write `path`. Returns the exit status:
    1 if a step failed; where a result is wrong or the device does not answer 1, where no step can
    be kept 2, and nothing is written then.

    Raises:
      UserError: `path` exists, or the unfinished run is another one's.
    """
    start = time.monotonic()
    until = start + 60 * (minutes or MINUTES[quick])
    check_place(path, overwrite)
    folder, before, watch = partial_folder(path), device.clocks(), Watch()
    kept = WorkFolder(folder, {}, "--json")
    with kept.held(), exits_when_terminated():
        try:
            _follow(watch, folder, quick, overwrite, until)
        except Refused as refused:
            lines = [f"error: {refused.why}"] if refused.why else []
            lines += [_kept(watch, folder)] if watch.names else []
            print(*lines, sep="\n", end="\n" * bool(lines), file=sys.stderr)
            return refused.status
        except (KeyboardInterrupt, SystemExit):
            print(_kept(watch, folder), file=sys.stderr)
            raise
        if watch.wrong:
            return _stopped(watch, folder)
        found = content(watch, folder, quick, {"before": before, "after": device.clocks()})
        print(machine_report.text(found))
        write_text(path, json_text(found))
        print(f"wrote {path} after {show_seconds(time.monotonic() - start)}")
        if watch.left or watch.failed:
            print(_kept(watch, folder))
        else:
            kept.clear()
    return 1 if watch.failed else 0


def check_place(path: Path, overwrite: bool) -> None:
    """Raise `UserError` unless results may be written to `path`. A file that lists steps as not
    finished may be replaced by the run that goes on, as long as its steps are kept."""
    if path == DEFAULT and not path.parent.exists():
        return  # it is made when the first step is kept
    check_new_file(path, overwrite=True, flag="--json")
    if path.is_file() and not overwrite and not _goes_on(path):
        raise UserError(f"{path} exists already: choose another --json or add --overwrite")


def _goes_on(path: Path) -> bool:
    """Whether a file of results is of an unfinished run whose steps are there."""
    if not (partial_folder(path) / SETTINGS).is_file():
        return False
    try:
        found = read_json(path)
    except UserError as error:
        raise UserError(f"{error}; choose another --json or add --overwrite") from None
    if not isinstance(found, dict) or found.get("format") != FORMAT["format"]:
        return False
    steps = found.get("steps")
    listed = [s for s in steps if isinstance(s, dict)] if isinstance(steps, list) else []
    return any(step.get("status") != "finished" for step in listed)


def _follow(watch: Watch, folder: Path, quick: bool, overwrite: bool, until: float) -> None:
    """Run the steps in one process after another: the next goes on where a step ended the last."""
    again = True
    while again and time.monotonic() < until:
        started = command(folder, quick, overwrite, watch.failed)
        again = watch.follow(started, own_process.environment(), until)


def command(folder: Path, quick: bool, overwrite: bool, skip: Sequence[str]) -> list[str]:
    """The command of the process that uses the device."""
    flags = ["--machine", f"--worker={folder}"]
    flags += ["--quick"] * quick + ["--overwrite"] * overwrite
    flags += [f"--skip={','.join(skip)}"] if skip else []
    return [*own_process.command("experiments.bench"), *flags]


def _kept(watch: Watch, folder: Path) -> str:
    there = f"{len(watch.done)} of {len(watch.names)} steps are kept in {folder}"
    return f"{there}: the same command goes on from there"


def _stopped(watch: Watch, folder: Path) -> int:
    """Say what is wrong, and how to see it again."""
    wrong = watch.wrong
    lines = [f"error: wrong result in step {wrong.step}: {wrong.words}"]
    lines += [f"repeat: {wrong.command}"] if wrong.command else []
    print(*lines, _kept(watch, folder), sep="\n", file=sys.stderr)
    return 1


# --- results ---


def content(watch: Watch, folder: Path, quick: bool, clocks: dict) -> dict:
    """The content of the file of results. `UserError` if what was kept is not there any more."""
    settings = _settings(folder)
    found = _found(watch, folder, WorkFolder(folder, settings).digest)
    here = {k: v for k, v in settings.items() if k not in ("format", "quick")}
    return {
        **FORMAT,
        "date": datetime.date.today().isoformat(),
        "quick": quick,
        "revision": revision(here["versions"]),
        "device": here,
        "driver": device.driver(clocks["before"]) or here["plugin"],
        "clocks": clocks,
        "steps": [_step(name, found[name], watch.failed.get(name)) for name in watch.names],
        "rows": [row for name in watch.names for row in found[name].get("rows", ())],
        "tuned": [tiles for name in watch.names for tiles in found[name].get("tuned", ())],
    }


def _settings(folder: Path) -> dict:
    """What the process of the steps has said of itself."""
    try:
        found = read_json(folder / SETTINGS)
        if isinstance(found, dict) and OF_A_MACHINE <= found.keys():
            return found
        why = "it does not say what the machine is"
    except UserError as error:
        why = str(error)
    raise UserError(
        f"{folder / SETTINGS} was lost or changed during the run, and nothing is written: {why}; "
        "leave that folder alone and run the same command with --overwrite"
    )


def _found(watch: Watch, folder: Path, digest: str) -> dict[str, dict]:
    """{step: what it found}; nothing of steps that are not finished."""
    found = {name: step_files.read(folder, name, digest) or {} for name in watch.names}
    if lost := [name for name in watch.done if not found.get(name)]:
        raise UserError(
            f"{folder} was changed during the run, and nothing is written: {some(lost, 5)} had been"
            " kept there; the same command runs them again"
        )
    return found


def _step(name: str, found: dict, why: str | None) -> dict:
    """A step in the list of the file."""
    status = "finished" if found else "not run" if why is None else "failed"
    return {"name": name, "status": status, "seconds": found.get("seconds"), "note": why or ""}


def revision(versions: dict) -> str:
    """The commit of this varjax, or else its version."""
    return commit() or versions.get("varjax", "unknown")


def commit() -> str | None:
    """The commit of this varjax; None where that is not known."""
    git = ["git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD"]
    try:
        done = subprocess.run(git, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
