"""The output folder of a run: batches are kept as they finish, the folder appears when everything
is there.

While a run goes on its batches lie in `DIR.partial`. An interrupted run started again with the same
flags continues after the last finished batch; with other flags it is refused unless --overwrite
discards it. On completion results are written and `DIR.partial` is removed.
"""

import json
import pathlib
import shutil
from collections.abc import Iterator

import numpy as np

from varjax.errors import UserError
from varjax.files import writing
from varjax.folders import check_absent

SETTINGS = "settings.json"
RESULTS = pathlib.Path("results")


class RunFolder:
    """`out` and the work folder beside it."""

    def __init__(self, out: pathlib.Path, fingerprint: str, *, overwrite: bool):
        check_absent(out, overwrite=overwrite)
        self.out, self.fingerprint, self.overwrite = out, fingerprint, overwrite
        self.work = partial_folder(out)
        self.resumed = False

    @classmethod
    def fresh(cls, stem: str, fingerprint: str) -> "RunFolder":
        """The first free `results/STEM-NNN`; an unfinished one with the same settings is
        continued."""
        for number in range(1, 1000):
            out = RESULTS / f"{stem}-{number:03d}"
            work = partial_folder(out)
            if out.exists() or (work.exists() and _stored_fingerprint(work) != fingerprint):
                continue
            return cls(out, fingerprint, overwrite=False)
        raise UserError(f"{RESULTS} holds 999 runs of {stem}: name a folder with --out")

    def open(self) -> None:
        """Create or re-open the work folder.

        Raises:
          UserError: an unfinished run with other settings lies there, or there is no write
            permission.
        """
        if self.work.exists():
            if _stored_fingerprint(self.work) == self.fingerprint:
                self.resumed = True
                return
            if not self.overwrite:
                raise UserError(
                    f"{self.work} holds an unfinished run with other settings: use its settings "
                    f"to continue it, add --overwrite "
                    "to discard it, or choose another --out"
                )
            shutil.rmtree(self.work)
        self.work.mkdir(parents=True)
        (self.work / SETTINGS).write_text(self.fingerprint, encoding="utf-8")

    def finished(self, series: str) -> int:
        """How many images of a series ("main", "full") are stored, counted without gaps."""
        return sum(len(index) for index, _ in self.batches(series))

    def add(self, series: str, index: np.ndarray, results: dict[str, np.ndarray]) -> None:
        """Keep one finished batch."""
        with writing(self.work / f"{series}-{index[0]:08d}.npz") as file:
            np.savez(file, index=index, **results)

    def batches(self, series: str) -> Iterator[tuple[np.ndarray, dict[str, np.ndarray]]]:
        """Stored batches in order, up to the first gap."""
        expected = 0
        for path in sorted(self.work.glob(f"{series}-*.npz")):
            with np.load(path) as archive:
                results = {name: archive[name] for name in archive.files}
            index = results.pop("index")
            if index[0] != expected:
                return
            expected = int(index[-1]) + 1
            yield index, results

    def collect(self, series: str) -> dict[str, np.ndarray]:
        """All arrays of a series, images first to last."""
        parts = [results for _, results in self.batches(series)]
        return {name: np.concatenate([p[name] for p in parts]) for name in parts[0]}

    def close(self) -> None:
        """Remove the work folder after the results are in place."""
        shutil.rmtree(self.work, ignore_errors=True)


def partial_folder(out: pathlib.Path) -> pathlib.Path:
    """Where the batches of an unfinished run into `out` are."""
    return out.with_name(out.name + ".partial")


def _stored_fingerprint(work: pathlib.Path) -> str | None:
    try:
        text = (work / SETTINGS).read_text(encoding="utf-8")
        json.loads(text)
        return text
    except (OSError, ValueError):
        return None
