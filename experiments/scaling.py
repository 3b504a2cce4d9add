"""Say what a compiled program would do on 1 to 256 chips, by the cost model: a table on paper.

    python -m experiments.aot --model=var-d36 --train --mesh=fsdp=8 --batch_size=64 --remat \\
        --target=v5p --json=FILE
    python -m experiments.scaling FILE

FILE is the --json of experiments.aot with a --mesh. Every chip keeps its share of the batch (weak
scaling). A program that draws grows along `data`: more groups of devices that share a model, which
exchange nothing with each other. A training step grows along `fsdp`: the same arrays are gathered
and summed by more devices.

A row has the time of the kernels by the model, the time of the exchanges around a ring at 80 % of
the links' published rate, and images per second if all exchanges are hidden behind kernels, and if
none is. Nothing was run. Latency, files and the host are not counted.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments.aot.collectives import sent_by
from pallas_kernels import chips
from varjax.cli import command_line
from varjax.cli.flags import CommandFlags
from varjax.errors import UserError
from varjax.parallel.split import MeshSpec
from varjax.parallel.training import AXES, TrainingMesh
from varjax.storage.manifest import read_json

REACHED = 0.8  # share of a link's rate; assumed, not measured
MOST = 2**13

FLAGS = CommandFlags("--file=FILE")
FILE = FLAGS.argument("file", "What experiments.aot has written with --json, for a mesh.")
CHIPS = FLAGS.integer("chips", 256, "The most chips.", lower_bound=1, upper_bound=MOST)


@dataclass(frozen=True)
class Program:
    """What one chip does for its share of a batch. images: that share.

    grows: whether exchanges are over all chips, as in training; else over `least` of them.
    least: the smallest number of chips.
    kernels: seconds without exchanges. rows: exchanges (`collectives.describe`).
    """

    target: str
    images: float
    least: int
    grows: bool
    kernels: float
    rows: Sequence[Mapping]

    def exchanging(self, count: int) -> float:
        """Seconds of all exchanges on `count` chips, one after the other."""
        group = count if self.grows else self.least
        rate = REACHED * chips.get_chip(self.target).ring_rate(group)
        sent = sum(
            sent_by(row["kind"], group if row["group"] > 1 else 1, row["bytes"])
            for row in self.rows
        )
        return sent / rate

    def counts(self, most: int) -> Iterator[int]:
        count = self.least
        while count <= most:
            yield count
            count *= 2


def read(path: Path) -> tuple[str, list[Program]]:
    """Return what was compiled, in words, and its programs. `UserError` if the file holds none on
    a mesh."""
    content = read_json(path)
    try:
        flags, results = content["flags"], content["results"]
        title, mesh, train = content["title"], flags["mesh"], flags["train"]
        compiled = [r for r in results if r["status"] == "compiled"]
        made = _step if train else _drawing
        found = [made(r, mesh) for r in compiled]
    except (KeyError, TypeError):
        raise UserError(
            f"{path} was not written by experiments.aot of this version with --json: make it again"
        ) from None
    if not found:
        raise UserError(f"{path} holds no program that was compiled: it can say nothing")
    for name in (program.target for program in found):
        if chips.get_chip(name).links is None:
            raise UserError(f"{name}: the rate of its links is not known, so nothing can be said")
    return title, found


def _step(result: Mapping, mesh: str | None) -> Program:
    parsed = TrainingMesh.parse(mesh, result["devices"])
    if parsed.data > 1 or parsed.fsdp == 1:
        raise UserError(
            f"the step was compiled for {parsed}: compile it with --mesh=fsdp=N, N from 2 on, the "
            f"axis that grows ({AXES['fsdp']})"
        )
    kernels = _kernels(result["target"], [result["modelled"]])
    images = result["batch_size"] / result["devices"]
    return Program(result["target"], images, 1, True, kernels, result["collectives"])


def _drawing(result: Mapping, mesh: str | None) -> Program:
    parsed, programs = MeshSpec.parse(mesh), list(result["programs"].values())
    kernels = _kernels(result["target"], [p["modelled"] for p in programs])
    rows = [row for program in programs for row in program["collectives"]]
    images = result["batch_size"] / parsed.num_devices
    return Program(result["target"], images, parsed.model, False, kernels, rows)


def _kernels(target: str, modelled: Sequence[Mapping | None]) -> float:
    """Seconds of programs without their exchanges."""
    seconds = [m and m["modelled_s"] for m in modelled]
    if any(s is None for s in seconds):
        raise UserError(
            f"{target}: the model has no seconds for it (a TPU whose clock is not published)"
        )
    return sum(seconds) - sum(m["collective_s"] for m in modelled)


def table(program: Program, most: int) -> str:
    """Lines of a Markdown table: a row for each number of chips, doubled from the least to `most`.
    Efficiency: images per second and chip over those of the first row."""
    lines = [
        f"| {program.target} chips | kernels, ms | exchanges, ms | images/s | efficiency |",
        "| --- | --- | --- | --- | --- |",
    ]
    first = None
    for count in program.counts(most):
        kernels, exchanging = program.kernels, program.exchanging(count)
        hidden, plain = max(kernels, exchanging), kernels + exchanging
        rates = [program.images * count / seconds for seconds in (plain, hidden)]
        first = first or [rate / count for rate in rates]
        shares = [rate / count / one for rate, one in zip(rates, first, strict=True)]
        lines.append(
            f"| {count} | {1e3 * kernels:.4g} | {1e3 * exchanging:.3g} | {_range(rates, '.3g')} "
            f"| {_range(shares, '.2f')} |"
        )
    return "\n".join(lines)


def _range(values: Sequence[float], form: str) -> str:
    """One number, or two where they differ as they are shown."""
    low, high = (format(value, form) for value in values)
    return low if low == high else f"{low} to {high}"


def main(argv: list[str]) -> None:
    title, programs = read(Path(FILE.value))
    print(title)
    for program in programs:
        if program.least > CHIPS.value:
            raise UserError(
                f"--chips={CHIPS.value}: {program.least} chips share the model: choose as many or "
                "more"
            )
        print(f"\n{program.images:g} images a chip\n\n{table(program, CHIPS.value)}")


if __name__ == "__main__":
    command_line.run(main)
