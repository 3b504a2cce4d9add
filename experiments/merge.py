"""Check the parts that --shard=I/N has made, and join them to what one process would have written.

    python -m experiments.run --num_images=50000 --shard=0/2 --out=OUT
    python -m experiments.run --num_images=50000 --shard=1/2 --out=OUT
    python -m experiments.merge OUT

Joins parts of experiments.run and of experiments.sweep. Neither checkpoint nor device is needed.
All parts have to be there, each once, finished, and made with the same flags, checkpoint and
versions; what is missing or damaged is named, and nothing is changed then. The results take the
place of the parts in OUT.
"""

import contextlib
import pathlib
from collections.abc import Iterator, Sequence

import numpy as np

from experiments import batch_files, parts
from experiments.batch_files import Damaged, Series
from experiments.cli import command_line
from experiments.cli.flags import CommandFlags
from experiments.evaluation import metrics
from experiments.output import BatchStore
from experiments.parts import FinishedPart, PartStore
from experiments.run import files, results
from experiments.run.files import Shown
from experiments.run.results import FIDELITY
from experiments.sweep import cells, tables
from varjax.core.errors import UserError
from varjax.storage.atomic import check_place

FLAGS = CommandFlags(
    "python -m experiments.run --num_images=4 --shard=0/2 --out=OUT\n"
    "python -m experiments.run --num_images=4 --shard=1/2 --out=OUT\n"
    "--out=OUT"
)
OUT = FLAGS.argument("out", "Folder of the parts, their --out.")


class JoinedStore(BatchStore):
    """The batches of all parts, as `experiments.run.files` takes them. `UserError` unless all
    images are there."""

    def __init__(self, out: pathlib.Path, found: Sequence[FinishedPart]):
        self.out, self.work, self.replaces = out, found[0].work, parts.files_of_parts
        said = found[0].content
        count, size = said["count"], said["batch_size"]
        self.series = dict.fromkeys(said["series"], Series(count, size))
        self._stores: list[PartStore] = []
        for part in found:
            made = Series(count, size, part.shard.images(count, size))
            series, given = dict.fromkeys(said["series"], made), part.work.description
            store = PartStore(out, part.shard, given, overwrite=False, series=series)
            store.scan()
            for name in series:
                if gaps := store.missing(name):
                    raise UserError(
                        f"{part.work.path} lacks image {gaps[0][0]}, or its file is damaged or "
                        f"doubled: {parts.again(part.work.path)}"
                    )
            self._stores.append(store)

    def batches(self, series: str) -> Iterator[tuple[np.ndarray, dict[str, np.ndarray]]]:
        for store in self._stores:
            yield from store.batches(series)

    def close(self) -> None:
        """The parts went when the results took their place."""


def join_run(out: pathlib.Path, found: list[FinishedPart]) -> str:
    """Write the results of a run in place of its parts; return the lines to print."""
    store = JoinedStore(out, found)
    # the report of the first part that drew images, with the devices and the runs of all
    drawn = [part for part in found if part.content["report"]]
    reports = [part.content["report"] for part in drawn]
    report = next((each for each in reports if each["time"]["runs"]), reports[0])
    report |= {
        "resumed": any(each["resumed"] for each in reports),
        "device": parts.device_of(found),
        "time": report["time"] | {"runs": [s for each in reports for s in each["time"]["runs"]]},
    }
    arrays = [
        {n.removeprefix(FIDELITY): a for n, a in part.arrays.items() if n.startswith(FIDELITY)}
        for part in drawn
    ]
    if arrays[0]:
        report["fidelity"] = results.fidelity(metrics.joined(arrays), drawn[0].content["judges"])
    files.write_run(store, Shown.from_json(found[0].content["shown"]), report)
    return results.summary(report, out)


def join_sweep(out: pathlib.Path, found: list[FinishedPart]) -> str:
    """Write the results of a sweep in place of its parts; return the table."""
    first, frame = found[0], found[0].content["frame"] | {"device": parts.device_of(found)}
    held: dict[str, dict] = {}
    for part in found:
        if part.content["frame"]["cells"] != frame["cells"]:
            raise UserError(
                f"{part.shard} is of other --policies or --budgets than {first.shard}: remove it "
                "and make it again with the flags of the others"
            )
        mine = {}
        for key in part.content["keys"]:
            path = cells.path_of(part.work.path, key)
            try:
                row, arrays = batch_files.read_with(path)
            except (Damaged, OSError):
                again = parts.again(part.work.path)
                raise UserError(f"{path} is missing or damaged: {again}") from None
            mine[key] = arrays | {"row": row}
        held = mine | held
        full = frame["reference"]
        if not np.array_equal(mine[full]["tokens"], held[full]["tokens"]):
            raise UserError(
                f"the full cache drew other tokens in {part.shard} than in {first.shard}, so their "
                "cells have no common reference: make them on devices of one kind"
            )
    calibration = first.arrays.get("calibration")
    copy = None if calibration is None else calibration.tobytes()
    report = tables.write_tables(out, parts.files_of_parts, frame, held, copy)
    return tables.markdown_rows(report)


def main(argv: list[str]) -> None:
    out = check_place(OUT.value, flag="OUT")
    found = parts.read_parts(out)
    join = {"run": join_run, "sweep": join_sweep}[found[0].content["command"]]
    with contextlib.ExitStack() as stack:  # keeps other processes out of all parts
        for part in found:
            stack.enter_context(part.work.held())
        text = join(out, found)
    print(text)


if __name__ == "__main__":
    command_line.run(main)
