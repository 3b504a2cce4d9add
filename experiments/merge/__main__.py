"""Check the parts that --shard=I/N has made, and join them to what one process would have written.

    python -m experiments.run --num_images=50000 --shard=0/2 --out=OUT
    python -m experiments.run --num_images=50000 --shard=1/2 --out=OUT
    python -m experiments.merge OUT

Joins parts of experiments.run and of experiments.sweep. Neither checkpoint nor device is needed.
All parts have to be there, each once, finished, and made with the same flags, checkpoint and
versions; what is missing or damaged is named, and nothing is changed then. The results take the
place of the parts in OUT.
"""

import pathlib
from collections.abc import Iterator, Sequence

import numpy as np

from experiments import parts
from experiments.batch_files import Series
from experiments.merge import sweeps
from experiments.output import BatchStore
from experiments.parts import Part
from experiments.run import files, results
from experiments.run.files import Shown
from experiments.run.results import FIDELITY
from experiments.shards import PartStore
from varjax import metrics
from varjax.cli import command_line
from varjax.cli.flags import CommandFlags
from varjax.errors import UserError
from varjax.storage.atomic import Written, check_place

FLAGS = CommandFlags(
    "python -m experiments.run --num_images=4 --shard=0/2 --out=OUT\n"
    "python -m experiments.run --num_images=4 --shard=1/2 --out=OUT\n"
    "--out=OUT"
)
OUT = FLAGS.argument("out", "Folder of the parts, their --out.")


class JoinedStore(BatchStore):
    """The batches of all parts, as `experiments.run.files` takes them."""

    def __init__(self, out: pathlib.Path, found: Sequence[Part]):
        self.out, self.work = out, found[0].work
        self._stores = [_store(out, part) for part in found]
        made = self._stores[0].series
        self.series = {n: Series(s.count, s.batch_size, s.arrays) for n, s in made.items()}

    @property
    def replaces(self) -> Written:
        return parts.files_of_parts

    def batches(self, series: str) -> Iterator[tuple[np.ndarray, dict[str, np.ndarray]]]:
        for store in self._stores:
            yield from store.batches(series)

    def close(self) -> None:
        """The parts went when the results took their place."""


def _store(out: pathlib.Path, part: Part) -> PartStore:
    """Return the batches of a part; `UserError` unless all its images are there."""
    said = part.content
    made = part.shard.images(said["count"], said["batch_size"])
    series = {
        name: Series(
            said["count"],
            said["batch_size"],
            {n: (np.dtype(kind), tuple(shape)) for n, (kind, shape) in arrays.items()},
            made,
        )
        for name, arrays in said["arrays"].items()
    }
    store = PartStore(out, part.shard, part.work.description, overwrite=False, series=series)
    store.scan()
    for name in series:
        if gaps := store.missing(name):
            raise UserError(
                f"{part.work.path} lacks image {gaps[0][0]}, or its file is damaged or doubled: "
                f"{parts.again(part.work.path)}"
            )
    return store


def join_run(out: pathlib.Path, found: list[Part]) -> str:
    """Write the results of a run in place of its parts; return the lines to print."""
    store = JoinedStore(out, found)
    report = _report(found)
    drawn = [part for part in found if part.content["report"]]
    arrays = [_fidelity(part) for part in drawn]
    if arrays[0]:
        report["fidelity"] = results.fidelity(metrics.joined(arrays), drawn[0].content["judges"])
    files.write(store, Shown.from_json(found[0].content["shown"]), report)
    return results.summary(report, out)


def _fidelity(part: Part) -> dict[str, np.ndarray]:
    named = ((n, a) for n, a in part.arrays.items() if n.startswith(FIDELITY))
    return {name.removeprefix(FIDELITY): array for name, array in named}


def _report(found: Sequence[Part]) -> dict:
    """Return the report of all parts: that of the first one that drew images, but for devices and
    the runs, which are those of all."""
    reports = [part.content["report"] for part in found if part.content["report"]]
    base = next((report for report in reports if report["time"]["runs"]), reports[0])
    runs = [seconds for report in reports for seconds in report["time"]["runs"]]
    return {
        **base,
        "resumed": any(report["resumed"] for report in reports),
        "device": parts.device_of(found),
        "time": {**base["time"], "runs": runs},
    }


def main(argv: list[str]) -> None:
    out = check_place(OUT.value, flag="OUT")
    found = parts.read(out)
    with parts.held(found):
        join = {"run": join_run, "sweep": sweeps.join}[found[0].content["command"]]
        text = join(out, found)
    print(text)


if __name__ == "__main__":
    command_line.run(main)
